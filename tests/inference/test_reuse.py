"""A model in memory stays the same whatever is done with it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import llmtrain
from llmtrain.models.hf import files
from tiny_llama import WORDS, make_model

MY_CONFIG = "from transformers import LlamaConfig\n\n\nclass MyConfig(LlamaConfig):\n    model_type = 'my_llama'\n"
MY_MODEL = """from transformers import LlamaForCausalLM
from .configuration_my import MyConfig


class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reuse")
    make_model(folder / "model")
    pairs = [{"instruction": f"{a} {b}", "output": f"{b} {a}"} for a in WORDS for b in WORDS[:4]]
    (folder / "examples.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def train(folder: Path, run_id: str, **overrides: object) -> None:
    values = {
        "model": {"name": "hf_causal_lm", "path": str(folder / "model"), "block_size": 32, "lora": None},
        "data": {"name": "instruct_jsonl", "train_file": str(folder / "examples.jsonl"), "val_fraction": 0.2},
        "trainer": {"max_steps": 10, "lr": 1e-2, "eval_every_steps": 10, "save_every_steps": 10},
        "output": {"root_dir": str(folder / "runs"), "run_id": run_id},
        "run": {"threads": 1, "device": "cpu"},
    }
    config = llmtrain.load_config(values, {"data.cache_dir": str(folder / "cache"), **overrides})
    llmtrain.train(config, progress="none")


def load(folder: Path, run_id: str) -> llmtrain.Model:
    return llmtrain.load_model(run_id, root=folder / "runs")


@pytest.fixture(scope="module")
def lora(folder: Path) -> Path:
    train(folder, "lora", **{"model.lora": {"rank": 4}})
    return folder


def losses(model: llmtrain.Model, folder: Path) -> tuple[float, float | None]:
    done = model.evaluate(folder / "examples.jsonl")
    return done.loss, done.base.loss if done.base else None


def test_export_leaves_the_model_as_it_is(lora: Path, tmp_path: Path) -> None:
    model = load(lora, "lora")
    before = losses(model, lora)
    assert before[0] < before[1]
    model.export(tmp_path / "rounded", merge=True, dtype="bfloat16", check=False)
    assert losses(model, lora) == before
    model.export(tmp_path / "adapter", check=False)
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    model.export(tmp_path / "merged", merge=True, dtype="float32", check=False)
    load(lora, "lora").export(tmp_path / "expected", merge=True, dtype="float32", check=False)
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert all(tensor.equal(expected[name]) for name, tensor in merged.items())


def test_interrupted_evaluation_of_the_base_enables_the_adapters_again(lora: Path) -> None:
    model = load(lora, "lora")
    before, doing = losses(model, lora), [""]

    class InBase:
        def is_set(self) -> bool:
            return "base" in doing[0]

        def set(self) -> None: ...

    with pytest.raises(llmtrain.Interrupted):
        model.evaluate(lora / "examples.jsonl", stop=InBase(), on_progress=lambda what, *_: doing.__setitem__(0, what))
    assert losses(model, lora) == before


def test_base_is_read_at_its_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(folder, "pinned", **{"model.revision": "v1.0"})
    model, asked = load(folder, "pinned"), []
    find_model = files.find_model
    monkeypatch.setattr(files, "find_model", lambda *a, **k: (asked.append(a[:2]), find_model(*a, **k))[1])
    assert losses(model, folder)[1] is not None
    assert asked == [(str(folder / "model"), "v1.0")]


def test_full_fine_tune_of_a_model_with_code_of_its_own(folder: Path) -> None:
    model = make_model(folder / "own")
    (model / "configuration_my.py").write_text(MY_CONFIG)
    (model / "modeling_my.py").write_text(MY_MODEL)
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    config |= {"model_type": "my_llama", "architectures": ["MyModel"], "auto_map": names}
    (model / "config.json").write_text(json.dumps(config))
    train(folder, "own-code", **{"model.path": str(model), "model.trust_remote_code": True})
    assert load(folder, "own-code").generate("red", max_new_tokens=2, temperature=0) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_an_error(folder: Path, lora: Path, value: float) -> None:  # noqa: ARG001
    model = load(folder, "lora")
    weights = next(part for name, part in model.loaded.module.named_parameters() if "norm" in name)
    weights.data.fill_(value)
    with pytest.raises(llmtrain.DataError):
        model.generate("red", temperature=0)
    with pytest.raises(llmtrain.DataError):
        model.evaluate(folder / "examples.jsonl")
    with pytest.raises(llmtrain.DataError, match="norm"):
        model.export(folder / f"exported-{value}", merge=True)
    assert not (folder / f"exported-{value}").exists()
