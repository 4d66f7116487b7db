"""The command table. Only the module of the command that is called is imported, so that --help answers at once."""

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

import llmtrain
from llmtrain.env import WORKER
from llmtrain.errors import Interrupted, LlmtrainError, TrainingFailed, UsageError
from llmtrain.files import is_full
from llmtrain.runs.exit_report import report_for_pod, write_exit_report
from llmtrain.terminal import discard, print_in_any_encoding, say

# An option with or without a value is more than the parser knows.
_SPELLING = {"--dry-run=server": "--dry-run-server", "--dry-run=client": "--dry-run"}
# The parser's own error, wherever this version of typer has it from.
_ParserError: Any = typer.BadParameter.__mro__[1]

# What `llmtrain --help` shows, by what people want to do. A command is `command` of the module with its name in
# llmtrain.commands; one with verbs of its own is `app`.
COMMANDS = {
    "Train": {
        "train": "Train a model, or resume a run.",
        "node": "Start and supervise the processes of one node.",
        "doctor": "Check this machine, or all processes of a job, before training.",
        "smoke": "Train a tiny classifier on synthetic data to test processes, network and device.",
        "validate": "Check a config and list every problem.",
        "print-config": "Print the resolved config.",
        "config-schema": "Print the JSON Schema of config files, for editors.",
        "presets": "List the presets that --config accepts by name.",
    },
    "On a Kubernetes cluster": {
        "launch": "Run a config or a command on a cluster, and watch it.",
        "status": "Show the runs of a namespace, or one run with its pods.",
        "logs": "Print the logs of all pods of a run, merged by time.",
        "why": "Explain why a run is not healthy: cause, evidence, remedy.",
        "recover": "Replace pods on nodes that are NotReady, and pods with a rank that hangs.",
        "push": "Copy files into the pods of a run launched with --hold.",
        "exec": "Run a command in the pods of a run.",
        "stop": "Save a checkpoint and stop a run.",
        "resume": "Launch a run again from its newest checkpoint.",
        "fetch": "Download a run from the cluster's volume.",
        "delete": "Remove a run from the cluster.",
        "lint": "Find known problems in training manifests.",
        "secret": "Create secrets that manifests refer to.",
        "guard": "Keep the runs of a namespace alive unattended.",
        "cluster": "Create a local cluster with Docker and kind (the tool).",
    },
    "Use what was trained": {
        "generate": "Generate text with a run, an adapter or a model directory.",
        "chat": "Chat with a model in the terminal.",
        "eval": "Evaluate a model on text files.",
        "export": "Write a model directory that transformers or peft loads.",
        "sync": "Copy a run directory to S3.",
        "runs": "List, show and compare runs.",
    },
    "Models and data": {
        "fetch-model": "Download a model from the Hugging Face hub.",
        "fetch-data": "Download a dataset from the Hugging Face hub.",
        "prefetch": "Download everything a config names on the hub.",
        "tokenizer": "Train a tokenizer.",
    },
}
GROUPS = ("secret", "guard", "cluster", "runs", "tokenizer")
_MODULES = {"eval": "evaluate"}


class _LazyGroup(typer.core.TyperGroup):
    """Knows every command by its name and summary; imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for panel, rows in COMMANDS.items():
            for name, summary in rows.items():
                self.add_command(typer.core.TyperCommand(name, short_help=summary, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, summary, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name and summary else None, rest


def load_command(name: str) -> Any:
    module = importlib.import_module(f"llmtrain.commands.{_MODULES.get(name, name).replace('-', '_')}")
    if name in GROUPS:
        return typer.main.get_group(module.app)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name)(module.command)
    return typer.main.get_command(single)


app = typer.Typer(
    name="llmtrain",
    cls=_LazyGroup,
    help="One typed config trains a GPT or fine-tunes a Hugging Face model, and every step of it can be trusted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"llmtrain {llmtrain.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """One typed config trains a GPT or fine-tunes a Hugging Face model, and every step of it can be trusted."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 64 bad usage or config, 65 bad data or checkpoint, 75 resume me.
    `node` says it in the words of its platform."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is a command of the user's
    arguments[:end] = [_SPELLING.get(word, word) for word in arguments[:end]]
    print_in_any_encoding()
    _share_the_cores()
    if arguments[:1] in (["node"], ["prefetch"]) or os.getpid() == 1:
        report_for_pod()
    try:
        code = _run_in_child(is_own_command=end < len(arguments)) if arguments[:1] == ["node"] else None
        if os.environ.get(WORKER) == "1":
            _end_with_parent()
        if code is None:
            code = app(args=arguments, standalone_mode=False, prog_name="llmtrain")
    except LlmtrainError as error:
        code = _report(error, arguments[:end])
    except _ParserError as error:
        message = error.format_message()  # empty when the help was shown instead
        code = (
            _report(UsageError(message, remedy=_help_hint(error)), arguments[:end]) if message else UsageError.exit_code
        )
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except OSError as problem:
        if isinstance(problem, BrokenPipeError) and _is_unread():
            sys.exit(128 + signal.SIGPIPE)  # as any program ends whose reader has gone (`| head`)
        if not is_full(problem):
            write_exit_report(_crash(problem))
            raise
        code = _report(_output_lost(problem), [])
    except Exception as problem:
        write_exit_report(_crash(problem))
        raise
    code = _flush_output() or code
    # What is left is to go: a SIGTERM now, from a launcher that ends the others too, must not change the exit code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code if isinstance(code, int) else 0)


def _run_in_child(is_own_command: bool) -> int | None:
    from llmtrain.distributed.exit_codes import run_in_child

    return run_in_child(is_own_command)


def _end_with_parent() -> None:
    from llmtrain.distributed.exit_codes import end_with_parent

    end_with_parent()


def _flush_output() -> int | None:
    """Here rather than when Python ends, which makes exit code 120 of what cannot be written: the code to end with
    where the result is lost. Lost log lines change nothing."""
    code = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None: closed by the caller (`>&-`)
                stream.flush()
        except OSError as problem:
            is_lost = stream is sys.stdout and not isinstance(problem, BrokenPipeError)  # else nobody wants to read it
            code = code or (_report(_output_lost(problem), []) if is_lost else None)
            discard(stream)
    return code


def _is_unread() -> bool:
    """Whether the reader of standard output has gone. Nothing more is written to it then."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return True
    return False


def _crash(problem: Exception) -> LlmtrainError:
    """A bug of ours, or of a library: Python prints its traceback, and the report has its last line."""
    return LlmtrainError(f"{type(problem).__name__}: {problem}")


def _output_lost(problem: OSError) -> LlmtrainError:
    return TrainingFailed(
        f"Cannot write to {problem.filename or 'standard output'}: {problem.strerror}.",
        remedy="Free some space, then run the same command again." if is_full(problem) else None,
        reason="disk_full" if is_full(problem) else None,
    )


def _share_the_cores() -> None:
    """Before torch is loaded: let its threads sleep soon when they wait for each other. By default they spin, and on
    a machine whose cores are shared (or a pod with a CPU limit) they spin while the one they wait for cannot run:
    with one other busy process on two cores that made small models 68 times slower."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _help_hint(error: Any) -> str:
    path = error.ctx.command_path if error.ctx else "llmtrain"
    return f"`{path} --help` shows what it takes."


def _report(error: LlmtrainError, arguments: list[str]) -> int:
    write_exit_report(error)
    if os.environ.get(WORKER) == "1":
        return error.exit_code  # whoever started this process speaks for all of its processes
    # Under torchrun every rank comes here; one object is enough.
    is_other_rank = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    if "--json" in arguments and not is_other_rank:
        with suppress(OSError):
            print(json.dumps(error.as_dict()))  # on one line: `logs --json` may have printed lines before
    with suppress(OSError):  # a log on a full disk must not change the exit code
        say(f"{'stopped' if isinstance(error, Interrupted) else 'error'}: {error}", sys.stderr)
    return error.exit_code
