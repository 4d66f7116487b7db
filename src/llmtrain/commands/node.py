"""llmtrain node: the command that every pod runs, or a person on each of several machines."""

import logging
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmtrain.code_bundle import check_mounted_code
from llmtrain.commands import doctor as doctor_command
from llmtrain.commands import smoke as smoke_command
from llmtrain.commands import train as train_command
from llmtrain.commands.options import (
    ConfigOption,
    JsonOption,
    LocalOnlyOption,
    ModelDirOption,
    SetOption,
    TokenizerDirOption,
    shorthands,
)
from llmtrain.commands.processes import diagnosed_join_errors, forwarded_options, run_processes, worker_command
from llmtrain.distributed.exit_codes import ended_before, record_end, refuse_surplus_pod, run_to_record
from llmtrain.distributed.process_info import NodeInfo, NodeOptions, find_node_info
from llmtrain.env import NODE, PREFETCHED, START, scoped_environment
from llmtrain.errors import UsageError
from llmtrain.files import read_json
from llmtrain.logs import log
from llmtrain.runs.exit_report import ExitReport, publish, report_to_run, set_position
from llmtrain.runs.heartbeats import announce_start

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.schema import Config
    from llmtrain.runs.directory import RunDirectory


def command(
    own_command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Run this command instead of training: any torch script."),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    nodes: Annotated[str | None, typer.Option(help="Number of nodes, or MIN:MAX for an elastic job.")] = None,
    processes_per_node: Annotated[
        str | None, typer.Option(help="Processes per node: a number, `gpu`, `cpu` or `auto`.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="Rank of this node, from 0.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Host name or address of node 0.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port on node 0. Default: 29500.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts after a crash, from the newest checkpoint.")] = 0,
    rdzv_backend: Annotated[
        str | None, typer.Option(help="static, c10d or etcd-v2. Default: static, or c10d with restarts.")
    ] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of the rendezvous (c10d, etcd-v2).")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Job id of the rendezvous (c10d, etcd-v2).")] = None,
    rdzv_conf: Annotated[str | None, typer.Option(help="Rendezvous settings: KEY=VALUE,...")] = None,
    grace_sec: Annotated[int, typer.Option(min=1, help="Seconds that workers have to save after SIGTERM.")] = 600,
    doctor: Annotated[bool, typer.Option("--doctor", help="Run `llmtrain doctor` on all nodes.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Run `llmtrain smoke` on all nodes.")] = False,
    model_local_dir: ModelDirOption = None,
    tokenizer_local_dir: TokenizerDirOption = None,
    local_files_only: LocalOnlyOption = False,
    json_: JsonOption = False,
) -> None:
    """Start and supervise the processes of this node. Its rank is read from the environment (torchrun's PET_*
    variables, an Indexed Job, a StatefulSet, a PyTorchJob or a TrainJob) unless options set it. An existing run is
    resumed."""
    if sum((bool(own_command), doctor, smoke)) > 1:
        raise UsageError("A command after --, --doctor and --smoke are mutually exclusive.", remedy="Use one of them.")
    options = NodeOptions(
        nodes, processes_per_node, node_rank, master_addr, master_port, rdzv_backend, rdzv_id, rdzv_conf, rdzv_endpoint
    )
    task: Task = "command" if own_command else "doctor" if doctor else "smoke" if smoke else "train"
    overrides = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    _run(_Request(task, own_command or [], config, overrides, options, max_restarts, grace_sec, json_))


Task = Literal["command", "doctor", "smoke", "train"]


@dataclass(frozen=True)
class _Request:
    """What the command line asks for."""

    task: Task
    command: list[str]
    config: str | None
    overrides: list[str]
    options: NodeOptions
    max_restarts: int
    grace_sec: int
    json: bool


def _run(request: _Request) -> None:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.logging import LoggingSection
    from llmtrain.logs import setup_logging

    check_mounted_code()
    config = _load(request)
    distributed = config.distributed if config else DistributedSection()
    setup_logging(config.logging if config else LoggingSection())
    hostname = socket.gethostname()
    max_nodes = (request.options.nodes or "").rpartition(":")[2]
    if max_nodes.isdecimal():
        refuse_surplus_pod(os.environ, hostname, int(max_nodes))
    run = run_to_record(config) if config and request.task == "train" else None
    if run and (before := ended_before(run)) is not None:
        log("DDP", f"this launch of run {run.run_id} has already ended")
        if before.error:
            publish(before)
        if before.exit_code == 0 and config and config.output.sync_uri:
            _sync_again(run, config.output.sync_uri, find_node_info(os.environ, request.options, hostname, distributed))
        raise typer.Exit(before.exit_code or 0)
    with record_end(run):
        _raise_prefetch_error()
        node = find_node_info(os.environ, request.options, hostname, distributed)
        if config and request.task == "train":
            _check_world_sizes(config, node)
        set_position(node_rank=node.node_rank)
        if run:
            report_to_run(run.exits)
        for name, source in sorted(node.sources.items()):
            log("DDP", f"{name} from {source}", logging.DEBUG)
        with scoped_environment(_node_variables(run, node)):
            _start(request, config, node, distributed)


def _load(request: _Request) -> "Config | None":
    """The config; None for a user's command, which has none."""
    from llmtrain.config.load import load_config
    from llmtrain.distributed.nested_launcher import check_own_command

    if request.task != "command":
        return load_config(request.config, request.overrides)
    check_own_command(request.command, "llmtrain node")
    if request.config or request.overrides:
        raise UsageError(
            "--config and --set apply to llmtrain's trainer, not to a command after --.",
            remedy="Pass the arguments of the command after it.",
        )
    return None


def _check_world_sizes(config: "Config", node: NodeInfo) -> None:
    """Refuse a job if any number of nodes that it may reach does not fit the micro-batches of a step."""
    from llmtrain.distributed.batch_split import micro_batches_in_step

    for nodes in range(node.min_nodes, node.max_nodes + 1):
        micro_batches_in_step(config, nodes * node.processes_per_node)


def _node_variables(run: "RunDirectory | None", node: NodeInfo) -> dict[str, str]:
    variables = {NODE: "1"}
    if run and node.node_rank is not None and not node.is_elastic:  # an elastic rendezvous detects restarts itself
        variables[START] = announce_start(run.heartbeats, node.node_rank)
    return variables


def _start(request: _Request, config: "Config | None", node: NodeInfo, distributed: "DistributedSection") -> None:
    from llmtrain.distributed.single_process import exec_command, is_single_process, set_process_variables

    if is_single_process(node, request.max_restarts):
        set_process_variables(node, is_command=request.task == "command")
        if request.task == "command":
            exec_command(request.command, node, distributed)
        else:
            _run_in_this_process(request)
        return
    arguments = forwarded_options(request.config, request.overrides, request.json)
    with diagnosed_join_errors(config):
        if request.task == "command":
            if shutil.which(request.command[0]) is None:
                raise UsageError(f"Cannot run {request.command[0]}: command not found.")
            run_processes(
                node, request.command, distributed, request.max_restarts, request.grace_sec, is_llmtrain=False
            )
        elif request.task == "doctor":
            doctor_command.run_workers(node, worker_command("doctor", *arguments), distributed)
        else:
            verb = ["smoke"] if request.task == "smoke" else ["train", "--resume", "auto"]
            words = worker_command(*verb, *arguments)
            run_processes(node, words, distributed, request.max_restarts, request.grace_sec)


def _run_in_this_process(request: _Request) -> None:
    if request.task == "doctor":
        doctor_command.command(request.config, request.overrides, json_=request.json)
    elif request.task == "smoke":
        smoke_command.command(request.config, request.overrides, json_=request.json)
    else:
        train_command.command(request.config, request.overrides, resume="auto", json_=request.json)


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
