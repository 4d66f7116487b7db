"""llmtrain doctor: the preflight."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption
from llmtrain.commands.processes import forwarded_options, local_node, run_processes, worker_command
from llmtrain.errors import LlmtrainError, UsageError

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.distributed.process_info import NodeInfo
    from llmtrain.doctor.report import Report


FOUND_SOMETHING = 1  # the exit code


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Check with so many processes on this machine.")] = None,
    local: Annotated[
        bool, typer.Option("--local", help="This machine only: do not join the other processes of the job.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Look for problems before training: on this machine, or with all processes of a job when it is started as one of
    them. Ends with 1 when something failed."""
    from llmtrain.config.load import load_config
    from llmtrain.logs import setup_logging

    if local and processes:
        raise UsageError("--local looks at one process; it does not go with --processes.")
    loaded = load_config(config, set_ or [])
    setup_logging(loaded.logging)
    if processes:
        words = worker_command("doctor", *forwarded_options(config, set_ or [], json_))
        run_workers(local_node(processes), words, loaded.distributed)
        return
    from llmtrain.doctor.examine import examine

    if not examine(loaded, lambda report: _show(report, json_), is_local=local):
        raise typer.Exit(FOUND_SOMETHING)


def run_workers(place: "NodeInfo", words: list[str], distributed: "DistributedSection") -> None:
    try:
        run_processes(place, words, distributed)
    except LlmtrainError as error:
        if error.exit_code != FOUND_SOMETHING:
            raise
        raise typer.Exit(FOUND_SOMETHING) from None  # the processes have printed what they found


def _show(report: "Report", as_json: bool) -> None:
    """In one piece: several processes may write to the same log. Standard output belongs to rank 0."""
    if report.rank:
        print(report.text(is_terminal=sys.stderr.isatty()), file=sys.stderr, flush=True)
    elif as_json:
        print(json.dumps(report.as_dict(), indent=2), flush=True)
    else:
        print(report.text(is_terminal=sys.stdout.isatty()), flush=True)
