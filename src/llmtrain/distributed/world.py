"""World: the processes of a run, and the rank of this one. Joining can hang, so every wait has a deadline and logs what
it waits for."""

import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.run import RunSection
from llmtrain.core.logs import log, set_rank, warn
from llmtrain.core.terminal import format_columns
from llmtrain.core.text import one_line, plural
from llmtrain.distributed.control_group import ControlGroup
from llmtrain.distributed.network import setup_network
from llmtrain.distributed.process_info import ProcessInfo, find_process_info, uses_agent_store
from llmtrain.distributed.rendezvous import (
    EARLIER_START_ENDED,
    join_deadline_sec,
    ready_deadline_sec,
    wait_for_master,
)
from llmtrain.errors import JoinError, UsageError
from llmtrain.runs.exit_report import exit_now
from llmtrain.runs.metadata import versions

JOIN_ATTEMPTS = 3
_FORMED = "formed"  # key of the store: all processes have connected to each other
PROGRESS_SEC = 10.0
WATCHDOG_MARGIN_SEC = 30
"""Collectives time out this long after distributed.timeout_sec: llmtrain's watchdog, which names the hung rank, must
be first."""


@dataclass(frozen=True)
class World:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_joined: bool = False
    """Whether there is a process group; a single process needs none."""
    control: ControlGroup = field(default_factory=ControlGroup)
    """For small messages of the training loop."""
    saving: ControlGroup = field(default_factory=ControlGroup)
    """For the thread that writes checkpoints: messages of two threads must not mix."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def current_process_info(distributed: DistributedSection) -> ProcessInfo:
    """Describe this process from its environment and the config, without joining."""
    return find_process_info(os.environ, socket.gethostname(), distributed)


def check_strategy(distributed: DistributedSection, process: ProcessInfo) -> None:
    if distributed.strategy == "none" and process.world_size > 1:
        raise UsageError(
            f"distributed.strategy is none, but the run has {process.world_size} processes.",
            remedy="Set distributed.strategy to ddp or fsdp, or start one process.",
        )


@contextmanager
def join_world(distributed: DistributedSection, run: RunSection) -> Iterator[World]:
    """Join the other processes for the duration of the context. Without a launcher the world size is 1."""
    process = current_process_info(distributed)
    set_rank(process.rank, process.world_size)
    for name, source in sorted(process.sources.items()):
        log("DDP", f"{name} from {source}", logging.DEBUG)
    device = pick_device(run.device, process.local_rank, process.local_world_size)
    try:
        if not process.is_launched:
            yield World(device=device)
            return
        check_strategy(distributed, process)
        world = _join(process, distributed, device)
        try:
            log_processes(world)
            yield world
        finally:
            with suppress(Exception):  # after an error peers may already be gone
                dist.destroy_process_group()
    finally:
        set_rank(0, 1)


def _join(process: ProcessInfo, distributed: DistributedSection, device: torch.device) -> World:
    """Wait for the master, then for all processes, until the deadline."""
    deadline = time.monotonic() + join_deadline_sec(distributed, os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    address = f"{process.master_addr}:{process.master_port}"
    log("DDP", f"joining as rank {process.rank} of {process.world_size} at {address}", logging.DEBUG)
    while True:
        try:
            return _join_once(process, distributed, device, deadline)
        except JoinError as error:
            # An elastic agent must join again before its workers can.
            if error.reason != "earlier_start_ended" or uses_agent_store(os.environ) or time.monotonic() > deadline:
                raise
            log("DDP", EARLIER_START_ENDED, logging.DEBUG)


def _join_once(process: ProcessInfo, distributed: DistributedSection, device: torch.device, deadline: float) -> World:
    started = time.monotonic()
    join_sec = deadline - started
    ready_sec = ready_deadline_sec(distributed, os.environ)
    if process.rank != 0 or uses_agent_store(os.environ):
        wait_for_master(process.master_addr, process.master_port, min(ready_sec, join_sec))
    setup_network(process.master_addr)  # after the wait: before it, the name may not resolve
    try:
        store = _connect(process, deadline)
        remaining = deadline - time.monotonic()
        late = _join_failed(process, "the processes started, but cannot connect to each other", join_sec, join_sec)
        with _stdout_to_stderr(), _exit_after(max(10.0, remaining), late):
            _init_group(process, store, pick_backend(distributed, device), distributed, device)
            world = _make_world(process, device, distributed.timeout_sec)
        store.set(_FORMED, "")
        return world
    except (dist.DistError, RuntimeError, ValueError, OSError) as problem:
        with suppress(Exception):
            dist.destroy_process_group()
        error = _join_failed(process, one_line(problem, 300), time.monotonic() - started, join_sec)
        if isinstance(problem, _ProcessesMissing):
            error.reason = "processes_missing"
        elif isinstance(problem, _EarlierStartEnded):
            error.reason = "earlier_start_ended"
        raise error from None


def _init_group(
    process: ProcessInfo, store: Store, backend: str, distributed: DistributedSection, device: torch.device
) -> None:
    device_id = None
    if backend == "nccl":
        device_id = device
    dist.init_process_group(
        backend,
        store=store,
        rank=process.rank,
        world_size=process.world_size,
        timeout=timedelta(seconds=distributed.timeout_sec + WATCHDOG_MARGIN_SEC),
        device_id=device_id,
    )
    dist.barrier()  # the first collective opens the connections


@contextmanager
def _exit_after(seconds: float, error: JoinError) -> Iterator[None]:
    """Exit the process if the block, which runs C++ code that ignores signals, takes longer."""
    timer = threading.Timer(seconds, exit_now, (error,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """NCCL prints its version to standard output, which is for results."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _connect(process: ProcessInfo, deadline: float) -> Store:
    """The store that all processes share, once all of them have connected. A failed first connection is retried: it may
    be a reset or a restarting name server."""
    for attempt in range(1, JOIN_ATTEMPTS + 1):
        remaining = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            store = _open_store(process, remaining)
            break
        except (dist.DistError, OSError) as problem:
            if attempt == JOIN_ATTEMPTS or time.monotonic() + 1 > deadline:
                raise
            message = one_line(problem, 200)
            warn("DDP", f"cannot connect, retrying (attempt {attempt} of {JOIN_ATTEMPTS}): {message}")
            time.sleep(random.uniform(0.2, 1.0) * attempt)
    shared: Store = PrefixStore("llmtrain", store)
    if process.rank == 0:
        shared.delete_key(_FORMED)  # of an earlier start, in the store of an agent
    else:
        _wait_for_earlier_start(shared, deadline)
    if shared.add(f"here/{process.rank}", 1) == 1:  # a process that restarted while others waited counts once
        shared.add("count", 1)
    _wait_for_all(shared, process.world_size, deadline)
    return shared


def _open_store(process: ProcessInfo, timeout: timedelta) -> Store:
    """Like torch's env://, but without waiting for the others in C++ code that ignores signals."""
    is_agent_store = uses_agent_store(os.environ)
    store: Store = TCPStore(
        process.master_addr,
        process.master_port,
        process.world_size,
        is_master=process.rank == 0 and not is_agent_store,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    if not is_agent_store:
        return store
    # The agent keeps its store while it restarts workers: each attempt needs its own keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"/worker/attempt_{attempt}", store)


def _wait_for_earlier_start(store: Store, deadline: float) -> None:
    """A replaced pod may be faster than the end of the processes that lost it. It cannot join them any more, and gloo
    would wait for a connection that never comes. Their end is a lost connection to the store, or, in the store of an
    agent, the next start of rank 0."""
    was_formed = False
    last_message = -PROGRESS_SEC
    while _is_formed(store, was_formed):
        was_formed = True
        if time.monotonic() > deadline:
            raise _ProcessesMissing("the earlier start of this run has not ended")
        if time.monotonic() > last_message + PROGRESS_SEC:
            warn("DDP", "waiting for the earlier start of this run to end: this process replaces one of it")
            last_message = time.monotonic()
        time.sleep(0.2)


def _is_formed(store: Store, was_formed: bool) -> bool:
    try:
        return bool(store.check([_FORMED]))
    except dist.DistError as problem:
        if was_formed:
            raise _EarlierStartEnded(str(problem)) from None
        raise


def _wait_for_all(store: Store, world_size: int, deadline: float) -> None:
    last_message = time.monotonic()
    while store.add("count", 0) < world_size:  # one request, whatever the world size
        if time.monotonic() < min(deadline, last_message + PROGRESS_SEC):
            time.sleep(0.05)
            continue
        missing = [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
        names = ", ".join(map(str, missing[:10]))
        if len(missing) > 10:
            names += ", ..."
        if time.monotonic() > deadline:
            raise _ProcessesMissing(f"{len(missing)} of {world_size} processes did not join: rank {names}")
        last_message = time.monotonic()
        warn("DDP", f"still waiting for {len(missing)} of {world_size} processes: rank {names}")


class _ProcessesMissing(dist.DistError):
    pass


class _EarlierStartEnded(dist.DistError):
    pass


def _join_failed(process: ProcessInfo, what: str, waited: float, join_sec: float) -> JoinError:
    error = JoinError(
        f"Rank {process.rank} could not join the {process.world_size} processes at "
        f"{process.master_addr}:{process.master_port} after {waited:.0f} s (of {join_sec:.0f} s): {what}",
        remedy="Check that every process was started with the same MASTER_ADDR and MASTER_PORT. `llmtrain doctor` "
        "checks the network.",
    )
    error.details = {"host": process.master_addr, "port": process.master_port, "waited_sec": round(waited, 1)}
    return error


def _make_world(process: ProcessInfo, device: torch.device, timeout_sec: int) -> World:
    size = process.world_size
    timeout = timedelta(seconds=timeout_sec + WATCHDOG_MARGIN_SEC)  # a new group does not inherit it
    groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
    return World(
        rank=process.rank,
        world_size=size,
        local_rank=process.local_rank,
        local_world_size=process.local_world_size,
        node_rank=process.node_rank,
        device=device,
        is_joined=True,
        control=ControlGroup(process.rank, size, groups[0]),
        saving=ControlGroup(process.rank, size, groups[1]),
    )


def log_processes(world: World) -> None:
    """Log a table of all processes, and a warning for each rank whose versions differ from rank 0."""
    rows = world.control.gather(
        {
            "rank": world.rank,
            "node": world.node_rank,
            "local_rank": world.local_rank,
            "device": _device_name(world.device),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": relevant_versions(),
        }
    )
    log("DDP", f"{plural(world.world_size, 'process')}, backend {dist.get_backend()}")
    columns = ("rank", "node", "local_rank", "device", "host", "pid")
    table: list[Sequence[str]] = [columns]
    for row in rows:
        table.append([str(row[column]) for column in columns])
    head, *lines = format_columns(table).splitlines()
    log("DDP", head)
    for row, line in zip(rows, lines, strict=True):
        log("DDP", line, fields={column: row[column] for column in columns})
    for row in rows:
        if world.is_first and row["versions"] != rows[0]["versions"]:
            warn("DDP", f"versions differ: rank {row['rank']} has {row['versions']}, rank 0 has {rows[0]['versions']}")


def relevant_versions() -> dict[str, Any]:
    """Versions of the installed packages that affect results."""
    names = ("llmtrain", "torch", "python", "transformers", "peft", "tokenizers")
    relevant = {name: version for name, version in versions().items() if name in names}
    relevant["torch"] = torch.__version__  # with its build: 2.11.0+cpu
    return relevant


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)}"


def pick_backend(distributed: DistributedSection, device: torch.device) -> str:
    backend = distributed.backend
    if backend == "auto":
        if device.type == "cuda" and dist.is_nccl_available():
            return "nccl"
        return "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise UsageError(
            "distributed.backend is nccl, but this process trains on a CPU.",
            remedy="Set distributed.backend to auto, or use a GPU.",
        )
    return backend


def pick_device(name: str, local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError(
            "run.device is cuda, but this machine has no usable CUDA device.",
            remedy="Set run.device to auto or cpu, or check the driver with nvidia-smi.",
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"No GPU for local rank {local_rank}: this node has {plural(local_world_size, 'process')} and "
            f"{plural(count, 'GPU')}.",
            remedy=f"Start at most {count} processes per node, or set run.device to cpu.",
        )
    return torch.device("cuda", local_rank)
