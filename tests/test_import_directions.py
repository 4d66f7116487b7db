"""Imports point downwards: from one layer to the layers below it, and never in a circle, not even inside a package."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import layers
import pytest
from layers import LAYERS

NEIGHBORS = {("config", "compat"), ("compat", "config")}
"""Loading a config upgrades an old document, and an upgrade needs the fields of the current schema."""
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
TORCH_PACKAGES = {"models", "data", "distributed", "plan", "checkpoint", "training", "inference"}
"""Of plan, only what traces a step; prices, history and formulas work without torch (tests of llmtrain-client)."""


def modules(repo: Path) -> list[tuple[str, Path]]:
    """(package, file) of every module; a module directly below llmtrain counts as a package."""
    source = repo / "src" / "llmtrain"
    files = [path for path in source.rglob("*.py") if path != source / "__init__.py"]
    return [(path.relative_to(source).parts[0].removesuffix(".py"), path) for path in sorted(files)]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, including those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its direction"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imported_package(name: str) -> str | None:
    parts = name.split(".")
    # `import llmtrain` itself, for the version, belongs to no package.
    return parts[1] if parts[0] == "llmtrain" and len(parts) > 1 and parts[1] != "__version__" else None


def upward_imports(package: str, tree: ast.AST) -> list[str]:
    upward = []
    for line, name in imports(tree):
        other = imported_package(name)
        if other is None or other == package or (package, other) in NEIGHBORS:
            continue
        if not LEVEL[package] < LEVEL[other]:
            upward.append(f"line {line}: {package} imports {name}")
    return upward


def module_level_torch(tree: ast.Module) -> list[int]:
    """Lines that import torch when the module is imported: not inside a function or `if TYPE_CHECKING`."""
    lines, pending = [], list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines += [line for line, name in imports(node) if name.split(".")[0] == "torch"]
        pending += ast.iter_child_nodes(node)
    return lines


def import_graph(source: Path) -> dict[str, set[str]]:
    """Module -> modules of the same source tree that it imports: at module level, inside functions and under
    TYPE_CHECKING."""
    paths = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(source.rglob("*.py"))
    }
    graph: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        for _, name in imports(ast.parse(path.read_text())):
            imported = name if name in paths else name.rpartition(".")[0]  # `from module import name`
            if imported in paths and imported != module:
                graph[module].add(imported)
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or through others."""

    def reachable(module: str) -> set[str]:
        reached: set[str] = set()
        pending = [module]
        while pending:
            new = graph[pending.pop()] - reached
            reached |= new
            pending += new
        return reached

    reached = {module: reachable(module) for module in graph}
    return sorted(
        {
            tuple(sorted(other for other in others if module in reached[other]))
            for module, others in reached.items()
            if module in others
        }
    )


def test_every_package_has_a_layer(repo: Path) -> None:
    assert {package for package, _ in modules(repo)} == set(LEVEL)


def test_contributing_shows_the_layers() -> None:
    assert layers.PAGE.read_text() == layers.written()


def test_imports_point_downwards(repo: Path) -> None:
    upward = [
        f"{path}: {text}"
        for package, path in modules(repo)
        for text in upward_imports(package, ast.parse(path.read_text()))
    ]
    assert upward == []


def test_no_import_circles(repo: Path) -> None:
    assert import_circles(import_graph(repo / "src")) == []


def test_torch_is_imported_by_torch_packages_only(repo: Path) -> None:
    lines = [
        f"{path}:{line}"
        for package, path in modules(repo)
        if package not in TORCH_PACKAGES
        for line in module_level_torch(ast.parse(path.read_text()))
    ]
    assert lines == []


@pytest.mark.parametrize(
    ("package", "code", "is_upward"),
    [
        ("config", "from llmtrain.runs.lock import RunLock", True),
        ("models", "from llmtrain.data import batches", True),
        ("data", "def f():\n    from llmtrain.training import run", True),
        ("training", "from llmtrain.models.base import ModelAdapter", False),
        ("runs", "import llmtrain\nfrom llmtrain.errors import UsageError", False),
        ("data", "from llmtrain.data.base import TextChunk", False),
        ("launch", "from llmtrain.training import run", True),
        ("launch", "from llmtrain.distributed.batch_split import micro_batches_in_step", False),
    ],
)
def test_upward_imports_are_detected(package: str, code: str, is_upward: bool) -> None:
    assert bool(upward_imports(package, ast.parse(code))) is is_upward


def test_module_level_torch_is_detected() -> None:
    assert module_level_torch(ast.parse("try:\n    import torch.nn\nexcept ImportError:\n    pass")) == [2]
    assert module_level_torch(ast.parse("def f():\n    import torch")) == []


def test_import_circles_are_detected(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/a.py": "from pkg.b import x",
        "pkg/b.py": "def f():\n    from pkg import c",
        "pkg/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pkg.a",
        "pkg/d.py": "import pkg.a, json",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert import_circles(import_graph(tmp_path)) == [("pkg.a", "pkg.b", "pkg.c")]


LIGHT_COMMANDS = [
    ["--help"],
    ["validate"],
    ["presets"],
    ["print-config"],
    ["print-config", "--reference"],
    ["config-schema"],
]
LIGHT_COMMANDS += [["runs", "list"], ["train", "--help"], ["train", "--set", "trainer.lr=much"]]
LIGHT_COMMANDS += [
    ["launch", "--dry-run", "--image", "me/train:1", "--kind", kind] for kind in ("indexed_job", "train_job")
]
SCRIPT = """
import contextlib, io, json, sys
from llmtrain.cli import main
codes, heavy = [], []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as ended:
            codes.append(ended.code)
    if "torch" in sys.modules or "kubernetes" in sys.modules:
        heavy.append(arguments)
print(json.dumps({"codes": codes, "heavy": heavy}))
"""


def test_light_commands_do_not_import_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(LIGHT_COMMANDS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"codes": [0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], "heavy": []}
