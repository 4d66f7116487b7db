"""Variables for worker processes are set while they run, and removed afterwards: a process may start two runs."""

import os

import pytest

from llmtrain.config.schema import DistributedSection
from llmtrain.core.env import NODE, SHARED_CORES, WORKER, scoped_environment
from llmtrain.distributed import workers
from llmtrain.distributed.machine_limits import thread_variables, usable_cores
from llmtrain.distributed.workers import local_node, run_processes
from llmtrain.errors import TrainingFailed

VARIABLES = ("OMP_NUM_THREADS", SHARED_CORES, WORKER)


@pytest.fixture(autouse=True)
def _unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, NODE, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def worker_environment(monkeypatch: pytest.MonkeyPatch, processes: int, *, is_llmtrain: bool = True) -> list[object]:
    """The variables that workers would inherit."""
    inherited: list[object] = []
    monkeypatch.setattr(workers, "run_node", lambda _: inherited.extend(map(os.environ.get, VARIABLES)))
    run_processes(local_node(processes), ["true"], DistributedSection(), is_llmtrain=is_llmtrain)
    return inherited


def test_second_run_in_one_process_divides_cores_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain.distributed.machine_limits.usable_cores", lambda: 8)
    before = dict(os.environ)
    assert worker_environment(monkeypatch, 2) == ["4", "1", "1"]
    assert dict(os.environ) == before
    assert worker_environment(monkeypatch, 4) == ["2", "1", "1"]
    assert worker_environment(monkeypatch, 1) == [None, None, "1"]
    assert worker_environment(monkeypatch, 2, is_llmtrain=False) == ["4", "1", None]
    assert dict(os.environ) == before


def test_failed_run_restores_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise TrainingFailed("failed")

    before = dict(os.environ)
    monkeypatch.setattr(workers, "run_node", fail)
    with pytest.raises(TrainingFailed):
        run_processes(local_node(2), ["true"], DistributedSection())
    assert dict(os.environ) == before


def test_thread_variables_respect_omp_num_threads() -> None:
    assert thread_variables(2, {"OMP_NUM_THREADS": "7"}) == {}
    assert thread_variables(2, {}) == {"OMP_NUM_THREADS": str(max(1, usable_cores() // 2)), SHARED_CORES: "1"}
    assert thread_variables(1, {}) == {}


def test_scoped_environment_restores_previous_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_DEBUG", "0")
    with scoped_environment({"LLMTRAIN_DEBUG": "1", NODE: "1"}):
        assert (os.environ["LLMTRAIN_DEBUG"], os.environ[NODE]) == ("1", "1")
    assert os.environ["LLMTRAIN_DEBUG"] == "0"
    assert NODE not in os.environ
