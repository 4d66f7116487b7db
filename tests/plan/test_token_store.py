"""The size of tokenized data, against stores that training builds."""

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Cli
from tests.plan.plan_cases import GPT2, make_config

from llmtrain.plan.token_store import token_store_size


def size(vocab_size: int | None = 300, **data: Any) -> tuple[int | None, str]:
    found = token_store_size(make_config(GPT2, data=data).data, vocab_size)
    return found.size, found.source


@pytest.fixture
def text(workdir: Path) -> Path:
    (workdir / "text").mkdir()
    for number in range(3):
        (workdir / "text" / f"{number}.txt").write_text("All work and no play makes a model. " * 300)
    return workdir / "text"


def test_store_of_bytes_is_as_large_as_the_store_of_training(train: Cli, text: Path, tmp_path: Path) -> None:
    files = f"data.files=[{text}/*.txt]"
    cache = tmp_path / "store"
    done = train("data.name=text_files", files, "data.tokenizer=byte", f"data.cache_dir={cache}")
    assert done.code == 0, done.err
    written = sum(path.stat().st_size for path in cache.rglob("*.bin"))
    planned, source = size(256, name="text_files", files=[f"{text}/*.txt"])
    assert planned == pytest.approx(written, rel=0.01)
    assert source == "3 files at 1 byte per token"


def test_numbers_grow_with_the_vocabulary(text: Path) -> None:
    total = sum(path.stat().st_size for path in text.iterdir())
    files = {"name": "text_files", "files": [str(text / "*.txt")]}
    assert size(50257, **files)[0] == total // 4 * 2
    assert size(128256, **files)[0] == total // 4 * 4
    example = {
        "name": "instruct_jsonl",
        "train_file": str(text / "0.txt"),
        "val_file": str(text / "1.txt"),
        "packing": False,
    }
    assert size(128256, **example)[0] == total * 2 // 3 // 4 * 5


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"name": "dummy_text"}, "not in files"),
        ({"name": "python_stdlib"}, "not in files"),
        ({"name": "hf_text", "dataset_name": "owner/name"}, "not in files"),
        ({"name": "text_files", "files": ["nowhere.txt"]}, "no file nowhere.txt"),
        ({"name": "text_files", "files": ["some.parquet"], "text_column": "text"}, "compressed"),
    ],
)
def test_unknown_size_is_said(workdir: Path, data: dict[str, Any], reason: str) -> None:
    (workdir / "some.parquet").write_bytes(b"PAR1")
    found, source = size(**data)
    assert found is None
    assert reason in source


def test_unknown_vocabulary_is_said(text: Path) -> None:
    found, source = size(None, name="text_files", files=[str(text / "*.txt")])
    assert found is None
    assert "vocabulary" in source
