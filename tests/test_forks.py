"""No process whose threads have started forks: neither the tests' own nor llmtrain's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fork_server
from limits import limit

# In a directory of PYTHONPATH Python imports this at its start: every fork writes down how many threads there are.
COUNTING = """
import os, pathlib
def count():
    threads = len(list(pathlib.Path("/proc/self/task").iterdir()))
    with open(os.environ["FORKS"], "a") as file:
        file.write(f"{threads}\\n")
os.register_at_fork(before=count)
"""


def test_a_child_of_the_fork_server_computes_with_threads() -> None:
    """Although this process has threads of its own, which would be dead in a child forked from it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    a = torch.randn(256, 256)
    wanted = float((a @ a).sum())
    torch.set_num_threads(threads)

    def compute() -> int:
        torch.set_num_threads(2)
        return 0 if float((a @ a).sum()) == wanted else 9

    child = fork_server.start(compute)
    child.join(limit(60))
    assert child.exitcode == 0


def test_a_child_knows_how_many_threads_its_server_had() -> None:
    def threads() -> int:
        import fork_server_preload

        return 100 + fork_server_preload.threads_at_fork

    child = fork_server.start(threads)
    child.join(limit(60))
    assert child.exitcode == 101


def forks(folder: Path, *words: object, **env: str) -> list[int]:
    """Threads at every fork of llmtrain with these words, its workers included."""
    (folder / "sitecustomize.py").write_text(COUNTING)
    log = folder / "forks"
    log.touch()
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "FORKS": str(log), **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in log.read_text().split()]


def test_node_forks_before_it_has_threads(tmp_path: Path) -> None:
    """The process that translates exit codes for a platform."""
    words = ("node", "--nodes", 1, "--", sys.executable, "-c", "pass")
    assert forks(tmp_path, *words, LLMTRAIN_EXIT_CODES="pytorchjob") == [1]


@pytest.mark.slow
def test_training_with_data_workers_never_forks(tmp_path: Path, tiny: list[str]) -> None:
    sets = [word for text in (*tiny, "data.num_workers=1", "trainer.max_steps=2") for word in ("--set", text)]
    assert forks(tmp_path, "train", "--config", "gpt_smoke", *sets) == []
