"""JoinState a world: who comes late, who never comes, and what is left afterwards."""

import os
import time
from typing import Any

import pytest
import rank_harness as ranks
import torch
import torch.distributed as dist

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.logging import LoggingSection
from llmtrain.config.run import RunSection
from llmtrain.distributed import world as world_module
from llmtrain.distributed.process_info import ProcessInfo
from llmtrain.distributed.world import World, join_world, pick_backend, pick_device
from llmtrain.errors import UsageError
from llmtrain.logs import setup_logging


def loud(body: Any, **distributed: Any) -> Any:
    """As in a command: what is logged goes to standard error."""
    joined = ranks.in_world(body, **distributed)

    def run(rank: int) -> Any:
        setup_logging(LoggingSection())
        return joined(rank)

    return run


def test_alone_there_is_no_process_group() -> None:
    with join_world(DistributedSection(strategy="ddp"), RunSection(device="cpu")) as world:
        assert world == World()
        assert not world.is_joined
        assert not dist.is_initialized()


def test_a_launched_process_of_one_joins_itself() -> None:
    """torchrun --nproc-per-node 1: the same code path as with more."""
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    body = ranks.in_world(lambda world: (world.is_joined, world.world_size, world.control.gather("x")))
    ended = ranks.start_ranks(1, body, {**env, "MASTER_PORT": str(ranks.free_port())}).wait()
    assert ranks.values(ended) == [(True, 1, ["x"])]


def test_nothing_is_left_afterwards() -> None:
    """A second world in the same processes, after the first."""

    def body(rank: int) -> Any:
        first = ranks.in_world(lambda world: world.control.sum(1))(rank)
        assert not dist.is_initialized()
        os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
        return first, ranks.in_world(lambda world: world.control.sum(10))(rank)

    ended = ranks.start_ranks(2, body, {"SECOND_PORT": str(ranks.free_port())}).wait()
    assert ranks.values(ended) == [(2, 20), (2, 20)]


@pytest.mark.parametrize("late", [0, 1])
def test_one_comes_late(late: int) -> None:
    def body(rank: int) -> Any:
        if rank == late:
            time.sleep(1.0)
        return ranks.in_world(lambda world: world.control.sum(1))(rank)

    assert ranks.values(ranks.start_ranks(3, body).wait()) == [3, 3, 3]


def test_who_never_comes_is_named() -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            return "stayed away"
        return loud(lambda world: world.control.sum(1))(rank)

    started = time.monotonic()
    ended = ranks.start_ranks(3, body, {"LLMTRAIN_DIST_TIMEOUT": "2"}).wait()
    assert time.monotonic() - started < 15
    assert ended[1].value == "stayed away"
    for end in (ended[0], ended[2]):
        assert end.error is not None, end.output
        assert (end.error[0], end.error[2]) == ("JoinError", 69)
    assert ended[0].error is not None
    assert "1 of 3 processes never came: rank 1" in ended[0].error[1]
    assert "llmtrain doctor" in ended[0].error[1]


def test_whoever_is_waited_for_is_said_on_the_way() -> None:
    def body(rank: int) -> Any:
        world_module.PROGRESS_SEC = 0.3
        if rank == 1:
            time.sleep(1.5)
        return loud(lambda world: world.control.sum(1))(rank)

    ended = ranks.start_ranks(2, body).wait()
    assert ranks.values(ended) == [2, 2]
    assert "still waiting for 1 of 2 processes: rank 1" in ended[0].output


def test_a_first_connection_that_fails_is_tried_again() -> None:
    def body(rank: int) -> Any:
        before, failures = world_module._open_store, []

        def flaky(process: Any, timeout: Any) -> Any:
            if rank == 1 and len(failures) < 2:
                failures.append(1)
                raise dist.DistNetworkError("Connection reset by peer")
            return before(process, timeout)

        world_module._open_store = flaky
        return loud(lambda world: (world.control.sum(1), len(failures)))(rank)

    ended = ranks.start_ranks(2, body).wait()
    assert ranks.values(ended) == [(2, 0), (2, 2)]
    assert ended[1].output.count("connecting failed, trying again") == 2


def test_one_that_always_fails_is_an_end() -> None:
    def body(rank: int) -> Any:
        def broken(process: Any, timeout: Any) -> Any:  # noqa: ARG001
            raise dist.DistNetworkError("Connection reset by peer")

        world_module._open_store = broken
        return loud(lambda world: world.control.sum(1))(rank)

    ended = ranks.start_ranks(1, body, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).wait()
    assert ended[0].error is not None, ended[0].output
    assert (ended[0].error[0], ended[0].error[2]) == ("JoinError", 69)
    assert "Connection reset by peer" in ended[0].error[1]


def test_the_table_is_printed_once() -> None:
    ended = ranks.start_ranks(2, loud(lambda _: os.getpid())).wait()
    pids = ranks.values(ended)
    lines = [line for line in ended[0].output.splitlines() if line.startswith("[DDP]")]
    assert lines[0] == "[DDP] 2 processes, backend gloo"
    assert lines[1].split() == ["[DDP]", "rank", "node", "local_rank", "device", "host", "pid"]
    host = os.uname().nodename
    assert [line.split()[1:] for line in lines[2:]] == [
        [str(rank), "0", str(rank), "cpu", host, str(pids[rank])] for rank in (0, 1)
    ]
    assert ended[1].output == ""


def test_another_version_on_one_rank_is_warned_about() -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            world_module.own_versions = lambda: {"llmtrain": "0.0.1", "torch": "1.0", "python": "3"}
        return loud(lambda world: world.control.sum(1))(rank)

    ended = ranks.start_ranks(3, body).wait()
    assert ranks.values(ended) == [3, 3, 3]
    warnings = [line for end in ended for line in end.output.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "rank 1 runs" in warnings[0]
    assert "0.0.1" in warnings[0]


def test_several_processes_need_a_strategy() -> None:
    started = time.monotonic()
    ended = ranks.run_ranks(2, lambda world: world.control.sum(1), strategy="none")
    assert [end.code for end in ended] == [64, 64]
    assert all("distributed.strategy is none" in end.output for end in ended)
    assert time.monotonic() - started < 10


def test_nccl_on_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="nccl"):
        pick_backend(DistributedSection(backend="nccl"), torch.device("cpu"))
    assert pick_backend(DistributedSection(backend="gloo"), torch.device("cpu")) == "gloo"
    assert pick_backend(DistributedSection(), torch.device("cpu")) == "gloo"


class TestDevice:
    """With a machine of two GPUs made up."""

    @pytest.fixture(autouse=True)
    def _two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    @pytest.mark.parametrize(("name", "local_rank", "device"), [("auto", 0, "cuda:0"), ("cuda", 1, "cuda:1")])
    def test_one_for_each_local_rank(self, name: str, local_rank: int, device: str) -> None:
        assert pick_device(name, local_rank, 2) == torch.device(device)

    def test_on_a_cpu_any_number(self) -> None:
        assert pick_device("cpu", 5, 6) == torch.device("cpu")

    def test_more_processes_than_gpus(self) -> None:
        with pytest.raises(UsageError, match="Local rank 2 has no GPU of its own: 3 processes on this node, 2 GPUs"):
            pick_device("auto", 2, 3)


def test_no_gpu_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", 3, 4) == torch.device("cpu")
    with pytest.raises(UsageError, match="no usable CUDA device"):
        pick_device("cuda")


def test_the_agents_store_is_used_where_there_is_one() -> None:
    """Under torchrun the store lives in the agent; each restart has names of its own in it."""
    port = ranks.free_port()
    body = ranks.in_world(lambda world: world.control.sum(1))
    store = ranks.start_ranks(1, lambda _: _serve(port))
    try:
        for attempt in ("0", "1"):
            env = {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": attempt,
                "MASTER_PORT": str(port),
            }
            assert ranks.values(ranks.start_ranks(2, body, env).wait()) == [2, 2]
    finally:
        store.end_all()


def _serve(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(60)
    del store  # kept until here: letting go of it ends the server


def test_a_process_that_is_started_again_while_others_wait_counts_once() -> None:
    """Rank 1 comes twice, rank 2 never: that is not three."""
    port = ranks.free_port()

    def body(number: int) -> str:
        process = ProcessInfo(min(number, 1), 3, 0, 1, min(number, 1), "127.0.0.1", port, True, {})
        with pytest.raises(dist.DistError) as problem:
            world_module._connect(process, time.monotonic() + 3)
        return str(problem.value)

    said = ranks.values(ranks.start_ranks(3, body).wait())
    assert "1 of 3 processes never came: rank 2" in said[0]
