"""The node of a run, supervised: what `llmtrain node` does in every pod, or a person on each of several machines.

Finds out which node this is, and whether the run has ended already; then does the work of the node in this process or
in worker processes (workers.py), and records how it ended.
"""

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmtrain.core.env import NODE, PREFETCHED, START, scoped_environment
from llmtrain.core.files import read_json
from llmtrain.core.logs import log
from llmtrain.distributed.platform_codes import ended_before, record_end, refuse_surplus_pod, run_to_record
from llmtrain.distributed.process_info import NodeInfo, NodeOptions, find_node_info
from llmtrain.distributed.single_process import is_single_process, set_process_variables
from llmtrain.errors import ExitCode
from llmtrain.runs.exit_report import ExitReport, publish, set_position, set_run_exits
from llmtrain.runs.heartbeats import announce_start

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.schema import Config
    from llmtrain.config.trainer import TrainerSection
    from llmtrain.runs.directory import RunDirectory

Mode = Literal["command", "doctor", "smoke", "train"]
"""What a node does; launch has `hold` too, in which a pod runs no node."""


@dataclass(frozen=True)
class NodeTask:
    """What a node does, in the two ways it can."""

    mode: Mode
    run_here: Callable[[NodeInfo], None]
    """Does the work in this process, which is the only one of the node."""
    run_workers: Callable[[NodeInfo], None]
    """Starts worker processes, which do the work."""
    max_restarts: int = 0


def supervise(
    task: NodeTask, options: NodeOptions, config: "Config | None", distributed: "DistributedSection"
) -> ExitCode | int:
    """Do the work of this node until it ends. Returns the exit code; raises the error of a run that failed. `config` is
    None for a user's command, which has none."""
    hostname = socket.gethostname()
    max_nodes = (options.nodes or "").rpartition(":")[2]
    if max_nodes.isdecimal():
        refuse_surplus_pod(os.environ, hostname, int(max_nodes))
    run = run_to_record(config.output) if config and task.mode == "train" else None
    if run and config:
        before = ended_before(run)
        if before is not None:
            log("DDP", f"this launch of run {run.run_id} has already ended")
            if before.error:
                publish(before)
            if before.exit_code == ExitCode.FINISHED and config.output.sync_uri:
                _sync_again(run, config.output.sync_uri, find_node_info(os.environ, options, hostname, distributed))
            return before.exit_code or ExitCode.FINISHED
    with record_end(run):
        _raise_prefetch_error()
        node = find_node_info(os.environ, options, hostname, distributed)
        if config and task.mode == "train":
            _check_world_sizes(config.trainer, distributed, node)
        set_position(node_rank=node.node_rank)
        if run:
            set_run_exits(run.exits)
        for name, source in sorted(node.sources.items()):
            log("DDP", f"{name} from {source}", logging.DEBUG)
        with scoped_environment(_node_variables(run, node)):
            is_command = task.mode == "command"
            if is_single_process(node, task.max_restarts, is_command):
                set_process_variables(node, is_command)
                task.run_here(node)
            else:
                task.run_workers(node)
    return ExitCode.FINISHED


def _check_world_sizes(trainer: "TrainerSection", distributed: "DistributedSection", node: NodeInfo) -> None:
    """Refuse a job if any number of nodes that it may reach does not fit the micro-batches of a step."""
    from llmtrain.distributed.batch_split import micro_batches_in_step

    for nodes in range(node.min_nodes, node.max_nodes + 1):
        micro_batches_in_step(trainer, distributed, nodes * node.processes_per_node)


def _node_variables(run: "RunDirectory | None", node: NodeInfo) -> dict[str, str]:
    variables = {NODE: "1"}
    if run and node.node_rank is not None and not node.is_elastic:  # an elastic rendezvous detects restarts itself
        variables[START] = announce_start(run.heartbeats, node.node_rank)
    return variables


def _sync_again(run: "RunDirectory", uri: str, node: NodeInfo) -> None:
    """Complete the copy of a finished run: node 0 may have been killed while it copied, after the others had ended."""
    from llmtrain.runs.sync import check_installed, sync_finished

    if node.node_rank in (0, None) and run.finished.is_file():
        check_installed("output.sync_uri is set")
        sync_finished(run, uri)


def _raise_prefetch_error() -> None:
    """Raise the error that the init container reported: an exit code has one meaning here, but not there."""
    path = os.environ.get(PREFETCHED)
    report = read_json(Path(path)) if path else None
    if isinstance(report, dict):
        error = ExitReport.of_worker(0, int(report.get("exit_code") or 1), report).as_error()
        error.reason = error.reason or "prefetch"
        raise error
