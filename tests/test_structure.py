"""Limits that keep the code readable: short files, short functions, everything annotated."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_MEDIAN_LINES = 400, 60, 150
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(repo: Path) -> list[Path]:
    return sorted((repo / "src" / "llmtrain").rglob("*.py"))


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def is_kernel(function: Function) -> bool:
    """Triton gives annotations a meaning of its own."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_short(repo: Path) -> None:
    lengths = {str(path): line_count(path) for path in sources(repo)}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}
    assert statistics.median(lengths.values()) < MAX_MEDIAN_LINES


def test_functions_are_short(repo: Path) -> None:
    long = {
        f"{path}:{function.lineno} {function.name}": length
        for path in sources(repo)
        for function in functions(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_functions_are_annotated(repo: Path) -> None:
    bare = [
        f"{path}:{function.lineno} {function.name}({argument.arg})"
        for path in sources(repo)
        for function in functions(path)
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if argument.annotation is None and argument.arg not in ("self", "cls") and not is_kernel(function)
    ]
    bare += [
        f"{path}:{function.lineno} {function.name}"
        for path in sources(repo)
        for function in functions(path)
        if function.returns is None and not is_kernel(function)
    ]
    assert bare == []
