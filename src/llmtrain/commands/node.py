"""llmtrain node: what a pod runs, and what a person runs by hand on each of several machines."""

import logging
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from llmtrain.commands.processes import explaining, options, run_processes, worker_command
from llmtrain.distributed.env import NAMES
from llmtrain.distributed.exit_codes import ended_before, keeping_the_end, kept_run, refuse_surplus_pod
from llmtrain.env import NODE, PREFETCHED, START
from llmtrain.errors import UsageError
from llmtrain.files import read_json
from llmtrain.logs import log
from llmtrain.runs.heartbeats import announce_start

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.distributed.process_info import NodeInfo
    from llmtrain.runs.directory import RunDirectory

# What a platform says about pods must not be taken for what torchrun says about processes.
STALE = [
    name
    for thing in (
        *("rank", "world_size", "local_rank", "local_world_size", "group_rank"),
        *("nodes", "node_rank", "processes_per_node"),
    )
    for name in NAMES[thing]
]


def command(
    own_command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND ...]", help="Run this instead of training: any torch script."),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    nodes: Annotated[str | None, typer.Option(help="Number of nodes, or MIN:MAX for an elastic job.")] = None,
    processes_per_node: Annotated[
        str | None, typer.Option(help="Processes on each node: a number, `gpu`, `cpu` or `auto`.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which node this is, from 0.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Name or address of node 0.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port on node 0; 29500 unless said otherwise.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Starts after a crash, from the newest checkpoint.")] = 0,
    rdzv_backend: Annotated[str | None, typer.Option(help="static, c10d, etcd-v2. Chosen by itself.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT to meet at, for c10d and etcd-v2.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Name of the job, for c10d and etcd-v2.")] = None,
    rdzv_conf: Annotated[str | None, typer.Option(help="Settings of the rendezvous: KEY=VALUE,...")] = None,
    grace_sec: Annotated[int, typer.Option(min=1, help="How long processes may take to save when told to stop.")] = 600,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Look for problems on all nodes instead of training.")
    ] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Train a tiny classifier instead: `llmtrain smoke`.")] = False,
    model_local_dir: ModelDirOption = None,
    tokenizer_local_dir: TokenizerDirOption = None,
    local_files_only: LocalOnlyOption = False,
    json_: JsonOption = False,
) -> None:
    """Start this node's processes, and see them through. Who this node is is read from the environment (torchrun's
    PET_ variables, an Indexed Job, a StatefulSet, a PyTorchJob, a TrainJob) where no option says it. A run that is
    there already goes on."""
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.load import load_config
    from llmtrain.config.logging import LoggingSection
    from llmtrain.distributed.batch_split import micro_batches_in_step
    from llmtrain.distributed.nested_launcher import check_own_command
    from llmtrain.distributed.process_info import NodeOptions, find_node_info
    from llmtrain.logs import setup_logging

    set_ = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    if sum((bool(own_command), doctor, smoke)) > 1:
        raise UsageError("Give one of: a command, --doctor, --smoke.")
    if own_command:
        check_own_command(own_command, "llmtrain node")
    if own_command and (config or set_):
        raise UsageError("--config and --set are for llmtrain's own trainer; a command of yours has its own arguments.")
    loaded = None if own_command else load_config(config, set_)
    distributed = loaded.distributed if loaded else DistributedSection()
    setup_logging(loaded.logging if loaded else LoggingSection())
    given = NodeOptions(
        nodes=nodes,
        processes_per_node=processes_per_node,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_backend=rdzv_backend,
        rdzv_id=rdzv_id,
        rdzv_conf=rdzv_conf,
        rdzv_endpoint=rdzv_endpoint,
    )
    if nodes and nodes.rpartition(":")[2].isdecimal():
        refuse_surplus_pod(os.environ, socket.gethostname(), int(nodes.rpartition(":")[2]))
    run = kept_run(loaded) if loaded and not doctor and not smoke else None
    if run and (code := ended_before(run)) is not None:
        log("DDP", f"this launch of run {run.run_id} has ended before, for good")
        if code == 0 and loaded and loaded.output.sync_uri:
            copy_again(
                run, loaded.output.sync_uri, find_node_info(os.environ, given, socket.gethostname(), distributed)
            )
        raise typer.Exit(code)  # cli.main then waits
    with keeping_the_end(run):
        check_prefetch()
        place = find_node_info(os.environ, given, socket.gethostname(), distributed)
        if loaded and not doctor and not smoke:
            for count in range(place.min_nodes, place.max_nodes + 1):  # every size that the job may come to have
                micro_batches_in_step(loaded, count * place.processes_per_node)
        for thing, source in sorted(place.sources.items()):
            log("DDP", f"{thing} from {source}", logging.DEBUG)
        os.environ[NODE] = "1"
        if run and place.node_rank is not None and not place.is_elastic:  # an elastic rendezvous notices by itself
            os.environ[START] = announce_start(run.heartbeats, place.node_rank)
        if is_direct(place, max_restarts):
            seat_alone(place, always=bool(own_command))
            if own_command:
                become(own_command, place, distributed)
            elif doctor:
                doctor_command.command(config, set_, json_=json_)
            elif smoke:
                smoke_command.command(config, set_, json_=json_)
            else:
                train_command.command(config, set_, resume="auto", json_=json_)
            return
        own_words = options(config, set_, json_)
        if own_command:
            if shutil.which(own_command[0]) is None:
                raise UsageError(f"{own_command[0]} cannot be run: there is no such command.")
            with explaining(loaded):
                run_processes(place, own_command, distributed, max_restarts, grace_sec, is_ours=False)
        elif doctor:
            with explaining(loaded):
                doctor_command.run_workers(place, worker_command("doctor", *own_words), distributed)
        else:
            what = ["smoke"] if smoke else ["train", "--resume", "auto"]
            with explaining(loaded):
                run_processes(place, worker_command(*what, *own_words), distributed, max_restarts, grace_sec)


def copy_again(run: "RunDirectory", uri: str, place: "NodeInfo") -> None:
    """Node 0 may have been killed while it copied the finished run, after the others had ended. What is there already
    is not sent again."""
    from llmtrain.runs.sync import check_installed, sync_finished

    if place.node_rank in (0, None) and run.finished.is_file():
        check_installed("output.sync_uri is set")
        sync_finished(run, uri)


def check_prefetch() -> None:
    """What the pod's init container found wrong is said here, where exit codes mean the same on every platform."""
    from llmtrain.distributed.worker_exit import error_of

    path = os.environ.get(PREFETCHED)
    report = read_json(Path(path)) if path else None
    if isinstance(report, dict):
        raise error_of(report)


def is_direct(place: "NodeInfo", max_restarts: int) -> bool:
    """Whether this very process can be the node's only one: nothing to start again, and its rank is known."""
    is_fixed = not place.is_elastic and place.rdzv_backend in (None, "static")
    return place.processes_per_node == 1 and is_fixed and not max_restarts


def seat_alone(place: "NodeInfo", always: bool) -> None:
    """Say in torchrun's words who this process is. A single one needs no words, unless a script expects them."""
    for name in STALE:
        os.environ.pop(name, None)
    if place.nodes == 1 and not always:
        return
    os.environ.update(
        RANK=str(place.node_rank),
        WORLD_SIZE=str(place.nodes),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(place.node_rank),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
    )


def become(words: list[str], place: "NodeInfo", distributed: "DistributedSection") -> None:
    """Another program in this process's place, after the same checks and waiting; its exit code is ours."""
    from llmtrain.distributed.network import setup_network
    from llmtrain.distributed.node import ending_while_joining
    from llmtrain.distributed.rendezvous import ready_deadline_sec, wait_for_master

    if place.node_rank != 0:
        with ending_while_joining():
            wait_for_master(place.master_addr, place.master_port, ready_deadline_sec(distributed, os.environ))
    setup_network(place.master_addr)
    os.environ.update(TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0")  # scripts under torchrun read them
    try:
        os.execvp(words[0], words)
    except OSError as problem:
        raise UsageError(f"{words[0]} cannot be run: {problem.strerror}.") from None
