"""Runs the worker processes of one node with torch's elastic agent, and returns their exit code.

torchrun exits with 1 whatever the exit code of its workers, and restarts them whatever the reason. Here exit codes 64,
65 and 75 are passed on, and workers are restarted only after a crash, of their own or of a peer.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmtrain.config.distributed import DistributedSection
from llmtrain.core.env import WORKER, scoped_environment
from llmtrain.core.install import install_command
from llmtrain.core.interrupts import stop_signals
from llmtrain.core.logs import is_debugging, log
from llmtrain.core.text import one_line
from llmtrain.distributed.machine_limits import thread_variables
from llmtrain.distributed.network import hostname_is_loopback, reachable_address, setup_network
from llmtrain.distributed.platform_env import parse_endpoint
from llmtrain.distributed.process_info import NodeInfo, NodeOptions, find_node_info
from llmtrain.distributed.rendezvous import (
    EARLIER_START_ENDED,
    join_deadline_sec,
    ready_deadline_sec,
    wait_for_master,
)
from llmtrain.distributed.worker_exit import JoinState, joined_earlier_start, merge_exits
from llmtrain.errors import Interrupted, JoinError, PeerLost, UsageError
from llmtrain.runs.exit_report import ExitReport

if TYPE_CHECKING:
    from llmtrain.distributed.agent import NodeAgent


@dataclass(frozen=True)
class NodeJob:
    node: NodeInfo
    command: list[str]
    """Run by every process of the node."""
    max_restarts: int = 0
    join_timeout_sec: float = 1800.0
    master_ready_timeout_sec: float = 600.0
    grace_sec: int = 600
    """Time that workers have to stop after SIGTERM."""


def worker_command(*arguments: str) -> list[str]:
    """The command line of llmtrain in a new process; -P ignores a directory named llmtrain in the working directory."""
    return [sys.executable, "-P", "-m", "llmtrain", *arguments]


def local_node(processes: int) -> NodeInfo:
    """This machine as the only node of a run, with this number of processes."""
    if "LOCAL_RANK" in os.environ:
        raise UsageError(
            "--processes starts processes, but this process was started by a launcher such as torchrun (LOCAL_RANK "
            "is set).",
            remedy="Use either --processes or the launcher.",
        )
    options = NodeOptions(nodes="1", processes_per_node=str(processes))
    return find_node_info({}, options, socket.gethostname(), DistributedSection())


def run_processes(
    node: NodeInfo,
    command: list[str],
    distributed: DistributedSection,
    max_restarts: int = 0,
    grace_sec: int = 600,
    is_llmtrain: bool = True,
) -> None:
    """Run a command in every process of the node until they end. Raises one error for all of them if any fails."""
    variables = thread_variables(node.processes_per_node, os.environ)
    if is_llmtrain:
        variables[WORKER] = "1"  # workers report their errors to this process, which prints one of them
    job = NodeJob(
        node,
        command,
        max_restarts,
        join_deadline_sec(distributed, os.environ),
        ready_deadline_sec(distributed, os.environ),
        grace_sec,
    )
    with scoped_environment(variables):
        run_node(job)


def run_node(job: NodeJob) -> None:
    """Run the processes of the node until they end. Raises one error for all of them if any did not finish."""
    backend = pick_rendezvous(job.node, job.max_restarts)
    deadline = time.monotonic() + job.join_timeout_sec
    with exit_on_signal_while_joining() as join_state:
        while True:
            exits, was_interrupted, last_crash = _join_and_run(job, backend, join_state)
            # With c10d and etcd the agents join again themselves.
            is_early = backend == "static" and not was_interrupted and joined_earlier_start(exits)
            if not is_early or time.monotonic() > deadline:
                break
            join_state.is_waiting = True
            log("DDP", EARLIER_START_ENDED)
    error = merge_exits(exits, was_interrupted, last_crash)
    if error is not None:
        raise error


def _join_and_run(job: NodeJob, backend: str, join_state: JoinState) -> tuple[list[ExitReport], bool, str | None]:
    node = job.node
    # Node 0 is the master itself. Without a node_rank the master is not known yet: torch finds it.
    is_another_node = node.node_rank is not None and node.node_rank > 0
    if node.nodes > 1 and is_another_node and not backend.startswith("etcd"):
        host, port = rendezvous_address(node)
        wait_for_master(host, port, job.master_ready_timeout_sec)
    setup_network(node.master_addr)  # inherited by the workers
    return _run_agent(job, backend, join_state)


def pick_rendezvous(node: NodeInfo, max_restarts: int) -> str:
    """static for a fixed number of nodes that the platform restarts, c10d where the agents join again themselves."""
    if node.rdzv_backend == "static" and node.nodes > 1 and max_restarts:
        raise UsageError(
            "The static rendezvous does not support --max-restarts with several nodes.",
            remedy="Omit --rdzv-backend (c10d is then used), or omit --max-restarts and let the platform restart pods.",
        )
    if node.rdzv_backend:
        return node.rdzv_backend
    if node.nodes > 1 and not node.is_elastic and not max_restarts:
        return "static"
    return "c10d"


def rendezvous_address(node: NodeInfo) -> tuple[str, int]:
    """Host and port of the rendezvous: its endpoint if one is set, else the master."""
    if node.rdzv_endpoint:
        return parse_endpoint(node.rdzv_endpoint)
    return node.master_addr, node.master_port


@contextmanager
def exit_on_signal_while_joining() -> Iterator[JoinState]:
    """While nodes wait for each other there is nothing to save: a signal exits at once, with 75. The main
    thread may be blocked in C++, so a thread reads the signals from Python's wakeup pipe."""
    state = JoinState()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def watch_signals() -> None:
        while data := os.read(read_end, 1):
            if data[0] in before and state.is_waiting:
                log("DDP", f"received {signal.Signals(data[0]).name} while waiting for the other nodes")
                os._exit(Interrupted.exit_code)

    def ignore(number: int, frame: FrameType | None) -> None:
        """Python writes to the wakeup pipe only for signals that have a handler."""

    before = {number: signal.signal(number, ignore) for number in stop_signals()}
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=watch_signals, name="signals", daemon=True).start()
    try:
        yield state
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)  # ends the thread


def _run_agent(job: NodeJob, backend: str, join_state: JoinState) -> tuple[list[ExitReport], bool, str | None]:
    """The exits of all workers, whether the node was interrupted by a signal, and why workers were restarted last."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

    was_interrupted = False
    with tempfile.TemporaryDirectory(prefix="llmtrain-node-") as log_dir:
        agent = _make_agent(job, backend, join_state, log_dir)
        try:
            agent.run()
        except SignalException as interrupt:
            was_interrupted = True
            level = logging.DEBUG
            if job.node.nodes > 1:
                level = logging.INFO
            with suppress(SignalException):  # a second signal while the workers are stopping
                log("DDP", f"{signal.Signals(interrupt.sigval).name}: the processes of this node have stopped", level)
        except RendezvousClosedError:
            raise PeerLost(
                "The other nodes have ended the run.", remedy="See the log of the node that ended first."
            ) from None
        except Exception as problem:
            if isinstance(problem, DistError | RendezvousError | OSError) or _is_etcd_error(problem):
                if join_state.is_waiting:
                    raise _rendezvous_failed(job, backend, problem) from None
                raise PeerLost(
                    f"The rendezvous ({backend}) was lost while the processes of this node were training: "
                    f"{one_line(problem, 300)}",
                    remedy="See the log of the node that ended first. A restart of all nodes resumes the run.",
                ) from None
            raise
        finally:
            # A rendezvous closed in etcd stays closed for two hours, and the pods that replace these could not join it.
            # (That of c10d ends with node 0.)
            is_left_open = backend.startswith("etcd") and not job.max_restarts
            agent.kill_workers(close_rendezvous=not was_interrupted and not is_left_open)
        return agent.worker_exits(), was_interrupted, agent.last_crash


def _make_agent(job: NodeJob, backend: str, join_state: JoinState, log_dir: str) -> "NodeAgent":
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from llmtrain.distributed.agent import NodeAgent

    _quiet_torch_elastic()
    node = job.node
    if node.max_nodes > 1:
        # Otherwise an agent that has joined before does not announce the store's address to a new one (a replaced pod,
        # or a node that joins an elastic job), which then waits forever (torch 2.11 to 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    endpoint = _rendezvous_endpoint(node)
    local_addr = _local_addr(node)
    log("DDP", f"rendezvous {backend} at {endpoint}, processes on this node: {node.processes_per_node}")
    try:
        handler = registry.get_rendezvous_handler(
            RendezvousParameters(
                backend=backend,
                endpoint=endpoint,
                run_id=node.rdzv_id or "llmtrain",
                min_nodes=node.min_nodes,
                max_nodes=node.max_nodes,
                local_addr=local_addr,
                **_settings(job, backend),
            )
        )
        spec = WorkerSpec(
            role="train",
            local_world_size=node.processes_per_node,
            entrypoint=job.command[0],
            args=tuple(job.command[1:]),
            rdzv_handler=handler,
            max_restarts=job.max_restarts,
            monitor_interval=0.1,  # seconds between two looks at the workers
            local_addr=local_addr,
        )
        if backend == "static":  # the others find the master themselves
            spec.master_addr = node.master_addr
            spec.master_port = node.master_port
        return NodeAgent(spec, DefaultLogsSpecs(log_dir=log_dir), job.grace_sec, join_state)
    except TypeError as problem:
        raise UsageError(f"--rdzv-conf has an unsupported setting: {problem}.") from None
    except ImportError as problem:
        raise UsageError(
            f"The rendezvous backend {backend} needs a package that is not installed: {problem}.",
            remedy=f"{install_command('etcd')} (python-etcd), or use the backend c10d.",
        ) from None
    except Exception as problem:
        if isinstance(problem, DistError | RendezvousError | ValueError | OSError) or _is_etcd_error(problem):
            raise _rendezvous_failed(job, backend, problem) from None
        raise


def _quiet_torch_elastic() -> None:
    """Problems are reported by llmtrain's errors; torch logs each of them several times, with tracebacks."""
    level = logging.CRITICAL
    if is_debugging():
        level = logging.INFO
    for name in list(logging.root.manager.loggerDict):  # a copy: getLogger changes it
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(level)


def _local_addr(node: NodeInfo) -> str | None:
    """The address that this node announces to the others. None: its host name."""
    if node.max_nodes == 1:
        return "127.0.0.1"
    if hostname_is_loopback():
        return reachable_address()
    return None


def _rendezvous_endpoint(node: NodeInfo) -> str:
    """host:port of the rendezvous. A single node uses any free port unless one is set."""
    if node.rdzv_endpoint:
        return node.rdzv_endpoint
    port = node.master_port
    if node.max_nodes == 1 and node.sources.get("master_port", "default") == "default":
        port = 0
    return f"{node.master_addr}:{port}"


def _settings(job: NodeJob, backend: str) -> dict[str, Any]:
    node = job.node
    timeout = int(job.join_timeout_sec)
    settings: dict[str, Any] = {"timeout": timeout, "join_timeout": timeout, "read_timeout": timeout}
    if backend == "c10d" and node.node_rank is not None:
        settings["is_host"] = str(node.node_rank == 0).lower()
    settings |= node.rdzv_conf
    if backend == "static":
        settings["rank"] = node.node_rank
    return settings


def _is_etcd_error(problem: Exception) -> bool:
    return type(problem).__module__.split(".")[0] == "etcd"


def _rendezvous_failed(job: NodeJob, backend: str, problem: Exception) -> JoinError:
    host, port = rendezvous_address(job.node)
    remedy = (
        "Check that every node was started with the same --nodes and --master-addr. `llmtrain node --doctor` checks "
        "the network between them."
    )
    if backend.startswith("etcd"):
        remedy = (
            "Check that the etcd server is reachable from every node and serves the v2 API (etcd --enable-v2, up to "
            "3.5)."
        )
    error = JoinError(
        f"The {job.node.nodes} nodes did not find each other at {host}:{port} within {job.join_timeout_sec:.0f} s "
        f"(rendezvous {backend}): {one_line(problem, 300)}",
        remedy=remedy,
    )
    error.details = {"host": host, "port": port, "node": socket.gethostname()}
    return error
