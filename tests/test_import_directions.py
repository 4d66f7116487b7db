"""The layers of the package: a module may import from layers below its own, never from above or from beside it."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("diagnose",),
    ("inference",),
    ("training", "operate", "doctor", "lint", "local_cluster"),
    ("checkpoint", "launch"),
    ("models", "data", "distributed", "tracking", "kubernetes"),
    ("hub",),
    ("runs",),
    ("config",),
    ("registry",),
    ("content_hash", "findings"),
    ("files", "logs"),
    ("errors", "redact", "terminal", "fault_injection"),
    ("env",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
TORCH_ROOMS = {"models", "data", "distributed", "checkpoint", "training", "inference"}


def rooms(repo: Path) -> list[tuple[str, Path]]:
    """(room, file) of every module; a room is a package or a module right below llmtrain."""
    source = repo / "src" / "llmtrain"
    files = [path for path in source.rglob("*.py") if path != source / "__init__.py"]
    return [(path.relative_to(source).parts[0].removesuffix(".py"), path) for path in sorted(files)]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its direction"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imported_room(name: str) -> str | None:
    parts = name.split(".")
    # `import llmtrain` itself, for the version, is nobody's room.
    return parts[1] if parts[0] == "llmtrain" and len(parts) > 1 and parts[1] != "__version__" else None


def wrong_arrows(room: str, tree: ast.AST) -> list[str]:
    found = []
    for line, name in imports(tree):
        other = imported_room(name)
        if other is not None and other != room and not LEVEL[room] < LEVEL[other]:
            found.append(f"line {line}: {room} imports {name}")
    return found


def module_level_torch(tree: ast.Module) -> list[int]:
    """Lines that import torch when the module is imported: not inside a function or `if TYPE_CHECKING`."""
    found, waiting = [], list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [line for line, name in imports(node) if name.split(".")[0] == "torch"]
        waiting += ast.iter_child_nodes(node)
    return found


def test_every_room_has_a_layer(repo: Path) -> None:
    assert {room for room, _ in rooms(repo)} == set(LEVEL)


def test_arrows_point_down(repo: Path) -> None:
    wrong = [
        f"{path}: {text}" for room, path in rooms(repo) for text in wrong_arrows(room, ast.parse(path.read_text()))
    ]
    assert wrong == []


def test_torch_stays_in_its_rooms(repo: Path) -> None:
    wrong = [
        f"{path}:{line}"
        for room, path in rooms(repo)
        if room not in TORCH_ROOMS
        for line in module_level_torch(ast.parse(path.read_text()))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("room", "code", "wrong"),
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
def test_the_walk_sees_wrong_arrows(room: str, code: str, wrong: bool) -> None:
    assert bool(wrong_arrows(room, ast.parse(code))) is wrong


def test_the_walk_sees_torch() -> None:
    assert module_level_torch(ast.parse("try:\n    import torch.nn\nexcept ImportError:\n    pass")) == [2]
    assert module_level_torch(ast.parse("def f():\n    import torch")) == []


LIGHT_COMMANDS = [
    ["--help"],
    ["validate"],
    ["presets"],
    ["print-config"],
    ["print-config", "--reference"],
    ["config-schema"],
]
LIGHT_COMMANDS += [["runs", "list"], ["train", "--help"], ["train", "--set", "trainer.lr=much"]]
LIGHT_COMMANDS += [["launch", "--dry-run", "--kind", kind] for kind in ("indexed_job", "train_job")]
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
