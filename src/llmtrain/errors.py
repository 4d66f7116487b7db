"""The errors that llmtrain raises, with their exit codes.

    LlmtrainError          1  a worker crashed, or a service failed in an unknown way
    ├── UsageError        64  the command line, the config or the environment is invalid
    │   └── ConfigError   64  lists all problems of a config document
    ├── DataError         65  text, tokens or a tokenizer cannot be used
    ├── CheckpointError   65  a checkpoint is damaged or belongs to another run
    ├── TrainingFailed    65  the run cannot continue: NaN, out of memory, disk full
    ├── JoinError         69  the processes did not find each other in time
    ├── ClusterError      69  the cluster is unreachable or refuses a request
    ├── HubError          69  the Hugging Face hub is unreachable or refuses an upload
    └── Interrupted       75  SIGTERM or SIGINT; the run can be resumed
        ├── PeerLost      75  another process of the run ended or hangs: counts as a crash
        └── Superseded    75  another process has taken over the run

Exit code 0 means finished. Platforms may restart a run after 69 and 75, never after 64 and 65. For a process of a run
any other code is a crash, after which a restart may help.
Each error has a message, the accepted values where there are any, and a remedy.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

Reason = Literal[
    "disk_full",
    "earlier_start_ended",
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
    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        known: Iterable[str] | None = None,
        remedy: str | None = None,
        reason: Reason | None = None,
    ) -> None:
        self.what = what
        self.reason = reason
        self.known = sorted(known) if known is not None else None
        self.remedy = remedy
        self.details: dict[str, object] = {}
        super().__init__(str(self))

    def __str__(self) -> str:
        return f"{self.what_and_known}\n  {self.remedy}" if self.remedy else self.what_and_known

    @property
    def what_and_known(self) -> str:
        return self.what if self.known is None else f"{self.what} Known: {', '.join(self.known) or 'none'}."

    def as_dict(self) -> dict[str, object]:
        return {
            "error": type(self).__name__,
            "what": self.what,
            "known": self.known,
            "remedy": self.remedy,
            "reason": self.reason,
            "exit_code": self.exit_code,
            **self.details,
        }


class UsageError(LlmtrainError):
    exit_code = 64


class ConfigError(UsageError):
    """All problems of one config document. `line`: of the only problem, if the document cannot be parsed."""

    def __init__(self, source: str, problems: Sequence[str], line: int | None = None) -> None:
        self.source = source
        self.problems = list(problems)
        count = len(self.problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        is_unparsed = line is not None and count == 1
        super().__init__(
            f"{source}:{line}: {self.problems[0]}."
            if is_unparsed
            else f"{source}: {count} problem{'s' if count != 1 else ''}{lines}"
        )

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "source": self.source, "problems": self.problems}


class DataError(LlmtrainError):
    exit_code = 65


class CheckpointError(LlmtrainError):
    exit_code = 65


class TrainingFailed(LlmtrainError):
    exit_code = 65


class JoinError(LlmtrainError):
    exit_code = 69


class ClusterError(LlmtrainError):
    exit_code = 69


class HubError(LlmtrainError):
    exit_code = 69


class Interrupted(LlmtrainError):
    exit_code = 75


class PeerLost(Interrupted):
    pass


class Superseded(Interrupted):
    pass


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or an empty string if no known word is similar."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
