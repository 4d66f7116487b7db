"""The commands that a command line runs: of `bash -c SCRIPT`, of shell scripts that can be read, and behind wrappers
such as env, timeout or uv run."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmtrain.distributed.shell_script import ScriptCommand, is_assignment, parse_script

_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh")
_SHEBANG = re.compile(rf"#!\s*(?:\S*/)?(?:env\s+(?:-S\s+)?)?(?:\S*/)?(?:{'|'.join(_SHELLS)})\b")
_SHELL_SCRIPT = re.compile(r".*\.(?:sh|bash)")
_MAX_NESTED = 5
_MAX_WRAPPERS = 8
_MAX_SCRIPT_BYTES = 2**18  # larger ones contain an archive
_OPTION_C = re.compile(r"-[A-Za-z]*c")  # -c, -ec, -lc
# Possible values of a variable, and their length. Bounded: in a script that appends variables to themselves they grow
# exponentially.
_MAX_VALUES = 8
_MAX_VALUE = 2**14
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
# The directory of the script itself, as scripts find it.
_SCRIPT_DIRECTORY = re.compile(
    r"\$\((?:cd\s+(?:--\s+)?)?\$\(dirname\s+(?:--\s+)?\$(?:0|\{?BASH_SOURCE(?:\[0\])?\}?)\)[^()]*pwd\s*(?:-P)?\s*\)"
    r"|\$\(dirname\s+(?:--\s+)?\$(?:0|\{?BASH_SOURCE(?:\[0\])?\}?)\)"
)
# Programs that run another command: their options with a value, and the number of arguments before that command.
_WRAPPERS: dict[tuple[str, ...], tuple[tuple[str, ...], int]] = {
    ("env",): (("-u", "--unset", "-C", "--chdir"), 0),
    ("nohup",): ((), 0),
    ("setsid",): ((), 0),
    ("time",): (("-f", "--format", "-o", "--output"), 0),
    ("nice",): (("-n", "--adjustment"), 0),
    ("ionice",): (("-c", "--class", "-n", "--classdata"), 0),
    ("timeout",): (("-k", "--kill-after", "-s", "--signal"), 1),
    ("stdbuf",): (("-i", "--input", "-o", "--output", "-e", "--error"), 0),
    ("numactl",): (("-N", "--cpunodebind", "-m", "--membind", "-C", "--physcpubind", "-i", "--interleave"), 0),
    ("taskset",): ((), 1),
    ("sudo",): (("-u", "--user", "-g", "--group", "-D", "--chdir"), 0),
    ("gosu",): ((), 1),
    ("su-exec",): ((), 1),
    ("tini",): (("-p", "-e"), 0),
    ("dumb-init",): (("-r", "--rewrite"), 0),
    ("nsys", "profile"): (("-o", "--output", "-t", "--trace", "-s", "--sample", "-c", "--capture-range"), 0),
    ("poetry", "run"): ((), 0),
    ("pipenv", "run"): ((), 0),
    ("pdm", "run"): ((), 0),
    ("pixi", "run"): (("-e", "--environment", "--manifest-path"), 0),
    ("conda", "run"): (("-n", "--name", "-p", "--prefix", "--cwd"), 0),
    ("mamba", "run"): (("-n", "--name", "-p", "--prefix", "--cwd"), 0),
    ("micromamba", "run"): (("-n", "--name", "-p", "--prefix", "--cwd"), 0),
    ("uv", "run"): (
        ("--with", "--extra", "--group", "--project", "--directory", "-p", "--python", "--env-file", "--package"),
        0,
    ),
}

ReadScript = Callable[[str], str | None]
"""The text of a script file; None if it cannot be read."""


@dataclass(frozen=True)
class FoundCommand:
    """A command that runs, without wrappers."""

    words: list[str]
    file: str | None = None
    """The script that it is in; None: on the command line itself."""
    line: int = 1
    branch: tuple[str, int, int] | None = None
    """Script, block and branch, if it may not run: see ScriptCommand.branch."""
    is_certain: bool = True
    """False: its words depend on a variable, or the script could not be parsed."""


@dataclass(frozen=True)
class FoundCommands:
    commands: list[FoundCommand] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Scripts that could not be read."""


def commands_in(command: Sequence[str]) -> list[list[str]]:
    """The simple commands of `sh -c SCRIPT`, without wrappers; for any other command, that command."""
    found = find_commands(command, lambda _: None)
    return [each.words for each in found.commands if each.is_certain]


def find_commands(command: Sequence[str], read: ReadScript) -> FoundCommands:
    """All commands that a command runs, including those of shell scripts that `read` can read."""
    search = _Search(read)
    search.visit(FoundCommand(list(command)), depth=0)
    return search.found


def read_script(path: str) -> str | None:
    """The text of a script of this machine, found as a shell does; empty for a program."""
    found: str | None = path
    if not Path(path).is_file():
        found = shutil.which(path)
    if found is None:
        return None
    try:
        with Path(found).open("rb") as file:
            content = file.read(_MAX_SCRIPT_BYTES)
    except OSError:
        return None
    if b"\0" in content:  # a program, not a script
        return ""
    return content.decode(errors="replace")


class _Search:
    def __init__(self, read: ReadScript) -> None:
        self.found = FoundCommands()
        self._read = read

    def visit(self, command: FoundCommand, depth: int, here_document: str | None = None) -> None:
        words = without_wrappers(command.words)
        command = replace(command, words=words)
        if not words:
            return
        position = script_position(words)
        if depth >= _MAX_NESTED:
            self.found.commands.append(command)
        elif position is not None:
            # `sh -c SCRIPT NAME ARGUMENTS`: the word after the script is its $0.
            self._visit_script(words[position], command, words[position + 2 :], depth)
        elif words[0] == "eval":
            self._visit_script(" ".join(words[1:]), command, [], depth)
        elif (file := _script_file(words)) is not None:
            self._visit_file(file, command, depth)
        elif here_document is not None and program(words) in _SHELLS:
            self._visit_script(here_document, command, [], depth)
        else:
            self.found.commands.append(command)

    def _visit_file(self, file: str, command: FoundCommand, depth: int) -> None:
        words = command.words
        text = self._read(file)
        is_sourced = words[0] in (".", "source")
        is_run_by_shell = is_sourced or program(words) in _SHELLS
        # A sourced file that is missing is almost always an environment (conda.sh, bin/activate).
        if text is None and not is_sourced and (is_run_by_shell or _SHELL_SCRIPT.fullmatch(file)):
            self.found.unread.append(file)
        is_shell_script = text is not None and (is_run_by_shell or _is_shell_script(file, text))
        if text is None or not is_shell_script:
            self.found.commands.append(command)
            return
        arguments = words[words.index(file) + 1 :]
        self._visit_script(text, replace(command, file=file), arguments, depth, is_file=True)

    def _visit_script(
        self, text: str, outer: FoundCommand, arguments: list[str], depth: int, is_file: bool = False
    ) -> None:
        """`outer`: the command that runs the script."""
        variables = _Variables(arguments, outer.file)
        for command in parse_script(text):
            variables.assign(command)
            line = outer.line
            if is_file:
                line = command.line
            branch = outer.branch
            if command.branch:
                branch = (outer.file or "", *command.branch)
            for words, is_known in variables.expand(without_wrappers(command.words)):
                is_certain = outer.is_certain and is_known and not command.is_guess
                inner = replace(outer, words=words, line=line, branch=branch, is_certain=is_certain)
                self.visit(inner, depth + 1, command.here_document)


class _Variables:
    """The possible values of the variables that a script sets, and its arguments."""

    def __init__(self, arguments: list[str], file: str | None) -> None:
        self._arguments = arguments
        self._values = {str(number): [word] for number, word in enumerate(arguments, start=1)}
        self._may_be_unset: set[str] = set()
        self._directory = str(Path(file or "").parent)

    def assign(self, command: ScriptCommand) -> None:
        for name, value in command.assigned.items():
            values = []
            if command.is_conditional:  # the variable may keep the value that it had
                values = self._values.get(name, [])
                if not values:
                    self._may_be_unset.add(name)
            self._values[name] = [*values, self._text(value)][-_MAX_VALUES:]

    def expand(self, words: list[str]) -> Iterator[tuple[list[str], bool]]:
        """The command with each possible value of its program, or of its script, and whether it is certain."""
        if words and words[0] in ("$@", "$*", "${@}"):
            yield [*self._arguments, *words[1:]], True
        elif words:
            at = script_position(words) or int(words[0] == "eval")
            before = words[:at]
            rest = [self._text(word) for word in words[at + 1 :]]
            word = ""
            if at < len(words):
                word = words[at]
            for value, is_certain in self._alternatives(word):
                if at:  # a script is one word
                    yield [*before, value, *rest], is_certain
                else:  # LAUNCH="torchrun --nproc-per-node 2" is three
                    yield [*value.split(), *rest], is_certain

    def _alternatives(self, word: str) -> list[tuple[str, bool]]:
        variable = _VARIABLE.match(word)
        if variable is None:
            return [(self._text(word), True)]
        name = variable[1] or variable[2]
        default = variable[3]
        rest = self._text(word[variable.end() :])
        values = self._values.get(name, [])
        if name not in self._values and default is not None:
            values = [default]
        is_certain = len(values) == 1 and name in self._values and name not in self._may_be_unset
        return [(value + rest, is_certain) for value in values] or [(word, False)]

    def _text(self, word: str) -> str:
        """The word with the last values of variables."""

        def last_value(variable: re.Match[str]) -> str:
            values = self._values.get(variable[1] or variable[2])
            if values is None:
                return variable[0]
            return values[-1]

        word = _SCRIPT_DIRECTORY.sub(lambda _: self._directory, word)
        return _VARIABLE.sub(last_value, word)[:_MAX_VALUE]


def _script_file(words: list[str]) -> str | None:
    """FILE of `sh FILE`, `source FILE` or `./FILE`."""
    if words[0] in (".", "source"):
        position = 1
    elif program(words) in _SHELLS:
        position = _after_options(words)
    elif "/" in words[0] or _SHELL_SCRIPT.fullmatch(words[0]):
        position = 0
    else:
        return None
    if position >= len(words):
        return None
    return words[position]


def _is_shell_script(file: str, text: str) -> bool:
    if _SHEBANG.match(text):
        return True
    return _SHELL_SCRIPT.fullmatch(file) is not None and not text.startswith("#!")


def without_wrappers(command: Sequence[str]) -> list[str]:
    """The command without `env A=1`, `timeout 60` and other wrappers before it."""
    words = list(command)
    for _ in range(_MAX_WRAPPERS):
        rest = _without_wrapper(words)
        if rest is None:
            break
        words = rest
    return words


def _without_wrapper(words: list[str]) -> list[str] | None:
    name = program(words)
    wrapper = _WRAPPERS.get((name,)) or _WRAPPERS.get((name, *words[1:2]))
    if wrapper is None:
        return None
    with_value, arguments = wrapper
    at = 2  # `uv run`
    if (name,) in _WRAPPERS:
        at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] in with_value:
            at += 1
        at += 1
        if words[at - 1] == "--":
            break
    while name == "env" and at < len(words) and is_assignment(words[at]):
        at += 1
    return words[at + arguments :]


def script_position(words: Sequence[str]) -> int | None:
    """The index of SCRIPT in `sh -c SCRIPT`."""
    if program(words) not in _SHELLS:
        return None
    position = _after_options(words)
    if position >= len(words) or not _OPTION_C.fullmatch(words[position - 1]):
        return None
    return position


def _after_options(words: Sequence[str]) -> int:
    """The index of the first word behind the options of a shell, or behind -c."""
    position = 1
    while position < len(words) and words[position].startswith("-"):
        option = words[position]
        if re.fullmatch(r"-[A-Za-z]*[oO]", option):  # -o pipefail
            position += 1
        position += 1
        if _OPTION_C.fullmatch(option) or option == "--":
            break
    return position


def program(words: Sequence[str]) -> str:
    """The name of the program, without its directory."""
    if not words:
        return ""
    return words[0].rpartition("/")[2]
