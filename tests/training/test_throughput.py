"""The peak of a GPU, by its name."""

import pytest
import torch

from llmtrain.training.throughput import peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", 65e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_peak_flops(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == peak


def test_peak_of_a_cpu_is_unknown() -> None:
    assert peak_flops(torch.device("cpu")) is None
