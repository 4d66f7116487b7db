"""Starting processes of this node, for the commands that can: train, node, doctor, smoke."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmtrain.env import WORKER
from llmtrain.errors import JoinError, UsageError

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.schema import Config
    from llmtrain.distributed.process_info import NodeInfo


def worker_command(*words: str) -> list[str]:
    """llmtrain again, in a process of its own; -P: a directory named llmtrain here is not it."""
    return [sys.executable, "-P", "-m", "llmtrain", *words]


def options(config: str | None, overrides: list[str], json_: bool) -> list[str]:
    words = ["--config", config] if config else []
    for override in overrides:
        words += ["--set", override]
    return [*words, "--json"] if json_ else words


def place_here(processes: int) -> "NodeInfo":
    """This machine alone, with so many processes."""
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.distributed.process_info import NodeOptions, find_node_info

    if "LOCAL_RANK" in os.environ:
        raise UsageError(
            "--processes starts processes, but a launcher (torchrun) has started this one already.",
            remedy="Leave one of the two out.",
        )
    given = NodeOptions(nodes="1", processes_per_node=str(processes))
    return find_node_info({}, given, socket.gethostname(), DistributedSection())


@contextmanager
def explaining(config: "Config | None") -> Iterator[None]:
    """A start-up in which the processes do not find each other ends with a look at this machine."""
    try:
        yield
    except JoinError as error:
        from llmtrain.config.schema import Config
        from llmtrain.doctor.report import explain_failed_start

        if os.environ.get("LOCAL_RANK", "0") == "0":  # one voice a node: the others would say the same
            explain_failed_start(error, config or Config())
        raise


def run_processes(
    place: "NodeInfo",
    command: list[str],
    distributed: "DistributedSection",
    max_restarts: int = 0,
    grace_sec: int = 600,
    is_ours: bool = True,
) -> None:
    """Run a command in every process of the node, to the end. Raises what stands for them all if one fails."""
    from llmtrain.distributed.env import share_cores
    from llmtrain.distributed.node import NodeJob, run_node
    from llmtrain.distributed.rendezvous import join_deadline_sec, ready_deadline_sec

    share_cores(place.processes_per_node)
    if is_ours:
        os.environ[WORKER] = "1"  # errors are told to us, and we print them once
    try:
        run_node(
            NodeJob(
                place,
                command,
                max_restarts,
                join_deadline_sec(distributed, os.environ),
                ready_deadline_sec(distributed, os.environ),
                grace_sec,
            )
        )
    finally:
        os.environ.pop(WORKER, None)
