"""What the substitutes for CUDA's kernels save and return, against what the kernels do.

Flash and cuDNN attention save q, k, v, the result and the log-sum-exp of each query in float32 (and a mask if there is
one); native_dropout a mask of one byte per element; the fused RMSNorm its input and one float32 per row.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from llmtrain.plan.cuda_kernels import CudaKernels

B, HEADS, T, SIZE = 2, 4, 16, 8


def saved_bytes(function: Callable[[], torch.Tensor], mask_elements: int = 0) -> tuple[torch.Tensor, int]:
    """The result, and the bytes of all storages that are saved for the backward pass."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), CudaKernels(mask_elements):
        result = function()
    return result, sum(storages.values())


def heads(count: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(B, count, T, SIZE, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(("mask", "elements"), [(False, 0), (True, 0), (False, B * T * T)])
def test_attention_saves_inputs_result_and_a_number_per_query(mask: bool, elements: int) -> None:
    with FakeTensorMode():
        q, k, v = heads(), heads(), heads()
        bias = torch.empty(B, 1, T, T, dtype=torch.bfloat16) if mask else None
        result, saved = saved_bytes(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), elements)
        of_mask = 2 * (B * T * T if mask else elements)
        assert saved == 4 * q.nbytes + 4 * B * HEADS * T + of_mask
        assert (result.shape, result.dtype) == (q.shape, q.dtype)
        assert result.transpose(1, 2).is_contiguous()  # (B, T, C) is a view of it
        torch.autograd.backward(result.sum())
        for each in (q, k, v):
            assert each.grad is not None
            assert (each.grad.shape, each.grad.dtype) == (each.shape, each.dtype)


def test_attention_of_grouped_queries_saves_fewer_keys() -> None:
    with FakeTensorMode():
        q, k, v = heads(), heads(2), heads(2)
        result, saved = saved_bytes(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        assert saved == 3 * q.nbytes + 4 * B * HEADS * T
        torch.autograd.backward(result.sum())
        assert k.grad is not None
        assert k.grad.shape == k.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_saves_a_byte_per_element(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x = torch.empty(B, T, SIZE, dtype=dtype, requires_grad=True)
        result, saved = saved_bytes(lambda: F.dropout(x, 0.1, True))
        assert saved == x.numel()
        assert (result.shape, result.dtype) == (x.shape, dtype)


@pytest.mark.parametrize("arguments", [(0.0, True), (0.1, False)])
def test_dropout_without_effect_saves_nothing(arguments: tuple[float, bool]) -> None:
    with FakeTensorMode():
        x = torch.empty(B, T, requires_grad=True)
        result, saved = saved_bytes(lambda: F.dropout(x, p=arguments[0], training=arguments[1]))
        assert result is x
        assert saved == 0


@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm_saves_input_and_a_number_per_row(has_weight: bool) -> None:
    with FakeTensorMode():
        x = torch.empty(B, T, SIZE, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(SIZE, dtype=torch.bfloat16, requires_grad=True) if has_weight else None
        result, saved = saved_bytes(lambda: F.rms_norm(x, (SIZE,), weight))
        assert saved == x.nbytes + 4 * B * T + (weight.nbytes if weight is not None else 0)
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
        torch.autograd.backward(result.sum())
        assert x.grad is not None
        if weight is not None:
            assert weight.grad is not None
            assert weight.grad.shape == weight.shape
