"""Rounds the weights in memory as an export stores them: one tight tolerance then holds for every data type."""

from dataclasses import replace

import torch
from torch import nn

from llmtrain.errors import DataError
from llmtrain.inference.export_check.expected import Expected, continued, last_logits, logits_error
from llmtrain.inference.gguf.write import round_like_gguf
from llmtrain.inference.load import LoadedModel
from llmtrain.models.base import evaluating

ROUNDING = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "q8_0": 2e-1}
"""Data type of an export -> how much its rounding may change the logits: root mean square, relative to theirs. Above
what it does to a working model (q8_0: 0.06 for SmolLM2-135M)."""


def constant_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors that no file has, such as the frequencies of rotary positions."""
    stored = module.state_dict()
    return {name: buffer.clone() for name, buffer in module.named_buffers() if name not in stored}


@torch.no_grad()
def expect_rounded(loaded: LoadedModel, expected: Expected, dtype: str, buffers: dict[str, torch.Tensor]) -> Expected:
    """What the model computes in float32 with the weights of its export. Changes the module, which an export may have
    cast; `buffers`: constant_buffers before that."""
    module = loaded.module.float()
    for name, buffer in buffers.items():
        module.get_buffer(name).copy_(buffer)
    loaded.adapter.fold_weights(module)
    round_weights(module, dtype)
    with evaluating(module):
        logits = [last_logits(loaded, module, tokens) for tokens in expected.sequences]
        error = logits_error(expected.logits, logits)
        if not error <= ROUNDING[dtype]:
            raise DataError(
                f"Rounding the weights to {dtype} changes the logits by {error:.1e} of their size, more than "
                f"{ROUNDING[dtype]:.0e}. Nothing was written.",
                remedy="Pass --dtype float32 (f32 for GGUF), or another data type that loses less.",
                reason="export_differs",
            )
        return replace(
            expected,
            logits=logits,
            rounding_error=error,
            **continued(loaded, module, expected.prompt, expected.stop_ids),
        )


@torch.no_grad()
def round_weights(module: nn.Module, dtype: str) -> None:
    """In place; they stay float32."""
    seen = set()
    transposed = {f"{name}.weight" for name, layer in module.named_modules() if type(layer).__name__ == "Conv1D"}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point() or tensor.data_ptr() in seen:  # one that is tied is rounded once
            continue
        seen.add(tensor.data_ptr())
        if dtype != "q8_0":
            tensor.copy_(tensor.to(getattr(torch, dtype)))
        elif name in transposed:
            tensor.copy_(round_like_gguf(name, tensor.t(), dtype).t())
        else:
            tensor.copy_(round_like_gguf(name, tensor, dtype))
