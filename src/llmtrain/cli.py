"""`llmtrain`: finds the command, and turns errors into exit codes. Only the module of that command is imported.

commands/table.py lists the commands.
"""

import importlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer

from llmtrain.commands.table import COMMANDS, GROUPS, MODULES, NOT_AVAILABLE, OTHER_NAMES
from llmtrain.core.env import WORKER, openmp_variables
from llmtrain.core.files import is_full
from llmtrain.core.interrupts import command_ended, command_starts
from llmtrain.core.terminal import discard, open_missing_streams, print_in_any_encoding, say, stream_width
from llmtrain.errors import Interrupted, LlmtrainError, TrainingFailed, UsageError
from llmtrain.runs.exit_report import forget_earlier_run, set_pod_main, write_exit_report, write_success_report
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
_TRAINING_PACKAGES = {"torch", "numpy", "safetensors", "datasets", "pyarrow", "tiktoken", "tokenizers"}


class _LazyGroup(typer.core.TyperGroup):
    """Lists all commands from COMMANDS; imports only the requested one."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        _show_flags_without_value(self)
        for rows in COMMANDS.values():
            for name, summary in rows.items():
                self.add_command(typer.core.TyperCommand(name, short_help=summary))

    def format_commands(self, _: Any, formatter: Any) -> None:
        for panel, rows in COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl(list(rows.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args and args[0] in OTHER_NAMES:
            remedy = f"Did you mean `llmtrain {OTHER_NAMES[args[0]]}`?"
            raise UsageError(f"There is no command '{args[0]}'.", remedy=remedy)
        if args and args[0] in NOT_AVAILABLE:
            raise UsageError(f"There is no command '{args[0]}'.", remedy=NOT_AVAILABLE[args[0]])
        name, row, rest = super().resolve_command(ctx, args)
        command = load_command(name) if name and row else None
        return name, command, rest


_GIVEN_ONCE = {
    "config": "Pass one file. To build on another one, write `extends: FILE-OR-PRESET` in it.",
    "run": "Pass one run.",
    "adapter": "Pass one adapter.",
    "model": "Pass one model.",
}
"""Options of which the parser would silently take the last, with the remedy. Some commands accept several runs."""


_FIRST_ARGUMENT = ("config", "prompt", "to")
"""Options of which people type the value without the option."""


class _Command(typer.core.TyperCommand):
    """Refuses a second --config, --run, --adapter or --model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {parameter.name for parameter in self.params if not getattr(parameter, "multiple", False)}
        if names & _GIVEN_ONCE.keys() and not ctx.resilient_parsing:
            _, surplus, order = self.make_parser(ctx).parse_args(list(args))
            given = [parameter.name for parameter in order]
            for name, remedy in _GIVEN_ONCE.items():
                if name in names and given.count(name) > 1:
                    raise UsageError(f"--{name} was given more than once.", remedy=remedy)
            if surplus:
                remedy = f"See `{ctx.command_path} -h`."
                for name in _FIRST_ARGUMENT:
                    if name in names and not surplus[0].startswith("-"):
                        remedy = f"Did you mean --{name} {shlex.quote(surplus[0])}? {remedy}"
                        break
                raise UsageError(f"Unexpected argument '{surplus[0]}'.", remedy=remedy)
        return super().parse_args(ctx, args)


def load_command(name: str) -> Any:
    module = importlib.import_module(f"llmtrain.commands.{MODULES.get(name, name).replace('-', '_')}")
    if name in GROUPS:
        group: Any = typer.main.get_group(module.app)
        for command in (group, *group.commands.values()):
            _show_flags_without_value(command)
            command.rich_markup_mode = None
        group.format_commands = partial(_list_commands, group.commands)
        return group
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name, cls=_Command)(module.command)
    command = typer.main.get_command(single)
    _show_flags_without_value(command)
    return command


def _list_commands(commands: dict[str, Any], _: Any, formatter: Any) -> None:
    """The commands of a group, with their whole first paragraph: the parser cuts it off after 45 characters."""
    with formatter.section("Commands"):
        formatter.write_dl([(name, " ".join(row.help.split())) for name, row in commands.items()])


def _show_flags_without_value(command: Any) -> None:
    """Show `--json` in help texts, not `--json <bool>`, which looks as if it took a value."""
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
    rich_markup_mode=None,  # typer's rich help imports a Markdown parser, half of the time that --help took
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
    has_command = "--" in arguments  # the command that `node` or `launch` runs follows
    end = arguments.index("--") if has_command else len(arguments)
    arguments[:end] = [_SPELLING.get(word, word) for word in arguments[:end]]
    forget_earlier_run()
    open_missing_streams()
    print_in_any_encoding()
    os.environ.update(openmp_variables())
    if arguments[:1] in (["node"], ["prefetch"]) or os.getpid() == 1:
        set_pod_main()
    try:
        code = None
        if arguments[:1] == ["node"]:
            code = _run_in_child(has_command)
        if os.environ.get(WORKER) == "1":
            _terminate_with_parent()
        _check_dry_run(arguments[:end])
        if code is None:
            code = _run_command(arguments)
    except LlmtrainError as error:
        code = _report(error, arguments[:end])
    except _ParserError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command, such as `llmtrain runs`
            say(error.format_message())
            code = 0
        else:
            code = _report(_usage_error(error, arguments[:end]), arguments[:end])
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except OSError as problem:
        if isinstance(problem, BrokenPipeError) and _is_unread():
            sys.exit(128 + signal.SIGPIPE)  # as other programs whose reader has gone (`| head`)
        refused = _not_allowed(problem)
        if is_full(problem):
            code = _report(_output_lost(problem), [])
        elif refused is not None:
            code = _report(refused, arguments[:end])
        else:
            write_exit_report(_crash(problem))
            raise
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


def _check_dry_run(arguments: list[str]) -> None:
    for word in arguments:
        if word.startswith("--dry-run="):  # the values that exist have another spelling by now
            raise UsageError(f"{word}: use --dry-run=client (no cluster) or --dry-run=server (the API server checks).")


def _run_in_child(has_command: bool) -> int | None:
    from llmtrain.distributed.platform_codes import run_in_child

    return run_in_child(has_command)


def _terminate_with_parent() -> None:
    from llmtrain.distributed.platform_codes import terminate_with_parent

    terminate_with_parent()


def _flush_output() -> int | None:
    """Flush before Python does at its exit, where a failed flush gives exit code 120. Returns the exit code if the
    result could not be written."""
    code = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None: closed by the caller (`>&-`)
                stream.flush()
        except OSError as problem:
            # Lost log lines do not matter, and a closed pipe (`| head`) needs no result.
            if stream is sys.stdout and not isinstance(problem, BrokenPipeError):
                code = _report(_output_lost(problem), [])
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


def _not_allowed(problem: OSError) -> UsageError | None:
    """The error for a file or directory that this user may not read or write; None for every other problem."""
    if not isinstance(problem, PermissionError) or problem.filename is None:
        return None
    return UsageError(
        f"{problem.filename}: {problem.strerror} for the user id {os.geteuid()}.",
        remedy="Change the permissions, or run the command as another user.",
    )


def _output_lost(problem: OSError) -> LlmtrainError:
    error = TrainingFailed(f"Cannot write to {problem.filename or 'standard output'}: {problem.strerror}.")
    if is_full(problem):
        error.remedy = "Free some space, then run the same command again."
        error.reason = "disk_full"
    return error


def _usage_error(error: Any, arguments: list[str]) -> UsageError:
    message = error.format_message()
    for words, rule in _PARSER_WORDS.items():
        message = message.replace(words, rule)
    return (
        _field_as_option(error, arguments) or _option_of_launch(error) or UsageError(message, remedy=_help_hint(error))
    )


def _field_as_option(error: Any, arguments: list[str]) -> UsageError | None:
    """The error for `--lr 3e-4` where --set accepts the field; None for other errors of the parser."""
    takes_fields = error.ctx and any("--set" in parameter.opts for parameter in error.ctx.command.params)
    if not takes_fields or not hasattr(error, "possibilities"):
        return None
    from llmtrain.config.problems import setting_of_option

    option = error.option_name
    value = "VALUE"
    for word, following in pairwise([*arguments, ""]):
        name, _, attached = word.partition("=")
        given = attached or following
        if name == option and given and not given.startswith("--"):
            value = given
            break
    remedy = setting_of_option(option, value)
    return UsageError(f"There is no option {option}.", remedy=remedy) if remedy else None


def _option_of_launch(error: Any) -> UsageError | None:
    """The error for an option of `launch` that `sweep` does not take; None for others."""
    if not error.ctx or error.ctx.command_path != "llmtrain sweep" or not hasattr(error, "possibilities"):
        return None
    from llmtrain.commands.sweep import OPTIONS_OF_LAUNCH

    remedy = OPTIONS_OF_LAUNCH.get(error.option_name)
    return UsageError(f"sweep takes no option {error.option_name}.", remedy=remedy) if remedy else None


def _help_hint(error: Any) -> str:
    path = error.ctx.command_path if error.ctx else "llmtrain"
    return f"See `{path} -h`."


def _report(error: LlmtrainError, arguments: list[str]) -> int:
    from llmtrain.core.redact import redact, redact_values

    write_exit_report(error)
    if os.environ.get(WORKER) == "1":
        return error.exit_code  # the parent prints one error for all workers
    # Under torchrun every rank reports the error: print one JSON object.
    is_other_rank = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    if "--json" in arguments and not is_other_rank:
        with suppress(OSError):
            values = redact_values(error.as_dict())
            print(json.dumps(values))  # on one line, as `logs --json` prints one object per line
    with suppress(OSError):  # a log on a full disk must not change the exit code
        if isinstance(error, Interrupted):
            say(_interrupted_line(error), sys.stderr)
        else:
            say(redact(f"error: {error}"), sys.stderr, {"error:": "red"})
    return error.exit_code


def _interrupted_line(error: Interrupted) -> str:
    """On one line, unless that would break the command to resume with in a narrow terminal."""
    line = f"{error.what} {error.remedy or ''}".rstrip()
    width = stream_width(sys.stderr)
    if width is None or len(line) <= width:
        return line
    return f"{error.what}\n{error.remedy}"
