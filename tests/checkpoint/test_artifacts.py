"""Artifacts of a run besides its checkpoints: epoch directories, the best adapter, answers, MLflow artifacts; and the
manifest entries of adapter files."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID
from test_fine_tune_faults import (
    EVAL_STEPS,
    run_dir,
    train,
    trained,
    val_losses,
)

from llmtrain.checkpoint import artifacts
from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.store import CheckpointRequest, CheckpointStore
from llmtrain.config.schema import Config
from llmtrain.errors import CheckpointError
from llmtrain.runs.checksums import checksums_text
from llmtrain.training import eval_prompts
from llmtrain.training.step import Stepper
from slow_cases import some

pytestmark = pytest.mark.hf
MakeConfig = Callable[..., Config]
EPOCHS: dict[str, Any] = {"output__layout": "epochs", "trainer__eval_prompts": []}
ONLY_AT_EPOCH_ENDS: dict[str, Any] = {"trainer__eval_every_steps": None, "trainer__save_every_steps": None}
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "llmtrain.json"}


@pytest.fixture(scope="module")
def epoch_run(make_fine_tune: MakeConfig) -> tuple[Config, dict[str, Any]]:
    """An uninterrupted run with epoch directories and all its checkpoints."""
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    return config, trained(config)


def step_dir(config: Config, step: int) -> Path:
    return run_dir(config) / "checkpoints" / f"step_{step}"


def best_dir(config: Config) -> Path:
    name = (run_dir(config) / "checkpoints" / "best").read_text().strip()
    return run_dir(config) / "checkpoints" / name


def join_ranks(epoch: Path, to: Path, step: int) -> Checkpoint:
    """The files of all ranks in one directory."""
    for rank in epoch.iterdir():
        shutil.copytree(rank, to / f"step_{step}", dirs_exist_ok=True)
    return Checkpoint(to / f"step_{step}")


def leftovers(config: Config) -> list[str]:
    """Temporary directories of an incomplete replacement."""
    return sorted(path.name for path in run_dir(config).iterdir() if path.name.startswith(".llmtrain-"))


# Layout.


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_epoch_directories_have_the_files_of_their_ranks(
    make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]], tmp_path: Path, size: int
) -> None:
    config = epoch_run[0] if size == 1 else make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    if size == 2:
        trained(config, 2)
    for epoch, step in ((1, 4), (2, 8)):
        folder = run_dir(config) / f"epoch-{epoch}"
        assert sorted(path.name for path in folder.iterdir()) == [f"rank-{rank}" for rank in range(size)]
        together = join_ranks(folder, tmp_path / str(epoch), step)
        assert harness.tree(together.path) == harness.tree(step_dir(config, step))
        together.verify()
        names = {path.name for path in (folder / f"rank-{size - 1}").iterdir()}
        if size == 2:
            assert names == {"model-00002-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"}
        else:
            assert names >= {"model.safetensors", "state.json", "adapter"}
    assert not (run_dir(config) / "epoch-0").exists()
    assert harness.tree(run_dir(config) / "best") == harness.tree(best_dir(config))
    assert harness.tree(run_dir(config) / "adapter") == harness.tree(best_dir(config) / "adapter")
    assert leftovers(config) == []


def test_epochs_and_best_are_hard_links_and_adapter_is_a_copy(epoch_run: tuple[Config, dict[str, Any]]) -> None:
    """epoch-N/ and best/ take no space; adapter/ is a copy that people may edit."""
    config = epoch_run[0]
    weights = step_dir(config, 4) / "model.safetensors"
    assert (run_dir(config) / "epoch-1" / "rank-0" / "model.safetensors").samefile(weights)
    of_best = best_dir(config)
    assert (run_dir(config) / "best" / "model.safetensors").samefile(of_best / "model.safetensors")
    for name in FILES:
        assert not (run_dir(config) / "adapter" / name).samefile(of_best / "adapter" / name)


@pytest.mark.slow
def test_storage_without_hard_links(make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]]) -> None:
    """Some network storage does not support them."""

    def no_links() -> None:
        def link(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        artifacts.os.link = link  # type: ignore[assignment]

    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    result = trained(config, before=no_links)
    assert result["state_sha256"] == epoch_run[1]["state_sha256"]
    copied = run_dir(config) / "epoch-1" / "rank-0"
    assert harness.tree(copied) == harness.tree(step_dir(config, 4))
    assert not (copied / "model.safetensors").samefile(step_dir(config, 4) / "model.safetensors")


def test_epoch_directories_survive_pruned_checkpoints(make_fine_tune: MakeConfig, tmp_path: Path) -> None:
    """The checkpoint of the first epoch is pruned, and so is a best one that was replaced."""
    config = make_fine_tune(
        **EPOCHS, trainer__keep_checkpoints=2, trainer__save_every_steps=1, trainer__eval_every_steps=1
    )
    result = trained(config)
    assert not step_dir(config, 4).exists()
    together = join_ranks(run_dir(config) / "epoch-1", tmp_path, 4)
    together.verify()
    assert together.state()["progress"]["step"] == 4
    assert {"model", "optimizer"} == {name for name in ("model", "optimizer") if together.tensors(name)}
    best = shutil.copytree(run_dir(config) / "best", tmp_path / f"step_{result['best_step']}")
    Checkpoint(best).verify()
    assert Checkpoint(best).state()["progress"]["best_val_loss"] == result["best_val_loss"]


def test_layout_steps_creates_no_epoch_directories(make_fine_tune: MakeConfig) -> None:
    config = make_fine_tune(trainer__eval_prompts=[], trainer__max_epochs=1)
    trained(config)
    names = {path.name for path in run_dir(config).iterdir()}
    assert names & {"epoch-1", "best", "samples"} == set()
    assert "adapter" in names


def test_adapter_is_the_best_not_the_last(make_fine_tune: MakeConfig) -> None:
    config = make_fine_tune(**EPOCHS, trainer__eval_every_steps=1, trainer__keep_checkpoints=20)
    assert trained(config, before=val_losses(5.0, 4.0, 3.0, 3.5))["best_step"] == 3
    best, last = step_dir(config, 3), step_dir(config, 8)
    assert harness.tree(run_dir(config) / "adapter") == harness.tree(best / "adapter")
    assert harness.tree(run_dir(config) / "best") == harness.tree(best)
    assert harness.tree(last / "adapter") != harness.tree(best / "adapter")


def test_resume_from_an_older_checkpoint_updates_the_adapter(make_fine_tune: MakeConfig) -> None:
    """Resumed from an earlier checkpoint with a bad learning rate: later, better checkpoints are set aside."""
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    trained(config)
    worse = config.with_values("trainer", lr=3.0, schedule="constant")
    result = trained(worse, resume=str(step_dir(config, 3)), allow_config_change=True)
    assert result["best_step"] in (3, 4, 6, 8)
    assert harness.tree(run_dir(config) / "adapter") == harness.tree(best_dir(config) / "adapter")
    assert harness.tree(run_dir(config) / "best") == harness.tree(best_dir(config))


def late_saves(killed_after: int | None = None) -> Callable[[], None]:
    """Delay each background save until training is one step further. After step `killed_after` the process waits for
    its save and is killed."""

    def before() -> None:
        save, step_of, done = CheckpointStore.save, Stepper.train_step, [0]
        moved = threading.Condition()

        def late(self: CheckpointStore, request: CheckpointRequest, *arguments: Any) -> None:
            with moved:
                moved.wait_for(lambda: done[0] > request.step, 1.0)  # no step follows the last save
            time.sleep(0.05)
            save(self, request, *arguments)

        def stepping(self: Stepper, step: int, *arguments: Any) -> Any:
            if step == killed_after:
                for thread in threading.enumerate():
                    if thread.name == "saver":
                        thread.join()
                os.kill(os.getpid(), signal.SIGKILL)
            result = step_of(self, step, *arguments)
            with moved:
                done[0] = step + 1
                moved.notify_all()
            return result

        CheckpointStore.save, Stepper.train_step = late, stepping  # type: ignore[method-assign]

    return before


def test_background_save_publishes_the_saved_step(make_fine_tune: MakeConfig) -> None:
    """Training continues meanwhile: the saved step is published, not the current one."""
    config = make_fine_tune(**EPOCHS, **ONLY_AT_EPOCH_ENDS, trainer__async_save=True, trainer__keep_checkpoints=9)
    assert trained(config, before=late_saves())["epochs"] == 2
    for epoch, step in ((1, 4), (2, 8)):
        found = harness.tree(run_dir(config) / f"epoch-{epoch}" / "rank-0")
        assert sorted(found) == sorted(harness.tree(step_dir(config, step))), f"epoch {epoch}"
        assert found == harness.tree(step_dir(config, step))


def test_background_save_publishes_the_best_adapter_immediately(make_fine_tune: MakeConfig) -> None:
    """Not only at the end of the run, which may be killed before."""
    config = make_fine_tune(**ONLY_AT_EPOCH_ENDS, trainer__async_save=True, trainer__eval_prompts=[])
    (ended,) = train(config, before=late_saves(killed_after=6))
    assert ended.code == -signal.SIGKILL, ended.output
    step_4 = step_dir(config, 4)
    Checkpoint(step_4).verify()
    assert harness.tree(run_dir(config) / "adapter") == harness.tree(step_4 / "adapter")


# SIGKILL in between


@pytest.mark.parametrize("point", ["save_after_rename", pytest.param("save_before_prune", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", some([4, 8], 4))
def test_sigkill_between_checkpoint_and_artifacts(
    make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]], point: str, step: int
) -> None:
    """The checkpoint is complete and is not saved again: the resumed run creates its directories."""
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    assert train(config, fault=f"{point}:{step}:0:kill")[0].code == -signal.SIGKILL
    result = trained(config, resume=RUN_ID)
    assert result["resumed_from"] == step
    assert result["state_sha256"] == epoch_run[1]["state_sha256"]
    assert harness.tree(run_dir(config) / "best") == harness.tree(best_dir(config))
    assert harness.tree(run_dir(config) / "adapter") == harness.tree(best_dir(config) / "adapter")
    for epoch, end in ((1, 4), (2, 8)):
        folder = run_dir(config) / f"epoch-{epoch}"
        assert folder.is_dir(), f"epoch-{epoch}/ was never created"
        assert harness.tree(folder / "rank-0") == harness.tree(step_dir(config, end))


def killed_between_renames(name: str) -> Callable[[], None]:
    """SIGKILL when the old directory of this name is renamed and the new one is not yet in its place."""

    def before() -> None:
        real = Path.rename

        def rename(self: Path, target: Any) -> Path:
            is_new = self.name.startswith(".llmtrain-new-") and self.name.endswith(f"-{name}")
            if is_new and (name != "adapter" or list(self.parent.glob(f".llmtrain-old-*-{name}"))):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, target)

        Path.rename = rename  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize("name", some(["adapter", "best", "epoch-1"], "adapter", "epoch-1"))
def test_sigkill_while_a_directory_is_replaced(
    make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]], name: str
) -> None:
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    (ended,) = train(config, before=killed_between_renames(name))
    assert ended.code == -signal.SIGKILL, ended.output
    assert not (run_dir(config) / name).exists()
    result = trained(config, resume=RUN_ID)
    assert result["state_sha256"] == epoch_run[1]["state_sha256"]
    expected = {"adapter": best_dir(config) / "adapter", "best": best_dir(config), "epoch-1": step_dir(config, 4)}[name]
    found = run_dir(config) / name
    assert found.is_dir(), f"{name}/ was never created"
    assert harness.tree(found / "rank-0" if name == "epoch-1" else found) == harness.tree(expected)
    assert leftovers(config) == []


# Directories of the user


def test_directories_of_the_user_are_not_replaced(
    make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]], tmp_path: Path
) -> None:
    """Whatever their names: those that the run would create, later epochs, and names that are not epochs."""
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    assert train(config, fault="forward:6:0:kill")[0].code == -signal.SIGKILL
    run = run_dir(config)
    own = ("epoch-2", "epoch-7", "epoch-final", "epoch-03", "epoch-", ".old-stuff", ".new-stuff", "epoch-8")
    shutil.copytree(run / "epoch-1", run / "epoch-8")
    for name in own[:-1]:
        (run / name).mkdir()
        (run / name / "notes.txt").write_text(name)
    shutil.rmtree(run / "best")
    (run / "best").mkdir()
    (run / "best" / "notes.txt").write_text("best")
    shutil.rmtree(run / "adapter")
    (run / "adapter").symlink_to(tmp_path)
    before = {name: harness.tree(run / name) for name in (*own, "best")}
    result = trained(config, resume=RUN_ID)
    assert result["state_sha256"] == epoch_run[1]["state_sha256"]
    assert {name: harness.tree(run / name) for name in before} == before
    assert (run / "adapter").is_symlink()
    assert list(tmp_path.iterdir()) == []
    assert harness.tree(run / "epoch-1" / "rank-0") == harness.tree(step_dir(config, 4))
    assert leftovers(config) == []


def test_resume_from_an_older_checkpoint_removes_only_own_directories(make_fine_tune: MakeConfig) -> None:
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    trained(config)
    run = run_dir(config)
    shutil.copytree(run / "epoch-1", run / "epoch-3")
    assert json.loads((run / "artifacts.json").read_text()) == ["adapter", "best", "epoch-1", "epoch-2"]
    (ended,) = train(config, resume=str(step_dir(config, 3)), fault="forward:5:0:kill")
    assert ended.code == -signal.SIGKILL, ended.output
    assert not (run / "epoch-2").exists()
    assert (run / "epoch-3" / "rank-0" / "manifest.json").is_file()


@pytest.mark.parametrize(
    "record", ["[1, null]", *(pytest.param(record, marks=pytest.mark.slow) for record in ("{}", "not JSON"))]
)
def test_damaged_artifacts_json(make_fine_tune: MakeConfig, record: str) -> None:
    """Then all directories belong to the user."""
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    assert train(config, fault="forward:6:0:kill")[0].code == -signal.SIGKILL
    (run_dir(config) / "artifacts.json").write_text(record)
    before = harness.tree(run_dir(config) / "epoch-1")
    trained(config, resume=RUN_ID)
    assert harness.tree(run_dir(config) / "epoch-1") == before
    assert json.loads((run_dir(config) / "artifacts.json").read_text()) == ["epoch-2"]


# No space or no permission for artifacts


def fails_with(number: int, what: str) -> Callable[[], None]:
    def before() -> None:
        problem = OSError(number, os.strerror(number))

        def fail(*_: object, **__: object) -> None:
            raise problem

        if what == "folders":
            artifacts.write_directory = fail  # type: ignore[assignment]
        else:
            eval_prompts.write_json = fail  # type: ignore[assignment]

    return before


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["folders", "answers"])
def test_failing_artifacts_do_not_end_training(
    make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]], what: str, number: int
) -> None:
    config = make_fine_tune(**{**EPOCHS, "trainer__eval_prompts": ["say red"], "trainer__save_every_steps": 1})
    (ended,) = train(config, before=fails_with(number, what))
    assert ended.code == 0, ended.output
    assert ended.result is not None
    assert ended.result["state_sha256"] == epoch_run[1]["state_sha256"]
    assert os.strerror(number) in ended.output, "there is a warning"
    harness.verify_all(run_dir(config).parent)


def test_checkpoints_are_pruned_even_if_artifacts_fail(make_fine_tune: MakeConfig) -> None:
    """Otherwise a full disk would stay full. Every save here is a new best."""
    every = {"trainer__eval_every_steps": 1, "trainer__save_every_steps": 1, "trainer__lr": 1e-2}
    config = make_fine_tune(**{**EPOCHS, **every, "trainer__keep_checkpoints": 2})
    (ended,) = train(config, before=fails_with(errno.ENOSPC, "folders"))
    assert ended.code == 0, ended.output
    assert ended.result is not None
    assert ended.result["best_step"] == 8
    assert harness.steps_saved(run_dir(config).parent) == [7, 8]


def test_later_save_publishes_what_failed(make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]]) -> None:
    """No space at the end of the first epoch, space again afterwards."""

    def no_space_for_a_while() -> None:
        real = artifacts.write_directory

        def replace(target: Path, fill: Any) -> None:
            if not (target.parent / "checkpoints" / "step_6").exists():
                raise OSError(errno.ENOSPC, "No space left on device")
            real(target, fill)

        artifacts.write_directory = replace

    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    result = trained(config, before=no_space_for_a_while)
    assert result["state_sha256"] == epoch_run[1]["state_sha256"]
    assert harness.tree(run_dir(config) / "adapter") == harness.tree(best_dir(config) / "adapter")
    assert harness.tree(run_dir(config) / "epoch-2" / "rank-0") == harness.tree(step_dir(config, 8))


# The manifest.


@pytest.fixture
def copied(epoch_run: tuple[Config, dict[str, Any]], tmp_path: Path) -> Checkpoint:
    copy = Checkpoint(shutil.copytree(step_dir(epoch_run[0], 8), tmp_path / "step_8"))
    copy.verify()
    return copy


def test_manifest_has_every_file_of_the_adapter(copied: Checkpoint) -> None:
    listed = json.loads((copied.path / "manifest.json").read_text())["files"]
    assert {name for name in listed if "/" in name} == {f"adapter/{name}" for name in FILES}


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("how", ["first", "last", "shorter", "longer", "gone", "link"])
def test_damaged_adapter_file_is_detected(copied: Checkpoint, tmp_path: Path, name: str, how: str) -> None:
    path = copied.path / "adapter" / name
    data = bytearray(path.read_bytes())
    if how in ("first", "last"):
        data[0 if how == "first" else -1] ^= 1
    path.unlink()
    if how == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif how != "gone":
        path.write_bytes({"shorter": data[:-1], "longer": data + b"x"}.get(how, data))
    with pytest.raises(CheckpointError, match=f"adapter/{name} is (damaged|missing)"):
        copied.verify()


def test_resume_skips_a_checkpoint_with_a_damaged_adapter(
    make_fine_tune: MakeConfig, epoch_run: tuple[Config, dict[str, Any]]
) -> None:
    config = make_fine_tune(**EPOCHS, trainer__keep_checkpoints=9)
    assert train(config, fault="after_optimizer:7:0:kill")[0].code == -signal.SIGKILL
    path = step_dir(config, 6) / "adapter" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    (ended,) = train(config, resume=RUN_ID)
    assert ended.code == 0, ended.output
    assert f"{path} is damaged" in ended.output
    assert ended.result is not None
    assert ended.result["resumed_from"] == 4
    assert ended.result["state_sha256"] == epoch_run[1]["state_sha256"]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "adapter/../x",
        "adapter/../../x",
        "/etc/passwd",
        "adapter//x",
        "adapter/.x",
        "other/x",
        "adapter/a/b",
        ".",
    ],
)
def test_manifest_with_a_path_outside_is_refused(copied: Checkpoint, name: str) -> None:
    """Valid in every other way: the file exists and the hashes match."""
    target = copied.path / name
    if name != "/etc/passwd" and not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x")
    manifest = copied.path / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    files[name] = {"bytes": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
    manifest.write_text(checksums_text(files))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        copied.verify()


def test_manifest_with_a_valid_name_is_accepted(copied: Checkpoint) -> None:
    """Otherwise the test above could pass for another reason."""
    (copied.path / "adapter" / "more.txt").write_bytes(b"x")
    manifest = copied.path / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    entry = {"bytes": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
    manifest.write_text(checksums_text({**files, "adapter/more.txt": entry}))
    copied.verify()


# MLflow.


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mlflow_gets_parameters_answers_and_epochs(
    make_fine_tune: MakeConfig, empty_store: Path, is_stopped: bool
) -> None:
    from mlflow.tracking import MlflowClient

    config = make_fine_tune(tracking__mlflow__enabled=True)
    run_dir(config).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(empty_store, run_dir(config).parent / "mlflow.db")
    if is_stopped:
        assert train(config, fault="after_optimizer:4:0:term", env={"MLFLOW_TRACKING_URI": ""})[0].code == 75
    result = trained(config, resume="auto", env={"MLFLOW_TRACKING_URI": ""})
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir(config).parent / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name != 'Default'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert int(run.data.params["trainable_parameters"]) == result["trainable_parameters"] < result["parameters"]
    assert int(run.data.params["parameters"]) == result["parameters"]
    assert run.data.params["trainer.max_epochs"] == "2"
    kept = sorted(item.path for item in client.list_artifacts(run.info.run_id, "samples"))
    assert kept == [f"samples/step_{step}.json" for step in EVAL_STEPS]
    (folder,) = run_dir(config).parent.glob("mlartifacts/**/samples")
    assert harness.tree(folder) == harness.tree(run_dir(config) / "samples")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in ("train/epoch", "val/perplexity")}
    assert {m.step: m.value for m in history["train/epoch"]} == {step: step / 4 for step in range(1, 9)}
    assert sorted({m.step for m in history["val/perplexity"]}) == EVAL_STEPS
    assert {m.step for m in client.get_metric_history(run.info.run_id, "epoch/train_loss")} == {4, 8}


def test_answers_are_saved_in_the_order_of_the_prompts(make_fine_tune: MakeConfig) -> None:
    config = make_fine_tune(trainer__max_epochs=1, trainer__eval_every_steps=None, trainer__eval_prompt_tokens=3)
    trained(config)
    (path,) = (run_dir(config) / "samples").iterdir()
    assert path.name == "step_4.json"
    answers = json.loads(path.read_text())
    assert [answer["prompt"] for answer in answers] == ["say red", "say cat dog"]
    assert all(isinstance(answer["answer"], str) for answer in answers)
