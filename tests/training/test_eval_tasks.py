"""trainer.eval_tasks: scores while a run trains, which change nothing else, and decide which checkpoint is the best."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
from task_models import choice_items, write_items

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.schema import Config
from llmtrain.errors import ConfigError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.task_scores import scored_steps, task_scores_at

MakeConfig = Callable[..., Config]
METRIC = "tasks/items/acc"


@pytest.fixture
def make(tmp_path: Path, cache: Path) -> MakeConfig:
    path = write_items(tmp_path / "items.jsonl", choice_items(10))
    made = 0

    def config(with_tasks: bool = True, **changes: Any) -> Config:
        nonlocal made
        made += 1
        values: dict[str, Any] = {"model__block_size": 64, "trainer__eval_every_steps": 2, **changes}
        if with_tasks:
            values.setdefault("trainer__eval_tasks", {"tasks": [str(path)]})
        return harness.world_config(tmp_path / f"runs-{made}", cache, **values)

    return config


def run_of(config: Config) -> RunDirectory:
    return RunDirectory(Path(config.output.root_dir) / harness.RUN_ID)


def evaluations(config: Config) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in run_of(config).metrics.read_text().splitlines()]
    return {row["step"]: row for row in rows if "val/loss" in row}


def test_scores_are_recorded_and_training_has_the_same_bits(make: MakeConfig) -> None:
    plain = make(with_tasks=False)
    scored = make()
    assert ranks.trained(plain, 1)["state_sha256"] == ranks.trained(scored, 1)["state_sha256"]
    assert harness.train_rows(run_of(plain).path) == harness.train_rows(run_of(scored).path)
    assert harness.val_rows(run_of(plain).path) == harness.val_rows(run_of(scored).path)
    found = evaluations(scored)
    assert list(found) == [2, 4, 6, 8]
    assert all({METRIC, "tasks/items/acc_norm"} <= row.keys() for row in found.values())
    assert not any(name.startswith("tasks/") for row in evaluations(plain).values() for name in row)
    assert scored_steps(run_of(scored)) == [2, 4, 6, 8]
    record = task_scores_at(run_of(scored), 8)["items"]
    assert record["metrics"]["acc"] == found[8][METRIC]
    assert record["items"] == 10
    assert len(record["sha256"]) == 64


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_have_the_scores_of_one(make: MakeConfig, strategy: str) -> None:
    alone = make()
    together = make(distributed__strategy=strategy)
    ranks.trained(alone, 1)
    ranks.trained(together, 2)
    one = [row["tasks/items/acc_norm"] for row in evaluations(alone).values()]
    two = [row["tasks/items/acc_norm"] for row in evaluations(together).values()]
    assert one == two


def test_every_nth_evaluation_and_the_last(make: MakeConfig) -> None:
    section = make().trainer.eval_tasks
    assert section is not None
    config = make(trainer__eval_tasks={"tasks": section.tasks, "every": 3, "limit": 4}, trainer__max_steps=8)
    ranks.trained(config, 1)
    assert [step for step, row in evaluations(config).items() if METRIC in row] == [6, 8]
    assert task_scores_at(run_of(config), 6)["items"]["items"] == 4


def test_a_killed_run_resumes_to_the_same_scores(make: MakeConfig) -> None:
    whole = make()
    ranks.trained(whole, 1)
    killed = make()
    ended = harness.start(killed, fault="after_optimizer:5:0:kill").wait()
    assert ended.code == -9
    resumed = harness.run(killed, resume=harness.RUN_ID)
    assert resumed.code == 0, resumed.output

    def values(config: Config) -> list[tuple[int, Any, Any]]:
        return [(step, row["val/loss"], row[METRIC]) for step, row in evaluations(config).items()]

    assert values(killed) == values(whole)
    steps = CheckpointStore(run_of(whole).checkpoints).steps()
    for step in steps:
        assert run_of(killed).task_scores.joinpath(f"step_{step}.json").is_file()


def test_best_metric_decides_what_is_best(make: MakeConfig) -> None:
    """By accuracy, higher is better; by the loss, lower. Of equal ones the earlier is the best."""
    config = make(trainer__best_metric=METRIC, trainer__keep_checkpoints="all", trainer__lr=3e-2)
    ranks.trained(config, 1)
    rows = evaluations(config)
    accuracies = {step: row[METRIC] for step, row in rows.items()}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    store = CheckpointStore(run_of(config).checkpoints)
    pointed = store.pointed("best")
    assert pointed is not None
    assert pointed.step == best
    progress = Checkpoint(store.at(8).path).progress()
    assert (progress.best_step, progress.best_score) == (best, accuracies[best])
    assert progress.best_val_loss == rows[best]["val/loss"]
    highest = -1.0
    for step, row in rows.items():
        assert row["val/is_best"] == float(accuracies[step] > highest)
        highest = max(highest, accuracies[step])


def test_patience_counts_evaluations_without_a_better_score(make: MakeConfig) -> None:
    """With a learning rate near zero, no evaluation after the first is better."""
    config = make(
        trainer__best_metric=METRIC, trainer__early_stopping_patience=2, trainer__lr=1e-12, trainer__max_steps=20
    )
    result = ranks.trained(config, 1)
    assert result["stopped_early"]
    assert result["steps"] == 6
    assert result["best_step"] == 2


@pytest.mark.parametrize(
    ("metric", "has_tasks"),
    [("val/nothing", True), ("tasks/other/acc", True), (METRIC, False), ("train/loss", True)],
)
def test_a_metric_that_no_evaluation_has_is_refused(make: MakeConfig, metric: str, has_tasks: bool) -> None:
    with pytest.raises(ConfigError):
        make(has_tasks, trainer__best_metric=metric)


def test_a_metric_that_the_task_does_not_have_is_refused(make: MakeConfig) -> None:
    (ended,) = ranks.train_ranks(make(trainer__best_metric="tasks/items/exact_match"), 1)
    assert ended.code == 64
    assert ended.error is not None
    assert METRIC in ended.error[1]


def test_a_missing_file_is_found_before_the_run_exists(make: MakeConfig) -> None:
    config = make(trainer__eval_tasks={"tasks": ["nowhere.jsonl"]})
    (ended,) = ranks.train_ranks(config, 1)
    assert ended.code == 64
    assert not run_of(config).path.exists()
