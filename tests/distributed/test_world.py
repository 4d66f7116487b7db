"""Joining a world: late and missing ranks, retries, and cleanup."""

import os
import time
from typing import Any

import pytest
import rank_harness as ranks
import torch
import torch.distributed as dist

from limits import limit
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.logging import LoggingSection
from llmtrain.config.run import RunSection
from llmtrain.core.logs import setup_logging
from llmtrain.distributed import world as world_module
from llmtrain.distributed.process_info import ProcessInfo
from llmtrain.distributed.world import World, join_world, pick_backend, pick_device
from llmtrain.errors import UsageError


def with_logging(body: Any, **distributed: Any) -> Any:
    """As in a command: log lines go to standard error."""
    joined = ranks.in_world(body, **distributed)

    def run(rank: int) -> Any:
        setup_logging(LoggingSection())
        return joined(rank)

    return run


def test_single_process_has_no_process_group() -> None:
    with join_world(DistributedSection(strategy="ddp"), RunSection(device="cpu")) as world:
        assert world == World()
        assert not world.is_joined
        assert not dist.is_initialized()


def test_launched_single_process_joins() -> None:
    """torchrun --nproc-per-node 1: the same code path as with more."""
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    body = ranks.in_world(lambda world: (world.is_joined, world.world_size, world.control.gather("x")))
    ended = ranks.start_ranks(1, body, {**env, "MASTER_PORT": str(ranks.free_port())}).wait()
    assert ranks.values(ended) == [(True, 1, ["x"])]


def test_second_world_in_same_process() -> None:
    """A second world in the same processes, after the first."""

    def body(rank: int) -> Any:
        first = ranks.in_world(lambda world: world.control.sum(1))(rank)
        assert not dist.is_initialized()
        os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
        return first, ranks.in_world(lambda world: world.control.sum(10))(rank)

    ended = ranks.start_ranks(2, body, {"SECOND_PORT": str(ranks.free_port())}).wait()
    assert ranks.values(ended) == [(2, 20), (2, 20)]


@pytest.mark.parametrize("late", [0, 1])
def test_late_rank_joins(late: int) -> None:
    def body(rank: int) -> Any:
        if rank == late:
            time.sleep(1.0)
        return ranks.in_world(lambda world: world.control.sum(1))(rank)

    assert ranks.values(ranks.start_ranks(3, body).wait()) == [3, 3, 3]


def test_missing_rank_is_reported() -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            return "did not join"
        return with_logging(lambda world: world.control.sum(1))(rank)

    started = time.monotonic()
    ended = ranks.start_ranks(3, body, {"LLMTRAIN_DIST_TIMEOUT": str(round(limit(2)))}).wait()
    assert time.monotonic() - started < limit(15)
    assert ended[1].value == "did not join"
    for end in (ended[0], ended[2]):
        assert end.error is not None, end.output
        assert (end.error[0], end.error[2]) == ("JoinError", 69)
    assert ended[0].error is not None
    assert "1 of 3 processes" in ended[0].error[1]
    assert "rank 1" in ended[0].error[1]
    assert "llmtrain doctor" in ended[0].error[1]


def test_missing_ranks_are_logged_while_waiting() -> None:
    def body(rank: int) -> Any:
        world_module.PROGRESS_SEC = 0.3
        if rank == 1:
            time.sleep(1.5)
        return with_logging(lambda world: world.control.sum(1))(rank)

    ended = ranks.start_ranks(2, body).wait()
    assert ranks.values(ended) == [2, 2]
    assert "still waiting for 1 of 2 processes: rank 1" in ended[0].output


def test_failed_connection_is_retried() -> None:
    def body(rank: int) -> Any:
        before, failures = world_module._open_store, []

        def flaky(process: Any, timeout: Any) -> Any:
            if rank == 1 and len(failures) < 2:
                failures.append(1)
                raise dist.DistNetworkError("Connection reset by peer")
            return before(process, timeout)

        world_module._open_store = flaky
        return with_logging(lambda world: (world.control.sum(1), len(failures)))(rank)

    ended = ranks.start_ranks(2, body).wait()
    assert ranks.values(ended) == [(2, 0), (2, 2)]
    assert ended[1].output.count("Connection reset by peer") == 2


def test_permanent_connection_failure_is_join_error() -> None:
    def body(rank: int) -> Any:
        def broken(process: Any, timeout: Any) -> Any:  # noqa: ARG001
            raise dist.DistNetworkError("Connection reset by peer")

        world_module._open_store = broken
        return with_logging(lambda world: world.control.sum(1))(rank)

    ended = ranks.start_ranks(1, body, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).wait()
    assert ended[0].error is not None, ended[0].output
    assert (ended[0].error[0], ended[0].error[2]) == ("JoinError", 69)
    assert "Connection reset by peer" in ended[0].error[1]


def test_process_table_is_logged_by_rank0_only() -> None:
    ended = ranks.start_ranks(2, with_logging(lambda _: os.getpid())).wait()
    pids = ranks.values(ended)
    lines = [line for line in ended[0].output.splitlines() if line.startswith("[DDP]")]
    assert lines[0] == "[DDP] 2 processes, backend gloo"
    assert lines[1].split() == ["[DDP]", "rank", "node", "local_rank", "device", "host", "pid"]
    host = os.uname().nodename
    assert [line.split()[1:] for line in lines[2:]] == [
        [str(rank), "0", str(rank), "cpu", host, str(pids[rank])] for rank in (0, 1)
    ]
    assert ended[1].output == ""


def test_version_mismatch_is_warned_about() -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            world_module.relevant_versions = lambda: {"llmtrain": "0.0.1", "torch": "1.0", "python": "3"}
        return with_logging(lambda world: world.control.sum(1))(rank)

    ended = ranks.start_ranks(3, body).wait()
    assert ranks.values(ended) == [3, 3, 3]
    warnings = [line for end in ended for line in end.output.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "rank 1" in warnings[0]
    assert "0.0.1" in warnings[0]


def test_strategy_none_refuses_several_processes() -> None:
    started = time.monotonic()
    ended = ranks.run_ranks(2, lambda world: world.control.sum(1), strategy="none")
    assert [end.code for end in ended] == [64, 64]
    assert all("distributed.strategy is none" in end.output for end in ended)
    assert time.monotonic() - started < limit(10)


def test_nccl_on_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="nccl"):
        pick_backend(DistributedSection(backend="nccl"), torch.device("cpu"))
    assert pick_backend(DistributedSection(backend="gloo"), torch.device("cpu")) == "gloo"
    assert pick_backend(DistributedSection(), torch.device("cpu")) == "gloo"


class TestDevice:
    """On a simulated machine with two GPUs."""

    @pytest.fixture(autouse=True)
    def _two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    @pytest.mark.parametrize(("name", "local_rank", "device"), [("auto", 0, "cuda:0"), ("cuda", 1, "cuda:1")])
    def test_gpu_per_local_rank(self, name: str, local_rank: int, device: str) -> None:
        assert pick_device(name, local_rank, 2) == torch.device(device)

    def test_cpu_takes_any_local_rank(self) -> None:
        assert pick_device("cpu", 5, 6) == torch.device("cpu")

    def test_more_processes_than_gpus_is_refused(self) -> None:
        with pytest.raises(UsageError, match="local rank 2: this node has 3 processes and 2 GPUs"):
            pick_device("auto", 2, 3)


def test_device_cuda_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", 3, 4) == torch.device("cpu")
    with pytest.raises(UsageError, match="no usable CUDA device"):
        pick_device("cuda")


def test_agent_store_is_used() -> None:
    """Under torchrun the agent hosts the store; each restart uses its own keys."""
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
    del store  # kept until here: deleting it ends the server


def test_restarted_process_counts_once() -> None:
    """Rank 1 joins twice, rank 2 never: two of three processes have joined."""
    port, join_sec = ranks.free_port(), limit(3)

    def body(number: int) -> str:
        process = ProcessInfo(min(number, 1), 3, 0, 1, min(number, 1), "127.0.0.1", port, True, {})
        with pytest.raises(dist.DistError) as problem:
            world_module._connect(process, time.monotonic() + join_sec)
        return str(problem.value)

    messages = ranks.values(ranks.start_ranks(3, body).wait())
    assert "1 of 3 processes" in messages[0]
    assert "rank 2" in messages[0]
