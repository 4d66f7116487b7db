"""`llmtrain doctor`: exit codes, output, and real processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Doctor = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-P", "-m", "llmtrain", "doctor"]


@pytest.fixture
def doctor(tiny: list[str], tmp_path: Path) -> Doctor:
    """`llmtrain doctor` in a subprocess with its own environment."""
    sets = [part for text in tiny for part in ("--set", text)]

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "--config", "gpt_smoke", *sets, *arguments],
            cwd=tmp_path,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_single_process_passes(cli: Cli) -> None:
    result = cli("doctor")
    assert result.code == 0, result.err
    assert "Ready to train" in result.out
    assert result.out.splitlines()[0].split() == ["status", "check", "evidence", "and", "remedy"]


def test_json_is_one_object(cli: Cli) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0
    assert result.json["ok"] is True
    assert result.json["allreduce"] == []
    assert {finding["name"] for finding in result.json["findings"]} >= {"versions", "memory", "write speed"}


def test_failed_check_exits_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope7")
    result = cli("doctor")
    assert result.code == 1
    assert "FAIL" in result.out
    assert "nope7" in result.out
    assert result.err == ""


def test_bad_config_exits_64(cli: Cli) -> None:
    assert cli("doctor", "--set", "trainer.lr=much").code == 64
    assert cli("doctor", "--local", "--processes", "2").code == 64


def test_bad_environment_is_reported(doctor: Doctor) -> None:
    done = doctor("--json", RANK="3", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    assert done.returncode == 1
    wrong = [f for f in json.loads(done.stdout)["findings"] if f["status"] == "fail"]
    assert "RANK is 3" in wrong[0]["evidence"]
    assert wrong[0]["name"] == "identity"


@pytest.mark.slow
def test_node_variables_without_local_rank(doctor: Doctor) -> None:
    pod = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    pod["MASTER_PORT"] = str(closed_port())
    done = doctor(**pod)
    assert done.returncode == 1
    assert "llmtrain node" in done.stdout
    assert doctor("--local", **pod).returncode == 0


def test_two_processes(doctor: Doctor) -> None:
    done = doctor("--processes", "2", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["ok"] is True
    assert {finding["rank"] for finding in value["findings"]} == {0, 1, None}
    assert [row["bytes"] for row in value["allreduce"]] == [4, 4_000, 1_000_000, 16_000_000]
    assert all(row["wrong_ranks"] == [] for row in value["allreduce"])
    findings = {finding["name"]: finding for finding in value["findings"]}
    assert "gloo on cpu, 2 ranks" in findings["all-reduce"]["evidence"]


def test_failure_on_one_of_two_processes(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = doctor("--processes", "2", "--set", "output.root_dir=file")
    assert done.returncode == 1
    assert "crashed" not in done.stderr + done.stdout
    assert done.stdout.count("FAIL") == 1
    assert "Not ready to train" in done.stdout
    assert "all-reduce" in done.stdout


@pytest.mark.slow
def test_two_processes_that_cannot_join(doctor: Doctor) -> None:
    done = doctor("--processes", "2", "--json", "--set", "distributed.strategy=none")
    assert done.returncode == 1
    assert "crashed" not in done.stderr
    wrong = [f for f in json.loads(done.stdout)["findings"] if f["status"] == "fail"]
    assert [f["name"] for f in wrong] == ["join"]


def test_refusing_master_fails(doctor: Doctor) -> None:
    port = str(closed_port())
    process = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = doctor(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LLMTRAIN_DIST_TIMEOUT="1", **process)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "rank 1" in done.stderr
    assert f"127.0.0.1:{port} could not be reached" in done.stderr


@pytest.mark.slow
def test_manually_started_ranks(doctor: Doctor, tiny: list[str], tmp_path: Path) -> None:
    """As under a launcher that only sets the environment: rank 0 hosts the store."""
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed_port())}
    sets = [part for text in tiny for part in ("--set", text)]
    other = subprocess.Popen(
        [*COMMAND, "--config", "gpt_smoke", *sets],
        cwd=tmp_path,
        env={**os.environ, **both, "RANK": "1", "LOCAL_RANK": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        done = doctor(**both, RANK="0", LOCAL_RANK="0")
        out, _ = other.communicate(timeout=60)
    finally:
        other.kill()
    assert (done.returncode, other.returncode) == (0, 0), done.stderr
    assert "Ready to train" in done.stdout
    assert out == ""
