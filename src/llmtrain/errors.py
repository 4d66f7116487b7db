"""Every error a user can meet, and the exit code it ends with.

    LlmtrainError
    ├── UsageError        64  the command, the config or the machine is not fit for what was asked
    │   └── ConfigError   64  one or more problems in a config document, all listed
    ├── DataError         65  text, tokens or a tokenizer that cannot be used
    ├── CheckpointError   65  a checkpoint that is damaged, foreign or not one of ours
    ├── TrainingFailed   65  the run cannot go on: NaN, out of memory, disk full
    ├── JoinError         69  the processes did not find each other in time; to a platform this is a crash
    ├── ClusterError      69  the cluster cannot be reached, or does not do what it was asked
    └── Interrupted          75  told to stop; the same command with --resume goes on
        ├── PeerLost      75  another process of the run died or hangs: a crash to restart from
        └── Superseded    75  another process has taken the run over; nothing is to be done

Exit code 0 means finished; anything else than 0, 64, 65 and 75 is a crash.
Each error says what is wrong, the known values where there are any, and the remedy.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

Reason = Literal[
    "disk_full",
    "gave_up",
    "gpu_memory",
    "master_unreachable",
    "no_progress",
    "not_finite",
    "not_writable",
    "prefetch",
    "processes_missing",
]
"""What `llmtrain why` tells apart among errors of one type. Programs read this; the wording is for people."""


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
    """All problems of one config document at once."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        count = len(self.problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{source}: {count} problem{'s' if count != 1 else ''}{lines}")

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


class Interrupted(LlmtrainError):
    exit_code = 75


class PeerLost(Interrupted):
    pass


class Superseded(Interrupted):
    pass


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing where no known word is near."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
