"""The findings of the linter, as text and as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.core.findings import Finding, Status
from llmtrain.core.terminal import printable_line
from llmtrain.core.text import plural
from llmtrain.lint.rules.rule import Severity
from llmtrain.lint.source import Sources

if TYPE_CHECKING:
    from rich.text import Text

SEVERITIES: dict[Severity, Status] = {"error": "fail", "warning": "warn", "advice": "pass"}
"""Severity -> status of a Finding, most severe first; advice is not a failure."""
COLORS: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "advice": "cyan"}
Parts = list[tuple[str, str]]
"""(text, style of rich) of the parts of a line."""


@dataclass(frozen=True)
class ManifestFinding(Finding):
    """A mistake at its line. `name` is the id of the rule, `evidence` the occurrence, `remedy` that of the rule."""

    file: str = ""
    line: int = 0
    also_lines: tuple[int, ...] = ()
    """Lines of the same mistake in other pod templates of the workload."""
    severity: Severity = "error"
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "rule": self.name,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "also_lines": list(self.also_lines),
            "what": self.evidence,
            "why": self.why,
            "fix": self.remedy,
        }


@dataclass(frozen=True)
class LintReport:
    findings: list[ManifestFinding]
    """Sorted by severity, then by file and line."""
    sources: Sources
    training: int
    """Number of pod templates that train."""
    ignored: int = 0
    """Number of findings that --ignore or a comment suppressed."""

    def counts(self) -> dict[Severity, int]:
        counts = Counter(finding.severity for finding in self.findings)
        return {severity: counts[severity] for severity in SEVERITIES}

    def is_ok(self, *, is_strict: bool) -> bool:
        if is_strict:
            return not self.findings
        return all(finding.severity == "advice" for finding in self.findings)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing was checked, so that no findings mean nothing."""
        return not self.training and not self.findings and not self.ignored

    def as_dict(self, *, is_strict: bool) -> dict[str, Any]:
        return {
            "ok": None if self.is_unknown else self.is_ok(is_strict=is_strict),
            "files": self.sources.files,
            "skipped": self.sources.skipped,
            "objects": len(self.sources.objects),
            "training_pod_templates": self.training,
            "counts": self.counts(),
            "ignored": self.ignored,
            "findings": [finding.as_dict() for finding in self.findings],
        }

    def text(self) -> str:
        return "\n".join("".join(text for text, _ in line) for line in self._lines())

    def colored(self) -> "Text":
        """The report as text for the console of rich."""
        from rich.text import Text

        return Text("\n").join(Text.assemble(*line) for line in self._lines())

    def _lines(self) -> Iterator[Parts]:
        """One line per finding, in the format of compilers; reason and remedy at the first finding of a rule."""
        explained: set[str] = set()
        for found in self.findings:
            place = (f"{printable_line(found.file)}:{found.line}: ", "bold")
            also = ""
            if found.also_lines:
                also = f" (also line {', '.join(map(str, found.also_lines))})"
            yield [
                place,
                (f"{found.severity}: ", COLORS[found.severity]),
                (f"{found.evidence}{also} ", ""),
                (f"[{found.name}]", "dim"),
            ]
            if found.name not in explained:
                yield [(f"    why: {found.why}", "dim")]
                yield [(f"    fix: {found.remedy}", "")]
                explained.add(found.name)
        for path in self.sources.skipped:
            yield [(f"{printable_line(path)}: skipped, not a Kubernetes manifest", "dim")]
        yield [(self.summary(), "bold")]

    def summary(self) -> str:
        counts = self.counts()
        read = f"{plural(len(self.sources.objects), 'object')} in {plural(len(self.sources.files), 'file')}"
        if self.is_unknown:
            return (
                f"nothing to check: {read}, no training pod template. Name the file of a Job, StatefulSet, PyTorchJob, "
                "JobSet or TrainJob whose pods train."
            )
        found = ["no problems found"]
        if self.findings:
            found = [
                plural(counts["error"], "error"),
                plural(counts["warning"], "warning"),
                plural(counts["advice"], "suggestion"),
            ]
        if self.ignored:
            found.append(f"{self.ignored} ignored")
        return f"{', '.join(found)}: {read}, {plural(self.training, 'training pod template')}."
