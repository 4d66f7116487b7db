"""The processes of one node: started and watched by torch's elastic agent, their exit codes passed on.

torchrun does the same but ends with 1 whatever its workers ended with, and starts them again whatever the reason.
Here a worker's 64, 65 and 75 come out as they are, and only a crash, or a peer's crash, is worth another start.
"""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmtrain.distributed.env import endpoint
from llmtrain.distributed.network import own_name_is_loopback, reachable_address, setup_network
from llmtrain.distributed.process_info import NodeInfo
from llmtrain.distributed.rendezvous import wait_for_master
from llmtrain.distributed.worker_exit import JoinState, overall
from llmtrain.errors import Interrupted, JoinError, PeerLost, UsageError
from llmtrain.logs import is_debugging, log
from llmtrain.runs.exit_report import ExitReport
from llmtrain.text import one_line

if TYPE_CHECKING:
    from llmtrain.distributed.agent import NodeAgent


@dataclass(frozen=True)
class NodeJob:
    place: NodeInfo
    command: list[str]
    """What every process of the node runs."""
    max_restarts: int = 0
    join_timeout_sec: float = 1800.0
    master_ready_timeout_sec: float = 600.0
    grace_sec: int = 600
    """How long workers may take to stop once they were told to."""


def run_node(job: NodeJob) -> None:
    """Run the node's processes to their end. Raises the error that stands for them all when one did not finish."""
    place = job.place
    backend = pick_rendezvous(place, job.max_restarts)
    with exit_on_signal_while_joining() as joining:
        # Which of the nodes of an elastic job is the master may be for torch to find out: then nobody waits here.
        if place.nodes > 1 and place.node_rank and not backend.startswith("etcd"):
            host, port = meeting_point(place)
            wait_for_master(host, port, job.master_ready_timeout_sec)
        setup_network(place.master_addr)  # the workers inherit it
        ended, was_told = _run_agent(job, backend, joining)
    error = overall(ended, was_told)
    if error is not None:
        raise error


def pick_rendezvous(place: NodeInfo, max_restarts: int) -> str:
    """static: fixed nodes, and who dies is started again by the platform. c10d: agents that find each other again."""
    if place.rdzv_backend == "static" and place.nodes > 1 and max_restarts:
        raise UsageError(
            "The rendezvous static cannot meet again after a restart.",
            remedy="Leave --rdzv-backend out (c10d is then taken), or --max-restarts to the platform.",
        )
    if place.rdzv_backend:
        return place.rdzv_backend
    return "static" if place.nodes > 1 and not place.is_elastic and not max_restarts else "c10d"


def meeting_point(place: NodeInfo) -> tuple[str, int]:
    """Where agents meet: the endpoint where one is named, else the master."""
    return endpoint(place.rdzv_endpoint) if place.rdzv_endpoint else (place.master_addr, place.master_port)


@contextmanager
def exit_on_signal_while_joining() -> Iterator[JoinState]:
    """While nodes wait for each other there is nothing to save: a signal ends the process at once, with 75. The
    kernel's end of Python's signal handling writes to a pipe, which a thread reads even while the main one waits."""
    state = JoinState()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while data := os.read(reading, 1):
            if data[0] in (signal.SIGTERM, signal.SIGINT) and state.waiting:
                log("DDP", f"{signal.Signals(data[0]).name}: stopped while waiting for the other nodes")
                os._exit(Interrupted.exit_code)

    def note(number: int, frame: FrameType | None) -> None:
        """The thread acts; without a handler of our own there would be nothing written for it."""

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=listen, name="signals", daemon=True).start()
    try:
        yield state
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)  # ends the thread


def _run_agent(job: NodeJob, backend: str, joining: JoinState) -> tuple[list[ExitReport], bool]:
    """How every worker ended, and whether the node was told to stop."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

    was_told = False
    with tempfile.TemporaryDirectory(prefix="llmtrain-node-") as folder:
        agent = _make_agent(job, backend, joining, folder)
        try:
            agent.run()
        except SignalException as told:
            was_told = True
            with suppress(SignalException):  # a second signal while the workers are stopping
                log("DDP", f"{signal.Signals(told.sigval).name}: the processes of this node have stopped")
        except RendezvousClosedError:
            raise PeerLost(
                "The other nodes have given the run up.", remedy="The log of the node that gave up first says why."
            ) from None
        except Exception as problem:
            if isinstance(problem, DistError | RendezvousError | OSError) or _is_etcds(problem):
                raise _no_rendezvous(job, backend, problem) from None
            raise
        finally:
            # A meeting that is closed in etcd stays closed for two hours, and the pods that the platform starts instead
            # of these could not meet there. (That of c10d ends with node 0.)
            is_left_open = backend.startswith("etcd") and not job.max_restarts
            agent.end_all(close_meeting=not was_told and not is_left_open)
        return agent.ended(), was_told


def _make_agent(job: NodeJob, backend: str, joining: JoinState, folder: str) -> "NodeAgent":
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from llmtrain.distributed.agent import NodeAgent

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.INFO if is_debugging() else logging.CRITICAL)  # we speak ourselves
    place = job.place
    is_static, is_alone = backend == "static", place.max_nodes == 1
    if not is_alone:
        # Else an agent that has met others before does not tell a newcomer where the store is, which then waits for
        # ever: a replaced pod, or a node that joins an elastic job (torch 2.11 to 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    meeting, local_addr = _meeting(place), _local_addr(place)
    log("DDP", f"rendezvous {backend} at {meeting}, processes here: {place.processes_per_node}")
    try:
        handler = registry.get_rendezvous_handler(
            RendezvousParameters(
                backend=backend,
                endpoint=meeting,
                run_id=place.rdzv_id or "llmtrain",
                min_nodes=place.min_nodes,
                max_nodes=place.max_nodes,
                local_addr=local_addr,
                **_settings(job, backend),
            )
        )
        spec = WorkerSpec(
            role="train",
            local_world_size=place.processes_per_node,
            entrypoint=job.command[0],
            args=tuple(job.command[1:]),
            rdzv_handler=handler,
            max_restarts=job.max_restarts,
            monitor_interval=0.1,
            master_addr=place.master_addr if is_static else None,
            master_port=place.master_port if is_static else None,
            local_addr=local_addr,
        )
        return NodeAgent(spec, DefaultLogsSpecs(log_dir=folder), job.grace_sec, joining)
    except TypeError as problem:
        raise UsageError(f"--rdzv-conf has a setting that cannot be given: {problem}.") from None
    except ImportError as problem:
        raise UsageError(
            f"The rendezvous backend {backend} needs a package: {problem}.",
            remedy="Install the extra: pip install 'llmtrain[etcd]' (it is python-etcd); or use c10d.",
        ) from None
    except Exception as problem:
        if isinstance(problem, DistError | RendezvousError | ValueError | OSError) or _is_etcds(problem):
            raise _no_rendezvous(job, backend, problem) from None
        raise


def _local_addr(place: NodeInfo) -> str | None:
    """What this node tells the others to find it by. None: its own name."""
    if place.max_nodes == 1:
        return "127.0.0.1"
    return reachable_address() if own_name_is_loopback() else None


def _meeting(place: NodeInfo) -> str:
    """Where the agents meet. A node alone takes any free port, unless one was asked for."""
    is_free = place.max_nodes == 1 and place.sources.get("master_port", "default") == "default"
    return place.rdzv_endpoint or f"{place.master_addr}:{0 if is_free else place.master_port}"


def _settings(job: NodeJob, backend: str) -> dict[str, Any]:
    place, timeout = job.place, int(job.join_timeout_sec)
    settings: dict[str, Any] = {"timeout": timeout, "join_timeout": timeout, "read_timeout": timeout}
    if backend == "c10d" and place.node_rank is not None:
        settings["is_host"] = str(place.node_rank == 0).lower()
    settings |= place.rdzv_conf
    return {**settings, "rank": place.node_rank} if backend == "static" else settings


def _is_etcds(problem: Exception) -> bool:
    return type(problem).__module__.split(".")[0] == "etcd"


def _no_rendezvous(job: NodeJob, backend: str, problem: Exception) -> JoinError:
    place = job.place
    what = one_line(problem, 300)
    host, port = meeting_point(place)
    remedy = (
        "Check that the etcd server is reachable from every node and serves the v2 API (etcd --enable-v2, up to 3.5)."
        if backend.startswith("etcd")
        else "Check that every node has been started with the same --nodes and --master-addr; "
        "`llmtrain node --doctor` looks closer."
    )
    error = JoinError(
        f"The {place.nodes} nodes did not find each other at {host}:{port} ({backend}) "
        f"(deadline {job.join_timeout_sec:.0f} s): {what}",
        remedy=remedy,
    )
    error.details = {"host": host, "port": port, "node": socket.gethostname()}
    return error
