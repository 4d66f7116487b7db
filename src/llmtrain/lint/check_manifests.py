"""The linter for training manifests. RULES is the table of rules, which docs/lint.md shows.

It sends no requests to a cluster. What the files do not contain is not reported, with one exception: a Service that the
pods need.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace

from llmtrain.core.redact import redact
from llmtrain.core.terminal import printable_line
from llmtrain.errors import UsageError, nearest
from llmtrain.lint.manifests import Manifests
from llmtrain.lint.report import SEVERITIES, LintReport, ManifestFinding
from llmtrain.lint.rules import gpus, hardening, jobs, operators, pods, rendezvous, services
from llmtrain.lint.rules.rule import Match, Rule
from llmtrain.lint.source import Sources

RULES: tuple[Rule, ...] = (
    *rendezvous.RULES,
    *services.RULES,
    *jobs.RULES,
    *operators.RULES,
    *gpus.RULES,
    *pods.RULES,
    *hardening.RULES,
)
_IGNORE = re.compile(r"#\s*llmtrain:\s*ignore\b(?:\[([^\]]*)\])?")


def lint(sources: Sources, ignore: Sequence[str] = ()) -> LintReport:
    """Findings of all rules except those in `ignore`, errors first. Comments in the files ignore rules too."""
    known = [rule.id for rule in RULES]
    for name in ignore:
        if name not in known:
            raise UsageError(f"--ignore: rule '{name}' is unknown.{nearest(name, known)}", known=known, like=name)
    manifests = Manifests(sources.objects)
    comments = ignored_lines(sources, known)
    kept: dict[Hashable, ManifestFinding] = {}
    ignored: set[ManifestFinding] = set()
    for key, finding in _findings(manifests):
        if finding.name in ignore or finding.name in comments.get((finding.file, finding.line), ()):
            ignored.add(finding)
            continue
        first = kept.setdefault(key, finding)
        if first.line != finding.line:
            kept[key] = replace(first, also_lines=(*first.also_lines, finding.line))
    severities = list(SEVERITIES)
    file_order = {name: position for position, name in enumerate(sources.files)}

    def order(finding: ManifestFinding) -> tuple[int, int, int]:
        return severities.index(finding.severity), file_order.get(finding.file, 0), finding.line

    return LintReport(sorted(kept.values(), key=order), sources, len(manifests.training), len(ignored))


def ignored_lines(sources: Sources, known: Collection[str]) -> dict[tuple[str, int], set[str]]:
    """(file, line) -> ids of the rules that a comment suppresses there: `# llmtrain: ignore[rule]`, at the end of the
    line that a finding names or on a line of its own above it. Several rules are separated by commas."""
    found: dict[tuple[str, int], set[str]] = {}
    problems: list[str] = []
    for source in {id(node.source): node.source for node in sources.objects}.values():
        above: set[str] = set()
        for number, line in enumerate(source.lines, start=1):
            for match in _IGNORE.finditer(line):
                named = {name.strip() for name in (match[1] or "").split(",")}
                for name in sorted(named - set(known)):
                    problem = f"rule '{name}' is unknown" if name else "no rule is named"
                    problems.append(f"{source.name}:{number}: {problem}")
                above |= named
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            if above:
                found[source.name, number] = above
            above = set()
    if problems:
        raise UsageError("Invalid `# llmtrain: ignore[rule]` comments:\n  " + "\n  ".join(problems), known=known)
    return found


def _findings(manifests: Manifests) -> Iterator[tuple[Hashable, ManifestFinding]]:
    """Each finding once, with a key that is equal for one mistake in several pod templates of a workload, such as the
    Master and the Worker of a PyTorchJob."""
    seen: set[ManifestFinding] = set()
    for rule in RULES:
        occurrences: Counter[tuple[int, str]] = Counter()
        for match in rule.find(manifests):
            finding = _finding(rule, match)
            if finding in seen:
                continue
            seen.add(finding)
            if match.pod is None:
                yield finding, finding
                continue
            in_pod = (id(match.pod), finding.evidence)
            occurrences[in_pod] += 1
            yield (rule.id, id(match.pod.workload), finding.evidence, occurrences[in_pod]), finding


def _finding(rule: Rule, match: Match) -> ManifestFinding:
    return ManifestFinding(
        rule.id,
        SEVERITIES[rule.severity],
        printable_line(redact(match.evidence)),
        rule.remedy,
        file=match.node.source.name,
        line=match.line or match.node.line,
        severity=rule.severity,
        why=rule.why,
    )
