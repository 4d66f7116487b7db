"""Finding: what one check saw. A check yields findings; one that breaks is a finding too, never a crash: a preflight
that falls over its own feet tells nothing."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from llmtrain.errors import LlmtrainError
from llmtrain.text import one_line

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    evidence: str
    """What was seen, with the numbers."""
    recommendation: str | None = None
    rank: int | None = None
    """Of the process that saw it; None where there is one process, or where it concerns all of them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[], Iterable[Finding]]


def passed(name: str, evidence: str) -> Finding:
    return Finding(name, "pass", evidence)


def warned(name: str, evidence: str, recommendation: str) -> Finding:
    return Finding(name, "warn", evidence, recommendation)


def failed(name: str, evidence: str, recommendation: str | None) -> Finding:
    return Finding(name, "fail", evidence, recommendation)


def failed_by(name: str, error: LlmtrainError) -> Finding:
    """An error of ours as a finding: its remedy is the recommendation."""
    return failed(name, error.what_and_known, error.remedy)


def run_checks(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """All findings of (name, check), in order. What a check found before it broke is kept."""
    found: list[Finding] = []
    for name, check in checks:
        try:
            for finding in check():
                found.append(finding)
        except Exception as problem:
            what = one_line(problem) or "no text"
            found.append(
                warned(name, f"could not be checked: {type(problem).__name__}: {what}", "Report it if it stays so.")
            )
    return found


def at_rank(findings: Iterable[Finding], rank: int) -> list[Finding]:
    return [replace(finding, rank=rank) for finding in findings]


def is_ok(findings: Iterable[Finding]) -> bool:
    return all(finding.status != "fail" for finding in findings)
