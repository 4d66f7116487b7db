"""Two starts of one run: a second attended start is refused, an unattended one supersedes the first."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, Outcome, StartedWorld

from limits import limit
from llmtrain.config.schema import Config
from llmtrain.runs import lock as lock_module

MakeConfig = Callable[..., Config]
UNATTENDED = {"LLMTRAIN_NODE": "1"}

# An older generation may be stopped anywhere; these are all the places where it is about to publish something.
STOPS = [
    ("after_backward", 5, 0),
    ("after_optimizer", 6, 1),
    ("evaluate", 4, 0),
    ("evaluate", 8, 1),
    ("save_begin", 6, 0),
    ("save_model_written", 6, 0),
    ("save_model_written", 6, 1),
    ("save_before_manifest", 6, 0),
    ("save_before_rename", 6, 0),
    ("save_published", 6, 0),
    ("save_after_rename", 6, 0),
    ("save_before_prune", 6, 0),
    ("save_before_rename", 8, 0),
    ("after_final_save", 8, 0),
    ("after_final_save", 8, 1),
]


def some_slow(*fast: tuple[str, int, int], until: int = 8) -> list[Any]:
    """All values; only the named ones are not slow."""
    return [pytest.param(*stop, marks=[] if stop in fast else pytest.mark.slow) for stop in STOPS if stop[1] <= until]


def start_and_stop_all(config: Config, point: str, step: int, rank: int, size: int = 2) -> StartedWorld:
    """An unattended generation whose ranks are all stopped, like a node without network."""
    world = harness.start_world(config, size, "auto", fault=f"{point}:{step}:{rank}:stop", env=UNATTENDED)
    world[rank].wait_stopped()
    for other, child in enumerate(world.ranks):
        if other != rank:
            child.send(signal.SIGSTOP)
            child.wait_stopped()
    return world


def published(root: Path) -> dict[str, bytes]:
    return harness.tree(root / RUN_ID, without=("logs",))


def generations(root: Path) -> list[dict[str, Any]]:
    return list(json.loads((root / RUN_ID / "generations.json").read_text()))


@pytest.mark.parametrize(("point", "step", "rank"), some_slow(("save_model_written", 6, 1)))
def test_superseded_generation_publishes_nothing(
    world_config: Config, root: Path, world_golden: Outcome, point: str, step: int, rank: int
) -> None:
    older = start_and_stop_all(world_config, point, step, rank)
    harness.resume_and_check(
        world_config, 2, world_golden, resume="auto", env=UNATTENDED
    )  # takes it over: never refused
    assert [row["generation"] for row in generations(root)] == [1, 2]
    before = published(root)
    older.send(signal.SIGCONT)
    ends = older.wait()
    assert published(root) == before
    assert [ended.code for ended in ends] == [75, 75], ends[0].output + ends[1].output


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_superseded_generation_with_a_lost_rank_publishes_nothing(
    world_config: Config, root: Path, world_golden: Outcome, first: int
) -> None:
    """The node of one rank returns, that of the other does not: it exits because of the lost peer, not the lock."""
    older = start_and_stop_all(world_config, "evaluate", 4, 0)  # what comes next needs the other rank
    harness.resume_and_check(world_config, 2, world_golden, resume="auto", env=UNATTENDED)
    before = published(root)
    older[1 - first].send(signal.SIGKILL)
    older[1 - first].wait()
    older[first].send(signal.SIGCONT)
    ended = older[first].wait()
    assert ended.code == 75, ended.output
    assert published(root) == before


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_superseded_generation_of_another_size(
    world_config: Config, root: Path, world_golden: Outcome, size: int
) -> None:
    older = start_and_stop_all(world_config, "after_backward", 5, 0)
    harness.resume_and_check(world_config, size, world_golden, resume="auto", env=UNATTENDED)
    before = published(root)
    older.send(signal.SIGCONT)
    assert [ended.code for ended in older.wait()] == [75, 75]
    assert published(root) == before


@pytest.mark.parametrize(("point", "step", "rank"), some_slow(("save_before_rename", 6, 0), until=7))
def test_superseded_generation_that_resumes_during_a_save(
    world_config: Config, root: Path, world_golden: Outcome, point: str, step: int, rank: int
) -> None:
    """The newer one is about to complete its last save when the older one continues."""
    older = start_and_stop_all(world_config, point, step, rank)
    newer = harness.start_world(world_config, 2, "auto", fault="save_before_manifest:8:0:stop", env=UNATTENDED)
    newer[0].wait_stopped()
    older.send(signal.SIGCONT)
    assert [ended.code for ended in older.wait()] == [75, 75], older.output()
    newer[0].send(signal.SIGCONT)
    ends = newer.wait()
    assert [ended.code for ended in ends] == [0, 0], newer.output()
    assert "could not be written" not in ends[0].output
    assert harness.outcome(root, ends[0].result or {}) == world_golden
    harness.verify_all(root)
    assert generations(root)[-1]["ended"] == "finished"
    assert len(generations(root)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("point", "step", "rank"), [("save_model_written", 4, 1), ("save_before_rename", 4, 0)])
def test_superseded_generation_with_background_saves(
    make_world_config: MakeConfig, root: Path, world_golden: Outcome, point: str, step: int, rank: int
) -> None:
    config = make_world_config(trainer__async_save=True)
    older = start_and_stop_all(config, point, step, rank)
    harness.resume_and_check(config, 2, world_golden, resume="auto", env=UNATTENDED)
    before = published(root)
    older.send(signal.SIGCONT)
    assert [ended.code for ended in older.wait()] == [75, 75], older.output()
    assert published(root) == before


@pytest.mark.slow
def test_superseded_generation_with_fsdp(make_world_config: MakeConfig, root: Path, fsdp_golden: Outcome) -> None:
    config = make_world_config(distributed__strategy="fsdp")
    older = start_and_stop_all(config, "save_model_written", 6, 1)
    harness.resume_and_check(config, 2, fsdp_golden, resume="auto", env=UNATTENDED)
    before = published(root)
    older.send(signal.SIGCONT)
    assert [ended.code for ended in older.wait()] == [75, 75], older.output()
    assert published(root) == before


@pytest.mark.slow
def test_running_generation_is_superseded(make_world_config: MakeConfig, root: Path) -> None:
    """A generation that still runs: cut off from its launcher, but not from the storage."""
    endless = make_world_config(trainer__max_steps=10**6, trainer__save_every_steps=50, trainer__schedule="constant")
    older = harness.start_world(endless, 2, "auto", env=UNATTENDED)
    older.wait_for(lambda: "step 5/" in older[0].output())
    newer = harness.start_world(endless, 2, "auto", fault="forward:70:0:term", env=UNATTENDED)
    ends = older.wait()
    assert [ended.code for ended in ends] == [75, 75], older.output()
    assert "Another process has taken over this run" in ends[0].output
    assert [ended.code for ended in newer.wait()] == [75, 75], newer.output()
    assert [row["ended"] for row in generations(root)] == [None, "stopped"]


def test_second_world_is_refused(world_config: Config, root: Path, world_golden: Outcome) -> None:
    first = harness.start_world(world_config, 2, fault="after_backward:3:0:stop")
    first[0].wait_stopped()
    before = harness.tree(root, without=("logs",))
    for resume in (RUN_ID, "auto", None):
        for ended in harness.run_world(world_config, 2, resume):
            assert ended.code == 64, ended.output
            assert ended.seconds < 5
            if resume:
                assert f"is being written by process {first[0].pid}" in ended.output
    after = harness.tree(root, without=("logs",))
    for tree in (before, after):  # rank 1 lives, and may write its heartbeat
        tree.pop(f"{RUN_ID}/heartbeats/rank-1.json")
    assert after == before
    first[0].send(signal.SIGCONT)
    ends = first.wait()
    assert [ended.code for ended in ends] == [0, 0], first.output()
    assert harness.outcome(root, ends[0].result or {}) == world_golden


@pytest.mark.slow
def test_lock_of_a_killed_world_is_taken_over_immediately(
    world_config: Config, root: Path, world_golden: Outcome
) -> None:
    world = harness.start_world(world_config, 2, fault="after_backward:5:0:stop")
    world[0].wait_stopped()
    world.send(signal.SIGKILL)
    world.wait()
    assert (root / RUN_ID / "lock").exists()
    assert harness.resume_and_check(world_config, 2, world_golden) == 4


def test_restart_takes_over_from_a_rank_that_died_on_another_node(
    world_config: Config, root: Path, world_golden: Outcome
) -> None:
    """torchrun on several nodes: rank 0 was killed with a fresh heartbeat, and the new rank 0 is on another node, where
    the death of the old one is not visible."""
    ends = harness.run_world(world_config, 2, fault="after_backward:5:0:kill")
    assert [ended.code for ended in ends] == [-signal.SIGKILL, 75]
    lock = root / RUN_ID / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "another-node"}))

    def quick(_: int) -> None:
        lock_module.STALE_AFTER_SEC = 3.0

    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert harness.resume_and_check(world_config, 2, world_golden, env=restarted, before=quick) == 4


@pytest.mark.slow
def test_two_generations_that_start_together(world_config: Config, root: Path, world_golden: Outcome) -> None:
    """One of them owns the run in the end and finishes it; the other exits."""
    assert [ended.code for ended in harness.run_world(world_config, 2, fault="after_optimizer:3:0:term")] == [75, 75]
    worlds = [harness.start_world(world_config, 2, "auto", env=UNATTENDED) for _ in range(2)]
    codes = sorted([ended.code for ended in world.wait()] for world in worlds)
    assert codes[0] == [0, 0], "\n".join(world.output() for world in worlds)
    assert codes[1] in ([0, 0], [75, 75]), "\n".join(world.output() for world in worlds)
    assert harness.outcome(root, harness.read_result(root)) == world_golden
    harness.verify_all(root)
    assert [path.name for path in (root / RUN_ID / "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_run_that_another_generation_finishes_while_processes_join(make_world_config: MakeConfig) -> None:
    """A process that finds the run finished exits before it joins, while the others wait for it."""

    def hold(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    config = make_world_config(distributed__join_timeout_sec=round(limit(15)))
    assert [ended.code for ended in harness.run_world(config, 2, fault="after_optimizer:3:0:term")] == [75, 75]
    late = harness.start_world(config, 2, "auto", env=UNATTENDED, before=hold)
    late[1].wait_stopped()
    assert [ended.code for ended in harness.run_world(config, 2, "auto", env=UNATTENDED)] == [0, 0]
    late[1].send(signal.SIGCONT)
    assert [ended.code for ended in late.wait()] == [0, 0], late.output()
    assert "still waiting for 1 of 2 processes: rank 1" in late.output()


def test_two_generations_that_both_create_the_run(world_config: Config, world_golden: Outcome) -> None:
    """Data preparation takes long: a generation that found no run may find one when it is about to create it. That is
    not a usage error (64), after which a platform would not restart it."""

    def hold(rank: int) -> None:
        from llmtrain.training import components

        build_components = components.build_components

        def held(*arguments: Any) -> object:
            if rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            return build_components(*arguments)

        components.build_components = held  # type: ignore[assignment]

    late = harness.start_world(world_config, 2, "auto", env=UNATTENDED, before=hold)
    late[0].wait_stopped()
    ends = harness.run_world(world_config, 2, "auto", fault="after_backward:5:0:kill", env=UNATTENDED)
    assert [ended.code for ended in ends] == [-signal.SIGKILL, 75]
    late[0].send(signal.SIGCONT)
    codes = [ended.code for ended in late.wait()]
    assert codes in ([0, 0], [75, 75]), late.output()
    harness.resume_and_check(world_config, 2, world_golden, resume="auto", env=UNATTENDED)
