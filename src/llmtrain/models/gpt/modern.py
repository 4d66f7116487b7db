"""The modern architecture, for one device; parallelism is applied from outside.

Rotary positions, RMSNorm, QK-norm, no biases, grouped-query attention, and output projections that start at zero.
`mlp` chooses between two shapes that transformers has a class for: `swiglu` is Qwen3's; `relu2` is NanoChat's, whose
norms have no weights, so ours has them only where an export can fold them into the next matrix (modern_formats.py).
Few, large operations: matrices with the same input are one, and positions are applied to queries and keys at once.
Shapes: B batch size, T sequence length, C d_model, nh heads, nkv key and value heads, hs head size, V padded
vocabulary size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.compat.numerics import Numerics
from llmtrain.config.model import ModernGptSection
from llmtrain.core.seeds import derive_seed
from llmtrain.models.gpt.kv_cache import AnyCache, AnyLayer, StaticCache, attend, of_positions
from llmtrain.models.gpt.model import INIT_STD, LanguageModel, make_padding_bias
from llmtrain.models.sizes import padded_vocab_size
from llmtrain.models.target_device import is_gpu

NORM_EPS = 1e-6
Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, (T, 1, hs) each"""


class Linear(nn.Linear):
    """Without a bias, and uninitialized: see init_parameter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """Uninitialized: see init_parameter."""

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    def __init__(self, config: ModernGptSection) -> None:
        super().__init__()
        shape = config.shape
        self.n_heads = shape.n_heads
        self.n_kv_heads = shape.n_kv_heads
        self.head_dim = shape.head_dim
        self.qkv = Linear(shape.d_model, (self.n_heads + 2 * self.n_kv_heads) * self.head_dim)  # rows q | k | v
        self.proj = Linear(self.n_heads * self.head_dim, shape.d_model)
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if config.mlp == "swiglu":  # norms without weights commute with the rotation, which NanoChat applies before
            self.q_norm = nn.Parameter(torch.empty(self.head_dim))
            self.k_norm = nn.Parameter(torch.empty(self.head_dim))

    def forward(self, x: torch.Tensor, rotary: Rotary, cache: AnyLayer | None = None) -> torch.Tensor:
        B, T, _ = x.shape  # noqa: N806
        nh = self.n_heads
        nkv = self.n_kv_heads
        hs = self.head_dim
        qk, v = self.qkv(x).view(B, T, nh + 2 * nkv, hs).split_with_sizes((nh + nkv, nkv), dim=2)
        qk = F.rms_norm(qk, (hs,), eps=NORM_EPS)  # (B, T, nh + nkv, hs)
        if self.q_norm is not None and self.k_norm is not None:
            weights = torch.cat([self.q_norm.expand(nh, hs), self.k_norm.expand(nkv, hs)])
            qk = qk * weights.to(qk.dtype)
        q, k = _rotate(qk, rotary).to(v.dtype).split_with_sizes((nh, nkv), dim=2)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cache=cache)  # (B, nh, T, hs)
        return self.proj(y.transpose(1, 2).reshape(B, T, nh * hs))  # (B, T, C)


class SwiGLU(nn.Module):
    def __init__(self, config: ModernGptSection) -> None:
        super().__init__()
        self.gate_up = Linear(config.shape.d_model, 2 * config.shape.d_ff)  # rows gate | up
        self.down = Linear(config.shape.d_ff, config.shape.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, d_ff) each
        return self.down(F.silu(gate) * up)


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2 with the gradient 2 sqrt(result): the next layer saves the result in any case, so that the backward
    pass does not need x, a fifth of all activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = F.relu(x).square()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return 2 * result.sqrt() * upstream[0]


class SquaredReLU(nn.Module):
    def __init__(self, config: ModernGptSection, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics
        self.up = Linear(config.shape.d_model, config.shape.d_ff)
        self.down = Linear(config.shape.d_ff, config.shape.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        up = self.up(x)  # (B, T, d_ff)
        if is_gpu(up) and self.numerics.saves_one_relu2:
            return self.down(_SquaredReLU.apply(up))  # type: ignore[no-untyped-call]
        return self.down(F.relu(up).square())


class ModernBlock(nn.Module):
    def __init__(self, config: ModernGptSection, numerics: Numerics) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(config.shape.d_model, eps=NORM_EPS)
        self.attn = Attention(config)
        self.norm_2 = nn.RMSNorm(config.shape.d_model, eps=NORM_EPS)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else SquaredReLU(config, numerics)

    def forward(self, x: torch.Tensor, rotary: Rotary, cache: AnyLayer | None = None) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x), rotary, cache)
        return x + self.mlp(self.norm_2(x))  # (B, T, C)


class ModernGPT(LanguageModel):
    rotary_cos: torch.Tensor
    rotary_sin: torch.Tensor

    def __init__(self, config: ModernGptSection, vocab_size: int, numerics: Numerics) -> None:
        super().__init__(numerics)
        shape = config.shape
        padded_size = padded_vocab_size(vocab_size)
        self.has_embedding_norm = config.mlp == "relu2"
        self.wte = Embedding(padded_size, shape.d_model)
        self.h = nn.ModuleList(ModernBlock(config, numerics) for _ in range(shape.n_layers))
        self.norm_f = nn.RMSNorm(shape.d_model, eps=NORM_EPS)
        self.lm_head = None if config.tie_embeddings else Linear(shape.d_model, padded_size)
        self.register_buffer("padding_bias", make_padding_bias(vocab_size), persistent=False)
        cos, sin = _rotary_tables(config.block_size, shape.head_dim, config.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)
        seed = torch.initial_seed()
        for name, parameter in self.named_parameters():
            init_parameter(name, parameter, seed)

    def hidden_states(self, tokens: torch.Tensor, cache: AnyCache | None = None) -> torch.Tensor:
        x = self.wte(tokens)  # (B, T, C)
        if self.has_embedding_norm:
            x = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
        rotary = self._rotary(tokens.shape[1], cache, x.dtype)
        for index, block in enumerate(self.h):
            layer = cache.layers[index] if cache else None
            x = block(x, rotary, layer)
        return self.norm_f(x)

    def _rotary(self, count: int, cache: AnyCache | None, dtype: torch.dtype) -> Rotary:
        cos = of_positions(self.rotary_cos, count, cache)
        sin = of_positions(self.rotary_sin, count, cache)
        if isinstance(cache, StaticCache):  # cast once here: a cast in each block would be a tenth of a step's kernels
            return cos.to(dtype), sin.to(dtype)
        return cos, sin


def fused_rows(config: ModernGptSection) -> dict[str, list[int]]:
    """Matrices of a block that are several in one: name in the block -> number of rows of each."""
    shape = config.shape
    kv_rows = shape.n_kv_heads * shape.head_dim
    rows = {"attn.qkv.weight": [shape.n_heads * shape.head_dim, kv_rows, kv_rows]}
    if config.mlp == "swiglu":
        rows["mlp.gate_up.weight"] = [shape.d_ff, shape.d_ff]
    return rows


@torch.no_grad()
def fold_norms(model: ModernGPT) -> None:
    """Multiply the weights of the norms of a `relu2` into the matrices behind them, as its export has them."""
    vocabulary, width = model.head_weight.shape
    head = Linear(width, vocabulary)
    head.weight.copy_(model.head_weight * model.norm_f.weight)
    model.lm_head = head.to(model.head_weight.device)  # no longer tied: the embedding has no norm behind it
    model.norm_f.weight.fill_(1.0)
    for block in model.h:
        assert isinstance(block, ModernBlock)
        assert isinstance(block.mlp, SquaredReLU)
        block.attn.qkv.weight.mul_(block.norm_1.weight)
        block.mlp.up.weight.mul_(block.norm_2.weight)
        block.norm_1.weight.fill_(1.0)
        block.norm_2.weight.fill_(1.0)


def init_parameter(name: str, parameter: torch.Tensor, seed: int) -> None:
    """Initialize one parameter. Its values depend on the seed, its name and its shape only, so that any process can
    reproduce it alone. Weights of norms are one and output projections zero: at the start, every block is the
    identity."""
    if parameter.is_meta:  # a model that is only counted, or whose weights come from a checkpoint
        return
    generator = torch.Generator(parameter.device).manual_seed(derive_seed(seed, name))
    if parameter.dim() < 2:
        nn.init.ones_(parameter)
    elif name.endswith(("attn.proj.weight", "mlp.down.weight")):
        nn.init.zeros_(parameter)
    elif name in ("wte.weight", "lm_head.weight"):
        nn.init.normal_(parameter, std=INIT_STD, generator=generator)
    else:
        nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5, generator=generator)


def _rotary_tables(length: int, head_dim: int, theta: float) -> Rotary:
    """cos and sin of each position, (length, 1, hs) each; the first half of sin is negated (see _rotate)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # (hs / 2,)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies  # (length, hs / 2)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def _rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + hs/2]) of each head by angles that grow with the position; (B, T, heads, hs).

    Rolling by half swaps the halves, and the sign is in the table of sin: three operations in all.
    """
    cos, sin = (table.to(x.dtype) for table in rotary)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
