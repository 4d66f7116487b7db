"""The linter for training manifests. RULES is the table of rules, which docs/lint.md shows.

It sends no requests to a cluster. What the files do not contain is not reported, with one exception: a Service that the
pods need.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from llmtrain.errors import UsageError, nearest
from llmtrain.lint.ignore_comments import ignored_lines
from llmtrain.lint.manifests import Manifests
from llmtrain.lint.report import SEVERITIES, LintReport, ManifestFinding
from llmtrain.lint.rules import gpus, hardening, jobs, operators, pods, rendezvous, services
from llmtrain.lint.rules.rule import Match, Rule
from llmtrain.lint.source import Sources
from llmtrain.redact import redact
from llmtrain.terminal import printable_line

RULES: tuple[Rule, ...] = (
    *rendezvous.RULES,
    *services.RULES,
    *jobs.RULES,
    *operators.RULES,
    *gpus.RULES,
    *pods.RULES,
    *hardening.RULES,
)


def lint(sources: Sources, ignore: Sequence[str] = ()) -> LintReport:
    """Findings of all rules except those in `ignore`, errors first. Comments in the files ignore rules too."""
    known = [rule.id for rule in RULES]
    for name in ignore:
        if name not in known:
            raise UsageError(f"--ignore: rule '{name}' is unknown.{nearest(name, known)}", known=known)
    manifests = Manifests(sources.objects)
    comments = ignored_lines(sources, known)
    kept: dict[Hashable, ManifestFinding] = {}
    ignored: set[ManifestFinding] = set()
    for key, finding in _findings(manifests):
        if finding.name in ignore or finding.name in comments.get((finding.file, finding.line), ()):
            ignored.add(finding)
        elif (first := kept.setdefault(key, finding)).line != finding.line:
            kept[key] = replace(first, also_lines=(*first.also_lines, finding.line))
    file_order = {name: position for position, name in enumerate(sources.files)}
    severities = list(SEVERITIES)
    findings = sorted(
        kept.values(), key=lambda each: (severities.index(each.severity), file_order.get(each.file, 0), each.line)
    )
    return LintReport(findings, sources, sum(1 for _ in manifests.training()), len(ignored))


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
        rule.fix,
        file=match.node.source.name,
        line=match.line or match.node.line,
        severity=rule.severity,
        why=rule.why,
    )
