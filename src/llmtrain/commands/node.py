"""llmtrain node: the command that every pod runs, or a person on each of several machines."""

import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.doctor import check_here
from llmtrain.commands.doctor import run_workers as run_doctor_workers
from llmtrain.commands.options import (
    ConfigOption,
    JsonOption,
    LocalOnlyOption,
    ModelDirOption,
    SetOption,
    TokenizerDirOption,
    given_options,
    shorthands,
)
from llmtrain.commands.processes import diagnosed_join_errors, forwarded_options
from llmtrain.commands.smoke import smoke_here
from llmtrain.commands.train import train_here
from llmtrain.core.logs import warn
from llmtrain.errors import UsageError
from llmtrain.launch.code_bundle import check_mounted_code

if TYPE_CHECKING:
    from llmtrain.config.schema import Config
    from llmtrain.distributed.node import Mode, NodeTask
    from llmtrain.distributed.process_info import NodeInfo

# The second names of these options are those of torchrun, which accepts a hyphen and an underscore.
NodesOption = Annotated[
    str | None, typer.Option("--nodes", "--nnodes", help="Number of nodes, or MIN:MAX for an elastic job.")
]
ProcessesOption = Annotated[
    str | None,
    typer.Option(
        "--processes-per-node",
        "--nproc-per-node",
        "--nproc_per_node",
        help="Processes per node: a number, `gpu`, `cpu` or `auto`.",
    ),
]
NodeRankOption = Annotated[int | None, typer.Option("--node-rank", "--node_rank", help="Rank of this node, from 0.")]
MasterAddrOption = Annotated[
    str | None, typer.Option("--master-addr", "--master_addr", help="Host name or address of node 0.")
]
MasterPortOption = Annotated[
    int | None, typer.Option("--master-port", "--master_port", help="Port on node 0. Default: 29500.")
]


def command(
    ctx: typer.Context,
    own_command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Run this command instead of training: any torch script."),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    nodes: NodesOption = None,
    processes_per_node: ProcessesOption = None,
    node_rank: NodeRankOption = None,
    master_addr: MasterAddrOption = None,
    master_port: MasterPortOption = None,
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
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.load import load_config
    from llmtrain.config.logging import LoggingSection
    from llmtrain.core.logs import setup_logging
    from llmtrain.distributed.node import supervise
    from llmtrain.distributed.process_info import NodeOptions

    if sum((bool(own_command), doctor, smoke)) > 1:
        raise UsageError("A command after --, --doctor and --smoke are mutually exclusive.", remedy="Use one of them.")
    check_mounted_code()
    overrides = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    options = NodeOptions(
        nodes, processes_per_node, node_rank, master_addr, master_port, rdzv_backend, rdzv_id, rdzv_conf, rdzv_endpoint
    )
    if own_command:
        if config or overrides:
            raise UsageError(
                "--config and --set apply to llmtrain's trainer, not to a command after --.",
                remedy="Pass the arguments of the command after it.",
            )
        setup_logging(LoggingSection())
        task = _command_task(own_command, given_options(ctx), max_restarts, grace_sec)
        code = supervise(task, options, None, DistributedSection())
    else:
        loaded = load_config(config, overrides)
        setup_logging(loaded.logging)
        mode: Mode = "train"
        if doctor:
            mode = "doctor"
        elif smoke:
            mode = "smoke"
        arguments = forwarded_options(config, overrides, json_)
        task = _llmtrain_task(mode, loaded, arguments, json_, max_restarts, grace_sec)
        code = supervise(task, options, loaded, loaded.distributed)
    if code:
        raise typer.Exit(code)


def _llmtrain_task(
    mode: "Mode", loaded: "Config", arguments: list[str], json_: bool, max_restarts: int, grace_sec: int
) -> "NodeTask":
    """A training, a smoke test or the checks of doctor. `arguments`: what workers get from the command line."""
    from llmtrain.distributed.node import NodeTask

    def run_here(_: "NodeInfo") -> None:
        if mode == "doctor":
            check_here(loaded, json_)
        elif mode == "smoke":
            smoke_here(loaded.distributed, loaded.run, json_)
        else:
            train_here(loaded, json_, resume="auto")

    def run_workers(node: "NodeInfo") -> None:
        from llmtrain.distributed.workers import run_processes, worker_command

        with diagnosed_join_errors(loaded):
            if mode == "doctor":
                run_doctor_workers(node, worker_command("doctor", *arguments), loaded.distributed)
                return
            verb = ["smoke"] if mode == "smoke" else ["train", "--resume", "auto"]
            run_processes(node, worker_command(*verb, *arguments), loaded.distributed, max_restarts, grace_sec)

    return NodeTask(mode, run_here, run_workers, max_restarts)


def _command_task(command: list[str], given: list[str], max_restarts: int, grace_sec: int) -> "NodeTask":
    """A user's command. `given`: the options of the command line."""
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.distributed.nested_launcher import check_command
    from llmtrain.distributed.node import NodeTask
    from llmtrain.distributed.single_process import exec_command
    from llmtrain.distributed.workers import run_processes

    for warning in check_command(command, "node", given):
        warn("DDP", warning)

    def run_workers(node: "NodeInfo") -> None:
        with diagnosed_join_errors(None):
            if shutil.which(command[0]) is None:
                raise UsageError(f"Cannot run {command[0]}: command not found.")
            run_processes(node, command, DistributedSection(), max_restarts, grace_sec, is_llmtrain=False)

    return NodeTask("command", lambda node: exec_command(command, node), run_workers, max_restarts)
