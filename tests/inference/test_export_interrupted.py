"""An export that is interrupted or killed leaves nothing that could be taken for an export."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_harness import Cli, end_clis, start_cli

from limits import wait_until
from llmtrain.config.load import load_config
from llmtrain.training.run import run_training
from slow_cases import some

pytestmark = pytest.mark.hf


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    model = ["model.name=gpt", "model.n_layers=1", "model.n_heads=2", "data.tokenizer=byte"]
    run_training(load_config("gpt_smoke", [*tiny, *model, f"output.root_dir={folder}", "output.run_id=one"]))
    return folder


@pytest.fixture(autouse=True)
def _end_processes() -> Iterator[None]:
    yield
    end_clis()


def start(root: Path) -> tuple[Cli, Path]:
    """An export, and the process that is checking it, which takes seconds."""
    started = start_cli("export", "one", "--root", root, "--to", "out", "--json")
    found: list[Path] = []
    started.wait_for(lambda: bool(found or found.extend(checking(started.pid)) or found))
    return started, found[0]


def checking(pid: int) -> list[Path]:
    """The children of a process that check an export."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if parent == str(pid) and is_checking(path):
            found.append(path)
    return found


def is_checking(process: Path) -> bool:
    try:
        return b"load_export.py" in (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(root: Path, workdir: Path, is_new: bool, number: int) -> None:
    if not is_new:
        (workdir / "out").mkdir()
    export, checker = start(root)
    export.send(number)
    assert export.wait() == 75, export.err
    assert list(workdir.rglob("*")) == ([] if is_new else [workdir / "out"])
    wait_until(lambda: not is_checking(checker), 10)


def test_a_signal_during_an_import_leaves_nothing(root: Path, workdir: Path) -> None:
    """The process ends inside the handler: an exception would pass through C++."""
    (workdir / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")

    def import_while_writing() -> None:
        import sys

        from llmtrain.inference import export

        write = export._write_model

        def slowly(*arguments: object) -> None:
            write(*arguments)
            import slow_to_import  # noqa: F401

        export._write_model = slowly
        sys.path.insert(0, "")

    export = start_cli("export", "one", "--root", root, "--to", "out", before=import_while_writing)
    export.wait_for(lambda: any(path.name == "model.safetensors" for path in workdir.rglob("*")))
    time.sleep(0.3)
    export.send(signal.SIGTERM)
    assert export.wait() == 75, export.err
    assert not [path for path in workdir.iterdir() if path.suffix != ".py" and path.name != "__pycache__"]


@pytest.mark.parametrize("is_new", some([True, False], True))
def test_an_export_after_one_that_was_killed(root: Path, workdir: Path, cli, is_new: bool) -> None:
    if not is_new:
        (workdir / "out").mkdir()
    export, checker = start(root)
    alive = cli("export", "one", "--root", root, "--to", "out", "--no-check")
    assert alive.code == (0 if is_new else 64), "what another process is writing is not removed"
    if is_new:
        for path in (workdir / "out").iterdir():
            path.unlink()
        (workdir / "out").rmdir()
    export.send(signal.SIGKILL)
    export.wait()
    wait_until(lambda: not is_checking(checker), 10)
    assert not (workdir / "out" / "config.json").exists()
    done = cli("export", "one", "--root", root, "--to", "out", "--no-check")
    assert done.code == 0, done.err
    assert [path.name for path in workdir.iterdir()] == ["out"]
    assert not [path for path in (workdir / "out").iterdir() if path.name.startswith(".")]
