"""`hf_causal_lm`: a Hugging Face model, fine-tuned fully or with LoRA adapters.

transformers provides the architecture and loads the weights, peft adds the adapters. Everything is read from a
directory, which hub/find.py downloads if needed; nothing here uses the network.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import HfCausalLmSection
from llmtrain.core.files import read_json, use_default_mode
from llmtrain.core.logs import log, warn
from llmtrain.core.text import one_line
from llmtrain.errors import DataError, UsageError
from llmtrain.hub.find import find_model
from llmtrain.hub.model_names import HubModel, hub_model_of
from llmtrain.models.base import (
    EXPORT_DTYPES,
    LossFunction,
    ModelAdapter,
    NextLogits,
    WriteInto,
    evaluating,
    outer_lists,
    parameter_count,
    trainable_count,
)
from llmtrain.models.group_losses import Groups, sums_of_logits
from llmtrain.models.hf.attention import (
    FLEX,
    best_attention,
    default_attention,
    example_mask,
    has_one_mask,
    without_flex,
)
from llmtrain.models.hf.files import (
    count_numbers,
    find_directory,
    has_tokenizer,
    quiet_libraries,
    read_config,
    read_weights,
    vocab_size_of,
    weight_shapes,
)
from llmtrain.models.hf.installed import check_installed
from llmtrain.models.hf.kv_cache import cached_next_logits, new_cache
from llmtrain.models.hf.lora import (
    ADAPTER,
    adapter_tensors,
    add_lora,
    describe_adapted,
    has_adapter,
    lora_layers,
    merge_adapters,
    save_adapter,
)
from llmtrain.models.hf.probes import changes_logits, is_multimodal, unreached_by_text
from llmtrain.models.losses import ChunkedLoss, OutputLoss, compiled_loss

MAX_CONTEXT = 4096  # tokens in the KV cache during generation
CONFIG_FILES = ("config.json", "generation_config.json")


class CausalLM(nn.Module):
    """A transformers model whose forward pass returns logits, or with targets the sum of the losses.

    The loss is computed in chunks, without all logits in memory, if the model allows it (has_linear_head).
    """

    def __init__(self, model: Any, numerics: Numerics) -> None:
        """`numerics`: those of the run."""
        super().__init__()
        self.model = model
        self.output_loss: OutputLoss = ChunkedLoss(numerics)
        self.has_linear_head = False
        """Whether the logits are exactly the output layer applied to the last hidden state. Found out by
        HFCausalLMAdapter.probe: some architectures scale or cap them, under many names."""

    @property
    def base(self) -> Any:
        """The transformers model, without the peft wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: Any = None,
        groups: Groups | None = None,
    ) -> torch.Tensor:  # (B, T) -> (B, T, V), with targets (), with groups (groups,)
        base = self.base
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": cache is not None}
        attention = str(base.config._attn_implementation)
        if positions is not None and attention.startswith("flash"):
            # transformers separates packed examples for flash attention only in a batch of one.
            tokens = tokens.reshape(1, -1)
            options["position_ids"] = positions.reshape(1, -1)
        elif positions is not None and attention == FLEX and has_one_mask(base.config):
            options["attention_mask"] = example_mask(positions)
        if not self.has_linear_head or targets is None:
            with without_flex(base.config) if cache is not None else nullcontext():
                logits = base(input_ids=tokens, **options).logits  # (B, T, V)
            if targets is None:
                return logits
            if groups is not None:
                return sums_of_logits(logits, targets.reshape(logits.shape[:-1]), groups)
            flat = logits.reshape(-1, logits.shape[-1]).float()
            return F.cross_entropy(flat, targets.reshape(-1), reduction="sum")
        hidden = getattr(base, base.base_model_prefix)(input_ids=tokens, **options).last_hidden_state  # (B, T, C)
        head = base.get_output_embeddings()
        return self.output_loss(hidden, head.weight, head.bias, targets, groups)


class HFCausalLMAdapter(ModelAdapter):
    config: HfCausalLmSection
    can_pack = True
    can_cast_weights = True

    def __init__(self, config: HfCausalLmSection, tokenizer_vocab: int) -> None:
        check_installed()
        self.config = config
        self.directory = find_directory(config)
        self.hf_config = read_config(self.directory, config)
        self.attention = default_attention(self.hf_config) if config.attention == "auto" else config.attention
        self.vocab_size = vocab_size_of(self.hf_config, self.directory)
        if tokenizer_vocab > self.vocab_size:
            raise DataError(
                f"The tokenizer has {tokenizer_vocab} tokens, more than the {self.vocab_size} of the model.",
                remedy="Remove data.tokenizer and model.tokenizer_path to use the tokenizer of the model.",
            )
        self.not_adapted: list[str] = []
        """Modules without adapters, because text does not reach them."""
        limit = self.max_positions
        if limit and config.block_size > limit:
            raise UsageError(
                f"model.block_size must be at most {limit}, the number of positions of the model, got "
                f"{config.block_size}.",
                remedy=f"Set model.block_size to {limit} or less.",
            )

    @property
    def max_positions(self) -> int | None:
        return getattr(self.hf_config.get_text_config(), "max_position_embeddings", None)

    def context_length(self) -> int:
        longest = max(self.config.block_size, MAX_CONTEXT)
        return min(self.max_positions or longest, longest)

    def stop_token_ids(self) -> set[int]:
        """A chat model may end a turn with another token than a document."""
        eos = (read_json(self.directory / "generation_config.json") or {}).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [eos]
        return {token for token in ids if isinstance(token, int)}

    def config_files(self) -> list[Path]:
        files = [self.directory / name for name in CONFIG_FILES]
        if self.config.trust_remote_code:
            files += sorted(self.directory.glob("*.py"))
        return [path for path in files if path.is_file()]

    @classmethod
    def default_tokenizer(cls, config: HfCausalLmSection) -> str:
        directory = find_directory(config)
        if config.tokenizer_path:
            directory = find_model(config.tokenizer_path, None, config.local_files_only, "model.tokenizer_path")
        if not has_tokenizer(directory):
            raise DataError(
                f"{directory} has no tokenizer.",
                remedy="Set model.tokenizer_path to a directory with tokenizer.json.",
            )
        return str(directory.absolute())  # a relative path may be the name of a built-in tokenizer: gpt2, byte

    def prepare_for(self, device: torch.device, is_packed: bool) -> None:
        if self.config.attention == "auto":
            self.attention = best_attention(self.hf_config, device, is_packed)

    def build(self) -> nn.Module:
        module = self._prepare(read_weights(self.directory, self.hf_config, self.config, self.attention))
        if self.config.lora:
            log("SETUP", describe_adapted(module, self.not_adapted))
        return module

    def build_empty(self) -> nn.Module:
        from transformers import AutoModelForCausalLM, GenerationConfig

        quiet_libraries()
        options = {"attn_implementation": self.attention, "trust_remote_code": self.config.trust_remote_code}
        model = AutoModelForCausalLM.from_config(self.hf_config, dtype=torch.float32, **options)
        if (self.directory / "generation_config.json").is_file():  # exports keep it
            model.generation_config = GenerationConfig.from_pretrained(str(self.directory), local_files_only=True)
        return self._prepare(model)

    def _prepare(self, model: Any) -> nn.Module:
        model.config.use_cache = False
        if self.config.lora:
            if self.numerics.adapts_text_layers and is_multimodal(self.hf_config):
                self.not_adapted = unreached_by_text(model)
            model = add_lora(model, self.config.lora, self.numerics.groups_lora, excluded=self.not_adapted)
        elif self.config.dtype == "bfloat16":
            warn("TRAIN", "model.dtype is bfloat16 without LoRA: small weight updates are lost to rounding")
        return CausalLM(model, self.numerics).train()

    def weight_count(self) -> int | None:
        shapes = weight_shapes(self.directory)
        return count_numbers(shapes) if shapes else None

    def base_model(self) -> HubModel | None:
        return hub_model_of(self.directory)

    def base_files(self) -> list[Path]:
        return sorted([self.directory / "config.json", *self.directory.glob("*.safetensors")])

    @property
    def uses_dropout(self) -> bool:
        return True  # LoRA has it, and architectures name theirs differently

    def loss(
        self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        return module(inputs, targets, positions)

    def group_losses(
        self,
        module: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        groups: Groups,
    ) -> torch.Tensor:
        return module(inputs, targets, positions, groups=groups)

    @torch.no_grad()
    def separates_packed_examples(self, module: nn.Module) -> bool:
        """Some architectures silently ignore the positions. So compare the logits of an example behind another one with
        those of the example alone: their distance must be small against the one without positions."""
        if not self._can_run(module):
            return True
        device = next(module.parameters()).device
        tokens = torch.arange(32, device=device).view(2, 16) % self.vocab_size
        borders = (8, 5)  # the first token of the second example, per sequence
        rows = [torch.cat([torch.arange(border), torch.arange(16 - border)]) for border in borders]
        positions = torch.stack(rows).to(device)  # (2, 16)
        with evaluating(module):
            packed = self._logits(module, tokens, positions)
            leaking = self._logits(module, tokens, None)
            for index, border in enumerate(borders):
                alone = self._logits(module, tokens[index : index + 1, border:], None)[0]
                leak = (leaking[index, border:] - alone).abs().max()
                if (packed[index, border:] - alone).abs().max() > 1e-5 + 0.1 * leak:
                    return False
        return True

    def _logits(self, module: nn.Module, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return module(tokens, positions=positions).float().view(*tokens.shape, -1)

    def _can_run(self, module: nn.Module) -> bool:
        """Flash attention does not run on the CPU, where a model is that will be sharded."""
        return not self.attention.startswith("flash") or next(module.parameters()).is_cuda

    @torch.no_grad()
    def probe(self, module: nn.Module) -> None:
        """Set has_linear_head: compare the loss in chunks with the loss of the whole model, and large logits, which
        some models cap, with those of the output layer."""
        assert isinstance(module, CausalLM)
        if not self._can_run(module):
            return
        device = next(module.parameters()).device
        tokens = torch.arange(16, device=device).view(2, 8) % self.vocab_size
        targets = tokens.roll(-1, dims=1)
        with evaluating(module):
            module.has_linear_head = False
            try:
                full = float(module(tokens, targets))
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError, ValueError) as problem:
                raise UsageError(
                    f"The model does not run on this machine: {one_line(problem, 200)}",
                    remedy="Set model.attention to sdpa or eager.",
                ) from None
            module.has_linear_head = True
            try:
                chunked = float(module(tokens, targets))
            except (AttributeError, TypeError, RuntimeError):  # the output layer is not a plain linear layer
                chunked = float("nan")
            is_linear = abs(chunked - full) <= 1e-5 * abs(full)
            module.has_linear_head = is_linear and not changes_logits(module.base, tokens)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The longest ModuleList; peft adds short ones."""
        return max(outer_lists(module), key=len, default=[])

    def compiled_loss(self, module: nn.Module, by_block: bool) -> LossFunction:  # noqa: ARG002
        """Always by block: as fast as compiling the whole model, in a fifth of the compile time."""
        # Whether to save the inputs of linear layers (norms, SwiGLU), as the compiler does by default, or to recompute
        # them in the backward pass: a third of the activations, for one more pass over each. A full fine-tuning needs
        # the memory for gradients and optimizer state.
        torch._functorch.config.ban_recompute_materialized_backward = self.config.lora is not None
        assert isinstance(module, CausalLM)
        module.output_loss = compiled_loss(self.numerics)
        return super().compiled_loss(module, by_block=True)

    def flops_per_token(self, module: nn.Module) -> float:
        """6 per trained weight; 4 per frozen one, which needs no weight gradient."""
        trained = trainable_count(module)
        config = self.hf_config.get_text_config()
        width = config.hidden_size
        attention = 12.0 * config.num_hidden_layers * width * self.config.block_size
        is_tied = getattr(config, "tie_word_embeddings", False)
        embedding = 0 if is_tied else self.vocab_size * width  # an untied one is looked up, not multiplied
        frozen = parameter_count(module) - trained
        if not frozen:
            return 6.0 * (trained - embedding) + attention
        return 4.0 * (frozen - embedding) + 6.0 * trained + attention

    def next_logits(self, module: nn.Module, block_size: int) -> NextLogits:
        return cached_next_logits(module, block_size)

    def hidden_states(self, module: nn.Module, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        assert isinstance(module, CausalLM)
        if not module.has_linear_head:
            return cast(torch.Tensor, module(tokens, cache=cache))
        base = module.base
        body = getattr(base, base.base_model_prefix)
        with without_flex(base.config) if cache is not None else nullcontext():
            output = body(input_ids=tokens, past_key_values=cache, use_cache=cache is not None)
        return cast(torch.Tensor, output.last_hidden_state)

    def output_logits(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        assert isinstance(module, CausalLM)
        if not module.has_linear_head:
            return hidden
        return cast(torch.Tensor, module.base.get_output_embeddings()(hidden))

    def new_cache(self, module: nn.Module, capacity: int) -> Any:  # noqa: ARG002
        return new_cache()

    def select_rows(self, cache: Any, rows: torch.Tensor) -> None:
        cache.batch_select_indices(rows)

    def checkpoint_extras(self, module: nn.Module) -> WriteInto | None:
        """The adapter in peft's format."""
        if not has_adapter(module):
            return None
        adapted: Any = module.model
        tensors = adapter_tensors(module)
        base = self.base_model()
        return lambda directory: save_adapter(adapted, tensors, directory / ADAPTER, base)

    def export_config(self) -> dict[str, Any]:
        return dict(self.hf_config.get_text_config().to_dict())

    def export(
        self,
        module: nn.Module,
        directory: Path,
        end_of_text: int | None = None,  # noqa: ARG002
        dtype: str = "float32",
    ) -> None:
        """Write a directory for AutoModelForCausalLM; adapters are merged into the weights in float32, then rounded."""
        from safetensors import SafetensorError

        assert isinstance(module, CausalLM)
        if has_adapter(module):
            merge_adapters(module)
        model = module.model.to(getattr(torch, dtype))
        model.config.use_cache = True
        quiet_libraries()
        generation = getattr(model, "generation_config", None)
        if generation is not None and (generation.temperature, generation.top_p) != (None, None):
            generation.do_sample = True  # transformers refuses to save a sampling config with do_sample False
        try:
            model.save_pretrained(str(directory))
        except SafetensorError as problem:
            raise OSError(str(problem)) from None
        except ValueError as problem:
            raise DataError(f"transformers cannot save the model: {one_line(problem, 300)}") from None
        for path in directory.glob("*.safetensors"):
            use_default_mode(path)

    def base_dtype(self) -> str:
        values = read_json(self.directory / "config.json") or {}
        name = values.get("dtype") or values.get("torch_dtype")  # the second one: transformers before 5
        return name if name in EXPORT_DTYPES else "float32"


def enable_adapters(module: nn.Module, enabled: bool) -> None:
    """Without its adapters, the module is the base model."""
    for layer in lora_layers(module):
        layer.enable_adapters(enabled)
