"""GPUs by the name that CUDA reports, and by the name that a user writes."""

import pytest

from llmtrain.core.gpus import GPUS, find_gpu, gpu_of_device
from llmtrain.errors import UsageError


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA GH200 480GB", "gh200-96g"),
        ("NVIDIA GB200", "gb200-186g"),
        ("NVIDIA B200", "b200-180g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-80g"),
        ("NVIDIA H100 NVL", "h100-94g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA L4", "l4-24g"),
        ("NVIDIA L40", "l40-48g"),
        ("NVIDIA L40S", "l40s-48g"),
        ("NVIDIA A10G", "a10-24g"),
        ("Tesla T4", "t4-16g"),
        ("NVIDIA RTX A6000", "a6000-48g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24g"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400 4GB", None),
        ("cpu", None),
    ],
)
def test_gpu_of_a_device(device: str, name: str | None) -> None:
    gpu = gpu_of_device(device)
    assert (gpu.name if gpu else None) == name


def test_names_are_found_as_people_write_them() -> None:
    for gpu in GPUS:
        assert find_gpu(gpu.name) == gpu
    assert find_gpu("h200").name == "h200-141g"
    assert find_gpu("NVIDIA-H100-80GB").name == "h100-80g"
    assert find_gpu("rtx4090_24g").name == "rtx4090-24g"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("h100", "Did you mean h100-94g or h100-80g?"),
        ("h100-80", "Did you mean h100-80g or"),
        ("tpu", "is not known. Choose"),
    ],
)
def test_unknown_and_ambiguous_names_list_the_known(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as problem:
        find_gpu(name)
    assert meant in f"{problem.value.what} {problem.value.remedy}"
    assert "a100-40g" in problem.value.remedy
