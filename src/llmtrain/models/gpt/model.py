"""The GPT-2 architecture, for one device; parallelism is applied from outside.

Modules have GPT-2's names, so that the transformers format (gpt2_format.py) differs only by transpositions.
Shapes: B batch size, T sequence length, C d_model, nh heads, hs head size, V padded vocabulary size.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import GptSection
from llmtrain.models.gpt.kv_cache import AnyCache, AnyLayer, attend, of_positions
from llmtrain.models.group_losses import Groups
from llmtrain.models.losses import ChunkedLoss, OutputLoss
from llmtrain.models.sizes import padded_vocab_size

INIT_STD = 0.02


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GptSection) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)  # query, key and value of all heads
        self.c_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: torch.Tensor, cache: AnyLayer | None = None) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape  # noqa: N806
        qkv = self.c_attn(x).view(B, T, 3, self.n_heads, C // self.n_heads)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, nh, T, hs)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, dropout, cache)  # (B, nh, T, hs)
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

    def forward(self, x: torch.Tensor, cache: AnyLayer | None = None) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class LanguageModel(nn.Module):
    """The output layer and the loss of both architectures, which differ in `hidden_states`."""

    wte: nn.Embedding
    lm_head: nn.Linear | None
    """None if the output layer is tied to the embedding: a checkpoint then cannot contain two different matrices."""
    padding_bias: torch.Tensor | None

    def __init__(self, numerics: Numerics) -> None:
        """`numerics`: those of the run."""
        super().__init__()
        self.output_loss: OutputLoss = ChunkedLoss(numerics)

    @property
    def head_weight(self) -> torch.Tensor:  # (V, C)
        """The matrix of the output layer; its logits also need padding_bias."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        cache: AnyCache | None = None,
        groups: Groups | None = None,
    ) -> torch.Tensor:
        """Logits, (B, T) -> (B, T, V); with targets the sum of their losses, or the sums of groups, computed in chunks.
        With a cache, the tokens follow those in it, and only the last one's logits are computed: (B, 1, V)."""
        hidden = self.hidden_states(tokens, cache)
        if targets is not None:
            return self.output_loss(hidden, self.head_weight, self.padding_bias, targets, groups)
        if cache is not None:
            hidden = hidden[:, -1:]  # (B, 1, C)
        return self.output_logits(hidden)

    def output_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # (..., C) -> (..., V)
        bias = None if self.padding_bias is None else self.padding_bias.to(hidden.dtype)
        return F.linear(hidden, self.head_weight.to(hidden.dtype), bias)

    def hidden_states(self, tokens: torch.Tensor, cache: AnyCache | None = None) -> torch.Tensor:
        """The input of the output layer, so that a loss can compute the logits in pieces: (B, T) -> (B, T, C)."""
        raise NotImplementedError


class GPT(LanguageModel):
    def __init__(self, config: GptSection, vocab_size: int, numerics: Numerics) -> None:
        super().__init__(numerics)
        self.dropout = config.dropout
        padded_size = padded_vocab_size(vocab_size)
        self.wte = nn.Embedding(padded_size, config.d_model)
        self.wpe = nn.Embedding(config.block_size, config.d_model)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.d_model, padded_size, bias=False)
        self.register_buffer("padding_bias", make_padding_bias(vocab_size), persistent=False)
        self._init_weights(config.n_layers)

    def hidden_states(self, tokens: torch.Tensor, cache: AnyCache | None = None) -> torch.Tensor:
        x = self.wte(tokens)  # (B, T, C)
        x = x + of_positions(self.wpe.weight, tokens.shape[1], cache).to(x.dtype)
        x = F.dropout(x, self.dropout, self.training)
        for index, block in enumerate(self.h):
            layer = cache.layers[index] if cache else None
            x = block(x, layer)
        return self.ln_f(x)

    def _init_weights(self, n_layers: int) -> None:
        """GPT-2's initialization: normal(0, 0.02), zero biases, residual projections scaled by 1 / sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                scale = math.sqrt(2 * n_layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=INIT_STD / scale)


def make_padding_bias(vocab_size: int) -> torch.Tensor | None:
    """-inf for the logits of padding ids, 0 for the others: (V,); None without padding. A bias is free; slicing the
    logits would copy them."""
    padded_size = padded_vocab_size(vocab_size)
    if padded_size == vocab_size:
        return None
    return torch.full((padded_size,), float("-inf")).index_fill_(0, torch.arange(vocab_size), 0.0)
