"""Ranks that hang, and ranks that receive SIGTERM."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import EVAL_STEPS, RUN_ID, STEPS, ChildExit, Outcome, StartedWorld

from limits import limit
from llmtrain.config.schema import Config
from llmtrain.core import fault_injection as faults
from llmtrain.runs.heartbeats import read_heartbeats

MakeConfig = Callable[..., Config]
SAVE_POINTS = [point for point in faults.POINTS if point.startswith("save_") and point != "save_while_replacing"]
TIMEOUT_SEC = 5
SOON_SEC = 3
"""Of the test that is not slow."""
MARGIN_SEC = 6.0  # two are promised


# Hanging ranks


def hang(config: Config, size: int, point: str, step: int, rank: int, resume: str | None = None) -> StartedWorld:
    world = harness.start_world(config, size, resume, fault=f"{point}:{step}:{rank}:stop")
    world[rank].wait_stopped()
    return world


def check_survivors(world: StartedWorld, silent: int, stopped_at: float, timeout: float = TIMEOUT_SEC) -> None:
    pid = world[silent].pid
    for rank, child in enumerate(world.ranks):
        if rank != silent:
            ended = child.wait(timeout + MARGIN_SEC + 10)
            assert ended.code == 75, ended.output
            assert time.monotonic() - stopped_at < limit(timeout + MARGIN_SEC), ended.output
            assert re.search(rf"rank {silent} .*\(pid {pid} on ", ended.output), ended.output
    assert world[silent].poll() is None, "the silent rank is only stopped"
    world[silent].send(signal.SIGKILL)
    assert world[silent].wait().code == -signal.SIGKILL


def test_hanging_rank_is_named_and_others_exit(tmp_path: Path, cache: Path, world_golden: Outcome) -> None:
    """Rank 0 of one world and rank 1 of another, at the same time, to save time."""
    configs = [
        harness.world_config(tmp_path / str(rank) / "runs", cache, distributed__timeout_sec=round(limit(SOON_SEC)))
        for rank in (0, 1)
    ]
    worlds, stopped_at = [], []
    for rank, config in enumerate(configs):
        worlds.append(hang(config, 2, "after_backward", 3, rank))
        stopped_at.append(time.monotonic())
    for rank, world in enumerate(worlds):
        check_survivors(world, rank, stopped_at[rank], SOON_SEC)
    for config in configs:
        assert harness.resume_and_check(config, 2, world_golden) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "step", "rank", "size", "changes"),
    [
        ("forward", 1, 1, 2, {}),
        ("evaluate", 4, 0, 2, {}),
        ("evaluate", 4, 1, 2, {}),
        ("save_begin", 4, 0, 2, {}),
        ("save_model_written", 4, 0, 2, {}),
        ("save_model_written", 4, 1, 2, {}),
        ("save_before_rename", 4, 0, 2, {}),
        ("save_before_prune", 4, 0, 2, {}),
        ("save_model_written", 4, 1, 2, {"trainer__async_save": True}),
        ("save_before_rename", 4, 0, 2, {"trainer__async_save": True}),
        ("after_final_save", 8, 0, 2, {}),
        ("after_final_save", 8, 1, 2, {}),
        ("after_optimizer", 5, 2, 4, {}),
    ],
)
def test_hang_anywhere(
    make_world_config: MakeConfig,
    world_golden: Outcome,
    point: str,
    step: int,
    rank: int,
    size: int,
    changes: dict[str, bool],
) -> None:
    config = make_world_config(distributed__timeout_sec=round(limit(TIMEOUT_SEC)), **changes)
    world = hang(config, size, point, step, rank)
    check_survivors(world, rank, time.monotonic())
    assert step - harness.resume_and_check(config, size, world_golden) <= 2 * harness.SAVE_EVERY


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_hang_with_fsdp(make_world_config: MakeConfig, fsdp_golden: Outcome, rank: int) -> None:
    config = make_world_config(distributed__timeout_sec=round(limit(TIMEOUT_SEC)), distributed__strategy="fsdp")
    world = hang(config, 2, "after_backward", 5, rank)
    check_survivors(world, rank, time.monotonic())
    assert harness.resume_and_check(config, 2, fsdp_golden) == 4


@pytest.mark.slow
def test_rank_that_resumes_too_late_exits_too(make_world_config: MakeConfig, root: Path, world_golden: Outcome) -> None:
    config = make_world_config(distributed__timeout_sec=2)
    world = hang(config, 2, "after_backward", 5, 1)
    assert world[0].wait().code == 75
    before = harness.tree(root / RUN_ID, without=("logs", "heartbeats", "exits"))
    world[1].send(signal.SIGCONT)
    assert world[1].wait().code == 75
    assert harness.tree(root / RUN_ID, without=("logs", "heartbeats", "exits")) == before
    assert harness.resume_and_check(config, 2, world_golden) == 4


@pytest.mark.slow
def test_short_hang_is_tolerated(make_world_config: MakeConfig, world_golden: Outcome, root: Path) -> None:
    config = make_world_config(distributed__timeout_sec=round(limit(TIMEOUT_SEC)))
    world = hang(config, 2, "after_backward", 3, 1)
    beat = read_heartbeats(root / RUN_ID / "heartbeats")[0]["beat"]
    world.wait_for(lambda: read_heartbeats(root / RUN_ID / "heartbeats")[0]["beat"] > beat)  # rank 0 waits for it
    world[1].send(signal.SIGCONT)
    ends = world.wait()
    assert [ended.code for ended in ends] == [0, 0], world.output()
    assert harness.outcome(root, ends[0].result or {}) == world_golden


# SIGTERM


def check_stopped(ends: list[ChildExit], root: Path, step: int) -> None:
    """All ranks saved the same step and exited together, with a command to resume."""
    for ended in ends:
        assert ended.code == 75, ended.output
        assert (ended.error["error"], ended.error["steps"]) == ("Interrupted", step)
        assert f"--resume {root / RUN_ID}" in ended.error["remedy"]
    assert harness.steps_saved(root)[-1] == step


@pytest.mark.parametrize(
    ("point", "step", "rank"),
    [
        ("after_optimizer", 3, 1),
        ("evaluate", 4, 1),
        ("save_model_written", 4, 1),
    ],
)
def test_sigterm_to_one_rank(
    world_config: Config, root: Path, world_golden: Outcome, point: str, step: int, rank: int
) -> None:
    check_stopped(harness.run_world(world_config, 2, fault=f"{point}:{step}:{rank}:term"), root, step)
    assert harness.resume_and_check(world_config, 2, world_golden) == step


MORE = [
    *(("forward", 1, rank) for rank in (0, 1)),
    *(("after_optimizer", step, rank) for step in range(1, STEPS + 1) for rank in (0, 1)),
    *(("evaluate", step, rank) for step in EVAL_STEPS for rank in (0, 1)),
    *((point, 4, 0) for point in SAVE_POINTS),
    *((point, 8, 0) for point in SAVE_POINTS),
    ("save_model_written", 8, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "step", "rank"), MORE)
@pytest.mark.parametrize("in_background", [False, True])
def test_sigterm_everywhere(
    make_world_config: MakeConfig,
    root: Path,
    world_golden: Outcome,
    point: str,
    step: int,
    rank: int,
    in_background: bool,
) -> None:
    config = make_world_config(trainer__async_save=in_background)
    ends = harness.run_world(config, 2, fault=f"{point}:{step}:{rank}:term")
    if in_background and point.startswith("save_"):  # the loop has continued meanwhile, on all ranks
        assert ends[0].error["steps"] >= step, ends[0].output
        step = ends[0].error["steps"]
    check_stopped(ends, root, step)
    assert harness.resume_and_check(config, 2, world_golden) == step


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after_optimizer", "evaluate", "save_model_written"])
def test_sigterm_with_fsdp(make_world_config: MakeConfig, root: Path, fsdp_golden: Outcome, point: str) -> None:
    config = make_world_config(distributed__strategy="fsdp")
    check_stopped(harness.run_world(config, 2, fault=f"{point}:4:1:term"), root, 4)
    assert harness.resume_and_check(config, 2, fsdp_golden) == 4


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sigterm_to_all_ranks(world_config: Config, root: Path, world_golden: Outcome, size: int) -> None:
    """As platforms do. Rank 0 is held inside step 3, so that all ranks receive it there."""
    world = harness.start_world(world_config, size, fault="after_backward:3:0:stop")
    world[0].wait_stopped()
    world.send(signal.SIGTERM)
    world[0].send(signal.SIGCONT)
    check_stopped(world.wait(), root, 3)
    assert harness.resume_and_check(world_config, size, world_golden) == 3


@pytest.mark.slow
@pytest.mark.parametrize("point", [point for point in SAVE_POINTS if point != "save_model_written"])  # it comes twice
def test_sigterm_to_all_ranks_during_a_save(
    world_config: Config, root: Path, world_golden: Outcome, point: str
) -> None:
    world = harness.start_world(world_config, 2, fault=f"{point}:4:0:stop")
    world[0].wait_stopped()
    world.send(signal.SIGTERM)
    world[0].send(signal.SIGCONT)
    check_stopped(world.wait(), root, 4)
    assert harness.resume_and_check(world_config, 2, world_golden) == 4


@pytest.mark.slow
def test_sigterm_during_the_final_sample(world_config: Config, root: Path, world_golden: Outcome) -> None:
    """The run is finished already."""
    ends = harness.run_world(world_config, 2, fault="after_final_save:8:1:term")
    assert [ended.code for ended in ends] == [0, 0]
    assert harness.outcome(root, harness.read_result(root)) == world_golden


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_while_joining(world_config: Config, root: Path, rank: int) -> None:
    """Rank 0 waits for rank 1, which is never started; rank 1 waits for the master."""
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(harness.free_port()), "LLMTRAIN_DEBUG": "1"}
    report = root.parent / "report.json"
    child = harness.start(world_config, env={**env, "TORCHELASTIC_ERROR_FILE": str(report)})
    child.wait_for(lambda: f"joining as rank {rank} of 2" in child.output())
    child.send(signal.SIGTERM)
    sent_at = time.monotonic()
    ended = child.wait()
    assert ended.code == 75, ended.output
    assert time.monotonic() - sent_at < limit(5)
    assert json.loads(report.read_text())["llmtrain"]["error"] == "Interrupted"
    assert not root.exists()


def test_sigterm_inside_torch_does_not_raise(world_config: Config, root: Path) -> None:
    """While the ranks connect, the handler may run below C++ that aborts on an exception (exit code 134)."""

    def send_sigterm(_: int) -> None:
        from llmtrain.distributed import world

        init_group = world._init_group

        def with_sigterm(*arguments: object) -> None:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                init_group(*arguments)  # type: ignore[arg-type]
            except BaseException:
                os._exit(134)

        world._init_group = with_sigterm  # type: ignore[assignment]

    ends = harness.run_world(world_config, 2, before=send_sigterm)
    assert [ended.code for ended in ends] == [75, 75], ends[0].output + ends[1].output
    assert not root.exists()


@pytest.mark.parametrize(
    "signaled", [pytest.param((0,), marks=pytest.mark.slow), (1,), pytest.param((0, 1), marks=pytest.mark.slow)]
)
def test_sigterm_during_data_preparation(
    world_config: Config, root: Path, world_golden: Outcome, signaled: tuple[int, ...]
) -> None:
    def send_sigterm(rank: int) -> None:
        from llmtrain.training import components

        build_components = components.build_components

        def with_sigterm(*arguments: object) -> object:
            if rank in signaled:
                os.kill(os.getpid(), signal.SIGTERM)
            return build_components(*arguments)  # type: ignore[arg-type]

        components.build_components = with_sigterm  # type: ignore[assignment]

    ends = harness.run_world(world_config, 2, before=send_sigterm)
    assert [ended.code for ended in ends] == [75, 75], ends[0].output + ends[1].output
    for rank in signaled:
        assert ends[rank].error["error"] == "Interrupted"
    assert not (root / RUN_ID).exists()
    assert harness.resume_and_check(world_config, 2, world_golden, resume="auto") == 0


# Repeated crashes of unattended runs

UNATTENDED = {"LLMTRAIN_NODE": "1"}


def sigterm_before_the_first_step(rank: int) -> None:
    from llmtrain.training.loop import Trainer

    loop = Trainer._loop

    def loop_after_sigterm(trainer: Trainer) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        loop(trainer)

    Trainer._loop = loop_after_sigterm  # type: ignore[method-assign]


def test_gives_up_after_three_crashes_without_progress(world_config: Config, world_golden: Outcome) -> None:
    """Whichever rank crashed: all exit with 65, until a person starts the run again."""
    for rank in (1, 0, 1):
        ends = harness.run_world(world_config, 2, "auto", fault=f"forward:1:{rank}:kill", env=UNATTENDED)
        assert ends[rank].code == -signal.SIGKILL
        assert ends[1 - rank].code == 75, ends[1 - rank].output
    for _ in range(2):  # restarting does not change that
        ends = harness.run_world(world_config, 2, "auto", env=UNATTENDED)
        assert [ended.code for ended in ends] == [65, 65], ends[0].output
        assert ends[0].error["reason"] == "gave_up"
    assert harness.resume_and_check(world_config, 2, world_golden) == 0  # attended


def test_crashes_during_data_preparation_are_counted(world_config: Config, world_golden: Outcome) -> None:
    for rank in (1, 0, 1):
        ends = harness.run_world(world_config, 2, "auto", fault=f"prepare:0:{rank}:kill", env=UNATTENDED)
        assert ends[rank].code == -signal.SIGKILL
        assert ends[1 - rank].code == 75, ends[1 - rank].output
    assert [ended.code for ended in harness.run_world(world_config, 2, "auto", env=UNATTENDED)] == [65, 65]
    assert harness.resume_and_check(world_config, 2, world_golden) == 0


def test_sigterm_during_data_preparation_leaves_no_directory(world_config: Config) -> None:
    ends = harness.run_world(world_config, 2, "auto", fault="prepare:0:0:term", env=UNATTENDED)
    assert [ended.code for ended in ends] == [75, 75]
    root = Path(world_config.output.root_dir)
    assert not root.exists() or list(root.iterdir()) == []


@pytest.mark.slow
def test_crashes_with_progress_do_not_give_up(world_config: Config, world_golden: Outcome) -> None:
    for step in (3, 5, 7, 8):
        ends = harness.run_world(world_config, 2, "auto", fault=f"forward:{step}:1:kill", env=UNATTENDED)
        assert [ended.code for ended in ends] == [75, -signal.SIGKILL], ends[0].output
    assert harness.resume_and_check(world_config, 2, world_golden, resume="auto", env=UNATTENDED) == 6


def test_sigterm_is_not_counted_as_a_crash(world_config: Config, world_golden: Outcome, root: Path) -> None:
    """Before the first step there is nothing to save, however often it is interrupted."""
    for _ in range(4):
        ends = harness.run_world(world_config, 2, "auto", before=sigterm_before_the_first_step, env=UNATTENDED)
        for ended in ends:
            assert ended.code == 75, ended.output
            assert (ended.error["error"], ended.error["steps"]) == ("Interrupted", 0)
    assert harness.steps_saved(root) == []
    assert harness.resume_and_check(world_config, 2, world_golden, resume="auto", env=UNATTENDED) == 0


# Another world size


def test_world_size_may_change_on_resume(world_config: Config, root: Path, world_golden: Outcome) -> None:
    """2 -> 1 -> 4 -> 2, interrupted in between: bit-exact with one process throughout."""
    resume = None
    for size, step in ((2, 2), (1, 4), (4, 6)):
        ends = harness.run_world(world_config, size, resume, fault=f"after_optimizer:{step}:{size - 1}:term")
        check_stopped(ends, root, step)
        resume = RUN_ID
    assert harness.resume_and_check(world_config, 2, world_golden) == 6


@pytest.mark.slow
def test_world_size_may_change_on_resume_with_fsdp(
    make_world_config: MakeConfig, root: Path, fsdp_golden: Outcome
) -> None:
    """Sharded sums round differently on other world sizes; samples and steps are the same."""
    config = make_world_config(distributed__strategy="fsdp")
    resume = None
    for size, step in ((2, 2), (1, 4), (4, 6)):
        ends = harness.run_world(config, size, resume, fault=f"after_optimizer:{step}:{size - 1}:term")
        check_stopped(ends, root, step)
        resume = RUN_ID
    ends = harness.run_world(config, 2, RUN_ID)
    assert [ended.code for ended in ends] == [0, 0]
    rows = harness.train_rows(root / RUN_ID)
    assert [step for step, _ in rows] == [step for step, _ in fsdp_golden.train]
    for (_, (loss, *_rest)), (_, (expected, *_more)) in zip(rows, fsdp_golden.train, strict=True):
        assert float.fromhex(loss) == pytest.approx(float.fromhex(expected), rel=1e-4)


# Heartbeats


def test_every_rank_sends_heartbeats(world_config: Config, root: Path) -> None:
    import socket

    world = harness.start_world(world_config, 2, fault="after_backward:4:1:stop")
    world[1].wait_stopped()
    beats = read_heartbeats(root / RUN_ID / "heartbeats")
    assert sorted(beats) == [0, 1]
    for rank, beat in beats.items():
        assert (beat["pid"], beat["host"]) == (world[rank].pid, socket.gethostname())
        assert (beat["rank"], beat["generation"]) == (rank, 1)
    world.wait_for(lambda: read_heartbeats(root / RUN_ID / "heartbeats")[0]["step"] == 3)  # written while it waits
    world[1].send(signal.SIGCONT)
    assert [ended.code for ended in world.wait()] == [0, 0]
    beats = read_heartbeats(root / RUN_ID / "heartbeats")
    assert {rank: beat["step"] for rank, beat in beats.items()} == {0: STEPS, 1: STEPS}


@pytest.mark.slow
def test_smaller_world_removes_heartbeats_of_missing_ranks(world_config: Config, root: Path) -> None:
    ends = harness.run_world(world_config, 4, fault="after_optimizer:3:0:term")
    assert [ended.code for ended in ends] == [75] * 4
    assert sorted(read_heartbeats(root / RUN_ID / "heartbeats")) == [0, 1, 2, 3]
    assert [ended.code for ended in harness.run_world(world_config, 2, RUN_ID)] == [0, 0]
    beats = read_heartbeats(root / RUN_ID / "heartbeats")
    assert {rank: beat["generation"] for rank, beat in beats.items()} == {0: 2, 1: 2}
