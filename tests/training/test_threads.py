"""Where the number of CPU threads comes from, and that a run keeps it: sums depend on it."""

from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID

from llmtrain.config.schema import Config
from llmtrain.core.env import SHARED_CORES
from llmtrain.distributed.machine_limits import omp_threads, usable_cores
from llmtrain.runs.directory import RunDirectory
from llmtrain.training.resume import Resumption, recorded_threads

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def _no_number_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def trained(config: Config, resume: str | None = None, **env: str) -> tuple[int, str]:
    """Threads of a run that finished, and where its log says they came from."""
    ended = harness.run(config, resume, env=env)
    assert ended.result, ended.output
    (line,) = [line for line in ended.output.splitlines() if "CPU threads: " in line]
    return ended.result["threads"], line.rpartition("(")[2].rstrip(")")


def test_the_config_comes_first(make_config: MakeConfig) -> None:
    assert trained(make_config(run__threads=1), OMP_NUM_THREADS="2") == (1, "run.threads")


def test_omp_num_threads_is_the_default(make_config: MakeConfig) -> None:
    assert trained(make_config(run__threads=None), OMP_NUM_THREADS="3") == (3, "OMP_NUM_THREADS")


def test_a_number_that_cannot_be_used_is_told(make_config: MakeConfig) -> None:
    ended = harness.run(make_config(run__threads=None), env={"OMP_NUM_THREADS": "many"})
    assert ended.result, ended.output
    assert ended.result["threads"] == usable_cores()
    (warning,) = [line for line in ended.output.splitlines() if "OMP_NUM_THREADS" in line]
    assert "warning" in warning


def test_else_the_cores(make_config: MakeConfig) -> None:
    threads, source = trained(make_config(run__threads=None))
    assert threads == usable_cores()
    assert source.startswith("cores: ")


@pytest.mark.parametrize(
    "fault", [pytest.param("after_optimizer:3:0:term", marks=pytest.mark.slow), "forward:1:0:kill"]
)
def test_a_resumed_run_keeps_its_number(make_config: MakeConfig, fault: str) -> None:
    """Over what torchrun or `node` sets by itself; also when there is no checkpoint yet."""
    config = make_config(run__threads=None)
    assert harness.run(config, fault=fault, env={"OMP_NUM_THREADS": "2"}).code in (75, -9)
    threads, source = trained(config, RUN_ID, OMP_NUM_THREADS="1", **{SHARED_CORES: "1"})
    assert threads == 2
    assert "first start" in source


@pytest.mark.parametrize(
    "run", ["null", "[1]", "abc", "{threads: -3}", "{threads: true}", "{threads: 99999999}", "\xff"]
)
def test_a_damaged_record_counts_for_nothing(tmp_path: Path, run: str) -> None:
    folder = RunDirectory(tmp_path / "runs" / RUN_ID)
    folder.path.mkdir(parents=True)
    folder.config.write_bytes(f"run: {run}\n".encode("latin-1"))
    assert recorded_threads(Resumption(folder, None, False)) is None


def test_one_process_ends_as_two_with_the_same_number(tmp_path: Path, cache: Path) -> None:
    """OMP_NUM_THREADS=1 and no word of threads in the config: what people do under torchrun."""
    hashes = set()
    for count in (1, 2):
        config = harness.world_config(tmp_path / str(count) / "runs", cache, run__threads=None)
        env = {"OMP_NUM_THREADS": "1"}
        ends = [harness.run(config, env=env)] if count == 1 else harness.run_world(config, 2, env=env)
        assert ends[0].result, ends[0].output
        assert ends[0].result["threads"] == 1
        hashes.add(ends[0].result["state_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": " 4, 2"}, 4),
        ({"OMP_NUM_THREADS": "4", SHARED_CORES: "1"}, None),
        ({"OMP_NUM_THREADS": ""}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "-1"}, None),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "100000"}, None),
        ({"OMP_NUM_THREADS": "9" * 5000}, None),
        ({"OMP_NUM_THREADS": "\u0663"}, None),
    ],
)
def test_what_omp_num_threads_may_hold(environment: dict[str, str], threads: int | None) -> None:
    assert omp_threads(environment) == threads
