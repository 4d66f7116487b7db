"""Limits that keep the code readable: short files, short functions, everything annotated, one table of exit codes."""

import ast
import re
import statistics
from functools import cache
from pathlib import Path

MAX_FILE_LINES = 400
MAX_MEDIAN_LINES = 150
MAX_FUNCTION_LINES = 80
MAX_TAKING_CONFIG = 50
PLANNER = "plan"
"""Functions that take the whole Config; others take the section they need."""
EXIT_CODES = {65, 69, 75, 137, 143}
"""Without 64, which is a common size."""
STANDALONE = "pod_scripts"
"""These files run without llmtrain."""
WITHOUT_TEXT = {STANDALONE, "exec"}
"""Packages with one module to speak of."""
FILE_NAME = re.compile(r"[\w*/-]+\.(?:py|md)\b")
READERS = {"last_rows", "read_generations", "read_heartbeats", "read_metrics"}
"""Functions that parse a file of a run directory; RunView offers what they return."""
MAY_READ = {"training/watchdog.py"}
"""It compares the beats of live peers."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(repo: Path) -> list[Path]:
    return sorted((repo / "src" / "llmtrain").rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Of the syntax tree of a file, its module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def functions(path: Path) -> list[Function]:
    return [node for node in nodes(path) if isinstance(node, Function)]


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


def test_packages_say_what_they_are_for(repo: Path) -> None:
    silent = []
    for path in sources(repo):
        if path.name == "__init__.py" and path.parent.name not in WITHOUT_TEXT:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if text is None or len(text.splitlines()) < 3:
                silent.append(str(path))
    assert silent == []


def unknown_files(package: Path, repo: Path) -> list[str]:
    """File names in the docstring of a package that are neither below it nor in llmtrain or the repository."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    places = (package, *package.iterdir(), repo / "src" / "llmtrain", repo / "src", repo)
    return [name for name in FILE_NAME.findall(text) if not any(list(place.glob(name)) for place in places)]


def test_packages_name_files_that_exist(repo: Path) -> None:
    packages = [path.parent for path in sources(repo) if path.name == "__init__.py"]
    unknown = {str(package): unknown_files(package, repo) for package in packages}
    assert {package: names for package, names in unknown.items() if names} == {}


def test_packages_name_the_packages_in_them(repo: Path) -> None:
    for path in sources(repo):
        parent = path.parent.parent
        if path.name == "__init__.py" and parent.name not in ("src", "llmtrain"):
            text = ast.get_docstring(ast.parse((parent / "__init__.py").read_text(encoding="utf-8"))) or ""
            assert f"{path.parent.name}/" in text, f"{parent.name}/__init__.py does not name {path.parent.name}/"


def test_exit_codes_are_named(repo: Path) -> None:
    """errors.ExitCode has the numbers."""
    bare = []
    for path in sources(repo):
        if path.name == "errors.py" or path.parent.name == STANDALONE:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value in EXIT_CODES:
                bare.append(f"{path}:{node.lineno} {node.value}")
    assert bare == []


def test_few_functions_take_the_whole_config(repo: Path) -> None:
    """A plan weighs all sections against each other and changes them, so its functions do."""
    taking = []
    for path in sources(repo):
        if path.parent.name == PLANNER:
            continue
        for function in functions(path):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            annotations = [
                ast.unparse(argument.annotation).strip("'\"") for argument in arguments if argument.annotation
            ]
            if "Config" in annotations or "Config | None" in annotations:
                taking.append(f"{path}:{function.lineno} {function.name}")
    assert len(taking) <= MAX_TAKING_CONFIG, taking


def test_run_directories_are_read_by_run_view_only(repo: Path) -> None:
    root = repo / "src" / "llmtrain"
    found = {
        f"{path.relative_to(root)}: {name.name}"
        for path in sources(repo)
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmtrain.runs.")
        for name in node.names
        if name.name in READERS and path.parent.name != "runs" and str(path.relative_to(root)) not in MAY_READ
    }
    assert found == set()
