from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import Outcome

from llmtrain.config.schema import Config


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    yield
    harness.end_all()


@pytest.fixture(scope="session")
def golden_root(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The directory of the uninterrupted run. Copy it before changing it."""
    root = tmp_path_factory.mktemp("golden") / "runs"
    ended = harness.run(harness.tiny_config(root, cache))
    assert ended.code == 0, ended.output
    return root


@pytest.fixture(scope="session")
def golden(golden_root: Path) -> Outcome:
    """What every interrupted run must end with."""
    result = harness.read_result(golden_root)
    found = harness.outcome(golden_root, result)
    assert [step for step, _ in found.train] == list(range(1, harness.STEPS + 1))
    assert [step for step, _ in found.val] == list(harness.EVAL_STEPS)
    return found


@pytest.fixture(scope="session")
def _killed_at_8(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    root = tmp_path_factory.mktemp("killed") / "runs"
    ended = harness.run(harness.tiny_config(root, cache), fault="forward:8:0:kill")
    assert ended.code == -9, ended.output
    assert harness.steps_saved(root) == [2, 4, 6]
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def killed_root(root: Path, _killed_at_8: Path) -> Path:
    """A copy of a run that was killed at step 8, with checkpoints of steps 2, 4 and 6."""
    return harness.copy_root(_killed_at_8, root)


@pytest.fixture
def finished_root(root: Path, golden_root: Path) -> Path:
    """A copy of the finished run."""
    return harness.copy_root(golden_root, root)


@pytest.fixture
def config(root: Path, cache: Path) -> Config:
    return harness.tiny_config(root, cache)


@pytest.fixture
def make_config(root: Path, cache: Path) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        return harness.tiny_config(root, cache, **changes)

    return make


# Runs of several processes


@pytest.fixture(scope="session")
def world_golden(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Outcome:
    """The result of one process for the runs that the tests train with several: they must be bit-exact."""
    root = tmp_path_factory.mktemp("world-golden") / "runs"
    ended = harness.run(harness.world_config(root, cache))
    assert ended.code == 0, ended.output
    return harness.outcome(root, harness.read_result(root))


@pytest.fixture(scope="session")
def fsdp_golden(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Outcome:
    """The uninterrupted run of two processes with fsdp."""
    root = tmp_path_factory.mktemp("fsdp-golden") / "runs"
    ends = harness.run_world(harness.world_config(root, cache, distributed__strategy="fsdp"), 2)
    assert [ended.code for ended in ends] == [0, 0], ends[0].output
    return harness.outcome(root, harness.read_result(root))


@pytest.fixture
def make_world_config(root: Path, cache: Path) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        return harness.world_config(root, cache, **changes)

    return make


@pytest.fixture
def world_config(make_world_config: Callable[..., Config]) -> Config:
    return make_world_config()
