"""An export is loaded in a new process and compared with the model; what differs is not written."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.config.load import load_config
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.data.tokenizers.char import CharTokenizer
from llmtrain.errors import DataError
from llmtrain.inference import export
from llmtrain.inference.export_check import check as module
from llmtrain.inference.export_check.check import Target, check_export
from llmtrain.inference.export_check.expected import Expected, check_texts, expect, logits_error
from llmtrain.inference.load import LoadedModel, Source, load_model
from llmtrain.training.run import run_training
from slow_cases import some

Cli = Callable[..., Any]
SWIGLU = ("model.architecture=modern", "model.mlp=swiglu", "trainer.lr=3e-4")
RELU2 = ("model.architecture=modern", "model.mlp=relu2")
HEAD_DIM = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    sets = [
        *tiny,
        "model.name=gpt",
        "model.n_layers=1",
        "model.n_heads=2",
        "data.tokenizer=byte",
        f"output.root_dir={folder}",
    ]
    for run_id, changes in (("one", SWIGLU), ("relu2", RELU2), ("gpt2", ())):
        run_training(load_config("gpt_smoke", [*sets, *changes, f"output.run_id={run_id}"]))
    return folder


@pytest.fixture(scope="module")
def loaded(root: Path) -> LoadedModel:
    return load_model(Source(run="one", root=str(root)), "cpu")


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> Expected:
    return expect(loaded)


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head in the order of llama.cpp."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture
def permute_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swap the rows of q and k of an export between writing and checking."""

    def tampered(folder: Path, *rest: Any) -> Any:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensors[name] = permuted(tensor, tensor.shape[0] // HEAD_DIM).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
        return check_export(folder, *rest)

    monkeypatch.setattr(export, "check_export", tampered)


@pytest.mark.hf
@pytest.mark.parametrize("dtype", some(["bfloat16", "float16"], "bfloat16"))
def test_wrong_weights_are_not_published(
    root: Path, cli: Cli, workdir: Path, request: pytest.FixtureRequest, dtype: str
) -> None:
    """The export loads. The model is hardly trained: the permutation changes its logits less than rounding may."""
    request.getfixturevalue("permute_queries_and_keys")
    done = cli("export", "one", "--root", root, "--to", "out", "--dtype", dtype, "--json")
    assert (done.code, done.json["reason"]) == (65, "export_differs"), done.err
    assert any("logits" in problem for problem in done.json["differences"])
    assert list(workdir.iterdir()) == []
    done = cli("export", "one", "--root", root, "--to", "out", "--dtype", dtype, "--no-check", "--json")
    assert (done.code, done.json["check"]) == (0, None), done.err
    assert "export-check.json" not in done.json["files"]
    assert "--no-check" in (workdir / "out" / "README.md").read_text()


@pytest.mark.hf
@pytest.mark.parametrize(
    "case", some(["one bfloat16", "one float16", "relu2 bfloat16", "gpt2 bfloat16"], "relu2 bfloat16")
)
def test_rounded_weights_are_compared_as_closely(root: Path, cli: Cli, workdir: Path, case: str) -> None:  # noqa: ARG001
    run_id, dtype = case.split()
    done = cli("export", run_id, "--root", root, "--to", "out", "--dtype", dtype, "--json")
    assert done.code == 0, done.err
    check = done.json["check"]
    assert check["logits_error"] < 1e-5 < 1e-4 < check["rounding_error"]
    assert check["tolerance"] == 1e-4


def found(expected: Expected, **changes: Any) -> dict[str, Any]:
    """What a process finds that computes the same, but for the changes."""
    tokenizer = {
        "ids": expected.ids,
        "special_tokens": {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
        "conversation": expected.conversation,
    }
    model = {"eos": expected.stop_ids, "continuation": expected.continuation, "has_ended": False}
    for name, value in changes.items():
        (tokenizer if name in tokenizer else model)[name] = value
    return {"versions": {"transformers": "5"}, "tokenizer": tokenizer, "model": model}


@pytest.fixture
def compare(expected: Expected, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """check_export with another answer of the process."""

    def run(answer: dict[str, Any], logits: list[torch.Tensor] | None = None, dtype: str = "float32") -> Any:
        tensors = {str(index): tensor for index, tensor in enumerate(logits or expected.logits)}
        monkeypatch.setattr(module, "_run", lambda work: answer)  # noqa: ARG005
        monkeypatch.setattr(module, "_read_logits", lambda work: tensors)  # noqa: ARG005
        return check_export(tmp_path, expected, Target(dtype))

    return run


def test_equal_answers_pass(compare: Callable[..., Any], expected: Expected) -> None:
    check = compare(found(expected))
    assert (check.texts, check.logits_error, check.equal_tokens) == (8, 0.0, len(expected.continuation))
    assert len(check.lines()) == 3
    assert json.loads(json.dumps(check.as_dict())) == check.as_dict()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ids": "first"}, "token ids"),
        ({"special_tokens": {"eos_token_id": 7}}, "eos_token_id"),
        ({"conversation": "<s>hello"}, "chat template"),
        ({"eos": None}, "stops"),
        ({"eos": [0, 5]}, "stops"),
        ({"continuation": []}, "greedy"),
        ({"continuation": [1]}, "token 1 of the greedy"),
    ],
)
def test_each_difference_is_named(
    compare: Callable[..., Any], expected: Expected, changes: dict[str, Any], word: str
) -> None:
    if changes.get("ids") == "first":
        changes = {"ids": [[9], *expected.ids[1:]]}
    with pytest.raises(DataError) as raised:
        compare(found(expected, **changes))
    (difference,) = raised.value.details["differences"]  # type: ignore[misc]
    assert word in difference
    assert raised.value.reason == "export_differs"


def test_an_export_that_does_not_load_is_a_difference(compare: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="KeyError: 'x'"):
        compare({"error": {"part": "model", "what": "KeyError: 'x'"}})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])
def test_one_tolerance_for_every_data_type(compare: Callable[..., Any], expected: Expected, dtype: str) -> None:
    def noisy(size: float) -> list[torch.Tensor]:
        return [tensor + size * tensor.std() * torch.randn_like(tensor) for tensor in expected.logits]

    assert compare(found(expected), noisy(1e-5), dtype).logits_error < 5e-5
    fewer = [tensor[:, 1:] for tensor in expected.logits]
    damaged = [tensor * float("nan") for tensor in expected.logits]
    for logits in (noisy(1e-3), fewer, damaged):
        with pytest.raises(DataError):
            compare(found(expected), logits, dtype)


def test_only_a_tie_may_change_the_greedy_text(
    compare: Callable[..., Any], expected: Expected, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = expected.continuation[0]
    other = (first + 1) % 256
    with pytest.raises(DataError):
        compare(found(expected, continuation=[other, *expected.continuation[1:]]), dtype="bfloat16")
    choices = expected.choices.clone()
    choices[0, other] = choices[0, first] - 1e-6
    tied = dataclasses.replace(expected, choices=choices)
    logits = {str(index): tensor for index, tensor in enumerate(expected.logits)}
    monkeypatch.setattr(module, "_run", lambda work: found(expected, continuation=[other, 1, 2]))  # noqa: ARG005
    monkeypatch.setattr(module, "_read_logits", lambda work: logits)  # noqa: ARG005
    check = check_export(tmp_path, tied, Target("float32"))
    assert check.equal_tokens == 0
    assert "tie" in check.lines()[2]


def test_error_of_logits_is_relative_to_their_spread() -> None:
    ours = [torch.tensor([[101.0, 99.0]]), torch.tensor([[1.0, -1.0]])]
    assert logits_error(ours, ours) == 0
    shifted = [tensor + torch.tensor([[0.1, -0.1]]) for tensor in ours]
    assert logits_error(ours, shifted) == pytest.approx(0.1, abs=1e-4)
    assert logits_error(ours, ours[:1]) == float("inf")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("\n abcdeé"), CharTokenizer("京東")])
def test_texts_can_be_encoded_by_any_tokenizer(tokenizer: Tokenizer) -> None:
    texts = check_texts(tokenizer)
    assert len(texts) == 8
    assert sum(len(tokenizer.encode(text)) for text in texts) >= 2


def test_without_transformers_an_export_is_not_checked(
    root: Path, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)  # noqa: ARG005
    done = cli("export", "one", "--root", root, "--to", "out", "--json")
    assert (done.code, done.json["check"]) == (0, None), done.err
    assert "transformers is not installed" in done.err
    assert "transformers is not installed" in (workdir / "out" / "README.md").read_text()


def test_a_killed_process_is_not_taken_for_a_difference(
    expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "check.py"
    (tmp_path / "load_export.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(module, "__file__", str(script))
    with pytest.raises(DataError, match="signal 9"):
        check_export(tmp_path, expected, Target("float32"))


def test_list_says_what_a_run_can_become(root: Path, cli: Cli) -> None:
    rows = cli("export", "one", "--root", root, "--list", "--json").json["exports"]
    assert [row["options"] for row in rows] == ["", "--format gguf"]
    assert "qwen3" in rows[0]["loads_in"]
    assert rows[0]["dtypes"][0] == "float32"
    assert (rows[1]["dtypes"], rows[1]["problem"]) == (["f32", "f16", "bf16", "q8_0"], None)
    assert "--format gguf" in cli("export", "one", "--root", root, "--list").out
