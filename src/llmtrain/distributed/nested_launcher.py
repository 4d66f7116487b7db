"""Refuses a launcher in the command of a launcher: `llmtrain node -- torchrun train.py`, or a script that runs it.

Each process would start its own world, so N separate runs would train instead of one. The error shows the command line
to use instead.
"""

import re
import shlex
from collections import Counter
from collections.abc import Sequence

from llmtrain.distributed.launchers import LauncherCommand, parse_launcher
from llmtrain.distributed.shell_command import (
    FoundCommand,
    ReadScript,
    find_commands,
    program,
    read_script,
    without_wrappers,
)
from llmtrain.errors import UsageError

_PYTHON = re.compile(r"python[\d.]*")
_CONSEQUENCE = "llmtrain starts the processes: each of them would start a separate run"
_SIZES = {
    "node": {"--nodes": r"\d+(:\d+)?", "--processes-per-node": r"\d+|gpu|cpu|auto"},
    "launch": {"--nodes": r"\d+(:\d+)?", "--processes-per-node": r"\d+"},
}
"""Values that the options of the two commands accept."""


def check_command(
    command: Sequence[str], verb: str, options: Sequence[str] = (), read: ReadScript = read_script
) -> list[str]:
    """Raise UsageError for an empty command, and for one that certainly runs a launcher; return warnings about what is
    not certain. `verb`: node or launch; `options`: those that the user passed to it; `read`: reads scripts."""
    if not command[0].strip():
        raise UsageError(
            "The command after -- is empty.", remedy=f"Run: {_line(verb, options, ['python', 'train.py'])}"
        )
    found = find_commands(command, read)
    warnings = []
    for script in dict.fromkeys(found.unread):
        warnings.append(
            f"{script} cannot be read here, so it was not checked. It must not run torchrun or another launcher: each "
            "process would start a separate run."
        )
    matches = []
    for each in found.commands:
        launcher = parse_launcher(each.words)
        if launcher:
            matches.append((each, launcher))
    # (script, block) -> number of its branches that contain a launcher.
    branches = Counter(branch[:2] for branch in {each.branch for each, _ in matches if each.branch})
    for each, launcher in matches:
        # A launcher in one of several branches may not run; in two of them, one of these branches probably does.
        is_optional = each.branch is not None and branches[each.branch[:2]] == 1
        if each.is_certain and not is_optional:
            raise _refusal(each, launcher, command, verb, options)
        warnings.append(f"{_place(each)} may run {launcher.launcher.label}, but {_CONSEQUENCE}.")
    return warnings


def _refusal(
    found: FoundCommand, launcher: LauncherCommand, command: Sequence[str], verb: str, options: Sequence[str]
) -> UsageError:
    sizes: list[str] = []
    for option, value in (("--nodes", launcher.nodes), ("--processes-per-node", launcher.processes_per_node)):
        is_given = any(word.partition("=")[0] == option for word in options)
        if value and not is_given and re.fullmatch(_SIZES[verb][option], value):
            sizes += [option, value]
    words = _innermost(launcher).python_command
    if parse_launcher(command):
        wrappers = command[: len(command) - len(without_wrappers(command))]
        subject = "The command"
        action = "is"
        remedy = f"Run: {_line(verb, [*options, *sizes], [*wrappers, *words])}"
    else:
        subject = _place(found)
        action = "runs"
        remedy = f"In {found.file or 'the script'}, use: {shlex.join(words)}"
        if sizes:
            remedy += f", and pass {shlex.join(sizes)} to llmtrain {verb}"
    return UsageError(f"{subject} {action} {launcher.launcher.label}, but {_CONSEQUENCE}.", remedy=remedy)


def _innermost(launcher: LauncherCommand) -> LauncherCommand:
    """`srun torchrun train.py`: torchrun."""
    inner = parse_launcher(launcher.process)
    if inner is None:
        return launcher
    return _innermost(inner)


def _line(verb: str, options: Sequence[str], command: Sequence[str]) -> str:
    return f"llmtrain {verb} {shlex.join([*options, '--', *command])}"


def _place(found: FoundCommand) -> str:
    if not found.file:
        return "The command"
    return f"{found.file}, line {found.line},"


def launcher_name(command: Sequence[str]) -> str | None:
    """torchrun, accelerate launch, ..., if the command is one of them."""
    found = parse_launcher(command)
    if found is None:
        return None
    return found.launcher.label


def process_command(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """If the command is a launcher: its name, and the command of each process (a script without `python`). Generic
    launchers do not count: `srun torchrun` starts one torchrun per node."""
    found = parse_launcher(command)
    if found and not found.launcher.is_generic:
        return found.launcher.label, found.process
    words = without_wrappers(command)
    if _PYTHON.fullmatch(program(words)) and words[1:2] == ["-m"]:
        words = words[2:]
    if program(words) == "llmtrain" and words[1:2] == ["node"] and "--" in words:
        return "llmtrain node", words[words.index("--") + 1 :]
    return None
