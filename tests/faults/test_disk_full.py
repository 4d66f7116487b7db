"""Full disks: training continues while it can, and existing checkpoints stay intact."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, STEPS, Outcome

from llmtrain.checkpoint import store as checkpoint_module
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.document import dump_document
from llmtrain.config.schema import Config
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import read_generations
from slow_cases import some

MakeConfig = Callable[..., Config]
Cli = Callable[..., Any]
BEFORE_RENAME = ["save_begin", "save_model_written", "save_before_manifest", "save_before_rename"]
AFTER_RENAME = ["save_after_rename", "save_before_prune"]


@pytest.mark.parametrize("point", BEFORE_RENAME + AFTER_RENAME)
@pytest.mark.parametrize("step", some([2, 4], 4))
def test_full_disk_at_a_periodic_save(config: Config, root: Path, golden: Outcome, point: str, step: int) -> None:
    ended = harness.run(config, fault=f"{point}:{step}:0:enospc")
    assert ended.code == 0, ended.output
    message = (
        f"step_{step} is saved, but"
        if point == "save_before_prune"
        else f"checkpoint of step {step} could not be written"
    )
    assert message in ended.output
    assert "No space left on device" in ended.output
    assert harness.outcome(root, ended.result) == golden
    harness.verify_all(root)


@pytest.mark.parametrize("point", some(BEFORE_RENAME, "save_begin", "save_before_rename"))
def test_full_disk_at_the_final_save(config: Config, root: Path, golden: Outcome, point: str) -> None:
    ended = harness.run(config, fault=f"{point}:{STEPS}:0:enospc")
    assert ended.code == 65, ended.output
    assert ended.error["reason"] == "disk_full"
    assert f"step {STEPS}" in ended.error["what"]
    assert "No space left on device" in ended.output
    assert "--resume" in ended.output
    assert harness.steps_saved(root) == [2, 4, 6]
    harness.verify_all(root)
    assert not (root / RUN_ID / "finished.json").exists()

    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 6
    assert harness.outcome(root, ended.result) == golden


def test_full_disk_at_the_save_after_sigterm(config: Config, root: Path, golden: Outcome) -> None:
    """Exits 65, not 75: the checkpoint to resume from is older than the interrupted step."""

    def send_sigterm() -> None:
        import signal

        begin = CheckpointStore._begin

        def begin_after_sigterm(self: CheckpointStore, *arguments: object) -> None:
            if self.steps() == [2, 4]:
                os.kill(os.getpid(), signal.SIGTERM)
            begin(self, *arguments)

        CheckpointStore._begin = begin_after_sigterm

    ended = harness.run(config, fault="save_begin:6:0:enospc", before=send_sigterm)
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
    """Without the check of free space, the write itself fails halfway."""
    import shutil

    checkpoint_module.shutil = SimpleNamespace(rmtree=shutil.rmtree, disk_usage=lambda _: SimpleNamespace(free=1 << 40))


@pytest.mark.needs_root
@pytest.mark.parametrize("before", [None, do_not_look_before_writing], ids=["checked-first", "fails-while-writing"])
def test_full_file_system(
    make_config: MakeConfig, small_disk: Path, tmp_path: Path, before: Callable[[], None] | None
) -> None:
    """One checkpoint is about 1.2 MB: with three on the disk the next one does not fit until space is freed."""
    shape = {"model__d_model": 96, "model__n_heads": 4, "trainer__save_every_steps": 1, "trainer__keep_checkpoints": 9}
    plain = make_config(**shape)
    ended = harness.run(plain.with_values("output", root_dir=str(tmp_path / "roomy" / "runs")))
    assert ended.code == 0, ended.output
    expected = harness.outcome(tmp_path / "roomy" / "runs", ended.result)
    size = sum(len(data) for data in harness.tree(tmp_path / "roomy/runs" / RUN_ID / "checkpoints/step_8").values())
    assert 1 << 20 < size < 4 << 20

    root = small_disk / "runs"
    on_small_disk = plain.with_values("output", root_dir=str(root))
    ended = harness.run(on_small_disk, before=before)
    assert ended.code == 65, ended.output
    assert "could not be written" in ended.output
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
    assert harness.outcome(root, ended.result) == expected


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
def test_metrics_resume_after_a_full_disk(make_config: MakeConfig, small_disk: Path) -> None:
    """A disk that was full for a while must not disable metrics.jsonl permanently."""
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

        fault = step_module.inject_fault

        def fill_or_free(point: str, step: int) -> str | None:
            if (point, step) == ("after_backward", 3):
                fill(filler)
            if (point, step) == ("after_backward", 50):
                filler.unlink()
            return fault(point, step)

        step_module.inject_fault = fill_or_free

    ended = harness.run(config, before=fill_at_step_3_and_free_at_step_50)
    assert ended.code == 0, ended.output
    steps = [step for step, _ in harness.train_rows(root / RUN_ID)]
    assert steps[-10:] == list(range(51, 61)), ended.output


# The command line on a real 4 MB file system, in a mount namespace of its own: nothing is mounted outside it.

IN_NAMESPACE = """
set -u
mkdir -p "$DISK" && mount -t tmpfs -o size=4m tmpfs "$DISK" || { echo "tmpfs refused" >&2; exit 125; }
"""


def unshare() -> list[str]:
    """A command that runs another one in its own mount namespace; skips where that is not allowed."""
    own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", "--mount", *own_user, "sh", "-c"]
    try:
        done = subprocess.run([*command, "mount -t tmpfs tmpfs /mnt"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare (util-linux)")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted in a namespace here: {done.stderr.strip()}")
    return command


def on_small_disk(config: Config, tmp_path: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with $DISK (4 MB), $CONFIG of the run and $PYTHON. It copies the files to inspect."""
    disk = tmp_path / "disk"
    document = tmp_path / "config.yaml"
    document.write_text(
        dump_document(config.with_values("output", root_dir=str(disk / "runs")).as_dict()), encoding="utf-8"
    )
    names = {"DISK": disk, "CONFIG": document, "PYTHON": sys.executable, "AFTER": tmp_path / "after"}
    return subprocess.run(
        [*unshare(), IN_NAMESPACE + script],
        env={**os.environ, **{name: str(value) for name, value in names.items()}, **env},
        capture_output=True,
        text=True,
        check=False,
    )


FILL_DURING_TRAINING = """
touch "$LLMTRAIN_FAULT_FILE"
"$PYTHON" -m llmtrain train --config "$CONFIG" --json &
while ! grep -q '"step": 11,' "$DISK/runs/tiny/metrics.jsonl" 2>/dev/null; do kill -0 $! || exit 126; sleep 0.1; done
dd if=/dev/zero of="$DISK/filler" bs=1k 2>/dev/null
rm "$LLMTRAIN_FAULT_FILE"
wait $!
code=$?
cp -r "$DISK/runs/tiny" "$AFTER"
if test "$THEN" = resume; then
  rm "$DISK/filler"
  "$PYTHON" -m llmtrain train --resume "$DISK/runs/tiny" || exit 127
  rm -r "$AFTER"
  cp -r "$DISK/runs/tiny" "$AFTER"
fi
exit $code
"""


@pytest.mark.timeout(300)  # whole starts of the command line
@pytest.mark.parametrize("then", ["end", pytest.param("resume", marks=pytest.mark.slow)])
def test_disk_that_fills_up_while_the_run_trains(make_config: MakeConfig, tmp_path: Path, then: str) -> None:
    """Log file, metrics, checkpoints and generations.json are all on it, and no space remains."""
    config = make_config(trainer__max_steps=60, trainer__save_every_steps=4)
    ended = on_small_disk(
        config,
        tmp_path,
        FILL_DURING_TRAINING,
        LLMTRAIN_FAULT="forward:12:0:wait",
        LLMTRAIN_FAULT_FILE=str(tmp_path / "waiting"),
        THEN=then,
    )
    assert ended.returncode == 65, ended.stderr
    error = json.loads(ended.stdout.splitlines()[0])
    assert (error["error"], error["exit_code"]) == ("TrainingFailed", 65)
    assert "Traceback" not in ended.stderr
    assert "Logging error" not in ended.stderr
    run = RunDirectory(tmp_path / "after")
    generations = read_generations(run)
    if then == "end":
        assert [row["ended"] for row in generations] == ["failed"]
        assert not run.finished.exists()
        kept = (run.logs / "train.log").read_text()
        assert "step 11/60" in kept
        assert "step 59/60" not in kept, "the log was meant to be full, too"
    else:
        assert [row["ended"] for row in generations] == ["failed", "finished"]
        assert [step for step, _ in harness.train_rows(run.path)] == list(range(1, 61))
    steps = CheckpointStore(run.checkpoints).steps()
    assert steps[-1] == (8 if then == "end" else 60)
    for step in steps:
        CheckpointStore(run.checkpoints).at(step).verify()


INIT_ON_A_FULL_DISK = """
dd if=/dev/zero of="$DISK/filler" bs=1k 2>/dev/null
"$PYTHON" -m llmtrain init --preset gpt_smoke --to "$DISK/my.yaml" --json
code=$?
ls -A "$DISK"
rm "$DISK/filler"
"$PYTHON" -m llmtrain init --preset gpt_smoke --to "$DISK/my.yaml" >&2 || exit 127
exit $code
"""


def test_init_on_a_full_disk_leaves_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    done = on_small_disk(make_config(), tmp_path, INIT_ON_A_FULL_DISK)
    assert done.returncode == 65, done.stderr
    error, *names = done.stdout.splitlines()
    assert json.loads(error)["reason"] == "disk_full"
    assert names == ["filler"]


START_WITH_LITTLE_SPACE = """
mkdir -p "$DISK/runs" "$AFTER"
for free in 0 8 16 24 200; do
  rm -f "$DISK/filler"
  dd if=/dev/zero of="$DISK/filler" bs=1k 2>/dev/null
  truncate -s -${free}K "$DISK/filler"
  "$PYTHON" -m llmtrain train --config "$CONFIG" --json >"$AFTER/$free.json" 2>"$AFTER/$free.err"
  echo $? >"$AFTER/$free.code"
  ls -A "$DISK/runs" >"$AFTER/$free.there"
done
"""


@pytest.mark.timeout(300)
def test_start_on_a_full_disk(make_config: MakeConfig, tmp_path: Path) -> None:
    done = on_small_disk(make_config(), tmp_path, START_WITH_LITTLE_SPACE)
    assert done.returncode == 0, done.stderr
    for free in (0, 8, 16, 24, 200):
        stderr = (tmp_path / "after" / f"{free}.err").read_text()
        assert (tmp_path / "after" / f"{free}.code").read_text().strip() == "65", stderr
        error = json.loads((tmp_path / "after" / f"{free}.json").read_text())
        assert error["error"] == "TrainingFailed"
        assert "output.root_dir" in error["remedy"]
        assert "Traceback" not in stderr
        assert (tmp_path / "after" / f"{free}.there").read_text() == "", "a partial run directory was left behind"


@pytest.mark.parametrize(
    "point", some(["run.lock", "generations.json", "config.yaml", "meta.json"], "run.lock", "meta.json")
)
def test_start_removes_a_partially_created_run(config: Config, root: Path, point: str) -> None:
    """There were free blocks when it was checked, but the quota or the inodes are exhausted."""

    def no_space_for_it() -> None:
        from llmtrain.core import files as atomic

        write = atomic.write_synced

        def refuse(path: Path, data: bytes) -> None:
            if point.removeprefix("run.") in path.name:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
            write(path, data)

        atomic.write_synced = refuse

    ended = harness.run(config, before=no_space_for_it)
    assert ended.code == 65, ended.output
    assert "Traceback" not in ended.output
    assert not (root / RUN_ID).exists()
    ended = harness.run(config)
    assert ended.code == 0, ended.output


def test_full_disk_at_the_result(config: Config, root: Path, golden: Outcome) -> None:
    """finished.json does not fit: the run finishes once there is space."""

    def no_space_for_it() -> None:
        from llmtrain.runs import result as result_module

        def refuse(path: Path, value: object) -> None:  # noqa: ARG001
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        result_module.write_json = refuse if (root / RUN_ID).exists() else result_module.write_json

    assert harness.run(config, fault="after_final_save:8:0:kill").code == -9
    ended = harness.run(config, RUN_ID, before=no_space_for_it)
    assert ended.code == 65, ended.output
    assert "Traceback" not in ended.output
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert harness.outcome(root, ended.result) == golden


def test_failed_save_of_the_best_keeps_the_second_best(make_config: MakeConfig, root: Path, cli: Cli) -> None:
    last = 4  # of a run that gets worse from its second step on
    config = make_config(
        trainer__max_steps=last,
        trainer__schedule="constant",
        trainer__lr=0.3,
        trainer__warmup_steps=0,
        trainer__eval_every_steps=1,
        trainer__save_every_steps=1,
        trainer__keep_checkpoints=2,
    )
    whole = harness.run(config.with_values("output", run_id="whole"))
    assert whole.code == 0, whole.output
    losses = {step: float.fromhex(loss) for step, loss in harness.val_rows(root / "whole")}
    lost = whole.result["best_step"]
    del losses[lost]
    best = min(losses, key=lambda step: losses[step])
    assert best < last - 1, "the run was meant to get worse"

    ended = harness.run(config, fault=f"save_begin:{lost}:0:enospc")
    assert ended.code == 0, ended.output
    folder = root / RUN_ID / "checkpoints"
    assert ended.result["state_sha256"] == whole.result["state_sha256"]
    found = {name: ended.result[name] for name in ("best_step", "best_val_loss", "best_checkpoint")}
    assert found == {"best_step": best, "best_val_loss": losses[best], "best_checkpoint": str(folder / f"step_{best}")}
    assert (folder / "best").read_text().strip() == f"step_{best}"
    assert harness.steps_saved(root) == sorted({best, last - 1, last})

    to = root.parent / "exported"
    written = cli("export", "--no-check", "--run", root / RUN_ID, "--to", to, "--json")
    assert written.code == 0, written.err
    assert (written.json["step"], written.json["val_loss"]) == (best, losses[best])
    assert f"| validation loss | {losses[best]:.4f} |" in (to / "README.md").read_text()

    (folder / "best").unlink()
    ended = harness.run(config, str(folder / f"step_{last - 1}"))
    assert ended.code == 0, ended.output
    assert ended.result["best_step"] == best, "a resumed run finds it again"


def test_save_error_has_needed_and_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_200_000))
    with pytest.raises(OSError, match=r"0\.4 MB.* 1\.0 MB.* 1\.2 MB") as caught:
        CheckpointStore(tmp_path)._begin(tmp_path / "new", 400_000, 1)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("result", 65),
        pytest.param("log", 0, marks=pytest.mark.slow),  # without: the pipe and a full log in the test below
        ("error", 64),
        pytest.param("error and result", 64, marks=pytest.mark.slow),
    ],
)
def test_standard_output_on_a_full_disk(make_config: MakeConfig, tmp_path: Path, case: str, code: int) -> None:
    """`llmtrain train > /full/log 2>&1`: the exit code is that of the command, although its output is lost."""
    document = tmp_path / "config.yaml"
    document.write_text(dump_document(make_config(trainer__max_steps=3).as_dict()), encoding="utf-8")
    arguments = ["train", "--config", str(document), *(["--set", "trainer.lr=no"] if "error" in case else ["--json"])]
    if case == "result":
        arguments = ["print-config", "--config", str(document)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "llmtrain", *arguments],
            stdout=full if "result" in case else subprocess.PIPE,
            stderr=subprocess.PIPE if case == "result" else full,
            text=True,
            check=False,
        )
    assert ended.returncode == code, (ended.stdout, ended.stderr)
    if case == "result":
        assert "Traceback" not in ended.stderr
    if case == "log":
        assert json.loads(ended.stdout)["steps"] == 3


@pytest.mark.parametrize(
    "case", some(["pipe and full log", "pipe", "pipe with --json", "closed", "full"], "pipe and full log")
)
def test_closed_standard_output_does_not_change_the_exit_code(
    make_config: MakeConfig, tmp_path: Path, case: str
) -> None:
    """`llmtrain train | true`: the exit code is that of the run."""
    document = tmp_path / "config.yaml"
    document.write_text(dump_document(make_config(trainer__max_steps=3).as_dict()), encoding="utf-8")
    command = [sys.executable, "-m", "llmtrain", "train", "--config", str(document)]
    command += ["--json"] if not case.startswith("pipe") or case == "pipe with --json" else []
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, Path("/dev/full").open("w") as full:
        shell = ["sh", "-c", 'exec "$@" >&-', "sh"] if case == "closed" else []
        ended = subprocess.run(
            [*shell, *command],
            stdout=full if case == "full" else pipe,
            stderr=full if case == "pipe and full log" else subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == (65 if case == "full" else 0), ended.stderr
    if case != "full":
        assert (tmp_path / "runs" / RUN_ID / "finished.json").exists()
    assert "Traceback" not in (ended.stderr or "")
    if case == "full":
        assert f"--resume {tmp_path / 'runs' / RUN_ID}" in ended.stderr


def test_command_whose_reader_closes_while_it_prints(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "llmtrain", "print-config", "--reference"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert ended.returncode in (0, 128 + signal.SIGPIPE)
    assert ended.stderr == ""
