"""The simple commands of `bash -c SCRIPT`, and the command behind wrappers such as env, timeout or uv run.

Understands quotes, comments, redirections and separators, but no expansion.
"""

import re
from collections.abc import Sequence

_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_MAX_NESTED_SHELLS = 3
_MAX_WRAPPERS = 8
_TOKEN = re.compile(
    r"""
    (?P<skip> [^\S\n]+ | \\\n | (?:(?<=[\s;|&()])|^)\#[^\n]* | (?:\d+|&)?[<>]{1,3}&?[^\S\n]*[^\s;|&()<>"']* )
  | (?P<end> [\n;|&()]+ )
  | (?P<word> (?: \\. | "(?:\\.|[^"\\])*" | '[^']*' | \$\([^()]*\) | \$\{[^{}\n]*\} | [^\s"';|&()<>\\] )+ )
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""\\\n|\\(.)|"((?:\\.|[^"\\])*)"|'([^']*)'""", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# May precede a command in a script.
_KEYWORDS = ("if", "then", "elif", "else", "while", "until", "do", "!", "{", "exec", "command", "time")
# Programs that run another command: their options with a value, and the number of arguments before that command.
_WRAPPERS = {
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
    ("poetry", "run"): ((), 0),
    ("conda", "run"): (("-n", "--name", "-p", "--prefix", "--cwd"), 0),
    ("uv", "run"): (
        ("--with", "--extra", "--group", "--project", "--directory", "-p", "--python", "--env-file", "--package"),
        0,
    ),
}


def commands_in(command: Sequence[str]) -> list[list[str]]:
    """The simple commands of `sh -c SCRIPT`, without wrappers; for any other command, that command."""
    return _commands_in(command, _MAX_NESTED_SHELLS)


def _commands_in(command: Sequence[str], depth: int) -> list[list[str]]:
    words = without_wrappers(command)
    position = script_position(words)
    if position is None or depth == 0:
        return [words] if words else []
    return [inner for own in _simple_commands(words[position]) for inner in _commands_in(own, depth - 1)]


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
    at = 1 if (name,) in _WRAPPERS else 2
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in with_value else 1
        if words[at - 1] == "--":
            break
    while name == "env" and at < len(words) and _ASSIGNMENT.fullmatch(words[at]):
        at += 1
    return words[at + arguments :]


def script_position(words: Sequence[str]) -> int | None:
    """The index of SCRIPT in `sh -c SCRIPT`."""
    if program(words) not in _SHELLS:
        return None
    position = 1
    while position < len(words) and words[position].startswith("-"):
        option = words[position]
        if re.fullmatch(r"-[A-Za-z]*c", option):
            return position + 1 if position + 1 < len(words) else None
        position += 2 if re.fullmatch(r"-[A-Za-z]*[oO]", option) else 1  # -o pipefail
    return None


def program(words: Sequence[str]) -> str:
    """The name of the program, without its directory."""
    return words[0].rpartition("/")[2] if words else ""


def _simple_commands(script: str) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    position = 0
    while match := _TOKEN.match(script, position):
        if match["end"]:
            commands.append([])
        elif match["word"] and not (not commands[-1] and _is_prefix(match["word"])):
            commands[-1].append(_unquoted(match["word"]))
        position = match.end()
    if position < len(script):  # an open quote, which the shell will report
        return []
    return [words for words in commands if words]


def _is_prefix(word: str) -> bool:
    return word in _KEYWORDS or _ASSIGNMENT.fullmatch(word) is not None


def _unquoted(word: str) -> str:
    return _QUOTED.sub(lambda match: match[1] or match[2] or match[3] or "", word)
