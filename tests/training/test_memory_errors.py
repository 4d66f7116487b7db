"""Too little memory is an error with a remedy, also on a CPU."""

import pytest
import torch

from llmtrain.training.memory_errors import out_of_memory


def test_failed_allocation_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert str(1 << 60) in str(out_of_memory(caught.value))


def test_failed_allocation_on_a_gpu() -> None:
    problem = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 1 GiB")
    assert out_of_memory(problem) == "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_other_errors_are_not_about_memory() -> None:
    assert out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
