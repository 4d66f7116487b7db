"""Errors of the YAML parser in plain words, with the line in the user's file."""

import re

import yaml

from llmtrain.core.text import one_line

_KEY = re.compile(r"^(?P<indent> *)(?:- )?(?P<key>[^\s:#][^:#]*):(?P<value>.*)$")


def explain_yaml_error(problem: Exception, text: str) -> tuple[str, int | None]:
    """What is wrong, and the line (None: of the document as a whole)."""
    mark = getattr(problem, "problem_mark", None)
    if not isinstance(problem, yaml.MarkedYAMLError) or mark is None:
        return one_line(problem), None
    lines = text.splitlines() or [""]
    line = min(mark.line, len(lines) - 1)
    explained = _explain(str(problem.problem), lines, line, mark.column)
    if explained is None:
        explained = f"{one_line(problem.problem)} at column {mark.column + 1}: {lines[line].strip()[:80]}"
    return explained, line + 1


def explain_value_error(problem: Exception, text: str) -> str:
    """For the value of --set: what is wrong, and how to write it."""
    if isinstance(problem, yaml.constructor.ConstructorError):
        return f"not valid YAML: {one_line(problem.problem)}."
    mark = getattr(problem, "problem_mark", None)
    if mark is None:
        return f"not valid YAML: {one_line(problem)}."
    at = ""
    if mark.line == 0 and mark.column < len(text):
        at = f" at '{text[mark.column]}'"
    if text.lstrip().startswith("["):
        hint = 'Quote the text in a list and close it, such as \'["What is it?", "Why?"]\'.'
    else:
        hint = "Quote text that has a special meaning in YAML, such as '\"a: b\"'."
    return f"not valid YAML{at}. {hint}"


def _explain(what: str, lines: list[str], line: int, column: int) -> str | None:
    content = lines[line]
    if what.startswith("duplicate key"):
        return what
    if "\t" in content[: column + 1]:
        return "the line is indented with a tab; use spaces"
    if what.startswith("mapping values are not allowed"):
        return _misplaced_key(lines, line)
    if what.startswith(("expected ',' or", "expected the node content, but found '<stream end>'")):
        return "a list or mapping that is opened with [ or { is not closed, or text in it needs quotes"
    if what.startswith("expected <block end>, but found"):
        return f"'{content.strip()[:60]}' is not indented like the lines above it"
    if what.startswith(("found undefined alias", "could not determine a constructor")):
        return f"{one_line(what)}; quote the text"
    return None


def _misplaced_key(lines: list[str], line: int) -> str | None:
    """A key below one that already has a value, or two keys in a line."""
    here = _KEY.match(lines[line])
    above = None
    for earlier in reversed(lines[:line]):
        above = _KEY.match(earlier)
        if above:
            break
    if here and above and above["value"].strip() and len(here["indent"]) > len(above["indent"]):
        return f"'{here['key']}' is indented deeper than '{above['key']}' above it"
    if here and ": " in here["value"]:
        return f"the value of '{here['key']}' contains ': '; quote it"
    return None
