"""Classes of the user's own that fail, or return something else than llmtrain needs: one error, and no run is left."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
OWN = """
import torch
from torch import nn

from llmtrain.data.base import Example, ExampleData, Segment, TextChunk, TextData
from llmtrain.models.base import ModelAdapter
from llmtrain.tracking.base import Tracker

print("printed by the module")


class Model(ModelAdapter):
    def build(self):
        return nn.Sequential(nn.Embedding(self.vocab_size, 8), nn.Linear(8, self.vocab_size))


class BuildFails(Model):
    def build(self):
        raise ValueError("two\\nlines")  # here


class BuildExits(Model):
    def build(self):
        raise SystemExit(0)  # here


class BuildNone(Model):
    def build(self):
        return None


class WrongShape(Model):
    def build(self):
        return nn.Embedding(self.vocab_size, 7)


class Frozen(Model):
    def build(self):
        return super().build().requires_grad_(False)


class Lazy(Model):
    def build(self):
        return nn.Sequential(nn.Embedding(self.vocab_size, 8), nn.LazyLinear(self.vocab_size))


class ForwardFails(Model):
    def build(self):
        return nn.Sequential(nn.Embedding(self.vocab_size, 8), nn.Linear(7, self.vocab_size))


class LossNone(Model):
    def loss(self, module, inputs, targets, positions=None):
        return None


class FlopsFail(Model):
    def flops_per_token(self, module):
        raise ZeroDivisionError("x")  # here


class Features(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8).requires_grad_(False)  # random, and never trained
        self.head = nn.Linear(8, vocab_size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        if self.training:
            self.calls += 1
        return self.head(self.embedding(ids)).transpose(0, 1).contiguous().transpose(0, 1)


class PartlyFrozen(Model):
    def build(self):
        return Features(self.vocab_size)


class SharedMemory(Model):
    def build(self):
        module = Features(self.vocab_size)
        module.register_buffer("view", module.embedding.weight.detach()[1:])
        module.register_buffer("transposed", torch.rand(3, 2).t())
        return module


class Words(TextData):
    def identity(self):
        return {}

    def chunks(self, split):
        yield TextChunk("one two three four " * 200, True)


class IdentityFails(Words):
    def identity(self):
        raise RuntimeError("x")  # here


class IdentityObject(Words):
    def identity(self):
        return {"x": object()}


class ChunksFail(Words):
    def chunks(self, split):
        yield TextChunk("a", True)
        raise OSError("my data is gone")  # here


class ChunksNone(Words):
    def chunks(self, split):
        return None


class ChunksString(Words):
    def chunks(self, split):
        yield "abc"


class ChunksNumber(Words):
    def chunks(self, split):
        yield TextChunk(5, True)


class ChunksSurrogate(Words):
    def chunks(self, split):
        yield TextChunk("a\\udcff", True)


class ExamplesStrings(ExampleData):
    def identity(self):
        return {}

    def examples(self, split):
        yield Example(["a"], "file", 1)


class ExamplesNumber(ExamplesStrings):
    def examples(self, split):
        yield Example([Segment(5, True)], "file", 1)


class LogExits(Tracker):
    def log(self, step, metrics):
        raise SystemExit(9)


class Stop(BaseException):
    pass


class OpenStops(Tracker):
    def __init__(self, run, options):
        raise Stop
"""
RETURNED = ("BuildNone", "WrongShape", "Frozen", "Lazy", "LossNone")
MODELS = ("BuildFails", "BuildExits", "ForwardFails", "FlopsFail", *RETURNED)
TEXTS = ("IdentityFails", "IdentityObject", "ChunksFail", "ChunksNone", "ChunksString", "ChunksNumber")
DATA = (*TEXTS, "ChunksSurrogate", "ExamplesStrings", "ExamplesNumber")


@pytest.fixture(autouse=True)
def own(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = workdir / "plugin_code.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop("plugin_code", None)


@pytest.fixture
def train_plugin(cli: Cli, tiny: list[str], tmp_path: Path) -> Cli:
    def run(*overrides: str) -> Any:
        shared = [text for text in tiny if not text.startswith(("model.name", "model.d_model", "data.name"))]
        sets = [
            *shared,
            "model.name=plugin_code:Model",
            "data.name=plugin_code:Words",
            f"data.cache_dir={tmp_path / 'own'}",
        ]
        words = (part for text in [*sets, *overrides] for part in ("--set", text))
        return cli("train", "--config", "gpt_smoke", *words, "--json")

    return run


@pytest.mark.parametrize(("field", "name"), [*(("model", n) for n in MODELS), *(("data", n) for n in DATA)])
def test_plugin_that_fails_is_one_error_and_leaves_no_run(
    field: str, name: str, train_plugin: Cli, own: Path, workdir: Path
) -> None:
    packing = ["data.packing=false"] if name.startswith("Examples") else []
    done = train_plugin(f"{field}.name=plugin_code:{name}", *packing)
    assert done.code == (64 if field == "model" else 65), done.err
    what = done.json["what"]
    assert f"plugin_code:{name}" in what
    assert "\n" not in what
    if name in ("BuildFails", "BuildExits", "FlopsFail", "IdentityFails", "ChunksFail"):
        raising = OWN[OWN.index(f"class {name}") :].index("# here") + OWN.index(f"class {name}")
        assert f"{own}:{OWN.count(chr(10), 0, raising) + 1}" in what
    if name in RETURNED:
        assert f"{own}:{OWN.count(chr(10), 0, OWN.index(f'class {name}')) + 1}" in what
    assert "Traceback" not in done.err
    assert not list(workdir.glob("runs/*"))


@pytest.mark.parametrize("name", ["PartlyFrozen", "SharedMemory"])
def test_frozen_weights_and_buffers_of_an_own_model_are_saved(train_plugin: Cli, workdir: Path, name: str) -> None:
    import llmtrain

    done = train_plugin(f"model.name=plugin_code:{name}", "output.run_id=frozen")
    assert done.code == 0, done.err
    (workdir / "text.txt").write_text("one two three four " * 50)
    losses = {llmtrain.load_model("frozen").evaluate("text.txt").loss for _ in range(2)}
    assert len(losses) == 1, "weights that are not loaded are random"
    module = llmtrain.load_model("frozen").loaded.module
    assert int(module.calls) >= done.json["steps"]


def test_debug_variable_shows_the_traceback(train_plugin: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_DEBUG", "1")
    assert "Traceback" in train_plugin("model.name=plugin_code:BuildFails").err


def test_trackers_that_raise_system_exit_are_disabled_and_printing_modules_keep_json_intact(train_plugin: Cli) -> None:
    done = train_plugin("tracking.custom=[{name: plugin_code:LogExits}, {name: plugin_code:OpenStops}]")
    assert done.code == 0, done.err
    assert done.json["steps"] == 4
    assert "printed by the module" in done.err


def test_module_that_raises_base_exception_is_one_error(train_plugin: Cli, own: Path) -> None:
    own.write_text("class Stop(BaseException):\n    pass\nraise Stop('x')\n")
    done = train_plugin()
    assert done.code == 64, done.err
    assert f"{own}:3" in done.json["what"]


def test_run_stays_in_its_directory_when_the_program_changes_to_another(
    tiny: list[str], workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmtrain

    for resume in (None, "here"):
        monkeypatch.chdir(workdir)
        overrides = [*tiny, "output.run_id=here", f"trainer.max_steps={6 if resume else 4}"]
        config = llmtrain.load_config("gpt_smoke", overrides)
        result = llmtrain.train(config, resume=resume, on_log=lambda *_: os.chdir(tmp_path))
        assert result.values["run_dir"] == "runs/here"
        assert result.run_dir == workdir / "runs" / "here"
        assert (workdir / "runs/here/finished.json").is_file()
    assert not (tmp_path / "runs").exists()
