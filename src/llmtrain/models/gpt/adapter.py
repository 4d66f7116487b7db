"""`gpt`: builds, counts and exports a GPT for the trainer."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.core.text import one_line
from llmtrain.errors import DataError
from llmtrain.models.base import LossFunction, ModelAdapter, NextLogits, parameter_count
from llmtrain.models.gpt.decoding import next_logits_of
from llmtrain.models.gpt.format_files import State
from llmtrain.models.gpt.gpt2_format import gpt2_config, read_gpt2, write_gpt2
from llmtrain.models.gpt.kv_cache import KVCache
from llmtrain.models.gpt.model import GPT, LanguageModel
from llmtrain.models.gpt.modern import ModernGPT, fold_norms, fused_rows
from llmtrain.models.gpt.modern_formats import (
    nanochat_config,
    qwen3_config,
    read_nanochat,
    read_qwen3,
    write_nanochat,
    write_qwen3,
)
from llmtrain.models.group_losses import Groups
from llmtrain.models.losses import compiled_loss, needs_chunks


class GPTAdapter(ModelAdapter):
    """Both architectures; they differ in their module, their formats and their matrices."""

    config: GptSection | ModernGptSection
    can_cast_weights = True

    def build(self) -> nn.Module:
        module = self._new_module()
        if self.config.init != "random":
            state = self._read(Path(self.config.init).expanduser())
            try:
                module.load_state_dict(state)
            except RuntimeError as problem:
                message = one_line(problem, 300)
                raise DataError(f"model.init {self.config.init} does not have all weights: {message}") from None
        return module

    def _new_module(self) -> nn.Module:
        if isinstance(self.config, ModernGptSection):
            return ModernGPT(self.config, self.vocab_size, self.numerics)
        return GPT(self.config, self.vocab_size, self.numerics)

    def weight_count(self) -> int:
        """The weights in matrices; norms, biases and positions are not counted."""
        c = self.config
        shape = c.shape if isinstance(c, ModernGptSection) else c
        width = shape.d_model
        if isinstance(c, ModernGptSection):
            attention = 2 * width * (c.shape.n_heads + c.shape.n_kv_heads) * c.shape.head_dim  # q and output, k and v
            mlp_matrices = 3 if c.mlp == "swiglu" else 2
        else:
            attention = 4 * width * width
            mlp_matrices = 2
        block = attention + mlp_matrices * width * (shape.d_ff or 4 * width)
        vocabulary_matrices = 1 if c.tie_embeddings else 2
        return shape.n_layers * block + vocabulary_matrices * self.vocab_size * width

    def _read(self, directory: Path) -> State:
        if not isinstance(self.config, ModernGptSection):
            return read_gpt2(directory, self.config, self.vocab_size)
        read = read_qwen3 if self.config.mlp == "swiglu" else read_nanochat
        return read(directory, self.config, self.vocab_size)

    @property
    def uses_dropout(self) -> bool:
        return isinstance(self.config, GptSection) and self.config.dropout > 0

    def matrix_sections(self, module: nn.Module) -> dict[str, list[int]]:
        """Query, key and value share one matrix, and so do gate and up of `swiglu`."""
        if isinstance(self.config, ModernGptSection):
            rows = fused_rows(self.config)
        else:
            rows = {"attn.c_attn.weight": [self.config.d_model] * 3}
        sections = {}
        for name, _ in module.named_parameters():
            for key in rows:
                if name.endswith(f".{key}"):
                    sections[name] = rows[key]
        return sections

    def loss(
        self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.numerics.chunks_gpt_loss or not needs_chunks(inputs, self.vocab_size):
            return super().loss(module, inputs, targets, positions)
        return module(inputs, targets)

    def group_losses(
        self,
        module: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        groups: Groups,
    ) -> torch.Tensor:
        if not needs_chunks(inputs, self.vocab_size):
            return super().group_losses(module, inputs, targets, positions, groups)
        return module(inputs, targets, groups=groups)

    def compiled_loss(self, module: nn.Module, by_block: bool) -> LossFunction:
        assert isinstance(module, LanguageModel)
        module.output_loss = compiled_loss(self.numerics)
        return super().compiled_loss(module, by_block)

    def flops_per_token(self, module: nn.Module) -> float:
        """6 per weight (2 forward, 4 backward), and the two matrix products of attention over the context."""
        c = self.config
        shape = c.shape if isinstance(c, ModernGptSection) else c
        looked_up = 0  # positions and untied embeddings are not multiplied
        if isinstance(c, GptSection):
            looked_up = c.block_size * shape.d_model
        elif not c.tie_embeddings:
            looked_up = self.vocab_size * shape.d_model
        weights = parameter_count(module) - looked_up
        return 6.0 * weights + 12.0 * shape.n_layers * shape.d_model * c.block_size

    def next_logits(self, module: nn.Module, block_size: int) -> NextLogits:
        """For generation, with a KV cache."""
        return next_logits_of(module, len(self.blocks(module)), block_size)

    def export_config(self) -> dict[str, Any]:
        c = self.config
        if not isinstance(c, ModernGptSection):
            return gpt2_config(c, self.vocab_size)
        values = qwen3_config if c.mlp == "swiglu" else nanochat_config
        return values(c, self.vocab_size)

    def hidden_states(self, module: nn.Module, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        assert isinstance(module, LanguageModel)
        return module.hidden_states(tokens, cache)

    def output_logits(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        assert isinstance(module, LanguageModel)
        return module.output_logits(hidden)

    def new_cache(self, module: nn.Module, capacity: int) -> KVCache:
        return KVCache(len(self.blocks(module)), capacity)

    def select_rows(self, cache: Any, rows: torch.Tensor) -> None:
        assert isinstance(cache, KVCache)
        cache.select_rows(rows)

    def fold_weights(self, module: nn.Module) -> None:
        if isinstance(module, ModernGPT) and module.has_embedding_norm:
            fold_norms(module)

    def export(
        self, module: nn.Module, directory: Path, end_of_text: int | None = None, dtype: str = "float32"
    ) -> None:
        state = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        c = self.config
        if not isinstance(c, ModernGptSection):
            write_gpt2(directory, c, self.vocab_size, state, end_of_text, dtype)
            return
        write = write_qwen3 if c.mlp == "swiglu" else write_nanochat
        write(directory, c, self.vocab_size, state, end_of_text, dtype)
