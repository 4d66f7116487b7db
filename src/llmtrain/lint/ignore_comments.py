"""Comments that suppress findings: `# llmtrain: ignore[rule]`, at the end of the line that a finding names or on a line
of its own above it. Several rules are separated by commas."""

import re
from collections.abc import Collection

from llmtrain.errors import UsageError
from llmtrain.lint.source import Sources

_COMMENT = re.compile(r"#\s*llmtrain:\s*ignore\b(?:\[([^\]]*)\])?")


def ignored_lines(sources: Sources, known: Collection[str]) -> dict[tuple[str, int], set[str]]:
    """(file, line) -> ids of the rules that a comment suppresses there."""
    found: dict[tuple[str, int], set[str]] = {}
    problems: list[str] = []
    for source in {id(node.source): node.source for node in sources.objects}.values():
        above: set[str] = set()
        for number, line in enumerate(source.lines, start=1):
            if not line.strip():
                continue
            here = set()
            for match in _COMMENT.finditer(line):
                named = {name.strip() for name in (match[1] or "").split(",")}
                problems += [f"{source.name}:{number}: {_problem(name)}" for name in sorted(named - set(known))]
                here |= named
            above |= here
            if line.lstrip().startswith("#"):
                continue
            if above:
                found[source.name, number] = above
            above = set()
    if problems:
        raise UsageError("Invalid `# llmtrain: ignore[rule]` comments:\n  " + "\n  ".join(problems), known=known)
    return found


def _problem(name: str) -> str:
    return f"rule '{name}' is unknown" if name else "no rule is named"
