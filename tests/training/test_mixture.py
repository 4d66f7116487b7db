"""Runs on a mixture: bit-exact however they are interrupted, other weights from a step on, and what is refused."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pyarrow
import pyarrow.parquet
import pytest
import rank_harness as ranks
from fault_harness import RUN_ID

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.config.schema import Config
from llmtrain.plugins import search_in
from llmtrain.runs.metrics import read_metrics

MakeConfig = Callable[..., Config]
PLUGIN = """
from llmtrain.data.base import TextChunk, TextData

class Poems(TextData):
    def identity(self):
        return {"kind": "poems", "version": 1}

    def chunks(self, split):
        for number in range(40 if split == "train" else 8):
            yield TextChunk(f"Rose {number} is red, violet {number} is blue.\\n", ends_document=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of three sources: text, Parquet, and a plugin."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "web.txt").write_text("".join(f"{number} plus one is {number + 1}.\n" for number in range(200)))
    texts = [f"def add{number}(x):\n    return x + {number}\n" for number in range(80)]
    pyarrow.parquet.write_table(pyarrow.table({"content": texts}), folder / "code.parquet")
    (folder / "poems_of_a_test.py").write_text(PLUGIN)
    return folder


def sources(folder: Path) -> list[dict[str, Any]]:
    return [
        {"name": "text_files", "files": [str(folder / "web.txt")], "weight": 0.6},
        {
            "name": "text_files",
            "files": [str(folder / "code.parquet")],
            "text_column": "content",
            "weight": 0.3,
            "max_epochs": 1,
        },
        {"name": "poems_of_a_test:Poems", "weight": 0.1},
    ]


@pytest.fixture
def make(make_config: MakeConfig, folder: Path) -> MakeConfig:
    def config(**changes: Any) -> Config:
        values: dict[str, Any] = {
            "data__name": "mixture",
            "data__sources": sources(folder),
            "trainer__grad_accum_steps": 4,
            "distributed__strategy": "ddp",
            "distributed__reproducible_reduce": True,
        }
        return make_config(**values, **changes)

    return config


@pytest.fixture
def before(folder: Path) -> Callable[[], None]:
    """In a rank: find the plugin."""

    def find() -> None:
        os.chdir(folder)
        search_in([folder])

    return find


def metrics(config: Config) -> list[dict[str, Any]]:
    """All rows, without what depends on time."""
    timed = ("time", "train/tokens_per_second", "train/seconds_left")
    rows = read_metrics(Path(config.output.root_dir) / RUN_ID / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def test_killed_mixture_resumes_bit_exact_on_any_number_of_processes(
    make: MakeConfig, before: Callable[[], None]
) -> None:
    stages = [{"from_step": 4, "weights": [1, 1, 2]}]
    whole = make(data__stages=stages)
    expected = ranks.trained(whole, 1, before=before)
    config = make(data__stages=stages)
    killed = ranks.train_ranks(config, 4, before=before, env={"LLMTRAIN_FAULT": "after_optimizer:3:1:kill"})
    assert killed[1].code == -signal.SIGKILL
    stopped = ranks.train_ranks(config, 2, RUN_ID, before=before, env={"LLMTRAIN_FAULT": "after_optimizer:5:0:term"})
    assert [end.code for end in stopped] == [75, 75], stopped[0].output
    result = ranks.trained(config, 1, RUN_ID, before=before)
    assert result["resumed_from"] == 5
    assert result["state_sha256"] == expected["state_sha256"]
    assert metrics(config) == metrics(whole)


def test_metrics_of_each_source(make: MakeConfig, before: Callable[[], None]) -> None:
    config = make()
    ended = harness.run(config, before=before)
    assert ended.code == 0, ended.output
    rows = metrics(config)
    labels = ("web", "code", "Poems")
    train = [row for row in rows if "train/loss" in row][-1]
    used = [train[f"train/tokens/{label}"] for label in labels]
    samples = harness.STEPS * 4 * 2
    assert sum(used) == train["train/tokens"] == samples * config.model.block_size
    assert used[0] / sum(used) == pytest.approx(0.6, abs=2 / samples)
    val = [row for row in rows if "val/loss" in row][-1]
    mean = sum(share * val[f"val/loss/{label}"] for share, label in zip((0.6, 0.3, 0.1), labels, strict=True))
    assert val["val/loss"] == pytest.approx(mean)
    bits = [val[f"val/bits_per_byte/{label}"] for label in labels]
    assert min(bits) < val["val/bits_per_byte"] < max(bits)


def test_other_weights_keep_every_token_store(make: MakeConfig, before: Callable[[], None], cache: Path) -> None:
    assert harness.run(make(trainer__max_steps=1), before=before).code == 0
    stores = sorted(path.name for path in (cache / "tokens").iterdir())
    other = make(trainer__max_steps=1)
    weights = [source.model_copy(update={"weight": 1.0}) for source in other.data.sources]  # type: ignore[union-attr]
    assert harness.run(other.with_values("data", sources=weights), before=before).code == 0
    assert sorted(path.name for path in (cache / "tokens").iterdir()) == stores


def with_weight(config: Config, index: int, weight: float) -> Config:
    found = list(config.data.sources)  # type: ignore[union-attr]
    found[index] = found[index].model_copy(update={"weight": weight})
    return config.with_values("data", sources=found)


def test_resume_refuses_other_weights(make: MakeConfig, before: Callable[[], None]) -> None:
    config = make()
    assert harness.run(config, before=before, fault="after_optimizer:3:0:kill").code == -signal.SIGKILL
    ended = harness.run(with_weight(config, 2, 0.5), RUN_ID, before=before)
    assert ended.code == 64
    assert "data.sources.2.weight: 0.1 -> 0.5" in ended.output


def test_allowed_other_weights_become_a_stage(make: MakeConfig, before: Callable[[], None]) -> None:
    """The run continues as if it had been started with a stage from the next step on."""
    config = make()
    assert harness.run(config, before=before, fault="after_optimizer:3:0:kill").code == -signal.SIGKILL
    changed = with_weight(config, 2, 0.5)
    ended = harness.run(changed, RUN_ID, before=before, allow_config_change=True, fault="after_optimizer:5:0:kill")
    assert ended.code == -signal.SIGKILL, ended.output
    other = harness.run(with_weight(config, 2, 0.25), RUN_ID, before=before)
    assert other.code == 64
    assert "data.stages: weights 0.6, 0.3, 0.5 from step 3 on -> none" in other.output
    again = harness.run(changed, RUN_ID, before=before)  # what has been allowed need not be allowed again
    assert again.result is not None, again.output
    assert "weights: web 0.6, code 0.3, Poems 0.1; from step 3 on web 0.6, code 0.3, Poems 0.5" in again.output
    step = Checkpoint(Path(config.output.root_dir) / RUN_ID / "checkpoints" / "step_8")
    data = step.state()["config"]["data"]
    assert [source["weight"] for source in data["sources"]] == [0.6, 0.3, 0.1]
    assert data["stages"] == [{"from_step": 3, "weights": [0.6, 0.3, 0.5]}]  # checkpoints are of every second step
    planned = make(data__stages=data["stages"])
    assert harness.run(planned, before=before).result["state_sha256"] == again.result["state_sha256"]  # type: ignore[index]


def test_weights_that_a_stage_has_replaced_change_nothing(make: MakeConfig, before: Callable[[], None]) -> None:
    config = make(data__stages=[{"from_step": 2, "weights": [1, 1, 1]}, {"from_step": 99, "weights": [1, 0, 0]}])
    assert harness.run(config, before=before, fault="after_optimizer:5:0:kill").code == -signal.SIGKILL
    ended = harness.run(with_weight(config, 2, 0.5), RUN_ID, before=before, allow_config_change=True)
    assert ended.code == 0, ended.output
    assert "other weights of data.sources change nothing: data.stages.0 decides already" in ended.output
    assert "data.stages.1 begins in step 99" in ended.output
    assert "| by source: web " in ended.output


def test_resume_allows_other_labels_and_moved_files(make: MakeConfig, before: Callable[[], None], folder: Path) -> None:
    config = make()
    assert harness.run(config, before=before, fault="after_optimizer:3:0:kill").code == -signal.SIGKILL
    found = list(config.data.sources)  # type: ignore[union-attr]
    (folder / "moved").mkdir(exist_ok=True)
    (folder / "moved" / "web.txt").write_bytes((folder / "web.txt").read_bytes())
    values = {**found[0].model_dump(), "files": [str(folder / "moved" / "web.txt")], "label": "internet"}
    found[0] = type(found[0])(**values)
    ended = harness.run(config.with_values("data", sources=found), RUN_ID, before=before)
    assert ended.code == 0, ended.output


def test_run_longer_than_all_caps_is_refused(make: MakeConfig, before: Callable[[], None], folder: Path) -> None:
    capped = [{**source, "max_epochs": 1} for source in sources(folder)]
    config = make(trainer__max_steps=5000).model_copy()
    found = [type(source)(**values) for source, values in zip(config.data.sources, capped, strict=True)]  # type: ignore[union-attr]
    ended = harness.run(config.with_values("data", sources=found), before=before)
    assert ended.code == 64, ended.output
    assert "max_epochs" in ended.error["what"]


@pytest.mark.slow
def test_exhausted_source_is_said_once(make: MakeConfig, before: Callable[[], None]) -> None:
    ended = harness.run(make(trainer__max_steps=120, trainer__save_every_steps=None), before=before)
    assert ended.code == 0, ended.output
    assert ended.output.count("source code reaches its max_epochs in step") == 1


def write_examples(path: Path, count: int, answer: str) -> None:
    rows = ({"instruction": f"Say {number}", "output": answer * (1 + number % 5)} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_mixture_of_examples(make_config: MakeConfig, tmp_path: Path) -> None:
    """Unpacked: shares of examples; the same bits after a kill."""
    write_examples(tmp_path / "short.jsonl", 50, "yes ")
    write_examples(tmp_path / "long.jsonl", 40, "a longer answer ")
    both = [
        {"name": "instruct_jsonl", "train_file": str(tmp_path / f"{name}.jsonl"), "weight": weight, "packing": False}
        for name, weight in (("short", 3), ("long", 1))
    ]
    changes = {"data__name": "mixture", "data__sources": both, "model__block_size": 128}
    whole = harness.run(make_config(**changes))
    assert whole.result is not None, whole.output
    config = make_config(**changes)
    assert harness.run(config, fault="after_optimizer:3:0:kill").code == -signal.SIGKILL
    resumed = harness.run(config, RUN_ID)
    assert resumed.result is not None, resumed.output
    assert resumed.result["state_sha256"] == whole.result["state_sha256"]
    last = [row for row in metrics(config) if "train/loss" in row][-1]
    used = [last[f"train/epoch/{name}"] * count for name, count in (("short", 47), ("long", 38))]
    assert used == [pytest.approx(24, abs=1), pytest.approx(8, abs=1)]  # of 32 examples
    assert "val/bits_per_byte" not in last


BAD: dict[str, tuple[str, int]] = {
    "[{name: text_files, files: [a.txt], weight: 0}]": ("data.sources.0.weight", 64),
    "[{name: text_files, files: [a.txt], weight: -1}]": ("data.sources.0.weight", 64),
    "[{name: text_files, files: [a.txt], weight: much}]": ("data.sources.0.weight", 64),
    "[{name: text_files, files: [a.txt], weight: .inf}]": ("data.sources.0.weight", 64),
    "[{name: text_files, files: [a.txt], weight: 1e308}]": ("data.sources.0.weight", 64),
    "[{name: text_files, files: [a.txt], weight: 1e-9}, {name: dummy_text, weight: 1}]": ("data.sources.0.weight", 64),
    "[{name: text_files, files: [a.txt], wieght: 1, weight: 1}]": (
        "wieght is unknown. Did you mean",
        64,
    ),
    "[{name: text_files, files: [a.txt]}]": ("data.sources.0.weight", 64),
    "[{name: text_files, files: [a.txt], weight: 1, tokenizer: byte}]": ("data.tokenizer", 64),
    "[{name: mixture, weight: 1}]": ("mixture", 64),
    "[]": ("data.sources", 64),
    "[{name: text_files, files: [a.txt], weight: 1}, {name: chat_jsonl, train_file: x, weight: 1}]": ("one kind", 64),
    "[{name: text_files, files: [a.txt], weight: 1}, {name: preference_jsonl, train_file: x, weight: 1}]": (
        "one kind",
        64,
    ),
    "[{name: chat_jsonl, train_file: x, weight: 1}, {name: preference_jsonl, train_file: x, weight: 1}]": (
        "one kind",
        64,
    ),
    "[{name: preference_jsonl, train_file: x, weight: 1}]": ("trainer.objective", 64),
    "[{name: text_files, files: [a.txt], weight: 1}, {name: text_files, files: [none.txt], weight: 1}]": (
        "data.sources.1.files",
        65,
    ),
    "[{name: text_files, files: [a.txt], weight: 1}, {name: text_files, files: [empty.txt], weight: 1}]": (
        "data.sources.1.files",
        65,
    ),
    "[{name: text_files, files: [a.txt], weight: 1}, {name: text_files, files: [short.txt], weight: 1}]": (
        "Source 'short'",
        65,
    ),
    "[{name: text_files, files: [a.txt], weight: 1}, {name: text_files, files: [a.txt], val_files: [short.txt], "
    "weight: 1}]": ("Source 'a-2'", 65),
}


@pytest.mark.parametrize("found", BAD)
def test_bad_sources(cli: Callable[..., Any], workdir: Path, tiny: list[str], found: str) -> None:
    (workdir / "a.txt").write_text("some words in a file of text\n" * 50)
    (workdir / "short.txt").write_text("few\n")
    (workdir / "empty.txt").write_text("")
    where, code = BAD[found]
    sets = [part for text in (*tiny, "data.name=mixture", f"data.sources={found}") for part in ("--set", text)]
    result = cli("train", "--config", "gpt_smoke", *sets)
    assert result.code == code, result.err
    assert where in result.err
    assert "Traceback" not in result.err
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize(
    ("stages", "where"),
    [
        ("[{from_step: 5, weights: [1]}]", "data.stages.0.weights"),
        ("[{from_step: 5, weights: [1, 2, 3]}]", "data.stages.0.weights"),
        ("[{from_step: 5, weights: [0, 0]}]", "data.stages.0.weights"),
        ("[{from_step: 5, weights: [1, -1]}]", "data.stages"),
        ("[{from_step: 5, weights: [1, 1.0e-8]}]", "data.stages.0.weights.1"),
        ("[{from_step: 5, weights: [1, x]}]", "data.stages"),
        ("[{from_step: 0, weights: [1, 1]}]", "data.stages"),
        ("[{from_step: 5, weights: [1, 1]}, {from_step: 5, weights: [1, 1]}]", "data.stages.1.from_step"),
        ("[{from_step: 5, weights: [1, 1]}, {from_step: 4, weights: [1, 1]}]", "data.stages.1.from_step"),
        ("[{weights: [1, 1]}]", "data.stages"),
        ("7", "data.stages"),
    ],
)
def test_bad_stages(cli: Callable[..., Any], tiny: list[str], stages: str, where: str) -> None:
    both = "[{name: dummy_text, weight: 1}, {name: python_stdlib, weight: 1}]"
    more = ("data.name=mixture", f"data.sources={both}", f"data.stages={stages}")
    sets = [part for text in (*tiny, *more) for part in ("--set", text)]
    result = cli("validate", "--config", "gpt_smoke", *sets)
    assert result.code == 64, result.err
    assert where in result.err
    assert "Traceback" not in result.err
