"""A Triton kernel for products of batches of matrices, for muon's Newton-Schulz iteration.

Of a symmetric product only the tiles on and below the diagonal are computed, and mirrored. What is added to a product,
and a factor for each matrix, are applied to its float32 sums, so neither takes another pass over the GPU's memory.
"""

from functools import cache

import torch
import triton
import triton.language as tl

TILE = 128
DEPTH = 64
"""A program computes a tile of TILE x TILE, from DEPTH columns of its factors at a time."""
WARPS = 4
STAGES = 3
"""Parts of the factors that are loaded ahead: 32 KB of shared memory each."""
FEWEST_STAGES = 2
"""On GPUs with less than STAGES_MEMORY of shared memory per program."""
STAGES_MEMORY = 128 << 10


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    a_start, b_start, a_column, b_row, inner, is_even: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr
):
    """One tile of A B, from pointers to the first column of A's rows and to the first row of B's columns."""
    sums = tl.zeros([tile, tile], dtype=tl.float32)
    for first in range(0, inner, depth):
        index = first + tl.arange(0, depth)
        if is_even:
            left = tl.load(a_start + index[None, :] * a_column)
            right = tl.load(b_start + index[:, None] * b_row)
        else:
            left = tl.load(a_start + index[None, :] * a_column, mask=index[None, :] < inner, other=0.0)
            right = tl.load(b_start + index[:, None] * b_row, mask=index[:, None] < inner, other=0.0)
        sums = tl.dot(left, right, sums)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _tile_of_product(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    out,
    scales,
    rows,
    columns,
    inner,
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    alpha,
    beta,
    diagonal,
    has_addend: tl.constexpr,
    has_scales: tl.constexpr,
    is_symmetric: tl.constexpr,
    is_even: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
):
    """One tile of out = scale (alpha A B + beta C + diagonal I), for one matrix of the batch."""
    tiles = tl.cdiv(columns, tile)
    tile_row, tile_column = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if is_symmetric and tile_column > tile_row:
        return
    batch = tl.program_id(1).to(tl.int64)
    row = tile_row * tile + tl.arange(0, tile)
    column = tile_column * tile + tl.arange(0, tile)
    # Of tiles that reach beyond the matrix, the rest is computed from other rows and columns, and not stored.
    a_rows = row if is_even else row % rows
    b_columns = column if is_even else column % columns
    a_start = a + batch * a_batch + a_rows[:, None] * a_row
    b_start = b + batch * b_batch + b_columns[None, :] * b_column
    result = alpha * _sums(a_start, b_start, a_column, b_row, inner, is_even, tile, depth)
    is_inside = (row[:, None] < rows) & (column[None, :] < columns)
    matrix = batch * rows * columns  # C and the result have no gaps
    place = matrix + row[:, None] * columns + column[None, :]
    if has_addend:
        result += beta * tl.load(c + place, mask=is_inside, other=0.0).to(tl.float32)
    result += tl.where(row[:, None] == column[None, :], diagonal, 0.0)
    if has_scales:
        result *= tl.load(scales + batch)
    result = result.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=is_inside)
    if is_symmetric and tile_column < tile_row:
        mirrored = matrix + column[:, None] * columns + row[None, :]
        tl.store(out + mirrored, tl.trans(result), mask=tl.trans(is_inside))


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scales: torch.Tensor | None = None,
    is_symmetric: bool = False,
) -> torch.Tensor:
    """scale (alpha A B + beta C + diagonal I) for each matrix of a batch (n, rows, columns), with one scale for each.
    `is_symmetric`: the caller knows that the result is."""
    count, rows, inner = a.shape
    columns = b.shape[2]
    out = torch.empty((count, rows, columns), dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    _tile_of_product[(tiles, count)](
        a,
        b,
        out if addend is None else addend,
        out,
        out if scales is None else scales,
        rows,
        columns,
        inner,
        *a.stride(),
        *b.stride(),
        alpha,
        beta,
        diagonal,
        addend is not None,
        scales is not None,
        is_symmetric,
        rows % TILE == columns % TILE == inner % DEPTH == 0,
        TILE,
        DEPTH,
        num_warps=WARPS,
        num_stages=_stages(a.device),
    )
    return out


@cache
def _stages(device: torch.device) -> int:
    memory = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return STAGES if memory >= STAGES_MEMORY else FEWEST_STAGES
