"""A Triton kernel that casts a matrix to 8 bits and writes it twice, as it is and transposed: the matrix is read once,
while torch.compile makes two kernels of it."""

import torch
import triton
import triton.language as tl

TILE = 128
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    x,
    factor,
    out,
    transposed,
    rows,
    columns,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    is_inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    values = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32) * tl.load(factor)
    result = values.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=is_inside)
    mirrored = column[:, None] * rows + row[None, :]
    tl.store(transposed + mirrored, tl.trans(result), mask=tl.trans(is_inside))


def _cast_twice(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """x times a factor in 8 bits, (rows, columns) and (columns, rows)."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    transposed = torch.empty((columns, rows), dtype=dtype, device=x.device)
    grid = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    _tile[grid](x, factor, out, transposed, rows, columns, TILE, num_warps=WARPS)
    return [out, transposed]


cast_twice = torch.library.custom_op("llmtrain::cast_twice", _cast_twice, mutates_args=())


@cast_twice.register_fake
def _shapes(x: torch.Tensor, _: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, columns = x.shape
    return [x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)]
