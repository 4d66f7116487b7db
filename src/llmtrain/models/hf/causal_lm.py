"""`hf_causal_lm`: a Hugging Face model, fine-tuned whole or through LoRA adapters.

transformers holds the architecture and reads the weights, peft adds the adapters. Everything is read from a directory
(hub/find.py brings one), so that nothing here ever asks the network.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.model import HfCausalLmSection
from llmtrain.errors import DataError, UsageError
from llmtrain.files import read_json
from llmtrain.hub.find import find_model
from llmtrain.logs import warn
from llmtrain.models import losses as linear_loss
from llmtrain.models.base import (
    LossFunction,
    ModelAdapter,
    NextLogits,
    WriteInto,
    evaluating,
    parameter_count,
    trainable_count,
)
from llmtrain.models.hf.files import check_installed, is_tokenizer_folder, quiet_libraries, read_config, read_weights
from llmtrain.models.hf.lora import ADAPTER, add_lora, is_adapter_weight, lora_layers, save_adapter

LONGEST_CONTEXT = 4096  # of what is kept in memory while text is written
CONFIG_FILES = ("config.json", "generation_config.json")


class CausalLM(nn.Module):
    """A transformers model with this project's signature. With targets it gives the sum of the losses and never holds
    all logits at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.is_plain = False
        """Whether the logits are the output layer of the last hidden state and nothing else. It is tried (`examine`):
        many architectures do something more, under many names."""

    @property
    def base(self) -> Any:
        """The transformers model, without peft around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        base = self.base
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": cache is not None}
        if positions is not None and str(base.config._attn_implementation).startswith("flash"):
            # transformers tells packed rows apart for flash attention in a batch of one only.
            tokens, options["position_ids"] = tokens.reshape(1, -1), positions.reshape(1, -1)
        if not self.is_plain or targets is None:
            logits: torch.Tensor = base(input_ids=tokens, **options).logits
            if targets is None:
                return logits
            flat = logits.view(-1, logits.shape[-1]).float()
            return F.cross_entropy(flat, targets.view(-1), reduction="sum")
        hidden = getattr(base, base.base_model_prefix)(input_ids=tokens, **options).last_hidden_state
        head = base.get_output_embeddings()
        return linear_loss.linear_cross_entropy(hidden, head.weight, head.bias, targets)


class HFCausalLMAdapter(ModelAdapter):
    config: HfCausalLmSection
    can_pack = True

    def __init__(self, config: HfCausalLmSection, tokenizer_vocab: int) -> None:
        check_installed()
        self.config = config
        self.folder = model_folder(config)
        self.hf_config = read_config(self.folder, config)
        self.vocab_size = _vocab_size(self.hf_config, self.folder)
        if tokenizer_vocab > self.vocab_size:
            raise DataError(
                f"The tokenizer does not fit the model: it has {tokenizer_vocab} tokens, the model {self.vocab_size}.",
                remedy="Leave data.tokenizer and model.tokenizer_path empty to take the model's own.",
            )
        longest = self.longest
        if longest and config.block_size > longest:
            raise UsageError(
                f"model.block_size {config.block_size} is beyond the {longest} positions the model knows.",
                remedy=f"Set model.block_size to at most {longest}.",
            )

    @property
    def longest(self) -> int | None:
        found: int | None = getattr(self.hf_config.get_text_config(), "max_position_embeddings", None)
        return found

    def context_length(self) -> int:
        return min(self.longest or LONGEST_CONTEXT, max(self.config.block_size, LONGEST_CONTEXT))

    def end_ids(self) -> set[int]:
        """A chat model may end a turn with another token than a text."""
        named = (read_json(self.folder / "generation_config.json") or {}).get("eos_token_id")
        return {i for i in (named if isinstance(named, list) else [named]) if isinstance(i, int)}

    def config_files(self) -> list[Path]:
        return [path for name in CONFIG_FILES if (path := self.folder / name).is_file()]

    @classmethod
    def own_tokenizer(cls, config: HfCausalLmSection) -> str:
        folder = model_folder(config)
        if config.tokenizer_path:
            folder = find_model(config.tokenizer_path, None, config.local_files_only, "model.tokenizer_path")
        if not is_tokenizer_folder(folder):
            raise DataError(
                f"{folder} has no tokenizer.",
                remedy="Set model.tokenizer_path to the directory that has tokenizer.json.",
            )
        return str(folder)

    def build(self) -> nn.Module:
        return self._dress(read_weights(self.folder, self.hf_config, self.config))

    def build_empty(self) -> nn.Module:
        from transformers import AutoModelForCausalLM, GenerationConfig

        quiet_libraries()
        options = {"attn_implementation": self.config.attention, "trust_remote_code": self.config.trust_remote_code}
        model = AutoModelForCausalLM.from_config(self.hf_config, dtype=torch.float32, **options)
        if (self.folder / "generation_config.json").is_file():  # where to stop, and how to sample: an export keeps it
            model.generation_config = GenerationConfig.from_pretrained(str(self.folder), local_files_only=True)
        return self._dress(model)

    def _dress(self, model: Any) -> nn.Module:
        model.config.use_cache = False
        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.config.lora:
            model = add_lora(model, self.config.lora)
            # What adapter_config.json names must be found by whoever loads it: the directory, or a name on the hub.
            path = Path(self.config.path).expanduser()
            name = str(path.absolute()) if path.is_dir() else self.config.path
            model.peft_config["default"].base_model_name_or_path = name
        elif self.config.dtype == "bfloat16":
            warn("TRAIN", "model.dtype bfloat16 without LoRA: small updates of the weights are rounded away")
        return CausalLM(model).train()

    def base_files(self) -> list[Path]:
        return sorted([self.folder / "config.json", *self.folder.glob("*.safetensors")])

    @property
    def uses_dropout(self) -> bool:
        return True  # LoRA's, or one of the many names the architectures have for theirs

    def loss(
        self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        loss: torch.Tensor = module(inputs, targets, positions)
        return loss

    @torch.no_grad()
    def keeps_rows_apart(self, module: nn.Module) -> bool:
        """Some architectures drop the positions without a word. So it is tried: what a row says after another one must
        be what it says alone, or nearly so beside what it says without positions. Two sequences, packed differently."""
        if not self._can_try(module):
            return True
        device = next(module.parameters()).device
        rows = torch.arange(32, device=device).view(2, 16) % self.vocab_size
        borders = (8, 5)
        positions = torch.stack([torch.cat([torch.arange(b), torch.arange(16 - b)]) for b in borders]).to(device)
        with evaluating(module):
            after, leaking = (self._logits(module, rows, given) for given in (positions, None))
            for index, border in enumerate(borders):
                alone = self._logits(module, rows[index : index + 1, border:], None)[0]
                leak = (leaking[index, border:] - alone).abs().max()
                if (after[index, border:] - alone).abs().max() > 1e-5 + 0.1 * leak:
                    return False
        return True

    def _logits(self, module: nn.Module, rows: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        logits: torch.Tensor = module(rows, positions=positions)
        return logits.float().view(*rows.shape, -1)

    def _can_try(self, module: nn.Module) -> bool:
        """Flash attention has no CPU form, and a model to be sharded is still there."""
        return not self.config.attention.startswith("flash") or next(module.parameters()).is_cuda

    @torch.no_grad()
    def examine(self, module: nn.Module) -> None:
        assert isinstance(module, CausalLM)
        if not self._can_try(module):
            return
        device = next(module.parameters()).device
        rows = torch.arange(16, device=device).view(2, 8) % self.vocab_size
        targets = rows.roll(-1, dims=1)
        with evaluating(module):
            module.is_plain = False
            try:
                whole = float(module(rows, targets))
            except (NotImplementedError, RuntimeError, ValueError) as problem:
                raise UsageError(
                    f"The model cannot be computed here: {' '.join(str(problem).split())[:200]}",
                    remedy="Set model.attention to another one, such as sdpa or eager.",
                ) from None
            module.is_plain = True
            try:
                in_parts = float(module(rows, targets))
            except (AttributeError, TypeError, RuntimeError):  # an output layer of another kind
                in_parts = float("nan")
        module.is_plain = abs(in_parts - whole) <= 1e-5 * abs(whole)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The longest list of layers; adapters keep short lists of their own."""
        lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def compiled(self, module: nn.Module, by_block: bool) -> LossFunction:  # noqa: ARG002
        """Always by block: as fast as all at once, and compiled in a fifth of the time."""
        linear_loss.compile_chunks()
        return super().compiled(module, by_block=True)

    def flops_per_token(self, module: nn.Module) -> float:
        """Frozen weights need no gradient of their own: 4 a weight instead of 6."""
        trained = trainable_count(module)
        config = self.hf_config.get_text_config()
        layers, width = config.num_hidden_layers, config.hidden_size
        attention = 12.0 * layers * width * self.config.block_size
        embedding = 0 if getattr(config, "tie_word_embeddings", False) else self.vocab_size * width
        frozen = parameter_count(module) - trained
        weights = 4.0 * (frozen - embedding) + 6.0 * trained if frozen else 6.0 * (trained - embedding)
        return float(weights + attention)

    def next_logits(self, module: nn.Module, block_size: int) -> NextLogits:
        """Keys and values of what was read already are kept."""
        from transformers import DynamicCache

        state: dict[str, Any] = {"cache": None, "seen": 0}

        def following(ids: Sequence[int]) -> torch.Tensor:
            if state["cache"] is None or len(ids) > block_size:
                state["cache"], state["seen"] = DynamicCache(), max(0, len(ids) - block_size)
            new = torch.tensor([list(ids[state["seen"] :])], device=next(module.parameters()).device)
            logits: torch.Tensor = module(new, cache=state["cache"])
            state["seen"] = len(ids)
            return logits[0, -1]

        return following

    def companion(self, module: nn.Module) -> WriteInto | None:
        if not is_adapted(module):
            return None
        adapted: Any = module.model
        tensors = {
            name.removeprefix("model."): _whole_copy(parameter)
            for name, parameter in module.named_parameters()
            if is_adapter_weight(name)
        }
        return lambda folder: save_adapter(adapted, tensors, folder / ADAPTER)

    def export(
        self,
        module: nn.Module,
        folder: Path,
        end_of_text: int | None = None,  # noqa: ARG002
        dtype: str = "float32",
    ) -> None:
        """A directory that AutoModelForCausalLM loads; adapters are merged into the weights, in float32."""
        from safetensors import SafetensorError

        assert isinstance(module, CausalLM)
        model = module.model
        if is_adapted(module):
            model = model.float().merge_and_unload()
        model = model.to(getattr(torch, dtype))
        model.config.use_cache = True
        quiet_libraries()
        generation = getattr(model, "generation_config", None)
        if generation is not None and (generation.temperature, generation.top_p) != (None, None):
            generation.do_sample = True  # or transformers refuses to write what it has read
        try:
            model.save_pretrained(str(folder))
        except SafetensorError as problem:
            raise OSError(str(problem)) from None
        except ValueError as problem:
            raise DataError(
                f"transformers refuses to write the model: {' '.join(str(problem).split())[:300]}"
            ) from None


def model_folder(config: HfCausalLmSection) -> Path:
    is_code_pinned = Path(config.path).expanduser().is_dir() or re.fullmatch(r"[0-9a-f]{40}", config.revision or "")
    if config.trust_remote_code and not is_code_pinned:
        raise UsageError(
            "model.trust_remote_code runs code from the hub; it needs a commit as model.revision, so that the code "
            f"cannot change behind your back, and model.revision is {json.dumps(config.revision)}.",
            remedy="Set model.revision to the 40 digits of a commit you have read, or use a directory.",
        )
    return find_model(config.path, config.revision, config.local_files_only, code=config.trust_remote_code)


def is_adapted(module: nn.Module) -> bool:
    return hasattr(getattr(module, "model", None), "peft_config")


def set_adapters(module: nn.Module, are_on: bool) -> None:
    """Switch the adapters off to get the base model, and on again."""
    for layer in lora_layers(module):
        layer.enable_adapters(are_on)


def _vocab_size(config: Any, folder: Path) -> int:
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise DataError(f"{folder} is no language model: its config.json ({config.model_type}) has no vocab_size.")
    return size


def _whole_copy(parameter: torch.Tensor) -> torch.Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().cpu().clone()
