"""llmtrain doctor: preflight checks."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption
from llmtrain.commands.processes import forwarded_options
from llmtrain.errors import LlmtrainError, UsageError

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.schema import Config
    from llmtrain.distributed.process_info import NodeInfo
    from llmtrain.doctor.report import Report


CHECK_FAILED = 1  # exit code


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes on this machine.")] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Check this machine only, without the other processes of the job.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Check this machine before training, or all processes of a job if started as one of them. Exits with 1 if a check
    fails."""
    from llmtrain.config.load import load_config
    from llmtrain.core.logs import setup_logging

    if local and processes:
        raise UsageError("--local and --processes are mutually exclusive.", remedy="Use one of them.")
    loaded = load_config(config, set_ or [])
    setup_logging(loaded.logging)
    if processes:
        from llmtrain.distributed.workers import local_node, worker_command

        words = worker_command("doctor", *forwarded_options(config, set_ or [], json_))
        run_workers(local_node(processes), words, loaded.distributed)
        return
    check_here(loaded, json_, is_local=local)


def check_here(loaded: "Config", json_: bool, is_local: bool = False) -> None:
    """Check in this process."""
    from llmtrain.doctor.examine import examine

    if not examine(loaded, lambda report: _show(report, json_), is_local=is_local):
        raise typer.Exit(CHECK_FAILED)


def run_workers(node: "NodeInfo", command: list[str], distributed: "DistributedSection") -> None:
    from llmtrain.distributed.workers import run_processes

    try:
        run_processes(node, command, distributed)
    except LlmtrainError as error:
        if error.exit_code != CHECK_FAILED:
            raise
        raise typer.Exit(CHECK_FAILED) from None  # the processes have printed their findings


def _show(report: "Report", as_json: bool) -> None:
    """One write per report, because several processes may share the log. Only rank 0 uses standard output."""
    if report.rank:
        print(report.text(is_terminal=sys.stderr.isatty()), file=sys.stderr, flush=True)
    elif as_json:
        print(json.dumps(report.as_dict(), indent=2), flush=True)
    else:
        print(report.text(is_terminal=sys.stdout.isatty()), flush=True)
