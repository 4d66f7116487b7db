"""The linter for training manifests. RULES is the table of rules, which docs/lint.md shows.

It sends no requests to a cluster. What the files do not contain is not reported, with one exception: a Service that the
pods need.
"""

from dataclasses import dataclass
from typing import Any

from llmtrain.findings import Finding, Status
from llmtrain.lint.model import Manifests
from llmtrain.lint.rules import hardening, jobs, operators, pods, rendezvous, services
from llmtrain.lint.rules.rule import Match, Rule, Severity
from llmtrain.lint.source import Sources
from llmtrain.redact import redact
from llmtrain.terminal import printable_line
from llmtrain.text import plural

RULES: tuple[Rule, ...] = (
    *rendezvous.RULES,
    *services.RULES,
    *jobs.RULES,
    *operators.RULES,
    *pods.RULES,
    *hardening.RULES,
)
SEVERITIES: dict[Severity, Status] = {"error": "fail", "warning": "warn", "advice": "pass"}
"""Severity -> status of a Finding; advice is not a failure."""


@dataclass(frozen=True)
class ManifestFinding(Finding):
    """A mistake at its line. `name` is the id of the rule, `evidence` the occurrence, `recommendation` the fix."""

    file: str = ""
    line: int = 0
    severity: Severity = "error"
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "rule": self.name,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "what": self.evidence,
            "why": self.why,
            "fix": self.recommendation,
        }


@dataclass(frozen=True)
class LintReport:
    findings: list[ManifestFinding]
    sources: Sources
    training: int
    """Number of pod templates that train."""

    def counts(self) -> dict[Severity, int]:
        return {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}

    def is_ok(self, *, is_strict: bool) -> bool:
        return all(finding.severity == "advice" and not is_strict for finding in self.findings)

    def as_dict(self, *, is_strict: bool) -> dict[str, Any]:
        return {
            "ok": self.is_ok(is_strict=is_strict),
            "files": self.sources.files,
            "skipped": self.sources.skipped,
            "objects": len(self.sources.objects),
            "training_pod_templates": self.training,
            "counts": self.counts(),
            "findings": [finding.as_dict() for finding in self.findings],
        }

    def text(self) -> str:
        """One line per finding, in the format of compilers; reason and fix at the first finding of a rule."""
        lines: list[str] = []
        explained: set[str] = set()
        for found in self.findings:
            lines.append(f"{found.file}:{found.line}: {found.severity}: {found.evidence} [{found.name}]")
            if found.name not in explained:
                lines += [f"    why: {found.why}", f"    fix: {found.recommendation}"]
                explained.add(found.name)
        lines += [f"{path}: skipped, not a Kubernetes manifest" for path in self.sources.skipped]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        counts = self.counts()
        advice = plural(counts["advice"], "suggestion")
        found = ", ".join([plural(counts["error"], "error"), plural(counts["warning"], "warning"), advice])
        read = f"{plural(len(self.sources.objects), 'object')} in {plural(len(self.sources.files), 'file')}"
        training = plural(self.training, "training pod template")
        return f"{found if self.findings else 'no problems found'}: {read}, {training}."


def lint(sources: Sources) -> LintReport:
    manifests = Manifests(sources.objects)
    found = {_finding(rule, match): None for rule in RULES for match in rule.find(manifests)}
    order = {name: position for position, name in enumerate(sources.files)}
    findings = sorted(
        found, key=lambda each: (order.get(each.file, 0), each.line, list(SEVERITIES).index(each.severity))
    )
    return LintReport(findings, sources, sum(1 for _ in manifests.training()))


def _finding(rule: Rule, match: Match) -> ManifestFinding:
    return ManifestFinding(
        rule.id,
        SEVERITIES[rule.severity],
        printable_line(redact(match.evidence)),
        rule.fix,
        file=match.node.source.name,
        line=match.line or match.node.line,
        severity=rule.severity,
        why=rule.why,
    )
