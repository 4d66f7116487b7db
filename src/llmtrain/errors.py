"""The errors that llmtrain raises, with their exit codes.

This file is the one place for both: tools/exit_codes.py writes the tree below and the tables of the docs from it.
The first line of an error's docstring is its meaning there.

    LlmtrainError          1  a worker crashed, or a service failed in an unknown way
    ├── UsageError        64  the command line, the config or the environment is invalid
    │   └── ConfigError   64  lists all problems of a config document
    ├── DataError         65  text, tokens or a tokenizer cannot be used
    ├── CheckpointError   65  a checkpoint is damaged, missing, or belongs to another run
    ├── BuildError        65  an image cannot be built
    ├── TrainingFailed    65  the run cannot continue: NaN, out of memory, disk full
    ├── JoinError         69  the processes did not find each other in time
    ├── ClusterError      69  the cluster, a registry or a container engine is unreachable or refuses a request
    ├── HubError          69  the Hugging Face hub is unreachable or refuses an upload
    └── Interrupted       75  SIGTERM, SIGINT or SIGHUP; the run can be resumed
        ├── PeerLost      75  another process of the run ended or hangs; counts as a crash
        └── Superseded    75  another process has taken over the run

Exit code 0 means finished. Platforms may restart a run after 69 and 75, never after 64 and 65. For a process of a run
any other code is a crash, after which a restart may help.
Each error has a message, the accepted values where there are any, and a remedy.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Literal

LISTED_WIDTH = 100
"""Characters of a list of names in a message."""


class ExitCode(IntEnum):
    """How a process ended, and what to do about it."""

    def __new__(cls, code: int, meaning: str, remedy: str) -> "ExitCode":
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.remedy = remedy
        return member

    meaning: str
    remedy: str

    FINISHED = 0, "finished", "nothing"
    PROBLEM = 1, "a check found a problem; a process of a run crashed", "read the message; `--resume` continues a run"
    CANNOT_TELL = 2, "a check could not be made", "read the message"
    USAGE = 64, "bad usage or config", "read the message; never restarted"
    FAILED = 65, "bad data, unusable checkpoint, or training failed", "read the message; never restarted"
    UNAVAILABLE = 69, "peers or a required service unavailable", "read the message; platforms may retry"
    INTERRUPTED = 75, "interrupted, or a peer was lost", "run the same command with `--resume`"
    KILLED = 137, "killed or out of memory", "`--resume` continues from the newest checkpoint"
    TERMINATED = 143, "ended by SIGTERM before it could save", "`--resume` continues from the newest checkpoint"


Reason = Literal[
    "disk_full",
    "earlier_start_ended",
    "export_differs",
    "gave_up",
    "gpu_memory",
    "master_unreachable",
    "no_progress",
    "not_finite",
    "not_writable",
    "prefetch",
    "processes_missing",
]
"""Distinguishes causes within one error type, for programs such as `llmtrain why`; messages are for people only."""


class LlmtrainError(Exception):
    """a worker crashed, or a service failed in an unknown way"""

    exit_code: int = ExitCode.PROBLEM

    def __init__(
        self,
        what: str,
        *,
        known: Iterable[str] | None = None,
        like: str | None = None,
        remedy: str | None = None,
        reason: Reason | None = None,
    ) -> None:
        """`like`: the word that is not in `known`; of a long list the message has only the names nearest to it."""
        self.what = what
        self.like = like
        self.reason = reason
        self.known = sorted(known) if known is not None else None
        self.remedy = remedy
        self.details: dict[str, object] = {}
        super().__init__(str(self))

    def __str__(self) -> str:
        if self.remedy:
            return f"{self.what_and_known}\n  {self.remedy}"
        return self.what_and_known

    @property
    def what_and_known(self) -> str:
        if self.known is None:
            return self.what
        return f"{self.what} Known: {listed(self.known, self.like)}."

    def as_dict(self) -> dict[str, object]:
        return {
            "error": type(self).__name__,
            "what": self.what,
            "known": self.known,
            "remedy": self.remedy,
            "reason": self.reason,
            "exit_code": int(self.exit_code),
            **self.details,
        }


class UsageError(LlmtrainError):
    """the command line, the config or the environment is invalid"""

    exit_code: int = ExitCode.USAGE


class ConfigError(UsageError):
    """lists all problems of a config document

    line: of the only problem, if the document cannot be parsed.
    """

    def __init__(self, source: str, problems: Sequence[str], line: int | None = None) -> None:
        self.source = source
        self.problems = list(problems)
        count = len(self.problems)
        if line is not None and count == 1:
            super().__init__(f"{source}:{line}: {self.problems[0]}.")
        else:
            head = "1 problem" if count == 1 else f"{count} problems"
            super().__init__("\n  - ".join([f"{source}: {head}", *self.problems]))

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "source": self.source, "problems": self.problems}


class DataError(LlmtrainError):
    """text, tokens or a tokenizer cannot be used"""

    exit_code: int = ExitCode.FAILED


class CheckpointError(LlmtrainError):
    """a checkpoint is damaged, missing, or belongs to another run"""

    exit_code: int = ExitCode.FAILED


class BuildError(LlmtrainError):
    """an image cannot be built"""

    exit_code: int = ExitCode.FAILED


class TrainingFailed(LlmtrainError):
    """the run cannot continue: NaN, out of memory, disk full"""

    exit_code: int = ExitCode.FAILED


class JoinError(LlmtrainError):
    """the processes did not find each other in time"""

    exit_code: int = ExitCode.UNAVAILABLE


class ClusterError(LlmtrainError):
    """the cluster, a registry or a container engine is unreachable or refuses a request"""

    exit_code: int = ExitCode.UNAVAILABLE


class HubError(LlmtrainError):
    """the Hugging Face hub is unreachable or refuses an upload"""

    exit_code: int = ExitCode.UNAVAILABLE


class Interrupted(LlmtrainError):
    """SIGTERM, SIGINT or SIGHUP; the run can be resumed"""

    exit_code: int = ExitCode.INTERRUPTED


class PeerLost(Interrupted):
    """another process of the run ended or hangs; counts as a crash"""


class Superseded(Interrupted):
    """another process has taken over the run"""


def error_class(name: str) -> type[LlmtrainError]:
    """The class of an error that another process reported by its name, built from one message."""
    found = globals().get(name)
    if not isinstance(found, type) or not issubclass(found, LlmtrainError):
        return LlmtrainError
    if issubclass(found, ConfigError):  # built from a list of problems, which a report does not have
        return UsageError
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or an empty string if no known word is similar."""
    import difflib  # not at the top: __main__ imports this module before it can handle Ctrl-C

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def listed(names: Sequence[str], like: str | None = None) -> str:
    """The names, if they fit into a line; else the five nearest to `like`, or without it all of them, on lines."""
    text = ", ".join(names) or "none"
    if len(text) <= LISTED_WIDTH:
        return text
    if like is None:
        import textwrap

        return "\n  ".join(textwrap.wrap(text, LISTED_WIDTH, break_long_words=False, break_on_hyphens=False))
    import difflib

    near = difflib.get_close_matches(like, names, n=5, cutoff=0.0)
    return f"{', '.join(near)} and {len(names) - len(near)} more"
