"""llmtrain data show, llmtrain data stats, and docs/data.md."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = [{"instruction": f"Say {number}", "output": "yes " * (1 + number % 4)} for number in range(20)]


@pytest.fixture
def sets(workdir: Path, cache: Path) -> list[str]:
    (workdir / "web.txt").write_text("".join(f"web line {number}\n" for number in range(200)))
    (workdir / "books.jsonl").write_text("".join(json.dumps({"text": f"book {n % 30}"}) + "\n" for n in range(60)))
    sources = [
        {"name": "text_files", "files": ["web.txt"], "weight": 3},
        {"name": "text_files", "files": ["books.jsonl"], "text_column": "text", "weight": 1},
    ]
    values = ["data.name=mixture", f"data.sources={json.dumps(sources)}", f"data.cache_dir={cache}"]
    values += ["model.block_size=16", "trainer.micro_batch_size=8", "run.threads=1"]
    return [part for value in values for part in ("--set", value)]


def shown(cli: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    done = cli("data", *arguments, "--json")
    assert done.code == 0, done.err
    result: dict[str, Any] = done.json
    return result


def test_show_lists_sources_with_shares(cli: Callable[..., Any], sets: list[str], workdir: Path) -> None:
    value = shown(cli, "show", "--config", "gpt_smoke", *sets, "--samples", "2")
    rows = value["sources"]
    assert [(row["source"], row["share"]) for row in rows] == [("web", 0.75), ("books", 0.25)]
    size = (workdir / "web.txt").stat().st_size
    assert rows[0]["tokens"] + rows[0]["validation_tokens"] == size + 2  # the end of both parts
    assert rows[1]["documents"] == 57 + 1  # of 60, and the one that was split
    assert [sample["source"] for sample in value["samples"]] == ["web", "web", "books", "books"]
    assert all(part["is_trained"] for sample in value["samples"] for part in sample["parts"])
    assert "web line" in value["samples"][0]["parts"][0]["text"]


def test_show_marks_answers(cli: Callable[..., Any], workdir: Path, cache: Path) -> None:
    (workdir / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EXAMPLES))
    values = ["data.name=instruct_jsonl", "data.train_file=a.jsonl", "data.packing=false", f"data.cache_dir={cache}"]
    arguments = ["--config", "gpt_smoke", *(part for value in values for part in ("--set", value))]
    arguments += ["--set", "model.block_size=128"]
    (sample,) = shown(cli, "show", *arguments)["samples"]
    question, answer = sample["parts"]
    assert (question["is_trained"], answer["is_trained"]) == (False, True)
    assert "Say" in question["text"]
    assert answer["text"].startswith("yes")
    done = cli("data", "show", *arguments)
    assert any(line.startswith("  + yes") for line in done.out.splitlines())
    row = shown(cli, "stats", *arguments)["sources"][0]
    assert (row["unit"], row["count"], row["longer_than_context"]) == ("examples", 19, 0)


def test_stats_count_lengths_and_duplicates_across_sources(cli: Callable[..., Any], sets: list[str]) -> None:
    web, books = shown(cli, "stats", "--config", "gpt_smoke", *sets)["sources"]
    assert web["duplicates"] == 0
    assert books["duplicates"] >= 57 - 30 - 1  # 30 different texts
    assert sum(bucket["count"] for bucket in books["histogram"]) == books["count"]
    assert books["lengths"]["longest"] == len("book 29") + 1
    assert web["longer_than_context"] == 1.0
    assert web["tokens_cut_off"] is None


def test_examples_that_are_cut_off_are_counted(cli: Callable[..., Any], workdir: Path, cache: Path) -> None:
    (workdir / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EXAMPLES))
    values = ["data.name=instruct_jsonl", "data.train_file=a.jsonl", "data.packing=false", f"data.cache_dir={cache}"]
    arguments = ["--config", "gpt_smoke", *(part for value in values for part in ("--set", value))]
    row = shown(cli, "stats", *arguments, "--set", "model.block_size=48")["sources"][0]
    assert 0 < row["longer_than_context"] < 1
    assert 0 < row["tokens_cut_off"] < 0.5


def test_missing_files_are_an_error_of_the_config(cli: Callable[..., Any], workdir: Path) -> None:  # noqa: ARG001
    done = cli("data", "show", "--config", "gpt_smoke", "--set", "data.name=text_files", "--set", "data.files=none.txt")
    assert done.code == 65
    assert "none.txt" in done.err


def test_guide_works(cli: Callable[..., Any], repo: Path, workdir: Path, cache: Path) -> None:
    """docs/data.md: its mixture, and its commands."""
    text = (repo / "docs" / "data.md").read_text()
    for name in ("web", "books", "code"):
        (workdir / name).mkdir()
        lines = [f"{name} has a line with number {number}.\n" for number in range(400)]
        (workdir / name / "a.txt").write_text("".join(lines))
        (workdir / name / "a.jsonl").write_text("".join(json.dumps({"content": line}) + "\n" for line in lines))
    commands = [shlex.split(line)[1:] for line in re.findall(r"^    (llmtrain .*)$", text, re.M)]
    small = ["trainer.max_steps=2", "trainer.warmup_steps=0", "model.n_layers=1", "model.d_model=16", "run.threads=1"]
    small += [f"data.cache_dir={cache}", "trainer.eval_batches=1", "output.run_id=my-run"]
    tiny = [part for value in small for part in ("--set", value)]
    for words in commands:
        if words[0] == "init":
            words = ["init", "--text", "web/*.txt".replace("*", "a"), "books/a.txt"]
            assert cli(*words).code == 0
            (block,) = re.findall(r"^```yaml\n(data:.*?)^```$", text, re.M | re.S)
            written = Path("my.yaml").read_text()
            before = written[: written.index("data:")]
            Path("my.yaml").write_text(before + block + written[written.index("trainer:") :])
            continue
        if "train" in words and "my-run" not in words:
            continue  # below, once
        if "my-run" in words:
            done = cli("train", "--config", "my.yaml", *tiny)
            assert done.code == 0, done.err
            words += ["--set", "data.sources.0.weight=0.5", "--set", "trainer.max_steps=4"]
        done = cli(*words, *tiny[: len(tiny) if words[0] == "data" else -2])
        assert done.code == 0, done.err
