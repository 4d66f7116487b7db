"""Epochs: the length of a run, what is logged after each, resuming with more epochs, and early stopping."""

import json
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
import torch
import yaml
from fault_harness import RUN_ID
from test_fine_tune_faults import (
    STEPS,
    STEPS_IN_EPOCH,
    FineTuned,
    epoch_lines,
    fine_tuned,
    resume_and_check,
    rows,
    run_dir,
    train,
    trained,
    val_losses,
)

from llmtrain.config.schema import Config
from llmtrain.data.examples.example_batches import ExampleBatches
from llmtrain.distributed.world import World
from llmtrain.runs.metrics import read_metrics
from llmtrain.training.components import build_components
from llmtrain.training.step import Stepper
from slow_cases import some

pytestmark = pytest.mark.hf
MakeConfig = Callable[..., Config]
ONLY_AT_EPOCH_ENDS: dict[str, Any] = {"trainer__eval_every_steps": None, "trainer__save_every_steps": None}
CONSTANT: dict[str, Any] = {"trainer__schedule": "constant"}
LINE = re.compile(
    r"(\d+)/(\d+) \| step (\d+)/(\d+) \| train loss ([\d.]+) \| val loss ([\d.]+) \| perplexity ([\d.]+)"
    r"(?: \| bpb [\d.]+)?( \| best)?"
)


@pytest.fixture(scope="module")
def make(make_fine_tune: MakeConfig) -> MakeConfig:
    """Configs of runs without prompts."""
    return lambda **changes: make_fine_tune(**{"trainer__eval_prompts": [], **changes})


@pytest.fixture(scope="module")
def plain(make: MakeConfig) -> tuple[Config, dict[str, Any]]:
    """A finished run that tests compare with their own, and do not change."""
    config = make()
    return config, trained(config)


@pytest.fixture(scope="module")
def constant(make: MakeConfig) -> tuple[Config, dict[str, Any]]:
    """The same with a constant learning rate, which does not depend on the length of the run."""
    config = make(**CONSTANT, **ONLY_AT_EPOCH_ENDS)
    return config, trained(config)


@pytest.fixture(scope="module")
def finished(make: MakeConfig) -> tuple[Config, dict[str, Any]]:
    config = make(**ONLY_AT_EPOCH_ENDS)
    return config, trained(config)


def train_losses(config: Config) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in metric_rows(config) if "train/loss" in row}


def metric_rows(config: Config) -> list[dict[str, Any]]:
    return list(read_metrics(run_dir(config) / "metrics.jsonl"))


def check_epochs(config: Config, ends: list[int], all_losses: dict[int, float], of: int) -> None:
    """A row and a line after each epoch, with the mean loss of its steps and no other."""
    found = [row for row in metric_rows(config) if "epoch/number" in row]
    assert [(row["epoch/number"], row["step"]) for row in found] == list(enumerate(ends, start=1))
    lines = [LINE.fullmatch(line) for line in epoch_lines(run_dir(config))]
    assert len(lines) == len(ends)
    assert all(lines), epoch_lines(run_dir(config))
    for first, row, line in zip([0, *ends], found, lines, strict=False):
        losses = [all_losses[step] for step in range(first + 1, row["step"] + 1)]
        assert row["epoch/train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert row["val/perplexity"] == pytest.approx(math.exp(row["val/loss"]), rel=1e-12)
        assert line is not None
        number, last, step, _, loss, val, perplexity, _ = line.groups()
        assert (int(number), int(last), int(step)) == (row["epoch/number"], of, row["step"])
        assert (loss, val) == (f"{row['epoch/train_loss']:.4f}", f"{row['val/loss']:.4f}")
        assert perplexity == f"{row['val/perplexity']:.2f}"


def test_epochs_evaluate_and_save_at_their_end(make: MakeConfig) -> None:
    """Without eval_every_steps and save_every_steps."""
    config = make(**ONLY_AT_EPOCH_ENDS, trainer__max_epochs=3, trainer__keep_checkpoints=5)
    result = trained(config)
    assert (result["steps"], result["epochs"], result["stopped_early"]) == (12, 3, False)
    check_epochs(config, [4, 8, 12], train_losses(config), of=3)
    assert [step for step, _ in rows(run_dir(config), "val/loss")] == [4, 8, 12]
    assert harness.steps_saved(run_dir(config).parent) == [4, 8, 12]
    means = [row["epoch/train_loss"] for row in metric_rows(config) if "epoch/number" in row]
    assert len(set(means)) == 3


def test_epoch_loss_is_the_mean_over_all_steps(make: MakeConfig, plain: tuple[Config, dict[str, Any]]) -> None:
    """With evaluations and saves in the middle of an epoch, which read losses too."""
    every = plain[0]
    config = make(trainer__log_every_steps=7, trainer__eval_every_steps=2, trainer__save_every_steps=3)
    trained(config)
    assert sorted(train_losses(config)) == [4, 7, 8], "an epoch's last step is always logged"
    check_epochs(config, [4, 8], train_losses(every), of=2)


@pytest.mark.parametrize(
    ("max_steps", "steps", "ends"),
    [
        (6, 6, [4]),
        pytest.param(20, 8, [4, 8], marks=pytest.mark.slow),
        pytest.param(8, 8, [4, 8], marks=pytest.mark.slow),
        pytest.param(4, 4, [4], marks=pytest.mark.slow),
        pytest.param(2, 2, [], marks=pytest.mark.slow),
    ],
)
def test_smaller_of_max_epochs_and_max_steps_wins(
    make: MakeConfig, max_steps: int, steps: int, ends: list[int]
) -> None:
    config = make(**ONLY_AT_EPOCH_ENDS, trainer__max_steps=max_steps)
    result = trained(config)
    assert (result["steps"], result["epochs"]) == (steps, steps // STEPS_IN_EPOCH)
    check_epochs(config, ends, train_losses(config), of=2)
    assert result["final_val_loss"] is not None, "evaluated at the end of the run, too"
    assert [step for step, _ in rows(run_dir(config), "val/loss")] == sorted({*ends, steps})


def test_schedule_spans_the_epochs(make: MakeConfig, finished: tuple[Config, dict[str, Any]]) -> None:
    """lr decays until the last step of the last epoch, as with the equivalent max_steps."""
    in_epochs, of_epochs = finished
    in_steps = make(**ONLY_AT_EPOCH_ENDS, trainer__max_epochs=None, trainer__max_steps=STEPS)
    assert trained(in_steps)["state_sha256"] == of_epochs["state_sha256"]
    learned = [
        [row["train/lr"] for row in metric_rows(config) if "train/lr" in row] for config in (in_epochs, in_steps)
    ]
    assert learned[0] == learned[1]
    assert learned[0][-1] < 0.1 * max(learned[0])
    assert epoch_lines(run_dir(in_steps)) == [], "a run without max_epochs logs no epochs"


def test_best_is_the_lowest_validation_loss(make: MakeConfig) -> None:
    """In a run that improves and then gets worse."""
    config = make(trainer__eval_every_steps=1)
    result = trained(config, before=val_losses(5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 3.25))
    assert [row["val/loss"] for row in metric_rows(config) if "val/loss" in row] == [
        *(5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 3.25, 3.25)
    ]
    assert (result["best_step"], result["best_val_loss"], result["final_val_loss"]) == (4, 3.0, 3.25)
    assert (run_dir(config) / "checkpoints" / "best").read_text().strip() == "step_4"
    is_best = [row["val/is_best"] for row in metric_rows(config) if "val/is_best" in row]
    assert is_best == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], "an equal loss is not better"


def test_metrics_have_the_epoch(plain: tuple[Config, dict[str, Any]]) -> None:
    config, _ = plain
    found = {row["step"]: row["train/epoch"] for row in metric_rows(config) if "train/epoch" in row}
    assert found == {step: pytest.approx(step / STEPS_IN_EPOCH) for step in range(1, STEPS + 1)}
    for row in metric_rows(config):
        assert ("val/perplexity" in row) == ("val/loss" in row)


# Which examples a step read


def note_rows(folder: Path) -> Callable[[], None]:
    """Make every step append the token ids of the examples it read to a file of the process."""

    def before() -> None:
        real = Stepper.train_step

        def noting(self: Stepper, step: int, batches: Any, first_micro: int, counts: Any) -> Any:
            result = real(self, step, batches, first_micro, counts)
            with (folder / f"{os.getpid()}.jsonl").open("a") as file:
                for batch in batches:
                    file.write(json.dumps([step, batch.first_sample, rows_of(batch)]) + "\n")
            return result

        Stepper.train_step = noting  # type: ignore[method-assign]

    folder.mkdir(exist_ok=True)
    return before


def rows_of(batch: Any) -> list[list[int]]:
    """The token ids of a batch's examples; the last token of an answer is only among the targets."""
    found = []
    for index in range(len(batch.inputs)):
        inputs, targets = batch.inputs[index].tolist(), batch.targets[index].tolist()
        starts = [0]
        if batch.positions is not None:
            starts = [at for at, position in enumerate(batch.positions[index].tolist()) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(inputs)], strict=True):
            last = max((at for at in range(start, end) if targets[at] != -100), default=None)
            if last is not None:
                found.append([*inputs[start : last + 1], targets[last]])
    return found


def all_rows(config: Config) -> Counter[tuple[int, ...]]:
    batches = build_components(config, World(device=torch.device("cpu"))).train_batches
    assert isinstance(batches, ExampleBatches)
    store, selection = batches.samples.store, batches.samples.selection
    starts = [int(store.spans[row, 0]) for row in selection.examples]
    return Counter(
        tuple(store.tokens[start : start + int(length) + 1].tolist())
        for start, length in zip(starts, selection.lengths, strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"data__packing": False, "trainer__micro_batch_size": 2}, 1, marks=pytest.mark.slow),
        ({}, 2),
        pytest.param({"data__packing": False, "trainer__micro_batch_size": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_every_example_is_read_once_per_epoch(
    make: MakeConfig, tmp_path: Path, changes: dict[str, Any], size: int
) -> None:
    """In a run that is interrupted in its first epoch and killed in its second, whose step 5 is then repeated."""
    config = make(**changes)
    before = note_rows(tmp_path / "seen")
    assert {ended.code for ended in train(config, size, fault="after_optimizer:3:0:term", before=before)} == {75}
    assert train(config, size, RUN_ID, fault="after_backward:6:0:kill", before=before)[0].code == -9
    trained(config, size, RUN_ID, before=before)
    seen: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    again = 0
    for file in (tmp_path / "seen").iterdir():
        for line in file.read_text().splitlines():
            step, first, found = json.loads(line)
            found = [tuple(row) for row in found]
            again += (step, first) in seen
            assert seen.setdefault((step, first), found) == found, "repeated with other examples"
    assert again >= 4, "step 5 was repeated"
    assert len(seen) == STEPS * 4
    expected = all_rows(config)
    assert sum(expected.values()) == 30
    epochs = [[key for key in sorted(seen) if key[0] // STEPS_IN_EPOCH == number] for number in (0, 1)]
    for number, keys in enumerate(epochs):
        assert Counter(row for key in keys for row in seen[key]) == expected, f"epoch {number}"
    assert [seen[key] for key in epochs[0]] != [seen[key] for key in epochs[1]], "each has an order of its own"


# Running text.


@pytest.mark.parametrize("data", some(["text_files", "dummy_text"], "text_files"))
def test_epochs_of_text(tmp_path: Path, cache: Path, data: str) -> None:
    """A GPT from scratch. Windows do not fill a whole number of steps: an epoch ends with the step that has its last
    window."""
    changes: dict[str, Any] = {"data__name": data, "trainer__micro_batch_size": 8, "trainer__grad_accum_steps": 2}
    if data == "text_files":
        text = tmp_path / "text.txt"
        text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(130)))
        changes |= {"data__files": [str(text)], "data__val_fraction": 0.2}
    else:
        changes |= {
            "trainer__micro_batch_size": 800,
            "model__block_size": 32,
            "model__d_model": 8,
            "model__n_layers": 1,
        }
    config = harness.tiny_config(
        tmp_path / "runs", cache, **changes, **ONLY_AT_EPOCH_ENDS, trainer__max_steps=None, trainer__max_epochs=2
    )
    windows = build_components(config, World(device=torch.device("cpu"))).train_batches.sampler.windows  # type: ignore[attr-defined]
    in_step = 2 * changes["trainer__micro_batch_size"]
    ends = [math.ceil(windows / in_step), math.ceil(2 * windows / in_step)]
    assert windows % in_step, "else the border of the epochs is too easy"
    assert ends[0] > 1
    result = trained(config)
    assert (result["steps"], result["epochs"]) == (ends[1], 2)
    check_epochs(config, ends, train_losses(config), of=2)
    assert harness.steps_saved(run_dir(config).parent) == ends


def test_epoch_of_a_single_step(make: MakeConfig, tmp_path: Path) -> None:
    """Fewer examples than one step reads."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"instruction": "say {word}", "output": "{word}"}}\n' for word in ("red", "sun", "milk")))
    config = make(**ONLY_AT_EPOCH_ENDS, data__train_file=str(few), trainer__max_epochs=3, trainer__warmup_steps=0)
    result = trained(config)
    assert (result["steps"], result["epochs"]) == (3, 3)
    check_epochs(config, [1, 2, 3], train_losses(config), of=3)


# Going on.


def test_raised_max_epochs_on_resume(make: MakeConfig, constant: tuple[Config, dict[str, Any]]) -> None:
    uninterrupted, expected = constant
    config = make(**CONSTANT, **ONLY_AT_EPOCH_ENDS, trainer__max_epochs=1)
    assert trained(config)["epochs"] == 1
    more = config.with_values("trainer", max_epochs=2)
    assert train(more, resume=RUN_ID, fault="after_optimizer:6:0:term")[0].code == 75
    assert not (run_dir(config) / "finished.json").exists(), "it is not finished any more"
    result = trained(more, resume=RUN_ID)
    assert (result["steps"], result["epochs"], result["resumed_from"]) == (8, 2, 6)
    assert result["state_sha256"] == expected["state_sha256"]
    check_epochs(uninterrupted, [4, 8], train_losses(uninterrupted), of=2)
    numbers = [row for row in rows(run_dir(config), "val/loss") if "epoch/number" in row[1]]
    assert numbers == rows(run_dir(uninterrupted), "val/loss")


def test_raised_max_steps_within_the_epochs(make: MakeConfig, constant: tuple[Config, dict[str, Any]]) -> None:
    """Stopped by max_steps in the middle of the second epoch: its mean loss is still that of all its steps."""
    uninterrupted, expected = constant
    config = make(**CONSTANT, **ONLY_AT_EPOCH_ENDS, trainer__max_steps=6)
    assert trained(config)["steps"] == 6
    result = trained(config.with_values("trainer", max_steps=None), resume=RUN_ID)
    assert result["steps"] == STEPS
    assert result["state_sha256"] == expected["state_sha256"]
    check_epochs(config, [4, 8], train_losses(uninterrupted), of=2)


def test_max_epochs_set_in_the_middle_of_an_epoch(make: MakeConfig) -> None:
    """A run of 6 steps is resumed to the end of its second epoch: the mean is over that epoch's 4 steps."""
    config = make(**CONSTANT, **ONLY_AT_EPOCH_ENDS, trainer__max_epochs=None, trainer__max_steps=6)
    assert trained(config)["epochs"] == 1
    result = trained(config.with_values("trainer", max_steps=None, max_epochs=2), resume=RUN_ID)
    assert (result["steps"], result["epochs"]) == (8, 2)
    losses = train_losses(config)
    (row,) = [row for row in metric_rows(config) if row.get("epoch/number") == 2]
    assert row["epoch/train_loss"] == pytest.approx(sum(losses[step] for step in (5, 6, 7, 8)) / 4, rel=1e-12)


@pytest.mark.parametrize("is_node", [False, True])
def test_finished_run_returns_immediately(finished: tuple[Config, dict[str, Any]], is_node: bool) -> None:
    """Started by a person or restarted by `llmtrain node`: returns its result and writes nothing."""
    config, expected = finished
    before = harness.tree(run_dir(config))

    def no_model() -> None:
        from llmtrain.training import run

        run.build_on_all_ranks = None  # type: ignore[assignment]

    env = {"LLMTRAIN_NODE": "1"} if is_node else {}
    result = trained(config, resume="auto" if is_node else RUN_ID, before=no_model, env=env)
    assert result == expected
    assert harness.tree(run_dir(config)) == before


def test_finished_run_of_a_node_needs_no_peers(finished: tuple[Config, dict[str, Any]]) -> None:
    """Rank 1 of 2 is restarted alone, without its master."""
    config, _ = finished
    process = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "LLMTRAIN_NODE": "1"}
    nowhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(harness.free_port())}
    ended = harness.run(config, "auto", env={**process, **nowhere})
    assert ended.code == 0, ended.output
    assert ended.seconds < 10


def test_resume_with_its_own_config(make: MakeConfig, plain: tuple[Config, dict[str, Any]]) -> None:
    """`llmtrain train --resume <dir>`, as an interrupted run suggests: it still counts epochs."""
    expected = fine_tuned(*plain)
    config = make()
    assert train(config, fault="after_optimizer:3:0:term")[0].code == 75
    kept = yaml.safe_load((run_dir(config) / "config.yaml").read_text())["trainer"]
    assert (kept["max_epochs"], kept["max_steps"]) == (2, None)
    started = ranks.start_cli("train", "--resume", run_dir(config), "--json")
    try:
        assert started.wait() == 0, started.err
    finally:
        started.end()
    result = json.loads(started.out)
    assert (result["steps"], result["epochs"], result["resumed_from"]) == (8, 2, 3)
    assert result["state_sha256"] == expected.plain.state_sha256
    assert epoch_lines(run_dir(config)) == expected.epoch_lines
    kept = yaml.safe_load((run_dir(config) / "config.yaml").read_text())["trainer"]
    assert (kept["max_epochs"], kept["max_steps"]) == (2, None)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"trainer__warmup_steps": 8}, 1),
        ({"trainer__warmup_steps": 7, "trainer__max_steps": 9, "trainer__max_epochs": 1}, 2),
    ],
)
def test_warmup_longer_than_the_epochs_is_refused(make: MakeConfig, changes: dict[str, Any], size: int) -> None:
    """Known once the data is prepared; nothing may have been written by then."""
    config = make(**changes)
    ends = train(config, size)
    assert [ended.code for ended in ends] == [64] * size, ends[0].output
    assert "trainer.warmup_steps" in ends[0].output
    assert not run_dir(config).exists()


# Stopping early.

PATIENT: dict[str, Any] = {
    "trainer__max_epochs": 4,
    "trainer__eval_every_steps": 1,
    "trainer__early_stopping_patience": 2,
}
# One worse evaluation is forgiven; steps 5 and 6 are two in a row.
WORSE = val_losses(5.0, 4.0, 4.5, 3.0, 3.5, 3.25, 2.5, 4.0)
STOPPED_AT, BEST = 6, 4


@pytest.fixture(scope="module")
def stopped(make: MakeConfig) -> FineTuned:
    config = make(**PATIENT)
    return fine_tuned(config, trained(config, before=WORSE))


def test_early_stopping_ends_the_run(make: MakeConfig, stopped: FineTuned) -> None:
    config = make(**PATIENT)
    result = trained(config, before=WORSE)
    assert fine_tuned(config, result) == stopped
    assert (result["stopped_early"], result["steps"], result["best_step"]) == (True, STOPPED_AT, BEST)
    assert (result["best_val_loss"], result["final_val_loss"]) == (3.0, 3.25)
    assert (stopped.plain.best, stopped.plain.latest) == (f"step_{BEST}", f"step_{STOPPED_AT}")
    before = harness.tree(run_dir(config))
    assert trained(config, resume=RUN_ID, before=WORSE) == result
    assert harness.tree(run_dir(config)) == before


@pytest.mark.slow
def test_early_stopping_counts_evaluations_in_a_row(make: MakeConfig, stopped: FineTuned) -> None:
    """More patience: the same run, but longer."""
    config = make(**{**PATIENT, "trainer__early_stopping_patience": 3})
    result = trained(config, before=WORSE)
    assert (result["steps"], result["best_step"]) == (10, 7)
    assert rows(run_dir(config), "train/loss")[:STOPPED_AT] == stopped.train


FAULTS = [f"{back}-{action}" for back in range(4) for action in ("term", "kill")]


@pytest.mark.parametrize("fault", some(FAULTS, "1-kill"))
def test_faults_do_not_change_early_stopping(make: MakeConfig, stopped: FineTuned, fault: str) -> None:
    """Interrupted before, or killed in, one of the evaluations that decide."""
    config = make(**PATIENT)
    back, action = fault.split("-")
    point = "evaluate" if action == "kill" else "after_optimizer"
    (ended,) = train(config, fault=f"{point}:{STOPPED_AT - int(back)}:0:{action}", before=WORSE)
    assert ended.code == {"term": 75, "kill": -9}[action], ended.output
    resume_and_check(config, stopped, before=WORSE)


def test_sigkill_after_early_stopping(make: MakeConfig, stopped: FineTuned) -> None:
    config = make(**PATIENT)
    (ended,) = train(config, fault=f"after_final_save:{STOPPED_AT}:0:kill", before=WORSE)
    assert ended.code == -signal.SIGKILL
    assert resume_and_check(config, stopped, before=WORSE) == STOPPED_AT


@pytest.mark.slow
def test_two_processes_stop_early_at_the_same_step(make: MakeConfig, stopped: FineTuned) -> None:
    config = make(**PATIENT)
    assert fine_tuned(config, trained(config, 2, before=WORSE)) == stopped


def test_resume_without_early_stopping_continues(make: MakeConfig) -> None:
    """Resumed without patience: trains to the end of the epochs."""
    config = make(**PATIENT)
    assert trained(config, before=WORSE)["stopped_early"] is True
    result = trained(config.with_values("trainer", early_stopping_patience=None), resume=RUN_ID, before=WORSE)
    assert (result["steps"], result["stopped_early"], result["resumed_from"]) == (16, False, STOPPED_AT)


def test_improving_run_is_not_stopped(make: MakeConfig) -> None:
    result = trained(
        make(trainer__early_stopping_patience=1), before=val_losses(*(5.0 - step / 10 for step in range(STEPS)))
    )
    assert (result["steps"], result["stopped_early"]) == (STEPS, False)
