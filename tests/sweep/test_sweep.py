"""Sweeps of a real, tiny model: the same table however they are trained."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_workers import InThisProcess, MakeSweep

from llmtrain.config.load import load_config
from llmtrain.errors import CheckpointError, ExitCode, TrainingFailed, UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.metrics import read_metrics
from llmtrain.sweep.driver import drive
from llmtrain.sweep.jobs import Job
from llmtrain.sweep.outcome import diverged_at
from llmtrain.sweep.prepare import reopen
from llmtrain.sweep.record import DIVERGED, SweepDirectory, find_sweep
from llmtrain.sweep.show import describe, read_best
from llmtrain.sweep.trials import number_trials


def test_table_is_the_same_on_any_number_of_workers(make_sweep: MakeSweep) -> None:
    tables = []
    for number, parallel in enumerate((1, 4)):
        sweep = make_sweep(f"runs{number}")
        tables.append(drive(sweep, InThisProcess(number), parallel))
        assert json.loads(sweep.directory.table.read_text()) == tables[-1]
    assert tables[0]["is_complete"]
    assert tables[0]["rungs"] == [4, 12]
    assert [row["step"] for row in tables[0]["rows"]].count(12) == 3
    assert tables[1] == tables[0]


def test_promoted_trial_is_the_full_run(make_sweep: MakeSweep, workdir: Path) -> None:
    from llmtrain.training.run import run_training

    sweep = make_sweep()
    workers = InThisProcess(0)
    best = drive(sweep, workers, 2)["winner"]
    assert (best["run_id"], 1) in workers.trained
    (workdir / "best.yaml").write_text(read_best(sweep.directory))
    whole = run_training(load_config(workdir / "best.yaml", ["output.root_dir=alone"]), progress="none")
    assert whole.state_sha256 == best["state_sha256"]
    assert whole.final_val_loss == best["score"]


class Killed(BaseException):
    pass


def test_driver_that_is_killed_anywhere_ends_with_the_same_table(make_sweep: MakeSweep) -> None:
    expected = drive(make_sweep("whole"), InThisProcess(0), 2)
    sweep = make_sweep("killed")
    starts = 0
    for seed in range(40):
        workers = InThisProcess(seed)

        def kill(job: Job, workers: InThisProcess = workers) -> None:
            if len(workers.trained) == 2:  # the third one is not started
                raise Killed(job)

        workers.on_start = kill
        try:
            table = drive(reopen(sweep.directory), workers, 2)
            break
        except Killed:
            starts += 1
    assert starts > 3
    assert table == expected


def test_trials_that_diverge_count_as_worst(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(
        space={"trainer.lr": [1e-2, 1e4, 1e30], "trainer.max_grad_norm": "[1.0]"},
        search="grid",
        trials=None,
        halving=None,
    )
    table = drive(sweep, InThisProcess(0), 1)
    assert [row["status"] for row in table["rows"]] == ["finished", DIVERGED, DIVERGED]
    assert table["winner"]["trial"] == 0
    assert table["rows"][1]["score"] is None


def test_divergence_is_a_function_of_the_rows() -> None:
    def rows(*losses: float | None) -> list[dict[str, Any]]:
        return [{"step": 2 * index, "train/loss": loss} for index, loss in enumerate(losses, 1)]

    assert diverged_at(rows(5, 8, 8, 8), None) == 8
    assert diverged_at(rows(5, 8, 8, 4, 8, 8), None) is None
    assert diverged_at(rows(5, 8, None, 8, 8), None) == 10
    assert diverged_at(rows(5, 8, 8, 8), 6) is None
    assert diverged_at(rows(-5, -1, -1, -1), None) == 8
    assert diverged_at([], None) is None


def test_trial_that_learns_nothing_has_not_diverged() -> None:
    """The loss of a fine-tuning with a low learning rate is as often above the first one as below."""
    noise = random.Random(0)
    rows = [{"step": step, "train/loss": noise.gauss(2.0, 0.2)} for step in range(1, 200)]
    rows[0]["train/loss"] = 1.6
    assert diverged_at(rows, None) is None


def test_every_trial_diverges(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(space={"trainer.lr": [1e30, 1e31]}, search="grid", trials=None, halving=None)
    assert drive(sweep, InThisProcess(0), 1)["winner"] is None
    assert not sweep.directory.best.exists()


def test_seeds_give_mean_and_error_of_finalists(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(seeds=3)
    table = drive(sweep, InThisProcess(0), 4)
    with_seeds = [row for row in table["rows"] if row["seeds"]]
    assert len(with_seeds) == 3
    for row in with_seeds:
        assert row["seeds"]["n"] == 3
        assert row["seeds"]["scores"][0] == row["score"]
        assert len(set(row["seeds"]["scores"])) == 3
    assert table["winner"]["seeds"]["mean"] == min(row["seeds"]["mean"] for row in with_seeds)


def test_seeds_alone_give_the_mean_of_one_config(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(space=None, halving=None, trials=None, seeds=3)
    workers = InThisProcess(0)
    table = drive(sweep, workers, 3)
    assert {run_id for run_id, _ in workers.trained} == {"demo-0", "demo-0-s1", "demo-0-s2"}
    assert table["winner"]["seeds"]["n"] == 3


@pytest.mark.slow
def test_optuna_is_exact_too(make_sweep: MakeSweep) -> None:
    pytest.importorskip("optuna")
    values = {"search": "optuna", "trials": 10, "halving": None, "space": {"trainer.lr": "log(1e-3,1e-1)"}}
    first = drive(make_sweep("one", **values), InThisProcess(0), 1)
    sweep = make_sweep("two", **values)
    workers = InThisProcess(1)

    def kill(job: Job) -> None:
        if job.trial.number == 9:
            raise Killed

    workers.on_start = kill
    with pytest.raises(Killed):
        drive(sweep, workers, 4)
    assert drive(reopen(sweep.directory), InThisProcess(2), 4) == first
    assert len(first["rows"]) == 10


def test_trials_that_equal_one_of_an_earlier_bracket_are_not_trained(make_sweep: MakeSweep) -> None:
    configs = make_sweep().configs
    earlier = number_trials("demo", [{"trainer.lr": 0.1}, {"trainer.lr": 0.2}], configs)
    optimizer = load_config("gpt_smoke").trainer.optimizer
    added = number_trials("demo", [{"trainer.lr": 0.2, "trainer.optimizer": optimizer}], configs, earlier)
    assert [(trial.number, trial.same_as) for trial in added] == [(2, 1)]


def test_order_of_the_space_survives_a_restart(make_sweep: MakeSweep) -> None:
    momentum = {"values": [0.9, 0.95], "when": {"trainer.optimizer": "muon"}}
    space = {"trainer.optimizer": ["adamw", "muon"], "trainer.momentum": momentum, "run.notes": ["b", "a"]}
    sweep = make_sweep(space=space, search="grid", trials=None, halving=None)
    again = reopen(sweep.directory)
    assert again.space == sweep.space
    assert describe(sweep.directory)["fields"] == list(space)


def test_removed_trial_is_named(make_sweep: MakeSweep) -> None:
    sweep = make_sweep()
    workers = InThisProcess(0)

    def remove(job: Job) -> None:
        if job.rung == 0 and job.trial.number == 8:
            for number in range(8):
                shutil.rmtree(sweep.directory.run(f"demo-{number}").path)

    workers.on_start = remove
    with pytest.raises(CheckpointError, match="was removed"):
        drive(sweep, workers, 1)


def test_trial_that_cannot_be_trained_ends_the_sweep_with_its_error(make_sweep: MakeSweep, workdir: Path) -> None:
    text = workdir / "text.txt"
    text.write_text("the pod waits for the master.\n" * 40)
    sweep = make_sweep(overrides=["data.name=text_files", f"data.files=['{text}']"])
    text.unlink()
    with pytest.raises((UsageError, TrainingFailed), match=r"demo-0") as caught:
        drive(sweep, InThisProcess(0), 1)
    assert caught.value.remedy
    assert "--resume demo" in caught.value.remedy
    text.write_text("the pod waits for the master.\n" * 40)
    assert drive(reopen(sweep.directory), InThisProcess(0), 1)["is_complete"]


def test_run_that_crashes_again_and_again_ends_the_sweep(make_sweep: MakeSweep) -> None:
    sweep = make_sweep()
    workers = InThisProcess(0)
    workers.start = lambda job, _: workers._started.append(job)  # type: ignore[method-assign]
    with pytest.raises(TrainingFailed) as caught:
        drive(sweep, workers, 1)
    assert caught.value.reason == "gave_up"


def test_missing_metric_is_named(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(halving=None, trials=2, metric="val/bits_per_byte")
    assert drive(sweep, InThisProcess(0), 1)["metric"] == "val/bits_per_byte"


def test_score_of_a_task_is_a_metric(make_sweep: MakeSweep, cli: Callable[..., Any], workdir: Path) -> None:
    """Of which the higher is better: the trials with the highest are promoted, and one of them is the best."""
    letters = random.Random(0)
    items = []
    for number in range(40):
        choices = ["".join(letters.choices("abcdefghijklmnop ", k=4)) + "." for _ in range(2)]
        items.append({"question": str(number), "choices": choices, "answer": number % 2})
    (workdir / "pods.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    tasks = [f"trainer.eval_tasks.tasks=['{workdir / 'pods.jsonl'}']"]
    sweep = make_sweep(metric="tasks/pods/acc", overrides=tasks)
    table = drive(sweep, InThisProcess(0), 1)
    first = sorted((row["scores"][0] for row in table["rows"]), reverse=True)
    promoted = [row for row in table["rows"] if len(row["scores"]) == 2]
    assert sorted((row["scores"][0] for row in promoted), reverse=True) == first[:3]
    assert first[0] > first[-1], "the scores differ"
    assert table["winner"]["score"] == max(row["score"] for row in promoted)
    shown = cli("sweep", "show", "demo").out
    assert "tasks/pods/acc" in shown
    assert shown.splitlines()[1].split()[0] == str(table["winner"]["trial"])


def test_changed_config_is_refused_on_resume(make_sweep: MakeSweep, workdir: Path) -> None:
    config = workdir / "c.yaml"
    config.write_text("extends: gpt_smoke\n")
    sweep = make_sweep(config=str(config))
    reopen(sweep.directory)
    config.write_text("extends: gpt_smoke\ntrainer: {betas: [0.8, 0.9]}\n")
    with pytest.raises(UsageError, match=r"trainer\.betas"):
        reopen(sweep.directory)
    config.unlink()
    reopen(sweep.directory)


def test_two_sweeps_of_one_name_are_refused(make_sweep: MakeSweep) -> None:
    make_sweep()
    with pytest.raises(UsageError, match="already exists"):
        make_sweep()


def test_runs_with_the_names_of_trials_are_not_touched(make_sweep: MakeSweep, workdir: Path) -> None:
    (workdir / "runs" / "demo-3").mkdir(parents=True)
    with pytest.raises(UsageError, match="demo-3"):
        make_sweep()
    assert not SweepDirectory(workdir / "runs" / "demo").path.exists()


def test_show_of_a_sweep_that_runs(make_sweep: MakeSweep, cli: Callable[..., Any]) -> None:
    sweep = make_sweep()
    workers = InThisProcess(0)
    seen: list[dict[str, Any]] = []
    workers.on_start = lambda _: seen.append(describe(sweep.directory))
    drive(sweep, workers, 1)
    assert seen[3]["is_running"]
    assert not seen[3]["is_complete"]
    assert [row["status"] for row in seen[3]["rows"]].count("waiting") == 9
    assert [row["score"] is None for row in seen[3]["rows"]] == [False] * 3 + [True] * 6
    shown = cli("sweep", "show", "demo", "--json")
    assert shown.code == 0
    assert shown.json["winner"]["run_id"].startswith("demo-")
    assert all(row["seconds"] is not None for row in shown.json["rows"])
    assert "Best: trial" in cli("sweep", "show", "demo").out
    best = cli("sweep", "show", "demo", "--best")
    assert best.code == 0
    Path("best.yaml").write_text(best.out)
    assert cli("validate", "--config", "best.yaml").code == 0
    assert cli("sweep", "show", "other").code == ExitCode.USAGE
    assert cli("runs", "list").code == 0


def test_damaged_record_is_named(make_sweep: MakeSweep) -> None:
    sweep = make_sweep()
    whole = sweep.directory.trials.read_text()
    for part, other in (('"number": 3', '"number": 7'), ('"same_as": null', '"same_as": 99')):
        sweep.directory.trials.write_text(whole.replace(part, other))
        assert sweep.directory.trials.read_text() != whole
        with pytest.raises(CheckpointError, match=r"trials\.json"):
            describe(sweep.directory)
    sweep.directory.trials.write_text("{")
    with pytest.raises(CheckpointError, match=r"trials\.json"):
        drive(reopen(sweep.directory), InThisProcess(0), 1)
    for path in (sweep.directory.base, sweep.directory.spec):
        path.write_text("{}")
        with pytest.raises(CheckpointError, match=path.name):
            reopen(sweep.directory)


def test_passwords_of_the_config_are_in_no_file_that_others_read(make_sweep: MakeSweep) -> None:
    uri = "http://me:hunter2@mlflow.local"
    sweep = make_sweep(halving=None, trials=1, overrides=[f"tracking.mlflow.tracking_uri={uri}"])
    configs = sweep.directory.path / "configs"
    assert configs.stat().st_mode & 0o077 == 0
    drive(sweep, InThisProcess(0), 1)
    assert uri in sweep.directory.config("demo-0").read_text()  # what the trial needs
    for path in sweep.directory.root.rglob("*"):
        if path.is_file() and configs not in path.parents:
            assert b"hunter2" not in path.read_bytes(), path


def test_trials_are_grouped_for_trackers(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(halving=None, trials=1)
    drive(sweep, InThisProcess(0), 1)
    run = RunDirectory(sweep.directory.root / "demo-0")
    assert load_config(run.config).tracking.group == "demo"
    assert list(read_metrics(run.metrics))
    assert find_sweep(str(sweep.directory.root), "demo") == sweep.directory
