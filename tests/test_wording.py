"""User-facing text uses the field's words: no translation artifacts, no personification, American spelling.

Checked: string literals of src (not docstrings and comments), docs/*.md and README.md without code, the comments of
presets, the help texts of the Makefile. The list has only words with few false alarms; it does not replace a reader.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Pattern -> what to write instead.
PATTERNS = {
    r"\bas told\b|\btold to stop\b|\bbeing told\b": "interrupted, received SIGTERM",
    r"\b(?:is|are|was|were) told\b": "is reported, is set to",
    r"\banew\b": "again; recreate, rebuild",
    r"\bgo(?:es|ing)? on\b": "continue, resume",
    r"(?<!there )\b(?:is|are|was) no (?!longer\b|more\b|less\b)": "is not a",
    r"\bwhich is none\b": "is not valid",
    r"\bwhoever\b": "name the controller, process or person",
    r"\bnobody\b": "no process, no user",
    r"\bso (?:many|long)\b": "N; for N seconds",
    r"\bmends?\b": "fixes",
    r"\bhearts?\b": "heartbeat",
    r"\bdeaf\b": "ignores signals",
    r"\bspeaks?\b": "prints, uses the protocol",
    r"\baway with\b": "remove",
    r"\bby (?:itself|themselves)\b": "automatically",
    r"\bno right to\b": "not allowed to (RBAC)",
    r"\b(?:is|are) said by\b": "is set by",
    r"\bfor ever\b": "forever, indefinitely",
    r"\blooks? closer\b": "inspect",
    r"\btaken back\b": "rolled back",
    r"\bgiven up\b": "gave up; replaced",
    r"\ball the same\b": "anyway",
    r"\b(?:tokens|rows|times|bytes) a (?:step|second)\b": "per step, per second",
    r"\bwhat it (?:says|said)\b": "output",
    r"\b(?:no|has|is|for|there is) room\b": "capacity, space",
    r"\b(?:the|a|this|your) folders?\b": "directory",
    r"\b(?:token|initial|optim|organ|util|recogn|serial|synchron|material|normal)is(?:e|ed|es|ing|ation)\b": "-ize",
}
FORBIDDEN = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.IGNORECASE)
FENCED = re.compile(r"^( *)```[^\n]*\n.*?^ *```$", re.S | re.M)
INDENTED_CODE = re.compile(r"^    .*$", re.M)
INLINE_CODE = re.compile(r"`[^`\n]+`")

# Regular expressions that match messages of the first version stay as they are.
FIRST_VERSION_PATTERNS = ("src/llmtrain/operate/status/progress.py", "src/llmtrain/compat/logged_errors.py")


def violations(text: str) -> list[str]:
    return [match[0] for match in FORBIDDEN.finditer(" ".join(text.split()))]


def string_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is not a docstring; f-strings as one text with {} for their values."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in docstrings:
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | docstrings:
            yield node.lineno, node.value


def prose(page: Path) -> str:
    return INLINE_CODE.sub("`code`", INDENTED_CODE.sub("", FENCED.sub("", page.read_text())))


def checked_files(*patterns: str) -> list[str]:
    names = sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))
    return [name for name in names if not name.startswith(FIRST_VERSION_PATTERNS)]


@pytest.mark.parametrize("name", checked_files("src/llmtrain/**/*.py"))
def test_messages_have_no_forbidden_words(name: str) -> None:
    literals = string_literals(ast.parse((ROOT / name).read_text()))
    assert [f"{name}:{line}: {word}" for line, text in literals for word in violations(text)] == []


@pytest.mark.parametrize("name", checked_files("README.md", "*/README.md", "docs/**/*.md"))
def test_docs_have_no_forbidden_words(name: str) -> None:
    assert violations(prose(ROOT / name)) == []


def test_presets_and_make_help_have_no_forbidden_words() -> None:
    lines = [line for name in checked_files("configs/presets/*.yaml", "Makefile") for line in (ROOT / name).open()]
    assert violations("\n".join(line.partition("#")[2] for line in lines if "#" in line)) == []


@pytest.mark.parametrize(
    "text",
    [
        "stopped: Stopped at step 222 as told.",
        "--webhook is no http or https address.",
        "The claim is made anew.",
        "The run goes on with step 5.",
        "Nothing makes pods: whoever is to do that does not run.",
        "no\n    heart beats",
        "The text is tokenised.",
    ],
)
def test_violations_finds_forbidden_words(text: str) -> None:
    assert violations(text)


@pytest.mark.parametrize(
    "text", ["There is no GPU.", "The pod is no longer Ready.", "It continues at step 5.", "No heartbeat for 92 s."]
)
def test_violations_accepts_plain_text(text: str) -> None:
    assert violations(text) == []


def test_string_literals_skips_docstrings_and_joins_f_strings() -> None:
    code = 'def f(x):\n    """Made anew."""\n    # as told\n    return f"run {x} " f"goes on" + "plain"\n'
    assert sorted(text for _, text in string_literals(ast.parse(code))) == ["plain", "run {} goes on"]
