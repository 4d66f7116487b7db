"""limits.py, and that the tests use it."""

import ast
import time
from pathlib import Path

import pytest

import limits


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_measured", [])
    monkeypatch.setattr(limits, "MEASURE_EVERY_SEC", 0.0)


def set_probe(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Each measurement is the median of three probes; the last value stays."""
    probes = iter(value for value in seconds for _ in range(3))
    monkeypatch.setattr(limits, "_probe_sec", lambda: next(probes, seconds[-1]))


def test_probe_takes_time() -> None:
    """A probe that fails at once would make every machine fast."""
    assert limits._probe_sec() > limits.REFERENCE_SEC / 10


def test_limit_grows_with_the_load_and_falls_later(monkeypatch: pytest.MonkeyPatch) -> None:
    set_probe(monkeypatch, 0.01, 0.2, 0.1, 60.0)
    assert limits.limit(3) == 3  # a faster machine waits as long
    assert limits.limit(3) == pytest.approx(12)
    assert limits.limit(3) == pytest.approx(12)  # the load of a minute ago may be why it is late
    monkeypatch.setattr(limits, "REMEMBER_SEC", 0.0)
    assert limits.limit(3) == 30


def test_wait_until_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_probe(monkeypatch, 0.05)
    began = time.monotonic()
    with pytest.raises(AssertionError, match="state"):
        limits.wait_until(lambda: False, 0.2, lambda: "state")
    assert time.monotonic() - began > 0.2
    limits.wait_until(lambda: time.monotonic() - began > 0.3, 10)


SCALED = {"wait", "curve"}
"""Functions of the harnesses with a `timeout`, to which they apply limit()."""


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def is_fixed_limit(node: ast.AST) -> bool:
    """run(command, timeout=60), thread.join(10), time.monotonic() + 10, assert time.monotonic() - began < 5"""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        timeouts = [word.value for word in node.keywords if word.arg == "timeout" and name not in SCALED]
        return any(map(is_number, timeouts)) or (name == "join" and any(map(is_number, node.args)))
    if isinstance(node, ast.BinOp):
        return ast.unparse(node).startswith("time.monotonic() + ") and is_number(node.right)
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
        is_upper = isinstance(node.test.ops[-1], ast.Lt | ast.LtE)
        return "time.monotonic() - " in ast.unparse(node.test) and is_upper and is_number(node.test.comparators[-1])
    return False


def test_every_limit_of_a_test_grows_with_the_load() -> None:
    """Except those of tests that wait for a cluster or a GPU: what they wait for runs elsewhere."""
    folder = Path(__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder)
        if file.parts[0] not in ("end_to_end", "gpu"):
            nodes = filter(is_fixed_limit, ast.walk(ast.parse(path.read_text())))
            found += [f"{file}:{node.lineno} {ast.unparse(node)}" for node in nodes]  # type: ignore[attr-defined]
    assert found == [], "use limit() or wait_until() of tests/limits.py"


@pytest.mark.parametrize(
    "text",
    ["run(x, timeout=60)", "one.join(1.5)", "end = time.monotonic() + 3", "assert 0 <= time.monotonic() - a < 5"],
)
def test_fixed_limits_are_found(text: str) -> None:
    assert any(is_fixed_limit(node) for node in ast.walk(ast.parse(text)))
