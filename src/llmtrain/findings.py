"""Finding: the result of one check. A check that raises becomes a finding too, so that it does not hide the others."""

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
    """What was observed, with numbers."""
    recommendation: str | None = None
    rank: int | None = None
    """Of the process that found it; None for a single process, or if it concerns all of them."""

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
    """An error as a finding, with its remedy as the recommendation."""
    return failed(name, error.what_and_known, error.remedy)


def run_checks(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """The findings of all (name, check), in order. Findings of a check before it raised are kept."""
    findings: list[Finding] = []
    for name, check in checks:
        try:
            for finding in check():
                findings.append(finding)
        except Exception as problem:
            message = one_line(problem) or "no message"
            findings.append(
                warned(name, f"the check failed: {type(problem).__name__}: {message}", "Report it if it persists.")
            )
    return findings


def at_rank(findings: Iterable[Finding], rank: int) -> list[Finding]:
    return [replace(finding, rank=rank) for finding in findings]


def is_ok(findings: Iterable[Finding]) -> bool:
    return all(finding.status != "fail" for finding in findings)
