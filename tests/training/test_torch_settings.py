"""Settings of torch in the calling program: a training does not inherit them, and leaves them as they were."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import llmtrain
from llmtrain.inference import export, generate
from llmtrain.models import device_precision

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have it")
Train = Callable[..., llmtrain.TrainResult]
PLUGIN = """
import os

import torch
from torch import nn

from llmtrain.models.base import ModelAdapter


class Model(ModelAdapter):
    def build(self):
        net = nn.Sequential(nn.Embedding(self.vocab_size, 8), nn.Linear(8, self.vocab_size))
        return net.to(getattr(torch, os.environ["WEIGHTS"]))
"""


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _matmul_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default-dtype-bfloat16": lambda: _dtype(torch.bfloat16),
    "default-dtype-float64": lambda: _dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no-grad": torch.no_grad,
    "inference-mode": torch.inference_mode,
    "default-device": _device,
    "device-block": lambda: torch.device("meta"),
    "matmul-precision": _matmul_precision,
}


def settings() -> list[Any]:
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return [*portable_settings(), *(backend.fp32_precision for backend in backends)]


def portable_settings() -> list[Any]:
    """Without those of the backends: they say ieee or none for the same."""
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
    ]


@pytest.fixture
def train(workdir: Path, tiny: list[str]) -> Train:  # noqa: ARG001 (runs are written there)
    def run(run_id: str, overrides: list[str] | None = None, **options: Any) -> llmtrain.TrainResult:
        sizes = [each for each in tiny if not each.startswith("model.d_model")]
        config = llmtrain.load_config("gpt_smoke", [*sizes, f"output.run_id={run_id}", *(overrides or [])])
        return llmtrain.train(config, progress="log", **options)

    return run


@pytest.mark.parametrize("caller", CALLERS)
def test_training_does_not_depend_on_the_caller(caller: str, train: Train, workdir: Path) -> None:
    defaults = portable_settings()
    during = []
    alone = train("alone").state_sha256
    (workdir / "text.txt").write_text("some text to evaluate on " * 20)
    loss = llmtrain.evaluate("alone", "text.txt").loss
    with CALLERS[caller]():
        before = settings()
        assert portable_settings() != defaults
        assert train("called", on_log=lambda *_: during.append(portable_settings())).state_sha256 == alone
        assert settings() == before
        assert llmtrain.evaluate("called", "text.txt").loss == loss
        assert settings() == before
    assert during
    assert all(seen == defaults for seen in during)


@pytest.mark.parametrize("caller", CALLERS)
def test_generating_and_exporting_do_not_depend_on_the_caller(
    caller: str, trained: llmtrain.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = portable_settings()
    during: list[Any] = []
    for module, name in ((generate, "sample_text"), (export, "_write_model")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name), during))
    with CALLERS[caller]():
        before = settings()
        assert trained.generate("some", max_new_tokens=2) is not None
        assert settings() == before
        trained.export(tmp_path / "exported", check=False)
        assert settings() == before
    assert during == [defaults, defaults]


def recorded(function: Callable[..., Any], during: list[Any]) -> Callable[..., Any]:
    """The function; each call also appends the settings that it finds."""

    def call(*arguments: Any, **options: Any) -> Any:
        during.append(portable_settings())
        return function(*arguments, **options)

    return call


@pytest.fixture
def trained(train: Train) -> llmtrain.Model:
    train("trained", ["model.name=gpt", "model.d_model=16", "model.n_layers=1"])
    return llmtrain.load_model("trained")


def test_weights_of_another_data_type_are_not_resumed_silently(
    train: Train, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "typed_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(workdir))
    overrides = ["model.name=typed_plugin:Model", "trainer.schedule=constant"]
    monkeypatch.setenv("WEIGHTS", "bfloat16")
    train("typed", [*overrides, "trainer.max_steps=2"])
    monkeypatch.setenv("WEIGHTS", "float32")
    with pytest.raises(llmtrain.UsageError, match=r"data type of 0\.weight: 'bfloat16' -> 'float32'"):
        train("typed", overrides, resume="typed")
    assert train("typed", overrides, resume="typed", allow_config_change=True).steps == 4


def test_resume_in_another_precision_is_warned_of(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same config on a CPU without bfloat16 instructions, then on one that has them."""
    overrides = ["trainer.precision=bf16", "trainer.schedule=constant"]
    monkeypatch.setattr(device_precision, "has_bf16", lambda _: False)
    train("moved", [*overrides, "trainer.max_steps=2"])
    capfd.readouterr()
    train("moved", [*overrides, "trainer.max_steps=3"], resume="moved")
    assert "computed in" not in capfd.readouterr().err
    monkeypatch.setattr(device_precision, "has_bf16", lambda _: True)
    train("moved", overrides, resume="moved")
    assert "computed in fp32 and continues in bf16" in capfd.readouterr().err
