"""`gpt`: the GPT-2 architecture, for one device. Parallelism is applied from outside.

Names of modules are GPT-2's own, so that the transformers format (gpt2_format.py) is only a transposition away.
Shapes: B batch, T time, C width (d_model), nh heads, hs head size.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.model import GptSection
from llmtrain.errors import DataError
from llmtrain.models.base import ModelAdapter, parameter_count

INIT_STD = 0.02
PAD_MULTIPLE = 64


class Attention(nn.Module):
    def __init__(self, config: GptSection) -> None:
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)
        self.c_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape  # noqa: N806
        qkv = self.c_attn(x).view(B, T, 3, self.n_heads, C // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, nh, T, hs)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GptSection) -> None:
        super().__init__()
        d_ff = config.d_ff or 4 * config.d_model
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.d_model, d_ff)
        self.c_proj = nn.Linear(d_ff, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.c_fc(x), approximate="tanh")
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GptSection) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        mlp: torch.Tensor = self.mlp(self.ln_2(x))
        return x + mlp


class GPT(nn.Module):
    padding: torch.Tensor | None

    def __init__(self, config: GptSection, vocab_size: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        rows = padded_vocab(vocab_size)
        self.wte = nn.Embedding(rows, config.d_model)
        self.wpe = nn.Embedding(config.block_size, config.d_model)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        # Tied: there is no second matrix at all, so nothing can come apart in a checkpoint.
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.d_model, rows, bias=False)
        # Added to the logits, so that the rows that only pad the vocabulary have no say: a bias costs nothing, while
        # cutting the columns off would copy all logits.
        padding = torch.full((rows,), float("-inf")).index_fill_(0, torch.arange(vocab_size), 0.0)
        self.register_buffer("padding", padding if rows > vocab_size else None, persistent=False)
        self._initialise(config.n_layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]  # (B, T, C)
        x = F.dropout(x, self.dropout, self.training)
        for block in self.h:
            x = block(x)
        head = self.wte.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(self.ln_f(x), head, self.padding)  # (B, T, padded vocabulary)

    def _initialise(self, n_layers: int) -> None:
        """GPT-2's: normal 0.02, zero biases, and residual projections scaled down by the depth."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                scale = math.sqrt(2 * n_layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=INIT_STD / scale)


def padded_vocab(vocab_size: int) -> int:
    """Rows of the embedding: the next multiple of 64 where that adds under 1 % (50257 -> 50304, much faster on a
    GPU), else as they are (65 characters). It depends on the size only, so a run can move between devices."""
    padded = -(-vocab_size // PAD_MULTIPLE) * PAD_MULTIPLE
    return padded if padded <= 1.01 * vocab_size else vocab_size


class GPTAdapter(ModelAdapter):
    config: GptSection

    def build(self) -> nn.Module:
        module = GPT(self.config, self.vocab_size)
        if self.config.init != "random":
            from llmtrain.models.gpt.gpt2_format import read_gpt2

            state = read_gpt2(Path(self.config.init).expanduser(), self.config, self.vocab_size)
            try:
                module.load_state_dict(state)
            except RuntimeError as problem:
                what = " ".join(str(problem).split())[:300]
                raise DataError(f"model.init {self.config.init} does not hold the whole model: {what}") from None
        return module

    def flops_per_token(self, module: nn.Module) -> float:
        """6 for each weight (2 forward, 4 backward), and attention's two products over the context."""
        c = self.config
        weights = parameter_count(module) - c.block_size * c.d_model  # positions are looked up, not multiplied
        return 6.0 * weights + 12.0 * c.n_layers * c.d_model * c.block_size

    def export(self, module: nn.Module, folder: Path, end_of_text: int | None = None, dtype: str = "float32") -> None:
        from llmtrain.models.gpt.gpt2_format import write_gpt2

        write_gpt2(folder, self.config, self.vocab_size, module.state_dict(), end_of_text, dtype)
