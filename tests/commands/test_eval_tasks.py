"""llmtrain eval --tasks."""

import json
import math
from pathlib import Path

import pytest
from task_models import choice_items, write_items


@pytest.fixture
def items(workdir: Path) -> Path:
    return write_items(workdir / "items.jsonl", [item for item in choice_items(30) if len(item["question"]) < 40][:12])


@pytest.fixture
def wide(train) -> list[object]:
    """Two runs with room for items, of different seeds."""
    for name, seed in (("first", 1), ("second", 2)):
        model = ["model.name=gpt", "model.n_layers=1", "model.n_heads=2", "model.block_size=128"]
        done = train(f"output.run_id={name}", f"run.seed={seed}", *model)
        assert done.code == 0, done.err
    return ["first", "second"]


@pytest.mark.usefixtures("wide")
def test_a_run_is_scored_and_its_scores_are_shown_everywhere(cli, items: Path, workdir: Path) -> None:
    text = cli("eval", "first", "--tasks", f"{items},grammar", "--limit", 5)
    assert text.code == 0, text.err
    assert "grammar" in text.out
    assert "without a chat template" in text.out
    done = cli("eval", "first", "--tasks", items, "--json")
    assert done.code == 0, done.err
    score = done.json["tasks"]["items"]
    assert score["items"] == 12
    assert set(score["metrics"]) == {"acc", "acc_norm"}

    compared = cli("runs", "compare", "first", "second", "--json").json
    assert compared["runs"][0]["task_scores"]["items/acc"] == score["metrics"]["acc"]
    assert compared["runs"][1]["task_scores"] == {}
    assert "items/acc" in cli("runs", "compare", "first", "second").out
    exported = cli("export", "--run", "first", "--to", "exported")
    assert exported.code == 0, exported.err
    card = (workdir / "exported" / "README.md").read_text()
    assert "## Tasks" in card
    assert score["sha256"] in card


def test_runs_side_by_side_and_with_the_loss(cli, wide, items: Path, text: Path) -> None:
    alone = [cli("eval", name, "--tasks", items, "--json").json["tasks"] for name in wide]
    both = cli("eval", *wide, "--tasks", items, "--file", text, "--json").json["evaluations"]
    assert [each["tasks"] for each in both] == alone
    assert all(each["loss"] > 0 for each in both)
    shown = cli("eval", *wide, "--tasks", items)
    assert all(f"{name} at step 4" in shown.out for name in wide)


@pytest.mark.usefixtures("wide")
def test_a_baseline_is_compared_item_by_item(cli, items: Path) -> None:
    done = cli("eval", "first", "--tasks", items, "--baseline", "second", "--json")
    assert done.code == 0, done.err
    other = cli("eval", "second", "--tasks", items, "--json").json["tasks"]["items"]["metrics"]
    mine = done.json["tasks"]["items"]["metrics"]
    assert done.json["baseline"] == "second"
    for metric, each in done.json["comparison"]["items"].items():
        assert each["baseline"] == other[metric]
        assert each["difference"] == pytest.approx(mine[metric] - other[metric])
        better, worse = len(each["better"]), len(each["worse"])
        assert (better - worse) / 12 == pytest.approx(each["difference"])
        mean = (better - worse) / 12
        deviation = math.sqrt(((better + worse) - 12 * mean**2) / 11)
        assert each["high"] - each["low"] == pytest.approx(2 * 1.959964 * deviation / math.sqrt(12), abs=1e-5)
    same = cli("eval", "first", "--tasks", items, "--baseline", "first", "--json").json["comparison"]["items"]["acc"]
    assert (same["difference"], same["low"], same["high"], same["better"], same["worse"]) == (0, 0, 0, [], [])
    text = cli("eval", "first", "--tasks", items, "--baseline", "second").out
    assert "compared with second on the same items" in text


@pytest.mark.usefixtures("wide")
def test_bad_input_is_one_error(cli, items: Path, workdir: Path) -> None:
    (workdir / "empty.jsonl").write_text("")
    (workdir / "long.jsonl").write_text(json.dumps({"question": "x" * 900, "choices": ["a", "b"], "answer": 0}))
    (workdir / "open.jsonl").write_text(json.dumps({"prompt": "x", "answer": "y"}))
    cases = {
        (): 64,
        ("--limit", "3"): 64,
        ("--tasks", ""): 64,
        ("--tasks", "nowhere.jsonl"): 64,
        ("--tasks", "empty.jsonl"): 65,
        ("--tasks", "long.jsonl"): 65,
        ("--tasks", "open.jsonl"): 64,
        ("--tasks", items, "--limit", "0"): 64,
        ("--tasks", items, "--baseline", "nobody"): 64,
        ("--tasks", items, "--baseline", "base"): 64,
        ("--tasks", items, "--chat-template"): 64,
        ("--tasks", "helaswag"): 64,
    }
    for options, code in cases.items():
        done = cli("eval", "first", *options)
        assert done.code == code, f"{options}: {done.err}"
        assert done.out == ""
        assert "Traceback" not in done.err


@pytest.mark.usefixtures("wide")
def test_mistakes_are_found_before_a_model_is_loaded(cli, items: Path, workdir: Path) -> None:
    """The weights of the run are damaged, which loading it would report."""
    for path in (workdir / "runs" / "first" / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    assert cli("eval", "first", "--tasks", items, "--json").json["error"] == "CheckpointError"
    (workdir / "empty.jsonl").write_text("")
    cases = [
        ["first", "--file", "nowhere.txt"],
        ["first", "nobody", "--tasks", items],
        ["first", "--checkpoint", "step_3", "--tasks", items],
        ["first", "--adapter", "x", "--tasks", items],
        ["first", "--tasks", "nowhere.jsonl"],
        ["first", "--tasks", "empty.jsonl"],
        ["first", "--tasks", f"{items}:12"],
        ["first", "--tasks", "helaswag"],
        ["first", "--tasks", "hellaswag", "--tasks-dir", "nowhere"],
        ["first", "--tasks", items, "--baseline", "nobody"],
        ["first", "--tasks", items, "--baseline", "./nobody"],
        ["first", "--tasks", items, "--baseline", "base"],
        ["first", "--tasks", items, "--chat-template"],
        ["first", "--tasks", items, "--device", "gpu"],
    ]
    damaged = cli("eval", "first", "--tasks", items, "--json").json["what"]
    for words in cases:
        done = cli("eval", *words, "--json")
        assert done.code in (64, 65), f"{words}: {done.err}"
        assert done.json["what"] != damaged, words


@pytest.mark.usefixtures("wide")
def test_what_a_model_could_not_read_is_said_of_each(cli, train, workdir: Path) -> None:
    """Of several runs, and of the baseline."""
    model = ["model.name=gpt", "model.n_layers=1", "model.n_heads=2", "model.block_size=64"]
    assert train("output.run_id=narrow", *model).code == 0
    long = {"question": "x" * 80, "choices": ["a", "b"], "answer": 0}
    path = write_items(workdir / "own.jsonl", [long, {**long, "question": "x"}])
    both = cli("eval", "first", "narrow", "--tasks", path)
    assert "because narrow at step 4 reads less" in both.out
    assert "because first" not in both.out
    compared = cli("eval", "first", "--tasks", path, "--baseline", "narrow")
    assert "because narrow reads less" in compared.out
    found = cli("eval", "first", "--tasks", path, "--baseline", "narrow", "--json").json
    assert (found["tasks"]["own"]["truncated"], found["baseline_truncated"]) == (0, {"own": 1})
