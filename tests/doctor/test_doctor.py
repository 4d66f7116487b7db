"""`llmtrain doctor`: exit codes, output, and real processes."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_harness as ranks

Cli = Callable[..., Any]
Doctor = Callable[..., ranks.Cli]


@pytest.fixture
def doctor(tiny: list[str], tmp_path: Path) -> Iterator[Doctor]:
    """`llmtrain doctor` in a process with its own environment."""
    sets = [part for text in tiny for part in ("--set", text)]

    def start(*arguments: str, **environ: str) -> ranks.Cli:
        return ranks.start_cli("doctor", "--config", "gpt_smoke", *sets, *arguments, env=environ, cwd=tmp_path)

    yield start
    ranks.end_clis()


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
    assert done.wait() == 1
    wrong = [f for f in json.loads(done.out)["findings"] if f["status"] == "fail"]
    assert "RANK is 3" in wrong[0]["evidence"]
    assert wrong[0]["name"] == "identity"


@pytest.mark.slow
def test_node_variables_without_local_rank(doctor: Doctor) -> None:
    pod = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    pod["MASTER_PORT"] = str(closed_port())
    done = doctor(**pod)
    assert done.wait() == 1
    assert "llmtrain node" in done.out
    assert doctor("--local", **pod).wait() == 0


@pytest.mark.slow  # without: docs/distributed.md in test_readme.py
def test_two_processes(doctor: Doctor) -> None:
    done = doctor("--processes", "2", "--json")
    assert done.wait() == 0, done.err
    value = json.loads(done.out)
    assert value["ok"] is True
    assert {finding["rank"] for finding in value["findings"]} == {0, 1, None}
    assert [row["bytes"] for row in value["allreduce"]] == [4, 4_000, 1_000_000, 16_000_000]
    assert all(row["wrong_ranks"] == [] for row in value["allreduce"])
    findings = {finding["name"]: finding for finding in value["findings"]}
    assert "gloo on cpu, 2 ranks" in findings["all-reduce"]["evidence"]


def test_failure_on_one_of_two_processes(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = doctor("--processes", "2", "--set", "output.root_dir=file")
    assert done.wait() == 1
    assert "crashed" not in done.err + done.out
    assert done.out.count("FAIL") == 1
    assert "Not ready to train" in done.out
    assert "all-reduce" in done.out


@pytest.mark.slow
def test_two_processes_that_cannot_join(doctor: Doctor) -> None:
    done = doctor("--processes", "2", "--json", "--set", "distributed.strategy=none")
    assert done.wait() == 1
    assert "crashed" not in done.err
    wrong = [f for f in json.loads(done.out)["findings"] if f["status"] == "fail"]
    assert [f["name"] for f in wrong] == ["join"]


def test_refusing_master_fails(doctor: Doctor) -> None:
    port = str(closed_port())
    process = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = doctor(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LLMTRAIN_DIST_TIMEOUT="1", **process)
    assert done.wait() == 1
    assert done.out == ""
    assert "rank 1" in done.err
    assert f"127.0.0.1:{port} could not be reached" in done.err


@pytest.mark.slow
def test_manually_started_ranks(doctor: Doctor) -> None:
    """As under a launcher that only sets the environment: rank 0 hosts the store."""
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed_port())}
    other = doctor(**both, RANK="1", LOCAL_RANK="1")
    done = doctor(**both, RANK="0", LOCAL_RANK="0")
    assert (done.wait(), other.wait()) == (0, 0), done.err
    assert "Ready to train" in done.out
    assert other.out == ""
