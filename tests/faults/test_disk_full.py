"""No space for a checkpoint: training goes on while it can, and the checkpoints there are stay whole."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, STEPS, Outcome

from llmtrain.config.schema import Config
from llmtrain.training.checkpoint import CheckpointStore

MakeConfig = Callable[..., Config]
BEFORE_RENAME = ["save_begin", "save_model_written", "save_before_manifest", "save_before_rename"]
AFTER_RENAME = ["save_after_rename", "save_before_prune"]


@pytest.mark.parametrize("point", BEFORE_RENAME + AFTER_RENAME)
@pytest.mark.parametrize("step", [2, 4])
def test_a_full_disk_at_a_periodic_save(config: Config, root: Path, golden: Outcome, point: str, step: int) -> None:
    ended = harness.run(config, fault=f"{point}:{step}:0:enospc")
    assert ended.code == 0, ended.output
    said = (
        f"step_{step} is saved, but"
        if point == "save_before_prune"
        else f"checkpoint of step {step} could not be written"
    )
    assert said in ended.output
    assert "No space left on device" in ended.output
    assert harness.outcome(root, ended.result) == golden
    harness.verify_all(root)


@pytest.mark.parametrize("point", BEFORE_RENAME)
def test_a_full_disk_at_the_final_save(config: Config, root: Path, golden: Outcome, point: str) -> None:
    ended = harness.run(config, fault=f"{point}:{STEPS}:0:enospc")
    assert ended.code == 65, ended.output
    assert f"The checkpoint of step {STEPS} could not be written" in ended.output
    assert "No space left on device" in ended.output
    assert "--resume" in ended.output
    assert harness.steps_saved(root) == [2, 4, 6]
    harness.verify_all(root)
    assert not (root / RUN_ID / "finished.json").exists()

    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 6
    assert harness.outcome(root, ended.result) == golden


def test_told_to_stop_and_no_space_to_save(config: Config, root: Path, golden: Outcome) -> None:
    """Not 75: what would be resumed is older than what was asked to be saved, and that is said."""

    def be_told() -> None:
        import signal

        begin = CheckpointStore._begin

        def told(self: CheckpointStore, *arguments: object) -> None:
            if self.steps() == [2, 4]:
                os.kill(os.getpid(), signal.SIGTERM)
            begin(self, *arguments)

        CheckpointStore._begin = told

    ended = harness.run(config, fault="save_begin:6:0:enospc", before=be_told)
    assert ended.code == 65, ended.output
    assert "could not be written" in ended.output
    assert harness.steps_saved(root) == [2, 4]
    ended = harness.run(config, RUN_ID)
    assert harness.outcome(root, ended.result) == golden


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def do_not_look_before_writing() -> None:
    """Without the check of free space first, the write itself fails half-way."""
    CheckpointStore._check_space = lambda _self, _tensors: None


@pytest.mark.needs_root
@pytest.mark.parametrize("before", [None, do_not_look_before_writing], ids=["checked-first", "fails-while-writing"])
def test_a_real_full_disk(
    make_config: MakeConfig, small_disk: Path, tmp_path: Path, before: Callable[[], None] | None
) -> None:
    """One checkpoint is about 1.2 MB: with three on the disk the next does not fit, until somebody makes room."""
    shape = {"model__d_model": 96, "model__n_heads": 4, "trainer__save_every_steps": 1, "trainer__keep_checkpoints": 9}
    plain = make_config(**shape)
    ended = harness.run(plain.with_values("output", root_dir=str(tmp_path / "roomy" / "runs")))
    assert ended.code == 0, ended.output
    wanted = harness.outcome(tmp_path / "roomy" / "runs", ended.result)
    size = sum(len(data) for data in harness.tree(tmp_path / "roomy/runs" / RUN_ID / "checkpoints/step_8").values())
    assert 1 << 20 < size < 4 << 20

    root = small_disk / "runs"
    on_small_disk = plain.with_values("output", root_dir=str(root))
    ended = harness.run(on_small_disk, before=before)
    assert ended.code == 65, ended.output
    assert "could not be written" in ended.output
    assert "Training goes on" in ended.output
    assert "Traceback" not in ended.output
    kept = harness.steps_saved(root)
    assert kept
    assert STEPS not in kept
    harness.verify_all(root)
    assert not list((root / RUN_ID / "checkpoints").glob(".tmp-*"))

    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    ended = harness.run(on_small_disk, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == kept[-1]
    assert harness.outcome(root, ended.result) == wanted


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError as full:
            if full.errno != errno.ENOSPC:
                raise


@pytest.mark.needs_root
def test_metrics_come_back_after_a_full_disk(make_config: MakeConfig, small_disk: Path) -> None:
    """metrics.jsonl is always there: a disk that was full for a while must not switch it off for good."""
    root = small_disk / "runs"
    config = make_config(
        trainer__max_steps=60,
        trainer__save_every_steps=None,
        trainer__eval_every_steps=None,
        logging__log_to_file=False,
    ).with_values("output", root_dir=str(root))
    filler = small_disk / "filler"

    def fill_at_step_3_and_free_at_step_50() -> None:
        from llmtrain.training import step as step_module

        fault = step_module.fault

        def fill_or_free(point: str, step: int) -> str | None:
            if (point, step) == ("after_backward", 3):
                fill(filler)
            if (point, step) == ("after_backward", 50):
                filler.unlink()
            return fault(point, step)

        step_module.fault = fill_or_free

    ended = harness.run(config, before=fill_at_step_3_and_free_at_step_50)
    assert ended.code == 0, ended.output
    steps = [step for step, _ in harness.train_rows(root / RUN_ID)]
    assert steps[-10:] == list(range(51, 61)), ended.output
