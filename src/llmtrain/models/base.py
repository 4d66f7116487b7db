"""The model contract: what the trainer needs from a model.

`model.name` is a model of registry.MODELS, or a plugin (docs/extending.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn
from torch.nn.parameter import is_lazy

from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import ModelSection
from llmtrain.errors import UsageError
from llmtrain.hub.model_names import HubModel
from llmtrain.models.group_losses import Groups, sums_of_logits
from llmtrain.plugins import parse_options, plugin_errors, wrong_result

LossFunction = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
GroupLossFunction = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor | None, Groups], torch.Tensor]
NextLogits = Callable[[Sequence[int]], torch.Tensor]
"""Token ids so far -> logits of the next token. Successive calls extend the ids by one or more."""
WriteInto = Callable[[Path], None]
COMPILE_MODE: str | None = None
"""torch.compile's mode for a model that is compiled as a whole. `reduce-overhead` (CUDA graphs) is measured by
benchmarks/step_throughput.py; it needs one micro-batch per step, because gradients lie in memory that the next replay
overwrites."""
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


class ModelAdapter(ABC):
    """Builds a module that maps token ids (B, T) to logits (B, T, vocab_size), and describes it to the trainer. Only
    `build` must be implemented.

    The logits may have more columns than vocab_size if those are -inf.
    """

    class Options(BaseModel):
        """What model.options accepts: nothing, unless a class declares its own."""

    can_pack = False
    """Whether the loss accepts `positions`, which restart at 0 with each example of a packed sequence."""
    can_cast_weights = False
    """Whether the module also runs with bfloat16 weights and activations, as trainer.precision bf16 then computes.
    Otherwise it runs under autocast."""
    numerics = Numerics()
    """The numerics of the run; an earlier version if it was started by one."""

    def __init__(self, config: ModelSection, tokenizer_vocab: int) -> None:
        self.config = config
        self.options: BaseModel = parse_options(type(self), getattr(config, "options", {}))
        self.vocab_size: int = getattr(config, "vocab_size", None) or tokenizer_vocab
        if self.vocab_size < tokenizer_vocab:
            raise UsageError(
                f"model.vocab_size must be at least the tokenizer's {tokenizer_vocab}, got {self.vocab_size}.",
                remedy="Remove model.vocab_size to use the tokenizer's.",
            )

    # The one method to implement

    @abstractmethod
    def build(self) -> nn.Module:
        """A new module on the CPU, initialized from torch's global generator (the caller seeds it)."""

    # Before the module is built

    @classmethod
    def default_tokenizer(cls, config: Any) -> str:  # noqa: ARG003
        """The tokenizer to use if data.tokenizer is not set."""
        return "byte"

    def prepare_for(self, device: torch.device, is_packed: bool) -> None:  # noqa: B027 (optional)
        """Choose what depends on the device and on whether examples are packed. Called before `build` for training."""

    def weight_count(self) -> int | None:
        """About how many weights the module will have, without building it; None if unknown."""
        return None

    def config_files(self) -> list[Path]:
        """Files that are needed to build the module, apart from its weights."""
        return []

    def base_model(self) -> HubModel | None:
        """The pretrained base model on the hub; None without one, or if its directory does not say where it is from."""
        return None

    def base_files(self) -> list[Path]:
        """Files of the pretrained base model. They determine the result but are not stored in checkpoints."""
        return []

    def base_dtype(self) -> str:
        """Data type in which the weights of the pretrained base model are stored."""
        return "float32"

    # The module and its weights

    def build_empty(self) -> nn.Module:
        """The same module with arbitrary weights: to load a checkpoint into, or to count parameters."""
        return self.build()

    def probe(self, module: nn.Module) -> None:  # noqa: B027 (optional)
        """Run the finished model on a tiny input to find out what its code does not declare."""

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks, which are sharded and compiled one by one: members of ModuleLists."""
        return list(chain.from_iterable(outer_lists(module)))

    def matrix_sections(self, module: nn.Module) -> dict[str, list[int]]:  # noqa: ARG002
        """Parameters that hold several matrices one below the other: name -> row count of each. An optimizer that
        works on whole matrices (muon) treats them separately."""
        return {}

    def flops_per_token(self, module: nn.Module) -> float:
        """Floating-point operations of forward and backward per token: 6 per weight, without attention."""
        return 6.0 * parameter_count(module)

    @property
    def uses_dropout(self) -> bool:
        """Whether the module draws random numbers: they are then seeded for each micro-batch, so that a resume is
        exact. True for a plugin, whose code cannot be inspected."""
        return bool(getattr(self.config, "dropout", True))

    # The loss

    def loss(
        self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the cross-entropy over all targets except IGNORE_INDEX. A sum, because only the trainer knows the
        divisor: the number of target tokens in the whole step."""
        assert positions is None or self.can_pack
        logits = module(inputs)  # (B, T, V)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), reduction="sum")

    def compiled_loss(self, module: nn.Module, by_block: bool) -> LossFunction:
        """The loss, compiled. With `by_block`, only the blocks are, because FSDP gathers weights between them."""
        if not by_block:
            return torch.compile(self.loss, mode=COMPILE_MODE)
        for block in self.blocks(module):
            block.compile()
        return self.loss

    def group_losses(
        self,
        module: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        groups: Groups,
    ) -> torch.Tensor:
        """The cross-entropy summed over each group of targets, such as an answer of a preference pair: (groups,)."""
        assert positions is None or self.can_pack
        return sums_of_logits(module(inputs), targets, groups)

    def compiled_group_losses(self, module: nn.Module) -> GroupLossFunction:
        """The same with compiled blocks."""
        self.compiled_loss(module, by_block=True)
        return self.group_losses

    def separates_packed_examples(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Whether packed examples really do not attend to each other in this module."""
        return self.can_pack

    # Generation

    def context_length(self) -> int:
        """Maximum number of tokens of context for generation."""
        return self.config.block_size

    def stop_token_ids(self) -> set[int]:
        """Tokens that end a generated answer, in addition to the tokenizer's end of text."""
        return set()

    def next_logits(self, module: nn.Module, block_size: int) -> NextLogits:
        """For generation. Without a KV cache: recomputes the whole context for each token."""

        def next_logits(ids: Sequence[int]) -> torch.Tensor:
            device = next(module.parameters()).device
            logits = module(torch.tensor([ids[-block_size:]], device=device))  # (1, T, V)
            return logits[0, -1]

        return next_logits

    # Scores of tasks: log-likelihoods of given tokens, with a context that several continuations share computed once

    @property
    def max_positions(self) -> int | None:
        """Most tokens that the architecture can read; None if only context_length limits them."""
        return None

    def hidden_states(self, module: nn.Module, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:  # noqa: ARG002
        """What `output_logits` makes logits of: (B, T) -> (B, T, C). By default the logits themselves. With a cache,
        the tokens follow those in it."""
        return cast(torch.Tensor, module(tokens))

    def output_logits(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Logits of some positions, (N, C) -> (N, V): most positions of a task need none."""
        return hidden

    def new_cache(self, module: nn.Module, capacity: int) -> Any:  # noqa: ARG002
        """A cache for `hidden_states` with room for this many tokens; None if the model has none."""
        return None

    def select_rows(self, cache: Any, rows: torch.Tensor) -> None:
        """Replace the sequences in a cache by copies of some of them: row i becomes the former row rows[i]."""
        raise NotImplementedError

    # Files: checkpoints and export

    def checkpoint_extras(self, module: nn.Module) -> WriteInto | None:  # noqa: ARG002
        """A function that writes additional files into a checkpoint's directory; None if there are none.

        All ranks call this method together (it may gather shards). Rank 0 calls the result, maybe in a thread.
        """
        return None

    def export_config(self) -> dict[str, Any] | None:
        """config.json of an export, if `export` writes what AutoModelForCausalLM of transformers loads. The export is
        then checked by loading it."""
        return None

    def fold_weights(self, module: nn.Module) -> None:  # noqa: ARG002
        """Change the module so that it has the matrices that `export` stores, and computes the same: an export rounds
        them. For formats that multiply weights into each other."""
        return

    def export(
        self,
        module: nn.Module,  # noqa: ARG002
        directory: Path,  # noqa: ARG002
        end_of_text: int | None = None,  # noqa: ARG002
        dtype: str = "float32",  # noqa: ARG002
    ) -> None:
        """Write the model in a format that other tools load; `end_of_text` is the token to stop at."""
        raise UsageError(
            f"model.name {self.config.name} has no export format.",
            remedy=f"Implement `export` in {type(self).__qualname__}, or use the model with llmtrain generate, chat "
            "and eval.",
        )


def build_checked(adapter: ModelAdapter, is_empty: bool = False) -> nn.Module:
    """The module of an adapter; a plugin may fail, or return something else."""
    kind = type(adapter)
    with plugin_errors(kind, "build"):
        module: object = adapter.build_empty() if is_empty else adapter.build()
    if not isinstance(module, nn.Module):
        raise wrong_result(kind, "build returned", module, "a torch.nn.Module")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            what = f"build returned a module whose parameter {name} has no shape yet:"
            raise wrong_result(kind, what, module, "layers with their sizes (nn.Linear, not nn.LazyLinear)")
    return module


def outer_lists(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[list[nn.Module]]:
    """The members of every ModuleList that can be called, without lists inside of them (such as those of experts) and
    without those that were in a list before."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    members: list[nn.Module] = []
    if isinstance(module, nn.ModuleList):
        members = [part for part in dict.fromkeys(module) if part not in seen and _can_be_called(part)]
        seen.update(members)
    if members:
        yield members
    for part in module.children():
        yield from outer_lists(part, seen)


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def outermost_modules(names: Set[str], others: Set[str]) -> list[str]:
    """The largest modules that contain some of `names`, of layers or parameters, and none of `others`; a name that is
    in no such module stands for itself."""
    shared: set[str] = set()
    for name in others:
        shared.update(_parents(name))
    found = set()
    for name in names:
        unshared = [parent for parent in _parents(name) if parent not in shared]
        found.add(unshared[0] if unshared else name)
    return sorted(found)


def _parents(name: str) -> list[str]:
    """`a.b.c` -> ["a", "a.b"]"""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch the module to eval mode, and each of its parts back to its own mode at the end: a model may keep a part,
    such as a frozen batch norm, in eval mode while it is trained."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def block_matrices(adapter: ModelAdapter, module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable matrices of the transformer blocks, without embeddings: what muon orthogonalizes."""
    inside: set[int] = set()
    for block in adapter.blocks(module):
        for part in block.modules():
            if not isinstance(part, nn.Embedding):
                inside.update(map(id, part.parameters(recurse=False)))
    matrices = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in inside and parameter.requires_grad and parameter.dim() == 2:
            matrices[name] = parameter
    return matrices


def parameter_count(module: nn.Module) -> int:
    count = 0
    for parameter in module.parameters():
        is_packed = getattr(parameter, "quant_state", None)  # bitsandbytes packs two weights of 4 bits into a byte
        count += 2 * parameter.numel() if is_packed else parameter.numel()
    return count


def trainable_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
