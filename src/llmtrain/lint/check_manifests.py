"""The linter: every known trap of training manifests, by rules. RULES is the table; docs/lint.md shows it.

Nothing is asked of a cluster. What the files do not say is not held against them, with one exception that the finding
names: a Service that pods need and that is in none of the files given.
"""

from dataclasses import dataclass
from typing import Any

from llmtrain.findings import Finding, Status
from llmtrain.lint.model import Manifests
from llmtrain.lint.rules import hardening, jobs, operators, pods, rendezvous, services
from llmtrain.lint.rules.rule import Rule, Seen, Severity
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
"""In the words of a Finding: advice is no reason to stop."""


@dataclass(frozen=True)
class ManifestFinding(Finding):
    """A trap at its place. `name` is the rule's id, `evidence` what stands there, `recommendation` the fix."""

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
    """Pod templates that train."""

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
        """One line for each finding, as compilers write them; why and fix where a rule is met first."""
        lines: list[str] = []
        told: set[str] = set()
        for found in self.findings:
            lines.append(f"{found.file}:{found.line}: {found.severity}: {found.evidence} [{found.name}]")
            if found.name not in told:
                lines += [f"    why: {found.why}", f"    fix: {found.recommendation}"]
                told.add(found.name)
        lines += [f"{path}: passed over, no Kubernetes manifest" for path in self.sources.skipped]
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        counts = self.counts()
        said = [plural(counts["error"], "error"), plural(counts["warning"], "warning")]
        found = ", ".join([*said, f"{counts['advice']} of advice"]) if self.findings else "no trap found"
        read = f"{plural(len(self.sources.objects), 'object')} in {plural(len(self.sources.files), 'file')}"
        what = plural(self.training, "training pod template") if self.training else "nothing that looks like training"
        return f"{found}: {read}, {what}."


def lint(sources: Sources) -> LintReport:
    manifests = Manifests(sources.objects)
    found = {_finding(rule, seen): None for rule in RULES for seen in rule.look(manifests)}
    order = {name: position for position, name in enumerate(sources.files)}
    findings = sorted(found, key=lambda one: (order.get(one.file, 0), one.line, list(SEVERITIES).index(one.severity)))
    return LintReport(findings, sources, sum(1 for _ in manifests.training()))


def _finding(rule: Rule, seen: Seen) -> ManifestFinding:
    return ManifestFinding(
        rule.id,
        SEVERITIES[rule.severity],
        printable_line(redact(seen.evidence)),
        rule.fix,
        file=seen.node.source.name,
        line=seen.line or seen.node.line,
        severity=rule.severity,
        why=rule.why,
    )
