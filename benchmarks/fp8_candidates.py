"""Candidates for the products of models/fp8.py, which finetune_gpu.py --candidates measures. What wins goes there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmtrain.models import fp8
from llmtrain.models.fp8 import E4M3, E5M2, Fp8Linear, cast, scale_of
from llmtrain.models.hf import lora_fp8


@contextmanager
def candidate(name: str) -> Iterator[None]:
    product, backward = fp8.product, Fp8Linear.backward
    try:
        if "fast sums" in name:
            fp8.product = lora_fp8.product = _fast_product
        if "slow sums" in name:
            fp8.product = lora_fp8.product = _slow_product
        if "kernel" in name:
            Fp8Linear.backward = staticmethod(_kernel_backward)
        if "bf16 weight gradients" in name:
            Fp8Linear.backward = staticmethod(_bf16_weight_backward)
        if "transposed from 8 bits" in name:
            Fp8Linear.backward = staticmethod(_twice_backward)
        yield
    finally:
        fp8.product = lora_fp8.product = product
        Fp8Linear.backward = staticmethod(backward)


def _fast_product(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any) -> Any:
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)


def _slow_product(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any) -> Any:
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=False)


def _kernel_backward(ctx: Any, grad: Any) -> Any:
    """The gradient is cast by one kernel that writes it twice."""
    from cast_kernel import cast_twice

    x, x_scale, weight, w_scale = ctx.saved_tensors
    grad_scale = scale_of(E5M2, grad)
    grad8, grad_columns = cast_twice(grad, grad_scale.reciprocal(), E5M2)
    columns = cast(weight, w_scale, E4M3).t().contiguous()
    grad_x = fp8.product(grad8, grad_scale, columns, w_scale, x.dtype)
    x_columns = cast(x, x_scale, E4M3).t().contiguous()
    return grad_x, fp8.product(grad_columns, grad_scale, x_columns, x_scale, weight.dtype)


def _bf16_weight_backward(ctx: Any, grad: Any) -> Any:
    """The gradient of the weight in bf16: neither x nor the gradient is transposed."""
    x, _, weight, w_scale = ctx.saved_tensors
    grad_scale = scale_of(E5M2, grad)
    columns = cast(weight, w_scale, E4M3).t().contiguous()
    grad_x = fp8.product(cast(grad, grad_scale, E5M2), grad_scale, columns, w_scale, x.dtype)
    return grad_x, (grad.t() @ x).to(weight.dtype)


def _twice_backward(ctx: Any, grad: Any) -> Any:
    """The gradient is transposed from its 8 bits, not cast again."""
    x, x_scale, weight, w_scale = ctx.saved_tensors
    grad_scale = scale_of(E5M2, grad)
    grad8 = cast(grad, grad_scale, E5M2)
    columns = cast(weight, w_scale, E4M3).t().contiguous()
    grad_x = fp8.product(grad8, grad_scale, columns, w_scale, x.dtype)
    x_columns = cast(x, x_scale, E4M3).t().contiguous()
    transposed = torch.empty_like(grad8.t(), memory_format=torch.contiguous_format).copy_(grad8.t())
    return grad_x, fp8.product(transposed, grad_scale, x_columns, x_scale, weight.dtype)


def main() -> None:
    """Milliseconds of single products and casts at the shapes of Llama 1.24 B."""
    from finetune_gpu import time_of

    rows = 16384
    print(f"{'product':32}{'bf16':>9}{'fp8':>9}{'fast':>9}{'e5m2':>9}{'fast':>9}{'fp32 out':>10}{'fast':>9} ms")
    shapes = {
        "forward, gate": (rows, 2048, 8192),
        "forward, gate + up": (rows, 2048, 16384),
        "forward, q": (rows, 2048, 2048),
        "forward, k": (rows, 2048, 512),
        "forward, q + k + v": (rows, 2048, 3072),
        "forward, down": (rows, 8192, 2048),
        "weight gradient, gate": (8192, rows, 2048),
        "weight gradient, down": (2048, rows, 8192),
        "weight gradient, q": (2048, rows, 2048),
    }
    one = torch.ones((), device="cuda")
    for name, (n, k, m) in shapes.items():
        a, b = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (n, m))
        times = [time_of(lambda: a @ b.t())]  # noqa: B023
        b8 = b.to(E4M3)
        for dtype, out in ((E4M3, torch.bfloat16), (E5M2, torch.bfloat16), (E5M2, torch.float32)):
            a8 = a.to(dtype)
            for fast in (False, True):
                options: dict[str, Any] = {"out_dtype": out, "use_fast_accum": fast}
                times.append(time_of(lambda: torch._scaled_mm(a8, b8.t(), one, one, **options)))  # noqa: B023
        print(f"{name:32}" + "".join(f"{each:>9.3f}" for each in times), flush=True)
    casts = {
        "scale": lambda x: scale_of(E5M2, x),
        "cast": lambda x: cast(x, one, E5M2),
        "cast, transposed": lambda x: cast(x, one, E5M2).t().contiguous(),
        "both": lambda x: (cast(x, one, E5M2), cast(x, one, E5M2).t().contiguous()),
    }
    for shape, dtype in (((rows, 8192), torch.bfloat16), ((rows, 2048), torch.bfloat16), ((8192, 2048), torch.float32)):
        x = torch.randn(shape, device="cuda", dtype=dtype)
        for name, function in casts.items():
            compiled = torch.compile(function)
            milliseconds = time_of(lambda: compiled(x))  # noqa: B023
            print(f"{name:20}{shape!s:16}{milliseconds:>9.3f} ms, {x.nbytes / milliseconds / 1e6:,.0f} GB/s read")
        try:
            from cast_kernel import cast_twice

            out, transposed = cast_twice(x, one, E5M2)
            assert torch.equal(out.view(torch.uint8), cast(x, one, E5M2).view(torch.uint8))
            assert torch.equal(transposed.view(torch.uint8), out.view(torch.uint8).t())
            milliseconds = time_of(lambda: cast_twice(x, one, E5M2))  # noqa: B023
            print(f"{'kernel, both':20}{shape!s:16}{milliseconds:>9.3f} ms", flush=True)
        except Exception as problem:
            print(f"kernel failed: {type(problem).__name__}: {str(problem)[:600]}", flush=True)


if __name__ == "__main__":
    main()
