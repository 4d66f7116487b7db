"""The command table and exit codes. Only the module of the requested command is imported, so that --help is fast."""

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from llmtrain.env import WORKER, openmp_variables
from llmtrain.errors import Interrupted, LlmtrainError, TrainingFailed, UsageError
from llmtrain.files import is_full
from llmtrain.interrupts import command_ended, command_starts
from llmtrain.runs.exit_report import forget_earlier_run, report_for_pod, write_exit_report, write_success_report
from llmtrain.terminal import discard, print_in_any_encoding, say, stream_width
from llmtrain.version import __version__

# The parser does not support options with an optional value.
_SPELLING = {"--dry-run=server": "--dry-run-server", "--dry-run=client": "--dry-run"}
# The base class of the parser's errors, whose module depends on the version of typer.
_ParserError: Any = typer.BadParameter.__mro__[1]

_PARSER_WORDS = {
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
}

# Dependencies of llmtrain that llmtrain-client does not have.
_TRAINING_PACKAGES = {"torch", "numpy", "safetensors", "datasets", "tiktoken", "tokenizers"}

# Shown by `llmtrain --help`. Each command is the function `command` of the module with its name in llmtrain.commands; a
# command with subcommands is `app` of its module.
COMMANDS = {
    "Train": {
        "train": "Train a model, or resume a run.",
        "node": "Start and supervise the processes of one node.",
        "doctor": "Check this machine, or all processes of a job, before training.",
        "smoke": "Train a tiny classifier on synthetic data to test processes, network and device.",
        "validate": "Check a config and list every problem.",
        "print-config": "Print the resolved config.",
        "config-schema": "Print the JSON Schema of config files, for editors.",
        "presets": "List the presets that --config accepts by name, or show one.",
        "init": "Write a commented config for your text or examples.",
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
        "lint": "Check training manifests for common mistakes.",
        "secret": "Create secrets that manifests refer to.",
        "guard": "Keep the runs of a namespace alive unattended.",
        "cluster": "Create a local cluster with Docker and kind (the tool).",
    },
    "Use a trained model": {
        "generate": "Generate text with a run, an adapter or a model directory.",
        "chat": "Chat with a model in the terminal.",
        "eval": "Evaluate a model on text files.",
        "export": "Write a model directory that transformers or peft loads.",
        "sync": "Copy a run directory to S3.",
        "runs": "List, show, compare and prune runs.",
        "page": "Show runs in the browser, live.",
        "report": "Write runs to one HTML file, or to Markdown.",
    },
    "Models and data": {
        "fetch-model": "Download a model from the Hugging Face hub.",
        "fetch-data": "Download a dataset from the Hugging Face hub.",
        "prefetch": "Download everything a config names on the hub.",
        "tokenizer": "Train a tokenizer.",
    },
}
GROUPS = ("secret", "guard", "cluster", "presets", "runs", "tokenizer")
_MODULES = {"eval": "evaluate"}


class _LazyGroup(typer.core.TyperGroup):
    """Lists all commands from COMMANDS; imports only the requested one."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        _show_flags_without_value(self)
        for panel, rows in COMMANDS.items():
            for name, summary in rows.items():
                self.add_command(typer.core.TyperCommand(name, short_help=summary, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, summary, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name and summary else None, rest


class _Command(typer.core.TyperCommand):
    """Refuses a second --config, of which the parser would silently take the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(parameter.name == "config" for parameter in self.params) and not ctx.resilient_parsing:
            _, surplus, order = self.make_parser(ctx).parse_args(list(args))
            if sum(parameter.name == "config" for parameter in order) > 1:
                raise UsageError(
                    "--config was given more than once.",
                    remedy="Pass one file. To build on another one, write `extends: FILE-OR-PRESET` in it.",
                )
            if surplus:
                hint = f"Did you mean --config {surplus[0]}? " if "-" not in surplus[0][:1] else ""
                raise UsageError(f"Unexpected argument '{surplus[0]}'.", remedy=f"{hint}See `{ctx.command_path} -h`.")
        return super().parse_args(ctx, args)


def load_command(name: str) -> Any:
    module = importlib.import_module(f"llmtrain.commands.{_MODULES.get(name, name).replace('-', '_')}")
    if name in GROUPS:
        group = typer.main.get_group(module.app)
        for command in (group, *group.commands.values()):
            _show_flags_without_value(command)
        return group
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=_Command)(module.command)
    command = typer.main.get_command(single)
    _show_flags_without_value(command)
    return command


def _show_flags_without_value(command: Any) -> None:
    """In help texts: `--json`, not `--json <bool>`, which looks as if it took a value."""
    get_params = command.get_params

    def get_params_without_types(ctx: Any) -> list[Any]:
        parameters: list[Any] = get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    command.get_params = get_params_without_types


SUMMARY = "Train a GPT or fine-tune a Hugging Face model, from one config, on a laptop or a Kubernetes cluster."

app = typer.Typer(
    name="llmtrain",
    cls=_LazyGroup,
    help=SUMMARY,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # contexts of the commands inherit it
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"llmtrain {__version__}")
        raise typer.Exit


@app.callback(help=SUMMARY)
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of `llmtrain` itself."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code, see errors.py. `node` translates it for its platform."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)  # the user's own command follows
    dry_run = next((word for word in arguments[:end] if word.startswith("--dry-run=") and word not in _SPELLING), None)
    arguments[:end] = [_SPELLING.get(word, word) for word in arguments[:end]]
    forget_earlier_run()
    print_in_any_encoding()
    os.environ.update(openmp_variables())
    if arguments[:1] in (["node"], ["prefetch"]) or os.getpid() == 1:
        report_for_pod()
    try:
        code = _run_in_child(is_own_command=end < len(arguments)) if arguments[:1] == ["node"] else None
        if os.environ.get(WORKER) == "1":
            _terminate_with_parent()
        if dry_run:
            raise UsageError(
                f"{dry_run}: use --dry-run=client (no cluster) or --dry-run=server (the API server checks)."
            )
        if code is None:
            code = _run_command(arguments)
    except LlmtrainError as error:
        code = _report(error, arguments[:end])
    except _ParserError as error:
        message = error.format_message()  # empty if the help was printed instead
        for words, rule in _PARSER_WORDS.items():
            message = message.replace(words, rule)
        usage = _field_as_option(error, arguments[:end]) or UsageError(message, remedy=_help_hint(error))
        code = _report(usage, arguments[:end]) if message else 0
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except OSError as problem:
        if isinstance(problem, BrokenPipeError) and _is_unread():
            sys.exit(128 + signal.SIGPIPE)  # as other programs whose reader has gone (`| head`)
        if not is_full(problem):
            write_exit_report(_crash(problem))
            raise
        code = _report(_output_lost(problem), [])
    except Exception as problem:
        missing = _needs_full_install(problem, arguments)
        if missing is None:
            write_exit_report(_crash(problem))
            raise
        code = _report(missing, arguments[:end])
    code = _flush_output() or code
    if not code:
        write_success_report()
    # A SIGTERM from now on, from a launcher that stops all processes, must not change the exit code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code if isinstance(code, int) else 0)


def _run_command(arguments: list[str]) -> Any:
    command_starts()
    try:
        return app(args=arguments, standalone_mode=False, prog_name="llmtrain")
    finally:
        command_ended()


def _run_in_child(is_own_command: bool) -> int | None:
    from llmtrain.distributed.exit_codes import run_in_child

    return run_in_child(is_own_command)


def _terminate_with_parent() -> None:
    from llmtrain.distributed.exit_codes import terminate_with_parent

    terminate_with_parent()


def _flush_output() -> int | None:
    """Flush before Python does at its exit, where a failed flush gives exit code 120. Returns the exit code if the
    result could not be written; lost log lines do not matter."""
    code = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None: closed by the caller (`>&-`)
                stream.flush()
        except OSError as problem:
            is_lost = stream is sys.stdout and not isinstance(problem, BrokenPipeError)  # a closed pipe needs no result
            code = code or (_report(_output_lost(problem), []) if is_lost else None)
            discard(stream)
    return code


def _is_unread() -> bool:
    """Whether the reader of standard output has gone; if so, later output is discarded."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return True
    return False


def _needs_full_install(problem: Exception, arguments: list[str]) -> UsageError | None:
    """The error of a command whose packages llmtrain-client does not install; None for every other exception."""
    package = (getattr(problem, "name", None) or "").partition(".")[0]
    if not isinstance(problem, ModuleNotFoundError) or package not in _TRAINING_PACKAGES:
        return None
    return UsageError(
        f"`llmtrain {arguments[0]}` needs {package}, which is not installed.",
        remedy="Uninstall llmtrain-client if it is here, then: pip install llmtrain",
    )


def _crash(problem: Exception) -> LlmtrainError:
    """The error in the exit report for an unexpected exception; Python prints the traceback."""
    return LlmtrainError(f"{type(problem).__name__}: {problem}")


def _output_lost(problem: OSError) -> LlmtrainError:
    return TrainingFailed(
        f"Cannot write to {problem.filename or 'standard output'}: {problem.strerror}.",
        remedy="Free some space, then run the same command again." if is_full(problem) else None,
        reason="disk_full" if is_full(problem) else None,
    )


def _field_as_option(error: Any, arguments: list[str]) -> UsageError | None:
    """The error for `--lr 3e-4` where --set accepts the field; None for other errors of the parser."""
    takes_fields = error.ctx and any("--set" in parameter.opts for parameter in error.ctx.command.params)
    if not takes_fields or not hasattr(error, "possibilities"):
        return None
    from llmtrain.config.problems import setting_of_option

    option = error.option_name
    words = [(word.partition("=")[0], word) for word in arguments]
    at = next((index for index, (name, _) in enumerate(words) if name == option), len(words))
    following = [words[at][1].partition("=")[2] if at < len(words) else "", *arguments[at + 1 : at + 2]]
    value = next((word for word in following if word and not word.startswith("--")), "VALUE")
    remedy = setting_of_option(option, value)
    return UsageError(f"There is no option {option}.", remedy=remedy) if remedy else None


def _help_hint(error: Any) -> str:
    path = error.ctx.command_path if error.ctx else "llmtrain"
    return f"See `{path} -h`."


def _report(error: LlmtrainError, arguments: list[str]) -> int:
    write_exit_report(error)
    if os.environ.get(WORKER) == "1":
        return error.exit_code  # the parent prints one error for all workers
    # Under torchrun every rank reports the error: print one JSON object.
    is_other_rank = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    if "--json" in arguments and not is_other_rank:
        with suppress(OSError):
            print(json.dumps(error.as_dict()))  # on one line, as `logs --json` prints one object per line
    with suppress(OSError):  # a log on a full disk must not change the exit code
        say(_interrupted_line(error) if isinstance(error, Interrupted) else f"error: {error}", sys.stderr)
    return error.exit_code


def _interrupted_line(error: Interrupted) -> str:
    """On one line, unless that would break the command to resume with in a narrow terminal."""
    line, width = f"{error.what} {error.remedy or ''}".rstrip(), stream_width(sys.stderr)
    return line if width is None or len(line) <= width else f"{error.what}\n{error.remedy}"
