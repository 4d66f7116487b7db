"""Finding: the result of one check. A check that raises becomes a finding too, so that it does not hide the others."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmtrain.core.text import one_line
from llmtrain.errors import LlmtrainError

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    evidence: str
    """What was observed, with numbers."""
    remedy: str | None = None
    rank: int | None = None
    """Rank of the process that found it; None for a single process, or if it concerns all of them."""

    @property
    def recommendation(self) -> str | None:
        """The remedy, as documents and JSON of 0.1.0 name it."""
        return self.remedy

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "evidence": self.evidence,
            "recommendation": self.remedy,
            "rank": self.rank,
        }


Check = Callable[[], Iterable[Finding]]


def passed(name: str, evidence: str) -> Finding:
    return Finding(name, "pass", evidence)


def warned(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name, "warn", evidence, remedy)


def failed(name: str, evidence: str, remedy: str | None) -> Finding:
    return Finding(name, "fail", evidence, remedy)


def failed_by(name: str, error: LlmtrainError) -> Finding:
    """An error as a finding, with its remedy."""
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
