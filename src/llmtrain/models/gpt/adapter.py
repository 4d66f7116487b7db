"""`gpt`: builds, counts and exports a GPT for the trainer."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.errors import DataError
from llmtrain.models import losses
from llmtrain.models.base import ModelAdapter, NextLogits, parameter_count
from llmtrain.models.gpt.format_files import State
from llmtrain.models.gpt.gpt2_format import read_gpt2, write_gpt2
from llmtrain.models.gpt.kv_cache import KVCache
from llmtrain.models.gpt.model import GPT
from llmtrain.models.gpt.modern import ModernGPT, fused_rows
from llmtrain.models.gpt.nanochat_format import read_nanochat, write_nanochat
from llmtrain.models.gpt.qwen3_format import read_qwen3, write_qwen3
from llmtrain.text import one_line


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
        values = self.vocab_size, self.numerics
        c = self.config
        return ModernGPT(c, *values) if isinstance(c, ModernGptSection) else GPT(c, *values)

    def weight_count(self) -> int:
        """The weights in matrices; norms, biases and positions are not counted."""
        c = self.config
        shape = c.shape if isinstance(c, ModernGptSection) else c
        width, d_ff = shape.d_model, shape.d_ff or 4 * shape.d_model
        if isinstance(c, ModernGptSection):
            attention = 2 * width * (c.shape.n_heads + c.shape.n_kv_heads) * c.shape.head_dim
            block = attention + (3 if c.mlp == "swiglu" else 2) * width * d_ff
        else:
            block = 4 * width * width + 2 * width * d_ff
        return shape.n_layers * block + (1 if c.tie_embeddings else 2) * self.vocab_size * width

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
        c = self.config
        rows = fused_rows(c) if isinstance(c, ModernGptSection) else {"attn.c_attn.weight": [c.d_model] * 3}
        return {name: rows[key] for name, _ in module.named_parameters() for key in rows if name.endswith(f".{key}")}

    def loss(
        self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.numerics.chunks_gpt_loss or not losses.needs_chunks(inputs, self.vocab_size):
            return super().loss(module, inputs, targets, positions)
        loss: torch.Tensor = module(inputs, targets)
        return loss

    def flops_per_token(self, module: nn.Module) -> float:
        """6 per weight (2 forward, 4 backward), and the two matrix products of attention over the context."""
        c = self.config
        if isinstance(c, ModernGptSection):
            layers, width = c.shape.n_layers, c.shape.d_model
            looked_up = 0 if c.tie_embeddings else self.vocab_size * width
        else:
            layers, width = c.n_layers, c.d_model
            looked_up = c.block_size * width
        weights = parameter_count(module) - looked_up  # positions and untied embeddings are not multiplied
        return 6.0 * weights + 12.0 * layers * width * c.block_size

    def next_logits(self, module: nn.Module, block_size: int) -> NextLogits:
        """For generation, with a KV cache. Once the context is full, the last `block_size` tokens are computed anew
        for each token: they have other positions then."""
        cache = KVCache(len(self.blocks(module)), block_size)

        def next_logits(ids: Sequence[int]) -> torch.Tensor:
            device = next(module.parameters()).device
            is_full = len(ids) > block_size
            new = ids[-block_size:] if is_full else ids[cache.length :]
            logits: torch.Tensor = module(torch.tensor([list(new)], device=device), cache=None if is_full else cache)
            return logits[0, -1]

        return next_logits

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
