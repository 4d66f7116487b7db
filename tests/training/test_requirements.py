"""What a run needs on this machine is checked before torch is loaded, and listed in one error."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.errors import ConfigError, DataError, UsageError
from llmtrain.training.requirements import check_requirements, missing_requirements


@pytest.fixture
def without_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `make train`: without the extra hf."""
    found = importlib.util.find_spec
    missing = ("transformers", "peft")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))


@pytest.mark.usefixtures("without_hf")
def test_everything_missing_is_one_error(workdir: Path) -> None:  # noqa: ARG001
    config = load_config("lora_instruct")
    with pytest.raises(ConfigError) as caught:
        check_requirements("lora_instruct", config.sections())
    assert caught.value.exit_code == 64
    texts = caught.value.problems
    assert len(texts) == 3
    for text, word in zip(texts, ("transformers", "data/train.jsonl", "data/val.jsonl"), strict=True):
        assert word in text
    assert str(caught.value).count("Relative paths start at") == 1


def test_single_problem_is_raised_as_it_is(workdir: Path) -> None:
    (workdir / "data").mkdir()
    (workdir / "data" / "train.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"data\.val_file") as caught:
        check_requirements("lora_instruct", load_config("lora_instruct").sections())
    assert caught.value.exit_code == 65


def test_several_missing_files_are_a_data_error(workdir: Path) -> None:  # noqa: ARG001
    config = load_config("gpt_stdlib", ["data.name=text_files", "data.files=[a.txt, b.txt]", "data.val_files=[c.txt]"])
    with pytest.raises(DataError) as caught:
        check_requirements("gpt_stdlib", config.sections())
    assert [name in str(caught.value) for name in ("a.txt", "b.txt", "c.txt")] == [True] * 3


def test_missing_model_directory(workdir: Path) -> None:  # noqa: ARG001
    config = load_config("lora_instruct", ["model.path=./nowhere"])
    errors = missing_requirements(config.sections())
    assert [type(error) for error in errors] == [UsageError, DataError, DataError]


@pytest.mark.usefixtures("without_hf")
@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--processes", "2"]])
def test_train_reports_before_torch_is_loaded(
    cli: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llmtrain.training.run", None)
    monkeypatch.setitem(sys.modules, "llmtrain.training.dry_run", None)
    done = cli("train", "--config", "lora_instruct", *options)
    assert done.code == 64
    assert "3 problems" in done.err
    assert not (workdir / "runs").exists()


@pytest.mark.usefixtures("without_hf")
def test_validate_warns(cli: Any) -> None:
    done = cli("validate", "--config", "lora_instruct", "--json")
    assert done.code == 0
    assert len(done.json["missing"]) == 3
    assert done.err.count("warning: ") == 3
