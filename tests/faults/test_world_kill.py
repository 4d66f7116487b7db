"""One of several processes is killed, anywhere: the others exit promptly, and the run resumes exactly."""

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import EVAL_STEPS, RUN_ID, SAVE_EVERY, SAVE_STEPS, STEPS, ChildExit, Outcome

from llmtrain.config.schema import Config
from llmtrain.core import fault_injection as faults

MakeConfig = Callable[..., Config]
PROMPT_SEC = 10.0  # a lost connection is detected in milliseconds; the rest is for a loaded machine
STEP_POINTS = ("forward", "loss", "after_backward", "after_optimizer")
REPLACING = "save_while_replacing"  # only reached when a step is saved a second time: tested separately
SAVE_POINTS = [point for point in faults.POINTS if point.startswith("save_") and point != REPLACING]
ON_EVERY_RANK = "save_model_written"  # the other stages of a save are those of rank 0

EVERYWHERE = [
    *((point, step, rank) for point in STEP_POINTS for step in range(1, STEPS + 1) for rank in (0, 1)),
    *(("evaluate", step, rank) for step in EVAL_STEPS for rank in (0, 1)),
    *((point, step, 0) for point in SAVE_POINTS for step in SAVE_STEPS),
    *((ON_EVERY_RANK, step, 1) for step in SAVE_STEPS),
    *(("after_final_save", STEPS, rank) for rank in (0, 1)),
]
# Of rank 1; rank 0 is killed in the tests of background saves, and while it completes a save.
A_FEW = [
    ("forward", 1, 1),
    ("save_model_written", 6, 1),
    ("after_final_save", 8, 1),
]


def test_sweep_has_every_fault_point() -> None:
    # Before the first step: `prepare` in tests/faults/test_world_launcher.py, `reference` in
    # tests/training/test_preference_exact.py.
    assert {point for point, _, _ in EVERYWHERE} | {REPLACING, "prepare", "reference"} == set(faults.POINTS)


def kill(config: Config, point: str, step: int, rank: int, resume: str | None = None) -> list[ChildExit]:
    """Kill one rank of two; the other must exit promptly with PeerLost."""
    ends = harness.run_world(config, 2, resume, fault=f"{point}:{step}:{rank}:kill")
    killed, survivor = ends[rank], ends[1 - rank]
    assert killed.code == -signal.SIGKILL, killed.output
    assert survivor.code == 75, survivor.output
    assert survivor.error["error"] == "PeerLost", survivor.output
    assert survivor.seconds - killed.seconds < PROMPT_SEC
    return ends


def kill_and_resume(config: Config, golden: Outcome, point: str, step: int, rank: int, in_flight: int = 0) -> None:
    kill(config, point, step, rank)
    assert step - harness.resume_and_check(config, 2, golden) <= SAVE_EVERY + in_flight


@pytest.mark.parametrize(("point", "step", "rank"), A_FEW)
def test_sigkill(world_config: Config, world_golden: Outcome, point: str, step: int, rank: int) -> None:
    kill_and_resume(world_config, world_golden, point, step, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "step", "rank"), [case for case in EVERYWHERE if case not in A_FEW])
def test_sigkill_everywhere(world_config: Config, world_golden: Outcome, point: str, step: int, rank: int) -> None:
    kill_and_resume(world_config, world_golden, point, step, rank)


IN_BACKGROUND = [("save_before_rename", 4, 0)]


@pytest.mark.parametrize(("point", "step", "rank"), IN_BACKGROUND)
def test_sigkill_with_background_saves(
    make_world_config: MakeConfig, world_golden: Outcome, point: str, step: int, rank: int
) -> None:
    kill_and_resume(make_world_config(trainer__async_save=True), world_golden, point, step, rank, in_flight=SAVE_EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "step", "rank"), [case for case in EVERYWHERE if case not in IN_BACKGROUND])
def test_sigkill_everywhere_with_background_saves(
    make_world_config: MakeConfig, world_golden: Outcome, point: str, step: int, rank: int
) -> None:
    kill_and_resume(make_world_config(trainer__async_save=True), world_golden, point, step, rank, in_flight=SAVE_EVERY)


SHARDED = [
    *((point, step, rank) for point in ("forward", "after_optimizer") for step in (1, 4, 7) for rank in (0, 1)),
    *((point, 4, 0) for point in SAVE_POINTS),
    (ON_EVERY_RANK, 4, 1),
    ("evaluate", 8, 1),
    ("after_final_save", 8, 0),
    ("after_final_save", 8, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "step", "rank"), SHARDED)
def test_sigkill_with_fsdp(
    make_world_config: MakeConfig, fsdp_golden: Outcome, point: str, step: int, rank: int
) -> None:
    kill_and_resume(make_world_config(distributed__strategy="fsdp"), fsdp_golden, point, step, rank)


@pytest.mark.parametrize(
    ("point", "is_saved"),
    [
        pytest.param("save_begin", False, marks=pytest.mark.slow),
        pytest.param("save_before_manifest", True),
        pytest.param("save_before_rename", True, marks=pytest.mark.slow),
        pytest.param("save_after_rename", True, marks=pytest.mark.slow),
        pytest.param("save_before_prune", True, marks=pytest.mark.slow),
    ],
)
def test_sigkill_while_rank_0_completes_the_save(
    world_config: Config, world_golden: Outcome, point: str, is_saved: bool
) -> None:
    """Once every rank has written its files, rank 0 completes the checkpoint alone."""
    world = harness.start_world(world_config, 2, fault=f"{point}:4:0:stop")
    world[0].wait_stopped()
    world[1].send(signal.SIGKILL)
    assert world[1].wait().code == -signal.SIGKILL
    world[0].send(signal.SIGCONT)
    ended = world[0].wait()
    assert ended.code == 75, ended.output
    assert harness.resume_and_check(world_config, 2, world_golden) == (4 if is_saved else 2)


@pytest.mark.slow
def test_sigkill_while_a_checkpoint_is_replaced(world_config: Config, world_golden: Outcome) -> None:
    """Interrupted in an evaluation, step 4 is saved before it and again after it."""
    ends = harness.run_world(world_config, 2, fault="evaluate:4:1:term")
    assert [ended.code for ended in ends] == [75, 75]
    kill(world_config, REPLACING, 4, 0, RUN_ID)
    assert harness.resume_and_check(world_config, 2, world_golden) == 4


def test_finished_run_resumes_as_a_no_op(world_config: Config, root: Path, world_golden: Outcome) -> None:
    assert harness.resume_and_check(world_config, 2, world_golden, resume="auto") == 0
    before = harness.tree(root / RUN_ID)
    ends = harness.run_world(world_config, 2, RUN_ID)
    assert [ended.code for ended in ends] == [0, 0], ends[0].output
    assert ends[0].result == harness.read_result(root)
    assert ends[1].result == ends[0].result
    assert harness.tree(root / RUN_ID) == before


def test_all_survivors_of_four_exit(world_config: Config, world_golden: Outcome) -> None:
    ends = harness.run_world(world_config, 4, fault="after_backward:5:2:kill")
    assert [ended.code for ended in ends] == [75, 75, -signal.SIGKILL, 75]
    assert max(ended.seconds for ended in ends) - ends[2].seconds < PROMPT_SEC
    assert harness.resume_and_check(world_config, 4, world_golden) == 4


@pytest.mark.slow
def test_data_workers_exit_with_their_rank(make_world_config: MakeConfig, world_golden: Outcome) -> None:
    """start_world checks the process groups: the workers of a rank exit with it."""
    config = make_world_config(data__num_workers=1)
    kill(config, "after_backward", 3, 1)
    harness.resume_and_check(config, 2, world_golden)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_sequence_of_faults_with_changing_world_size(
    make_world_config: MakeConfig, world_golden: Outcome, root: Path, seed: int
) -> None:
    """Up to five faults on 1, 2 or 4 processes, each in the run that was resumed after the previous one."""
    rng = random.Random(seed)
    config = make_world_config(trainer__async_save=bool(seed % 2))
    resume, step = None, 1
    for _ in range(5):
        size = rng.choice([1, 2, 2, 4])
        step = rng.randint(step, STEPS)
        point = rng.choice([*STEP_POINTS[2:], *SAVE_POINTS, "evaluate"])
        action = rng.choice(["kill", "kill", "term"])
        ends = harness.run_world(config, size, resume, fault=f"{point}:{step}:{rng.randrange(size)}:{action}")
        codes = {ended.code for ended in ends}
        assert codes <= {0, 75} or codes <= {75, -signal.SIGKILL}, "\n".join(ended.output for ended in ends)
        resume = RUN_ID
        assert (root / RUN_ID).exists()
    ends = harness.run_world(config, 2, RUN_ID)
    assert [ended.code for ended in ends] == [0, 0]
    assert harness.outcome(root, harness.read_result(root)) == world_golden
    harness.verify_all(root)


@pytest.mark.parametrize("action", ["kill", pytest.param("enospc", marks=pytest.mark.slow)])
def test_no_rank_exits_with_0_before_the_run_is_finished(
    world_config: Config, root: Path, world_golden: Outcome, action: str
) -> None:
    """A platform does not restart a pod that exited with 0, so the others would wait for it forever."""

    def fail_at_finished_json(rank: int) -> None:
        from llmtrain.runs import result

        write_json = result.write_json

        def fail(path: Path, value: object) -> None:
            if path.name == "finished.json" and rank == 0:
                if action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, "No space left on device")
            write_json(path, value)

        result.write_json = fail

    ends = harness.run_world(world_config, 2, before=fail_at_finished_json)
    assert not (root / RUN_ID / "finished.json").exists()
    assert 0 not in [ended.code for ended in ends], ends[1].output
    assert harness.resume_and_check(world_config, 2, world_golden) == STEPS


@pytest.mark.slow
def test_restarted_rank_of_a_finished_run_returns_the_result(
    make_world_config: MakeConfig, root: Path, world_golden: Outcome
) -> None:
    """Rank 0 dies while it exits (for example while it uploads to MLflow). The other pods have exited with 0 and are
    not restarted, so there is no world to join; the run is finished."""
    config = make_world_config(distributed__join_timeout_sec=2)
    harness.resume_and_check(config, 2, world_golden, resume="auto", env={"LLMTRAIN_NODE": "1"})
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(harness.free_port()), "LLMTRAIN_NODE": "1"}
    ended = harness.run(config, "auto", env=env)
    assert ended.code == 0, ended.output
    assert ended.result == harness.read_result(root)
