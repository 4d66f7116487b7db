"""The command table. Modules of commands import nothing heavy at the top, so that --help answers at once."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

import llmtrain
from llmtrain.commands import (
    chat,
    cluster,
    delete,
    doctor,
    evaluate,
    exec,
    export,
    fetch,
    fetch_data,
    fetch_model,
    generate,
    guard,
    launch,
    lint,
    logs,
    node,
    prefetch,
    presets,
    print_config,
    push,
    recover,
    resume,
    runs,
    secret,
    smoke,
    status,
    stop,
    sync,
    tokenizer,
    train,
    validate,
    why,
)
from llmtrain.distributed.platform_codes import end_with_parent, run_in_child
from llmtrain.errors import LlmtrainError, ResumeMe, TrainingStopped, UsageError
from llmtrain.runs.atomic import is_full
from llmtrain.runs.exit_report import write_exit_report
from llmtrain.terminal import print_in_any_encoding, say

# An option with or without a value is more than the parser knows.
_SPELLING = {"--dry-run=server": "--dry-run-server", "--dry-run=client": "--dry-run"}
# The parser's own error, wherever this version of typer has it from.
_ParserError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="llmtrain",
    help="One typed config trains a GPT or fine-tunes a Hugging Face model, and every step of it can be trusted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# What `llmtrain --help` shows, by what people want to do.
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "train": train.command,
        "node": node.command,
        "doctor": doctor.command,
        "smoke": smoke.command,
        "validate": validate.command,
        "print-config": print_config.command,
        "presets": presets.command,
    },
    "On a Kubernetes cluster": {
        "launch": launch.command,
        "status": status.command,
        "logs": logs.command,
        "why": why.command,
        "recover": recover.command,
        "push": push.command,
        "exec": exec.command,
        "stop": stop.command,
        "resume": resume.command,
        "fetch": fetch.command,
        "delete": delete.command,
        "lint": lint.command,
    },
    "Use what was trained": {
        "generate": generate.command,
        "chat": chat.command,
        "eval": evaluate.command,
        "export": export.command,
        "sync": sync.command,
    },
    "Models and data": {
        "fetch-model": fetch_model.command,
        "fetch-data": fetch_data.command,
        "prefetch": prefetch.command,
    },
}
GROUPS = {
    "secret": (secret.app, "On a Kubernetes cluster"),
    "guard": (guard.app, "On a Kubernetes cluster"),
    "cluster": (cluster.app, "On a Kubernetes cluster"),
    "runs": (runs.app, "Use what was trained"),
    "tokenizer": (tokenizer.app, "Models and data"),
}
for _panel, _rows in COMMANDS.items():
    for _name, _function in _rows.items():
        _words = " ".join((_function.__doc__ or "").split())
        _first_sentence = _words.partition(". ")[0].rstrip(".") + "."
        app.command(_name, rich_help_panel=_panel, short_help=_first_sentence)(_function)
for _name, (_group, _panel) in GROUPS.items():
    app.add_typer(_group, name=_name, rich_help_panel=_panel)


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
    if os.environ.get("LLMTRAIN_WORKER") == "1":
        end_with_parent()
    try:
        code = run_in_child() if arguments[:1] == ["node"] else None
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
        if not is_full(problem):
            raise
        code = _report(_output_lost(problem), [])
    code = _flush_output() or code
    # What is left is to go: a SIGTERM now, from a launcher that ends the others too, must not change the exit code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code if isinstance(code, int) else 0)


def _flush_output() -> int | None:
    """Here rather than when Python ends, which makes exit code 120 of what cannot be written: the code to end with
    where the result is lost. Lost log lines change nothing."""
    code = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as problem:
            if not is_full(problem):
                raise
            code = code or (_report(_output_lost(problem), []) if stream is sys.stdout else None)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # takes what is left in the buffer
    return code


def _output_lost(problem: OSError) -> LlmtrainError:
    return TrainingStopped(
        f"The disk is full: {problem.strerror} ({problem.filename or 'standard output'}).",
        remedy="Free some space, then run the same command again.",
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
    if os.environ.get("LLMTRAIN_WORKER") == "1":
        return error.exit_code  # whoever started this process speaks for all of its processes
    # Under torchrun every rank comes here; one object is enough.
    is_other_rank = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    if "--json" in arguments and not is_other_rank:
        with suppress(OSError):
            print(json.dumps(error.as_dict()))  # on one line: `logs --json` may have printed lines before
    with suppress(OSError):  # a log on a full disk must not change the exit code
        say(f"{'stopped' if isinstance(error, ResumeMe) else 'error'}: {error}", sys.stderr)
    return error.exit_code
