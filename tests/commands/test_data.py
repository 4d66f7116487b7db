"""llmtrain data show, llmtrain data stats, and docs/data.md."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.runs.data_statistics import statistics_cells, statistics_rows

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


def test_show_separates_packed_examples(cli: Callable[..., Any], workdir: Path, cache: Path) -> None:
    """Each with its last token, which is no input."""
    (workdir / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EXAMPLES))
    values = ["data.name=instruct_jsonl", "data.train_file=a.jsonl", "data.tokenizer=byte", f"data.cache_dir={cache}"]
    values += ["data.val_file=null"]
    arguments = ["--config", "lora_instruct", *(part for value in values for part in ("--set", value))]
    (sample,) = shown(cli, "show", *arguments, "--set", "model.block_size=256")["samples"]
    answers = [part["text"] for part in sample["parts"] if part["is_trained"]]
    assert len(answers) > 1
    assert all(re.fullmatch(r"(yes )+<end of text>\n", answer) for answer in answers)


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


@pytest.mark.parametrize("packing", ["true", "false"])
def test_show_marks_both_answers_of_a_pair(cli: Callable[..., Any], workdir: Path, cache: Path, packing: str) -> None:
    pairs = [{"prompt": f"Say {n}", "chosen": "yes " * (1 + n % 4), "rejected": f"no {n}"} for n in range(20)]
    (workdir / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    source = {"name": "preference_jsonl", "train_file": "a.jsonl", "packing": packing == "true", "weight": 1}
    values = ["data.name=mixture", f"data.sources={json.dumps([source, {**source, 'label': 'b'}])}"]
    values += [f"data.cache_dir={cache}", "model.block_size=64", "trainer.objective.name=dpo", "data.tokenizer=byte"]
    values += ["trainer.micro_batch_size=4", "run.threads=1"]
    arguments = ["--config", "dpo_small", *(part for value in values for part in ("--set", value))]
    value = shown(cli, "show", *arguments)
    assert [row["pairs"] for row in value["sources"]] == [19, 19]
    assert [sample["source"] for sample in value["samples"]] == ["a", "b"]
    for sample in value["samples"]:
        parts = sample["parts"]
        assert [part["answer"] for part in parts[:4]] == ["chosen", "chosen", "rejected", "rejected"]
        assert [part["is_trained"] for part in parts[:4]] == [False, True, False, True]
        assert parts[0]["text"] == parts[2]["text"]
        assert "Say" in parts[0]["text"]
        assert parts[1]["text"].startswith("yes")
        assert parts[3]["text"].startswith("no")
        assert parts[3]["text"].endswith("<end of text>\n")
        assert len(parts) % 4 == 0 if packing == "true" else len(parts) == 4
    done = cli("data", "show", *arguments)
    assert any(line.startswith("  + no") for line in done.out.splitlines())
    assert "[rejected]" in done.out
    rows = shown(cli, "stats", *arguments)["sources"]
    assert [(row["unit"], row["count"]) for row in rows] == [("answers", 38), ("answers", 38)]
    assert rows[1]["duplicates"] == 38


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


def test_report_has_the_statistics_that_were_counted(cli: Callable[..., Any], sets: list[str]) -> None:
    """Counted before the run; a run does not count them itself."""
    tiny = ["trainer.max_steps=2", "trainer.warmup_steps=0", "model.n_layers=1", "model.d_model=16", "model.n_heads=1"]
    arguments = ["--config", "gpt_smoke", *sets, *(part for value in tiny for part in ("--set", value))]
    arguments += ["--set", "data.sources.0.label=internet", "--set", "data.cache_dir=own-cache"]
    for run_id, is_counted in (("before", False), ("after", True)):
        if is_counted:
            rows = shown(cli, "stats", *arguments)["sources"]
            assert shown(cli, "stats", *arguments)["sources"] == rows
        done = cli("train", *arguments, "--set", f"output.run_id={run_id}")
        assert done.code == 0, done.err
        recorded = json.loads(Path("runs", run_id, "meta.json").read_text()).get("data_statistics")
        assert recorded == (rows if is_counted else None)
        assert cli("report", run_id, "--format", "md", "--to", f"{run_id}.md").code == 0
        assert ("exact duplicates" in Path(f"{run_id}.md").read_text()) == is_counted
        assert ("exact duplicates" in Path("runs", run_id, "report.html").read_text()) == is_counted


def test_damaged_statistics_are_shown_as_far_as_they_can() -> None:
    rows = statistics_rows({"data_statistics": [5, {"source": "web", "lengths": 7, "count": "x", "tokens": 12}]})
    assert statistics_cells(rows) == [["source", "tokens"], ["", "-"], ["web", "12"]]
    assert statistics_rows({"data_statistics": {}}) == []


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
