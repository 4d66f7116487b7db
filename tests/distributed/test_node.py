"""`llmtrain node`: worker processes of one machine, their exit codes and signals."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fault_harness as harness
import pytest
import rank_harness as ranks
from rank_harness import Cli, start_cli

from fork_server import ignore_as_in_background
from limits import limit

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

# Writes its variables to a file, then exits with the code of its rank.
SCRIPT = f"""
import json, os, sys, time, signal
codes = [int(code) for code in sys.argv[1].split(",")]
rank = int(os.environ["RANK"])
variables = {{name: os.environ.get(name) for name in {NAMES!r}}}
open(f"rank-{{rank}}.json", "w").write(json.dumps(variables))
sys.exit(codes[rank])
"""

# Exits with 75 on SIGTERM, as a trainer does after saving.
TRAINER = """
import os, signal, sys, time
def stop(number, frame):
    open(f"interrupted-{os.environ['RANK']}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGHUP, stop)
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(60)
"""

IGNORED = "assert {signal.getsignal(n) for n in (signal.SIGINT, signal.SIGHUP)} == {signal.SIG_IGN}"


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    ranks.end_clis()


def node(directory: Path, *words: object, **env: str) -> Cli:
    return start_cli("node", *words, env=env, cwd=directory)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        *(("0", 0), ("7", 7), ("75", 75), ("0,7", 7)),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("0,0", 0), ("75,75", 75), ("7,7", 7), ("75,65", 65), ("64,0", 64))
        ),
    ],
)
def test_exit_code_of_workers_is_returned(tmp_path: Path, codes: str, code: int) -> None:
    count = len(codes.split(","))
    done = node(tmp_path, "--processes-per-node", count, "--", sys.executable, "-c", SCRIPT, codes)
    assert done.wait(30) == code, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("count", [1, 2])
def test_command_gets_torchrun_variables(tmp_path: Path, count: int) -> None:
    codes = ",".join("0" * count)
    done = node(tmp_path, "--processes-per-node", count, "--", sys.executable, "-c", SCRIPT, codes)
    assert done.wait(30) == 0, done.err
    for rank in range(count):
        variables = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert (variables["RANK"], variables["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"], variables["GROUP_RANK"]) == (
            str(count),
            str(count),
            "0",
        )
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(variables["MASTER_PORT"]) < 65536


def test_variables_of_the_pod_do_not_reach_the_command(tmp_path: Path) -> None:
    """PyTorchJob counts pods in RANK and processes in WORLD_SIZE."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "2", "PET_NNODES": "1"}
    done = node(tmp_path, "--", sys.executable, "-c", SCRIPT, "0,0", **env)
    assert done.wait(30) == 0, done.err
    assert json.loads((tmp_path / "rank-1.json").read_text())["RANK"] == "1"


def test_cores_are_divided_among_workers(tmp_path: Path) -> None:
    script = "import os; open('threads', 'a').write(os.environ['OMP_NUM_THREADS'] + '\\n')"
    done = node(tmp_path, "--processes-per-node", 2, "--", sys.executable, "-c", script)
    assert done.wait(30) == 0, done.err
    cores = len(os.sched_getaffinity(0))
    assert {int(line) for line in (tmp_path / "threads").read_text().split()} <= set(range(1, max(1, cores // 2) + 1))


def test_failed_worker_ends_the_others(tmp_path: Path) -> None:
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    done = node(tmp_path, "--processes-per-node", 2, "--", sys.executable, "-c", script)
    assert done.wait(100) == 7, done.err
    assert "rank 1" in done.err
    assert "exit code 7" in done.err


@pytest.mark.parametrize(
    ("words", "env", "text"),
    [
        (["--", "no-such-program"], {}, "no-such-program"),
        (["--processes-per-node", "2", "--", "no-such-program"], {}, "no-such-program"),
        (["--config", "gpt_smoke", "--", "true"], {}, "--config and --set"),
        (["--set", "run.seed=1", "--", "true"], {}, "--config and --set"),
        (["--smoke", "--", "true"], {}, "--smoke"),
        (["--smoke", "--doctor"], {}, "--doctor"),
        (["--nodes", "2", "--", "true"], {}, "MASTER_ADDR"),
        (["--nodes", "0", "--", "true"], {}, "--nodes"),
        (["--nodes", "2:1", "--", "true"], {}, "--nodes"),
        (["--nodes", "2", "--node-rank", "2", "--master-addr", "x", "--", "true"], {}, "node-rank"),
        (["--rdzv-backend", "zeus", "--", "true"], {}, "zeus"),
        (["--max-restarts", "-1", "--", "true"], {}, "max-restarts"),
        (["--grace-sec", "0", "--", "true"], {}, "grace-sec"),
        (["--", "true"], {"TORCHELASTIC_RUN_ID": "x"}, "started by torchrun"),
        (["--config", "gpt_smoke"], {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}, "started by torchrun"),
        (["--", "true"], {"LOCAL_RANK": "1"}, "LOCAL_RANK"),
        (["--config", "no-such-preset"], {}, "no-such-preset"),
    ],
)
def test_usage_errors_exit_64(tmp_path: Path, words: list[str], env: dict[str, str], text: str) -> None:
    done = node(tmp_path, *words, **env)
    assert done.wait(30) == 64, done.err
    assert text in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_is_forwarded_to_workers(tmp_path: Path, count: int, number: int) -> None:
    done = node(tmp_path, "--processes-per-node", count, "--", sys.executable, "-c", TRAINER)
    done.wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(count)))
    started = time.monotonic()
    done.send(number)
    code = done.wait(20)
    assert time.monotonic() - started < limit(10)
    assert code == 75, done.err
    assert [(tmp_path / f"interrupted-{rank}").exists() for rank in range(count)] == [True] * count


def test_ignored_signals_stay_ignored_in_workers(tmp_path: Path) -> None:
    """As under `nohup llmtrain node ... &` in a script: neither the node nor its workers stop, until SIGTERM."""
    program = TRAINER.replace("signal.signal(signal.SIGINT, stop)", IGNORED)
    command = [sys.executable, "-c", program]
    done = start_cli("node", "--processes-per-node", 2, "--", *command, cwd=tmp_path, before=ignore_as_in_background)
    done.wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
    for number in (signal.SIGINT, signal.SIGHUP):
        done.send(number)
    time.sleep(limit(0.5))  # for a node that would stop its workers now
    assert not any(tmp_path.glob("interrupted-*")), done.err
    done.send(signal.SIGTERM)
    assert done.wait(20) == 75, done.err
    assert len(list(tmp_path.glob("interrupted-*"))) == 2


def test_worker_ignoring_sigterm_is_killed_after_grace_period(tmp_path: Path) -> None:
    script = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "open(f'ready-{os.environ[\"RANK\"]}', 'w').close(); time.sleep(60)"
    )
    done = node(tmp_path, "--processes-per-node", 2, "--grace-sec", 1, "--", sys.executable, "-c", script)
    done.wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())
    started = time.monotonic()
    done.send(signal.SIGTERM)
    code = done.wait(20)
    assert time.monotonic() - started < limit(8)
    assert code == 137, done.err


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    done = node(tmp_path, "--processes-per-node", 2, "--", sys.executable, "-c", TRAINER)
    done.wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())
    done.send(signal.SIGTERM)
    assert done.wait(20) == 75
    with pytest.raises(ProcessLookupError):
        os.killpg(done.pid, 0)


# Restarts

COUNTING = """
import os, sys
rank = os.environ["RANK"]
with open(f"starts-{rank}", "a") as file:
    file.write(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
starts = len(open(f"starts-{rank}").read())
codes = [int(code) for code in sys.argv[1].split(",")]
sys.exit(codes[starts - 1])
"""


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "starts"),
    [
        ("1,0", 2, 0, "01"),
        pytest.param("1,1,1,0", 2, 1, "012", marks=pytest.mark.slow),
        ("64,0", 2, 64, "0"),
        pytest.param("65,0", 2, 65, "0", marks=pytest.mark.slow),
        ("75,0", 2, 75, "0"),
        pytest.param("1,75,0", 2, 75, "01", marks=pytest.mark.slow),
        ("1,0", 0, 1, "0"),
        pytest.param("0", 2, 0, "0", marks=pytest.mark.slow),
    ],
)
def test_only_crashes_are_restarted(tmp_path: Path, codes: str, restarts: int, code: int, starts: str) -> None:
    done = node(tmp_path, "--max-restarts", restarts, "--", sys.executable, "-c", COUNTING, codes)
    assert done.wait(60) == code, done.err
    assert (tmp_path / "starts-0").read_text() == starts
    if len(starts) > 1:
        assert f"{restarts - 1} restarts left" in done.err


# Training: with one process per node, the node command itself trains.


def sets(tmp_path: Path, cache: Path, *more: str) -> list[str]:
    config = harness.tiny_config(tmp_path / "runs", cache, trainer__grad_accum_steps=4, distributed__strategy="ddp")
    path = tmp_path / "train.json"
    path.write_text(json.dumps(config.as_dict()))
    return ["--config", str(path), *(part for text in more for part in ("--set", text))]


def test_existing_run_is_resumed(tmp_path: Path, cache: Path) -> None:
    words = sets(tmp_path, cache)
    first = node(tmp_path, *words, "--json", LLMTRAIN_FAULT="after_optimizer:5:0:term")
    assert first.wait() == 75, first.err
    again = node(tmp_path, *words, "--json")
    assert again.wait() == 0, again.err
    assert json.loads(again.out)["resumed_from"] == 5
    third = node(tmp_path, *words, "--json")
    assert third.wait() == 0, "a finished run is finished"
    assert json.loads(third.out) == json.loads(again.out)
    golden = harness.run(harness.tiny_config(tmp_path / "golden", cache, trainer__grad_accum_steps=4))
    assert golden.result is not None
    assert json.loads(again.out)["state_sha256"] == golden.result["state_sha256"]


def test_new_start_takes_over_from_hung_process(tmp_path: Path, cache: Path) -> None:
    """A new generation does not wait for one that hangs; the old one publishes nothing when it continues."""
    words = sets(tmp_path, cache)
    old = node(tmp_path, *words, "--json", LLMTRAIN_FAULT="after_optimizer:5:0:stop")
    old.wait_for(lambda: "step 4/8" in old.err)
    time.sleep(0.3)
    new = node(tmp_path, *words, "--json")
    assert new.wait() == 0, new.err
    before = harness.tree(tmp_path / "runs", without=())
    old.send(signal.SIGCONT)
    assert old.wait() == 75, old.err
    after = harness.tree(tmp_path / "runs", without=())
    changed = {name for name in before if before[name] != after.get(name)}
    assert {name for name in changed if "logs/" not in name} == set()


# Real processes


@pytest.mark.slow  # without: docs/tour.md in test_readme.py
@pytest.mark.parametrize("count", [2])
def test_train_processes_prints_one_object(tmp_path: Path, cache: Path, count: int) -> None:
    words = sets(tmp_path, cache, "distributed.reproducible_reduce=true")
    done = start_cli("train", *words, "--processes", count, "--json", cwd=tmp_path)
    assert done.wait(120) == 0, done.err
    result = json.loads(done.out)
    assert (result["world_size"], result["steps"]) == (count, 8)
    assert done.err.count("[DDP] 2 processes, backend gloo") == 1
    table = [line for line in done.err.splitlines() if re.match(r"\[DDP\] +([01]|rank  node) ", line)]
    assert len(table) == 3, done.err
    assert done.err.count("[DONE]") == 1
    assert done.err.count("[TRAIN] step 3/8") == 1
    golden = harness.run(
        harness.tiny_config(
            tmp_path / "golden", cache, trainer__grad_accum_steps=4, distributed__reproducible_reduce=True
        )
    )
    assert golden.result is not None
    assert result["state_sha256"] == golden.result["state_sha256"]


@pytest.mark.slow
def test_worker_error_is_printed_once(tmp_path: Path, cache: Path) -> None:
    words = sets(tmp_path, cache, "data.name=text_files", "data.files=['nowhere.txt']")
    done = start_cli("train", *words, "--processes", 2, "--json", cwd=tmp_path)
    assert done.wait(120) == 65, done.err
    error = json.loads(done.out)
    assert (error["error"], error["exit_code"]) == ("DataError", 65)
    assert "nowhere.txt" in error["what"]
    assert done.err.count("error: ") == 1
    assert done.err.count("nowhere.txt") == 1
    assert "Traceback" not in done.err


def test_config_error_starts_no_process(tmp_path: Path, cache: Path) -> None:
    words = sets(tmp_path, cache, "trainer.no_such=1")
    done = start_cli("train", *words, "--processes", 2, "--json", cwd=tmp_path)
    assert done.wait(30) == 64
    assert "[DDP]" not in done.err
    assert json.loads(done.out)["error"] == "ConfigError"
    assert done.err.count("error: ") == 1


@pytest.mark.slow
def test_unfit_world_size_is_printed_once(tmp_path: Path, cache: Path) -> None:
    done = start_cli("train", *sets(tmp_path, cache), "--processes", 5, "--json", cwd=tmp_path)
    assert done.wait(90) == 64, done.err
    assert "1 to 4." in json.loads(done.out)["what"]
    assert done.err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()


def test_processes_under_torchrun_are_refused(tmp_path: Path, cache: Path) -> None:
    env = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = start_cli("train", *sets(tmp_path, cache), "--processes", 2, env=env, cwd=tmp_path)
    assert done.wait(30) == 64
    assert "torchrun" in done.err
