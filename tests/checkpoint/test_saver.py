"""Saving while the loop waits or in the background: the same bytes, and the same errors."""

import contextlib
import errno
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
import torch
from torch import nn

from limits import limit
from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.state import model_tensors, optimizer_tensors
from llmtrain.checkpoint.store import CheckpointRequest, CheckpointStore
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.runs.lock import NullLock

STATE = {"progress": {}, "config": {}, "data_fingerprint": "x", "vocab_size": 1}


def evaluated(step: int, loss: float) -> dict[str, Any]:
    """The state of a checkpoint that was saved after its evaluation."""
    return {**STATE, "progress": {"step": step, "evaluated_step": step, "last_val_loss": loss}}


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    return module, optimizer


def request(step: int, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> CheckpointRequest:
    tensors = {"model": model_tensors(module), "optimizer": optimizer_tensors(module, optimizer)}
    return CheckpointRequest(step, tensors, state)


class GatedStore(CheckpointStore):
    """A store that waits for a gate before it writes, and can fail."""

    def __init__(self, folder: Path, problem: Exception | None = None, is_open: bool = True) -> None:
        super().__init__(folder)
        self.gate, self.problem, self.threads = threading.Event(), problem, []
        if is_open:
            self.gate.set()

    def save(self, *arguments: Any, **options: Any) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(limit(10))
        if self.problem:
            raise self.problem
        super().save(*arguments, **options)


def saver_of(store: CheckpointStore, in_background: bool, keep: int = 2) -> Saver:
    return Saver(store, NullLock("me"), World(), keep, in_background)


@pytest.mark.parametrize("in_background", [False, True])
def test_save_writes_a_valid_checkpoint_and_updates_pointers(tmp_path: Path, in_background: bool) -> None:
    store = GatedStore(tmp_path)
    saver = saver_of(store, in_background)
    module, optimizer = model()
    for step in (1, 2, 3, 4):
        saver.save(request(step, module, optimizer, evaluated(step, loss=float(step))))
        saver.finish()
        store.at(step).verify()
    assert store.steps() == [1, 3, 4], "the two newest and the best"
    assert (store.pointed("latest"), store.pointed("best")) == (store.at(4), store.at(1))
    assert torch.equal(store.at(4).tensors("model")["weight"], module.weight)
    assert set(store.threads) == {"saver" if in_background else "MainThread"}


def test_background_save_is_not_affected_by_later_steps(tmp_path: Path) -> None:
    """The state at the start of the save is written, not that of later steps."""
    store = GatedStore(tmp_path, is_open=False)
    saver = saver_of(store, in_background=True)
    module, optimizer = model()
    expected = module.weight.detach().clone()
    averages = optimizer.state[module.weight]["exp_avg"].clone()
    saver.save(request(1, module, optimizer, STATE))
    module(torch.full((3,), 5.0)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, expected)
    assert store.steps() == []
    store.gate.set()
    saver.finish()
    assert torch.equal(store.at(1).tensors("model")["weight"], expected)
    assert torch.equal(store.at(1).tensors("optimizer")["state.weight.exp_avg"], averages)


def test_last_save_needs_no_copy_unless_there_are_buffers(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    module, optimizer = model()
    first = saver_of(store, in_background=True)
    first.save(request(1, module, optimizer, STATE), is_last=True)
    first.finish()
    assert first._copies == {}
    assert store.threads == ["MainThread"]
    second = saver_of(store, in_background=True)
    for step in (2, 3):
        second.save(request(step, module, optimizer, STATE), is_last=step == 3)
        second.finish()
    assert store.threads[1:] == ["saver", "saver"]
    assert torch.equal(store.at(2).tensors("model")["weight"], store.at(3).tensors("model")["weight"])


SAVE_IN_A_THREAD = """
import sys, threading, time
from pathlib import Path
import torch
from llmtrain.checkpoint.shards import shard
from llmtrain.checkpoint.store import CheckpointRequest, CheckpointStore
from llmtrain.distributed.world import World
from llmtrain.runs.lock import NullLock

store = CheckpointStore(Path(sys.argv[1]))
tensors = {"model": {"weight": torch.ones(3)}, "optimizer": {"average": torch.ones(3)}}

def save():
    threading.main_thread().join()
    shards = [shard(name, each, 0, 1) for name, each in tensors.items()]
    store.save(CheckpointRequest(1, tensors, {}), shards, NullLock("me"), World().saving)

threading.Thread(target=save).start()
"""

EXIT_WHILE_SYNCING = """
import os, sys, threading, time
from pathlib import Path
from llmtrain.checkpoint import store

path = Path(sys.argv[1]) / "file"
path.write_bytes(b"1")
is_syncing = threading.Event()

def never(_):
    is_syncing.set()
    time.sleep(3600)

os.fsync = never
threading.Thread(target=store.checksum_entry, args=[path], daemon=True).start()
is_syncing.wait()
sys.exit(65)
"""


def test_training_thread_saves_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SAVE_IN_A_THREAD, str(tmp_path)], check=False, timeout=limit(60))
    assert done.returncode == 0
    assert torch.equal(CheckpointStore(tmp_path).at(1).tensors("optimizer")["average"], torch.ones(3))


def test_exit_does_not_wait_for_storage_that_hangs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT_WHILE_SYNCING, str(tmp_path)], check=False, timeout=limit(60))
    assert done.returncode == 65


def test_background_save_reuses_its_buffers(tmp_path: Path) -> None:
    saver = saver_of(CheckpointStore(tmp_path), in_background=True)
    module, optimizer = model()
    saver.save(request(1, module, optimizer, STATE))
    saver.finish()
    before = {name: tensor.data_ptr() for name, tensor in saver._copies.items()}
    assert len(before) == 2 + 2 * 3  # weight and bias; step and two averages each
    saver.save(request(2, module, optimizer, STATE))
    saver.finish()
    assert {name: tensor.data_ptr() for name, tensor in saver._copies.items()} == before


@pytest.mark.parametrize("in_background", [False, True])
def test_finish_raises_a_failed_save_once(tmp_path: Path, in_background: bool) -> None:
    store = GatedStore(tmp_path, problem=OSError(errno.ENOSPC, "full"))
    saver = saver_of(store, in_background)
    module, optimizer = model()
    saver.save(request(1, module, optimizer, evaluated(1, 1.0)))
    with pytest.raises(OSError, match="full"):
        saver.finish()
    saver.finish()
    store.problem = None
    saver.save(request(1, module, optimizer, evaluated(1, 1.0)))
    saver.finish()
    store.at(1).verify()


def test_best_is_the_best_existing_checkpoint(tmp_path: Path) -> None:
    """Not an evaluation whose save failed, nor a step that was not evaluated; the best one is never pruned."""
    store = GatedStore(tmp_path)
    saver = saver_of(store, in_background=False)
    module, optimizer = model()
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.5, 5: 2.75, 6: 2.5, 7: 9.0}
    for step, loss in losses.items():
        store.problem = OSError(errno.ENOSPC, "full") if step == 2 else None
        state = evaluated(step, loss) if loss is not None else evaluated(step - 1, losses[step - 1])
        saver.save(request(step, module, optimizer, state))
        with contextlib.suppress(OSError):
            saver.finish()
        expected = 1 if step < 4 else 4
        assert store.pointed("best") == store.at(expected) == store.best()
    assert store.steps() == [4, 6, 7]


def test_best_counts_a_step_saved_again_after_its_evaluation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saver = saver_of(store, in_background=False)
    module, optimizer = model()
    for step, state in ((1, evaluated(1, 3.0)), (2, evaluated(1, 3.0)), (2, evaluated(2, 2.0))):
        saver.save(request(step, module, optimizer, state))
        saver.finish()
    assert store.pointed("best") == store.at(2)


# Whole runs


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[..., Config]:
    def config(**changes: Any) -> Config:
        return harness.tiny_config(
            tmp_path_factory.mktemp("saver") / "runs",
            cache,
            **{"trainer__eval_batches": 4, "trainer__keep_checkpoints": 9, **changes},
        )

    return config


def tensor_hashes(config: Config) -> dict[str, dict[str, str]]:
    """{checkpoint: {file of tensors or index: SHA-256}}, as the manifests have them."""
    found = {}
    for checkpoint in harness.checkpoints(Path(config.output.root_dir)):
        checkpoint.verify()
        files = json.loads((checkpoint.path / "manifest.json").read_text())["files"]
        found[checkpoint.path.name] = {name: row["sha256"] for name, row in files.items() if name != "state.json"}
    return found


@pytest.mark.parametrize(
    ("strategy", "count"), [("none", 1), pytest.param("ddp", 2, marks=pytest.mark.slow), ("fsdp", 2)]
)
def test_async_save_writes_the_same_bytes(make: Callable[..., Config], strategy: str, count: int) -> None:
    configs = [
        make(distributed__strategy=strategy, trainer__async_save=in_background) for in_background in (False, True)
    ]
    results = [ranks.train_ranks(config, count) for config in configs]
    blocking, background = (tensor_hashes(config) for config in configs)
    assert blocking.keys() == {f"step_{step}" for step in harness.SAVE_STEPS}
    assert len(blocking["step_8"]) == 2 * count + 1
    assert background == blocking
    hashes = {ranks.values(ended)[0]["state_sha256"] for ended in results}
    assert len(hashes) == 1
    assert "in the background" in results[1][0].output
    assert "in the background" not in results[0][0].output
    states = [
        json.loads((harness.checkpoints(Path(config.output.root_dir))[-1].path / "state.json").read_text())["progress"]
        for config in configs
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("count", "rank"), [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1)]
)
def test_failed_save_warns_once_and_is_repeated(make: Callable[..., Config], count: int, rank: int) -> None:
    config = make(distributed__strategy="ddp", trainer__async_save=True)
    ended = ranks.train_ranks(config, count, env={"LLMTRAIN_FAULT": f"save_model_written:4:{rank}:enospc"})
    result = ranks.values(ended)[0]
    warnings = [line for line in ended[0].output.splitlines() if "could not be written" in line]
    assert len(warnings) == 1
    assert "step 4" in warnings[0]
    assert "No space left" in warnings[0]
    assert harness.steps_saved(Path(config.output.root_dir)) == [2, 6, 8]
    harness.verify_all(Path(config.output.root_dir))
    assert result["state_sha256"] == ranks.trained(make(distributed__strategy="ddp"), count)["state_sha256"]
    folder = Path(config.output.root_dir) / harness.RUN_ID / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "latest", "step_2", "step_6", "step_8"]


@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_failed_last_save_fails_the_run_on_all_ranks(make: Callable[..., Config], in_background: bool) -> None:
    config = make(distributed__strategy="ddp", trainer__async_save=in_background)
    ended = ranks.train_ranks(config, 2, env={"LLMTRAIN_FAULT": "save_model_written:8:1:enospc"})
    assert [end.code for end in ended] == [65, 65], "\n".join(end.output for end in ended)
    for end in ended:
        assert end.error is not None
        assert end.error[0] == "TrainingFailed"
        assert "step 8 could not be written" in end.error[1]
    assert harness.steps_saved(Path(config.output.root_dir)) == [2, 4, 6]


def test_run_waits_for_its_final_save(make: Callable[..., Config]) -> None:
    """With a slow disk: when the run is finished, its last checkpoint is complete."""
    config = make(trainer__async_save=True)

    def slow() -> None:
        before = CheckpointStore.save

        def late(self: CheckpointStore, request: CheckpointRequest, *arguments: Any) -> None:
            time.sleep(0.5 if request.step == 8 else 0.0)
            before(self, request, *arguments)

        CheckpointStore.save = late  # type: ignore[method-assign]

    result = ranks.trained(config, 1, before=slow)
    last = Checkpoint(Path(result["run_dir"]) / "checkpoints" / "step_8")
    last.verify()
    assert (last.path.parent / "latest").read_text() == "step_8\n"


def test_interrupted_run_waits_for_its_save(make: Callable[..., Config]) -> None:
    config = make(trainer__async_save=True, distributed__strategy="ddp")
    ended = ranks.train_ranks(config, 2, env={"LLMTRAIN_FAULT": "after_optimizer:5:1:term"})
    assert [end.code for end in ended] == [75, 75]
    root = Path(config.output.root_dir)
    assert harness.steps_saved(root)[-1] == 5
    harness.verify_all(root)


def test_run_with_background_saves_resumes_exactly(make: Callable[..., Config]) -> None:
    uninterrupted, config = make(), make(trainer__async_save=True)
    expected = ranks.trained(uninterrupted, 1)
    (killed,) = ranks.train_ranks(config, 1, env={"LLMTRAIN_FAULT": "after_optimizer:7:0:kill"})
    assert killed.code == -9
    result = ranks.trained(config, 1, harness.RUN_ID)
    assert result["resumed_from"] in (4, 6), "the save of step 6 may or may not have been complete"
    assert result["state_sha256"] == expected["state_sha256"]
