"""`hf_causal_lm`: a Hugging Face model, fine-tuned whole or through LoRA adapters.

transformers holds the architecture and reads the weights, peft adds the adapters. Everything is read from a directory
(hub.py brings one), so that nothing here ever asks the network.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.schema import ModelSection
from llmtrain.errors import DataError, UsageError
from llmtrain.hub.find import find_model
from llmtrain.logs import warn
from llmtrain.models import linear_loss
from llmtrain.models.base import LossFunction, ModelAdapter, NextLogits, WriteInto, parameter_count, trainable_count
from llmtrain.models.hf_files import check_installed, is_tokenizer_folder, quiet_libraries, read_config, read_weights
from llmtrain.models.lora import ADAPTER, add_lora, is_adapter_weight, lora_layers, save_adapter

# Architectures that do something to the logits behind the output layer; they go through transformers' own forward.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")


class CausalLM(nn.Module):
    """A transformers model with this project's signature. With targets it gives the sum of the losses and never holds
    all logits at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        base = self.base
        self._is_plain = not any(_is_set(getattr(base.config, name, None)) for name in _LOGIT_CHANGES)

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
        if not self._is_plain or targets is None:
            logits: torch.Tensor = base(input_ids=tokens, **options).logits
            if targets is None:
                return logits
            flat = logits.view(-1, logits.shape[-1]).float()
            return F.cross_entropy(flat, targets.view(-1), reduction="sum")
        hidden = getattr(base, base.base_model_prefix)(input_ids=tokens, **options).last_hidden_state
        head = base.get_output_embeddings()
        return linear_loss.linear_cross_entropy(hidden, head.weight, head.bias, targets)


class HFCausalLMAdapter(ModelAdapter):
    can_pack = True

    def __init__(self, config: ModelSection, tokenizer_vocab: int) -> None:
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
        longest = getattr(self.hf_config, "max_position_embeddings", None)
        if longest and config.block_size > longest:
            raise UsageError(
                f"model.block_size {config.block_size} is beyond the {longest} positions the model knows.",
                remedy=f"Set model.block_size to at most {longest}.",
            )

    @classmethod
    def own_tokenizer(cls, config: ModelSection) -> str:
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
            path = Path(self.config.path or "").expanduser()
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
        be what it says alone, or nearly so beside what it says without positions."""
        device = next(module.parameters()).device
        rows = torch.arange(16, device=device).view(1, 16) % self.vocab_size
        positions = torch.arange(16, device=device).view(1, 16) % 8
        was_training = module.training
        module.eval()
        alone = module(rows[:, 8:])[0].float()
        after, leaking = (module(rows, positions=given)[0, 8:].float() for given in (positions, None))
        module.train(was_training)
        return bool((after - alone).abs().max() <= 1e-5 + 0.1 * (leaking - alone).abs().max())

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The longest list of layers; adapters keep short lists of their own."""
        lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def compiled(self, module: nn.Module, by_block: bool) -> LossFunction:  # noqa: ARG002
        """Always by block: as fast as all at once, and compiled in a fifth of the time."""
        for block in self.blocks(module):
            block.compile()
        linear_loss.compile_chunks()
        return self.loss

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

    def export(self, module: nn.Module, folder: Path, end_of_text: int | None = None) -> None:  # noqa: ARG002
        """A directory that AutoModelForCausalLM loads; adapters are merged into the weights."""
        from safetensors import SafetensorError

        assert isinstance(module, CausalLM)
        model = module.model
        if is_adapted(module):
            model = model.merge_and_unload()
        model.config.use_cache = True
        quiet_libraries()
        try:
            model.save_pretrained(str(folder))
        except SafetensorError as problem:
            raise OSError(str(problem)) from None


def model_folder(config: ModelSection) -> Path:
    assert config.path is not None
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


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, int | float) and math.isclose(value, 1.0))


def _whole_copy(parameter: torch.Tensor) -> torch.Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().cpu().clone()
