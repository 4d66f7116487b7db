"""The GPT-2 architecture, for one device; parallelism is applied from outside.

Modules have GPT-2's names, so that the transformers format (gpt2_format.py) differs only by transpositions.
Shapes: B batch size, T sequence length, C d_model, nh heads, hs head size, V padded vocabulary size.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.model import GptSection

INIT_STD = 0.02
VOCAB_MULTIPLE = 64


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GptSection) -> None:
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)  # query, key and value of all heads
        self.c_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape  # noqa: N806
        qkv = self.c_attn(x).view(B, T, 3, self.n_heads, C // self.n_heads)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, nh, T, hs)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GptSection) -> None:
        super().__init__()
        d_ff = config.d_ff or 4 * config.d_model
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.d_model, d_ff)
        self.c_proj = nn.Linear(d_ff, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, d_ff)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GptSection) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.attn(self.ln_1(x))
        mlp: torch.Tensor = self.mlp(self.ln_2(x))
        return x + mlp


class GPT(nn.Module):
    padding_bias: torch.Tensor | None

    def __init__(self, config: GptSection, vocab_size: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        padded_size = padded_vocab_size(vocab_size)
        self.wte = nn.Embedding(padded_size, config.d_model)
        self.wpe = nn.Embedding(config.block_size, config.d_model)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        # Tied embeddings have no second matrix, so a checkpoint cannot contain two different ones.
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.d_model, padded_size, bias=False)
        # -inf for the logits of padding ids. A bias is free; slicing the logits would copy them.
        bias = torch.full((padded_size,), float("-inf")).index_fill_(0, torch.arange(vocab_size), 0.0)  # (V,)
        self.register_buffer("padding_bias", bias if padded_size > vocab_size else None, persistent=False)
        self._init_weights(config.n_layers)

    @property
    def head_weight(self) -> torch.Tensor:  # (V, C)
        """The matrix of the output layer; its logits also need padding_bias."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, V)
        return F.linear(self.hidden_states(tokens), self.head_weight, self.padding_bias)

    def hidden_states(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, C)
        """The input of the output layer, so that a loss can compute the logits in pieces."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]  # (B, T, C)
        x = F.dropout(x, self.dropout, self.training)
        for block in self.h:
            x = block(x)
        hidden: torch.Tensor = self.ln_f(x)
        return hidden

    def _init_weights(self, n_layers: int) -> None:
        """GPT-2's initialization: normal(0, 0.02), zero biases, residual projections scaled by 1 / sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                scale = math.sqrt(2 * n_layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=INIT_STD / scale)


def padded_vocab_size(vocab_size: int) -> int:
    """The next multiple of 64 if that adds at most 1 % (50257 -> 50304, much faster on a GPU), else vocab_size itself.

    It does not depend on the device, so that a run can move between devices.
    """
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return padded if padded <= 1.01 * vocab_size else vocab_size
