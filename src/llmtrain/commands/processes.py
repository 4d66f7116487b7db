"""Worker processes of this node, for the commands that start them: train, node, doctor, smoke."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmtrain.env import WORKER, scoped_environment
from llmtrain.errors import JoinError, UsageError

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.schema import Config
    from llmtrain.distributed.process_info import NodeInfo


def worker_command(*arguments: str) -> list[str]:
    """The command line of llmtrain in a new process; -P ignores a directory named llmtrain in the working directory."""
    return [sys.executable, "-P", "-m", "llmtrain", *arguments]


def forwarded_options(config: str | None, overrides: list[str], json_: bool) -> list[str]:
    arguments = ["--config", config] if config else []
    for override in overrides:
        arguments += ["--set", override]
    return [*arguments, "--json"] if json_ else arguments


def local_node(processes: int) -> "NodeInfo":
    """This machine as the only node of a run, with this number of processes."""
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.distributed.process_info import NodeOptions, find_node_info

    if "LOCAL_RANK" in os.environ:
        raise UsageError(
            "--processes starts processes, but this process was started by a launcher such as torchrun (LOCAL_RANK "
            "is set).",
            remedy="Use either --processes or the launcher.",
        )
    options = NodeOptions(nodes="1", processes_per_node=str(processes))
    return find_node_info({}, options, socket.gethostname(), DistributedSection())


@contextmanager
def diagnosed_join_errors(config: "Config | None") -> Iterator[None]:
    """When processes fail to join, print the findings of the local doctor checks before the error."""
    try:
        yield
    except JoinError as error:
        from llmtrain.config.schema import Config
        from llmtrain.doctor.report import explain_failed_start

        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per node
            explain_failed_start(error, config or Config())
        raise


def run_processes(
    node: "NodeInfo",
    command: list[str],
    distributed: "DistributedSection",
    max_restarts: int = 0,
    grace_sec: int = 600,
    is_llmtrain: bool = True,
) -> None:
    """Run a command in every process of the node until they end. Raises one error for all of them if any fails."""
    from llmtrain.distributed.env import thread_variables
    from llmtrain.distributed.node import NodeJob, run_node
    from llmtrain.distributed.rendezvous import join_deadline_sec, ready_deadline_sec

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
