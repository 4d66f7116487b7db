"""Refuses a launcher as the command of a launcher: `llmtrain node -- torchrun train.py`.

Each process would start its own world, so N separate runs would train instead of one. The error shows the command line
to use instead.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.distributed.shell_command import commands_in, program, without_wrappers
from llmtrain.errors import UsageError


@dataclass(frozen=True)
class _Launcher:
    label: str
    flags: frozenset[str]
    """Options without a value, with hyphens; every other option takes one."""
    processes: tuple[str, ...]
    nodes: tuple[str, ...]


_PYTHON = re.compile(r"python[\d.]*")
_SCRIPT_FLAGS = ("module", "m", "no-python")
_TORCHRUN = _Launcher(
    "torchrun",
    frozenset({*_SCRIPT_FLAGS, "standalone", "run-path", "use-env", "virtual-local-rank", "h", "help"}),
    ("nproc-per-node",),
    ("nnodes",),
)
_ACCELERATE = _Launcher(
    "accelerate launch",
    frozenset({*_SCRIPT_FLAGS, "multi-gpu", "cpu", "tpu", "use-deepspeed", "use-fsdp", "debug", "quiet", "q"}),
    (),  # num_processes counts all machines
    ("num-machines",),
)
_DEEPSPEED = _Launcher(
    "deepspeed",
    frozenset({*_SCRIPT_FLAGS, "no-local-rank", "no-ssh", "no-ssh-check", "force-multi"}),
    ("num-gpus",),
    ("num-nodes",),
)


def check_own_command(command: Sequence[str], prefix: str) -> None:
    """Raise UsageError for a launcher or an empty command. `prefix`: the command line before options and `--`."""
    if not command[0].strip():
        raise UsageError("The command after -- is empty.", remedy=f"Run: {prefix} -- python train.py")
    direct = _find_launcher(command)
    match = direct or next(filter(None, map(_find_launcher, commands_in(command))), None)
    if match is None:
        return
    launcher, rest = match
    options, script = _split(launcher, rest)
    sizes = []
    for option, names in (("--nodes", launcher.nodes), ("--processes-per-node", launcher.processes)):
        value = next((options[name] for name in names if options.get(name)), None)
        sizes += [option, value] if value else []
    words = script or ["train.py"]
    if _is_module(options):
        words = ["python", "-m", *words]
    elif "no-python" not in options:
        words = ["python", *words]
    if direct:
        wrappers = command[: len(command) - len(without_wrappers(command))]
        verb, remedy = "is", f"Run: {prefix} {shlex.join([*sizes, '--', *wrappers, *words])}"
    else:
        more = f", and pass {shlex.join(sizes)} to {prefix}" if sizes else ""
        verb, remedy = "runs", f"In the script, use: {shlex.join(words)}{more}"
    raise UsageError(
        f"The command {verb} {launcher.label}, but llmtrain starts the processes: each of them would start a separate "
        "run.",
        remedy=remedy,
    )


def launcher_name(command: Sequence[str]) -> str | None:
    """torchrun, accelerate launch or deepspeed, if the command is one of them."""
    match = _find_launcher(command)
    return match[0].label if match else None


def process_command(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """If the command is a launcher: its name, and the command of each process (a script without `python`)."""
    match = _find_launcher(command)
    if match:
        launcher, rest = match
        options, script = _split(launcher, rest)
        return launcher.label, ["python", "-m", *script] if _is_module(options) else script
    words = without_wrappers(command)
    if _PYTHON.fullmatch(program(words)) and words[1:2] == ["-m"]:
        words = words[2:]
    if program(words) == "llmtrain" and words[1:2] == ["node"] and "--" in words:
        return "llmtrain node", words[words.index("--") + 1 :]
    return None


def _find_launcher(command: Sequence[str]) -> tuple[_Launcher, list[str]] | None:
    """The launcher that the command starts with, and the words after it."""
    words = without_wrappers(command)
    name = program(words)
    if _PYTHON.fullmatch(name):
        rest = words[1:]
        while rest and rest[0].startswith("-") and not rest[0].startswith("-m"):  # options of Python itself
            rest = rest[2:] if rest[0] in ("-W", "-X") else rest[1:]
        if not rest or not rest[0].startswith("-m"):
            return None
        if rest[0] != "-m":  # -mtorch.distributed.run
            rest = ["-m", rest[0][2:], *rest[1:]]
        module, rest = (rest[1:2] or [""])[0], rest[2:]
        if module in ("torch.distributed.run", "torch.distributed.launch"):
            return _TORCHRUN, rest
        if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
            return _ACCELERATE, rest[1:] if rest[:1] == ["launch"] else rest
        return (_DEEPSPEED, rest) if module == "deepspeed.launcher.runner" else None
    if name == "torchrun":
        return _TORCHRUN, words[1:]
    if name == "deepspeed":
        return _DEEPSPEED, words[1:]
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _ACCELERATE, words[2:]
    return None


def _is_module(options: dict[str, str]) -> bool:
    return bool(options.keys() & {"m", "module"})


def _split(launcher: _Launcher, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of the launcher by name, and the script with its arguments."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].lstrip("-").partition("=")
        name, at = name.replace("_", "-"), at + 1
        if not equals and name not in launcher.flags and at < len(words):
            value, at = words[at], at + 1
        options[name] = value
    return options, words[at:]
