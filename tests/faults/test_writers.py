"""One writer per run: a second is refused, a dead one is replaced, a superseded one publishes nothing."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, Child, Outcome

from llmtrain.config.schema import Config
from llmtrain.runs import lock as lock_module
from llmtrain.runs.lock import is_held
from slow_cases import some

MakeConfig = Callable[..., Config]


def move_elsewhere(root: Path) -> None:
    """Make the lock look like that of an owner on another node, of which only the heartbeat is visible."""
    lock = root / RUN_ID / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "another-node"}))


def start_and_stop_at(config: Config, point: str, step: int, resume: str | None = None) -> Child:
    child = harness.start(config, resume, fault=f"{point}:{step}:0:stop", before=quick_heartbeat)
    child.wait_stopped()
    return child


def quick_heartbeat() -> None:
    lock_module.HEARTBEAT_SEC = 0.1
    lock_module.STALE_AFTER_SEC = 1.0


def test_second_writer_is_refused(config: Config, root: Path, golden: Outcome) -> None:
    owner = start_and_stop_at(config, "after_backward", 3)
    before = harness.tree(root)
    for resume in (RUN_ID, "auto", str(root / RUN_ID / "checkpoints" / "step_2")):
        second = harness.run(config, resume)
        assert second.code == 64, second.output
        assert second.seconds < 5
        assert f"process {owner.pid}" in second.output
    assert harness.tree(root) == before
    owner.send(signal.SIGCONT)
    ended = owner.wait()
    assert ended.code == 0, ended.output
    assert harness.outcome(root, ended.result) == golden


def test_heartbeat_of_the_owner_refuses_others(make_config: MakeConfig, root: Path) -> None:
    config = make_config(trainer__max_steps=10**6, trainer__save_every_steps=1000, trainer__eval_every_steps=None)
    owner = harness.start(config, before=quick_heartbeat)
    owner.wait_for(lambda: (root / RUN_ID / "lock").exists())
    time.sleep(2.0)  # twice as long as a lock without heartbeats would count
    for _ in range(2):
        second = harness.run(config, RUN_ID, before=quick_heartbeat)
        assert second.code == 64, second.output
        assert second.seconds < 5
        move_elsewhere(root)
    owner.send(signal.SIGTERM)
    assert owner.wait().code == 75
    assert not (root / RUN_ID / "lock").exists()


@pytest.mark.parametrize("point", ["forward", "save_before_rename"])
def test_lock_of_a_killed_owner_is_taken_over_immediately(
    config: Config, root: Path, golden: Outcome, point: str
) -> None:
    assert harness.run(config, fault=f"{point}:4:0:kill").code == -9
    assert (root / RUN_ID / "lock").exists()
    assert not is_held(root / RUN_ID / "lock")
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert harness.outcome(root, ended.result) == golden


# Publishing goes through these; an owner may be stopped at any of them.
STOPS = [
    ("after_backward", 5),
    ("after_optimizer", 6),
    ("save_begin", 6),
    ("save_model_written", 6),
    ("save_before_manifest", 6),
    ("save_before_rename", 6),
    ("save_published", 6),
    ("save_after_rename", 6),
    ("save_before_prune", 6),
    ("evaluate", 8),
    ("save_before_rename", 8),
    ("after_final_save", 8),
]
# Before, in and after a save, and at the end.
A_FEW_STOPS = [("after_backward", 5), ("save_before_rename", 6), ("save_published", 6), ("after_final_save", 8)]


@pytest.mark.parametrize("stop", some(STOPS, *A_FEW_STOPS), ids=lambda stop: f"{stop[0]}-{stop[1]}")
def test_superseded_owner_publishes_nothing_after_the_end(
    config: Config, root: Path, golden: Outcome, stop: tuple[str, int]
) -> None:
    older = start_and_stop_at(config, *stop)
    move_elsewhere(root)
    newer = harness.run(config, RUN_ID, before=quick_heartbeat)
    assert newer.code == 0, newer.output
    assert harness.outcome(root, newer.result) == golden
    before = harness.tree(root / RUN_ID, without=("logs",))
    older.send(signal.SIGCONT)
    ended = older.wait()
    assert harness.tree(root / RUN_ID, without=("logs",)) == before
    assert ended.code == 75, ended.output


@pytest.mark.parametrize("stop", some(STOPS[:-3], *A_FEW_STOPS[:-1]), ids=lambda stop: f"{stop[0]}-{stop[1]}")
def test_superseded_owner_does_not_affect_the_run(
    config: Config, root: Path, golden: Outcome, stop: tuple[str, int]
) -> None:
    older = start_and_stop_at(config, *stop)
    move_elsewhere(root)
    newer = start_and_stop_at(config, "save_before_manifest", 8, resume=RUN_ID)
    older.send(signal.SIGCONT)
    assert older.wait().code == 75
    newer.send(signal.SIGCONT)
    ended = newer.wait()
    assert ended.code == 0, ended.output
    assert "could not be written" not in ended.output
    assert harness.outcome(root, ended.result) == golden
    harness.verify_all(root)


def test_two_generations_in_the_same_save(config: Config, root: Path, golden: Outcome) -> None:
    """Both are writing step 4: the older one must not remove the partial files of the newer one."""
    older = start_and_stop_at(config, "save_before_manifest", 4)
    move_elsewhere(root)
    newer = start_and_stop_at(config, "save_before_manifest", 4, resume=RUN_ID)
    older.send(signal.SIGCONT)
    assert older.wait().code == 75
    newer.send(signal.SIGCONT)
    ended = newer.wait()
    assert ended.code == 0, ended.output
    assert "could not be written" not in ended.output
    assert harness.outcome(root, ended.result) == golden


def test_second_writer_is_refused_before_it_chooses_a_checkpoint(config: Config) -> None:
    """The owner may prune its choice at any time, so the lock comes first."""
    first = start_and_stop_at(config, "after_backward", 3)

    def fail_when_a_checkpoint_is_chosen() -> None:
        from llmtrain.training import ownership

        def chosen(*_: object) -> object:
            raise AssertionError("chosen without the lock")

        ownership.find_resumption = chosen

    second = harness.run(config, RUN_ID, before=fail_when_a_checkpoint_is_chosen)
    assert second.code == 64, second.output
    first.send(signal.SIGCONT)
    assert first.wait().code == 0
