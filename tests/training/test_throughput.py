"""The peak of the device that trains."""

import pytest
import torch

from llmtrain.training.throughput import peak_flops


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA RTX A1000", None)])
def test_peak_flops(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == peak


def test_peak_of_a_cpu_is_unknown() -> None:
    assert peak_flops(torch.device("cpu")) is None
