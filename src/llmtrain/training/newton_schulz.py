"""Newton-Schulz iteration: replaces the singular values of a matrix by values near 1.

One iteration is X <- (a I + b G + c G G) X with G = X X^T. For a matrix that is much longer than wide most of the work
is in forming G and multiplying by X. Such matrices are iterated in Gram form: G itself is updated (all factors are
polynomials of G, so they commute), the factors are multiplied up, and X is multiplied once. In bfloat16 the rounding
errors of G would grow too far over five iterations, so X is multiplied and G formed again after three.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c, chosen by Keller Jordan for a steep slope at 0: singular values end between about 0.7 and 1.2."""
ITERATIONS = 5
EPSILON = 1e-7
GRAM_RATIO = 1.5
"""From this ratio of the sides on, the Gram form takes fewer operations: for ratio r and sides n and r n, per n^3,
4 r + 34 (8 r + 28 with one restart) instead of 20 r + 10."""
MAX_BATCH_ELEMENTS = 1 << 26
"""Maximum elements per batch, which bounds the memory: 128 MB in bfloat16 per intermediate result."""
MAX_KERNEL_ELEMENTS = 2**31 - 1
"""Maximum elements per matrix: our kernel computes offsets in 32 bits."""
KERNEL_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs with products in bfloat16."""


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; float32 on a CPU, where bfloat16 products are slow."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def has_kernel(device: torch.device) -> bool:
    """Whether newton_schulz_by_kernel runs on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= KERNEL_CAPABILITY


class Product(Protocol):
    """scale (alpha A B + beta C + diagonal I) for each matrix of a batch: product_kernel.product, or torch's."""

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        addend: torch.Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        diagonal: float = 0.0,
        scales: torch.Tensor | None = None,
        is_symmetric: bool = False,
    ) -> torch.Tensor: ...


def newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """Orthogonalize each matrix of a batch (n, rows, columns)."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    # The largest singular value is then at most 1. Divided in float32, without a float32 copy.
    x = torch.div(x, norm.clamp_(min=EPSILON), out=torch.empty_like(x))
    # Square ones count as tall: X^T X is several times faster than X X^T in OpenBLAS.
    return _iterate(x, None, x.shape[-2] >= x.shape[-1], _torch_product)


def newton_schulz_by_kernel(x: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz with a kernel that computes half of each symmetric product: all but the last one with X are
    polynomials of G. The division by the norm of X is part of the first Gram matrix and of the first product with X."""
    from llmtrain.training.product_kernel import product

    # One by one, so that no bit depends on the other matrices. The largest singular value is then at most 1.
    norms = torch.stack(torch._foreach_norm(x.unbind(0), 2, dtype=torch.float32))
    scales = norms.clamp_(min=EPSILON).reciprocal_()
    return _iterate(x, scales, x.shape[-2] > x.shape[-1], product)


def _torch_product(
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scales: torch.Tensor | None = None,
    is_symmetric: bool = False,  # noqa: ARG001
) -> torch.Tensor:
    assert scales is None
    if addend is None:
        return torch.bmm(a, b)
    result = torch.baddbmm(addend, a, b, beta=beta, alpha=alpha)  # C is added in the precision of the accumulator
    if diagonal:
        result.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return result


def _iterate(x: torch.Tensor, scales: torch.Tensor | None, is_tall: bool, product: Product) -> torch.Tensor:
    """`scales`: what X is still to be multiplied by. A tall X is multiplied from the right, where G is smaller."""
    a, b, c = COEFFICIENTS
    for count in _iterations_per_gram(x):
        squares = None if scales is None else scales * scales
        left, right = (x.mT, x) if is_tall else (x, x.mT)
        gram = product(left, right, scales=squares, is_symmetric=True)
        if count == 1:
            factor = product(gram, gram, gram, alpha=c, beta=b, is_symmetric=True)
            left, right = (x, factor) if is_tall else (factor, x)
            x = product(left, right, x, beta=a, scales=scales)
        else:
            factor = _product_of_factors(gram, count, product)
            left, right = (x, factor) if is_tall else (factor, x)
            x = product(left, right, scales=scales)
        scales = None
    return x


def _iterations_per_gram(x: torch.Tensor) -> Sequence[int]:
    """How many iterations use each Gram matrix."""
    if max(x.shape[-2:]) < GRAM_RATIO * min(x.shape[-2:]):
        return (1,) * ITERATIONS
    return (3, ITERATIONS - 3) if x.dtype == torch.bfloat16 else (ITERATIONS,)


def _product_of_factors(gram: torch.Tensor, count: int, product: Product) -> torch.Tensor:
    """The product of the factors of `count` iterations, from the Gram matrix before the first."""
    a, b, c = COEFFICIENTS
    result: torch.Tensor | None = None
    for left in reversed(range(count)):
        factor = product(gram, gram, gram, alpha=c, beta=b, diagonal=a, is_symmetric=True)
        result = factor if result is None else product(factor, result, is_symmetric=True)
        if left:
            gram = product(factor, product(gram, factor, is_symmetric=True), is_symmetric=True)
    assert result is not None
    return result


def orthogonalize_(matrices: Sequence[torch.Tensor], batched: bool, uses_kernel: bool = False) -> None:
    """Orthogonalize matrices in place. With `batched`, those of equal shape are computed together, which a GPU does
    faster; which kernel of torch it then uses, and so the last bits, may depend on their number. With `uses_kernel` it
    is our own, which needs Triton and a C compiler, as torch.compile does on a GPU; not for matrices that are too large
    for it."""
    if not matrices:
        return
    dtype = compute_dtype(matrices[0].device)
    for batch in _batches(matrices, batched):
        function = newton_schulz
        if uses_kernel and batch[0].numel() <= MAX_KERNEL_ELEMENTS:
            function = newton_schulz_by_kernel
        x = torch.empty((len(batch), *batch[0].shape), dtype=dtype, device=batch[0].device)
        torch._foreach_copy_(x.unbind(0), batch)
        torch._foreach_copy_(batch, function(x).unbind(0))


def _batches(matrices: Sequence[torch.Tensor], batched: bool) -> list[list[torch.Tensor]]:
    if not batched:
        return [[matrix] for matrix in matrices]
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
    found = []
    for same in by_shape.values():
        size = max(1, MAX_BATCH_ELEMENTS // same[0].numel())
        found += [same[start : start + size] for start in range(0, len(same), size)]
    return found


def cost(rows: int, columns: int) -> int:
    """Multiplications of an orthogonalization, up to a constant factor: to share matrices out evenly."""
    small = min(rows, columns)
    large = max(rows, columns)
    return small * small * (large + 4 * small)
