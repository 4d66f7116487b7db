"""Two `llmtrain node` processes, as on two machines: they join, train as one, and stop on SIGTERM."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
from rank_harness import Cli, free_port, start_cli

from limits import limit

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
with open(f"sum-{dist.get_rank()}", "w") as file:
    file.write(f"{total.item():g} of {dist.get_world_size()}, local {os.environ['LOCAL_RANK']}")
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    ranks.end_clis()


def two_nodes(
    directory: Path, *words: object, address: str = "127.0.0.1", env: tuple[Any, Any] = ({}, {})
) -> list[Cli]:
    rendezvous = ["--master-addr", address, "--master-port", free_port()]
    return [
        start_cli("node", "--nodes", 2, "--node-rank", rank, *rendezvous, *words, env=env[rank], cwd=directory)
        for rank in (0, 1)
    ]


def config_file(directory: Path, cache: Path, root: str = "runs", **changes: Any) -> Path:
    settings = {
        "trainer__grad_accum_steps": 4,
        "trainer__eval_batches": 4,
        "distributed__strategy": "ddp",
        "distributed__reproducible_reduce": True,
        "distributed__timeout_sec": 30,
    }
    path = directory / f"{root}.json"
    path.write_text(json.dumps(harness.tiny_config(directory / root, cache, **{**settings, **changes}).as_dict()))
    return path


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> str:
    """The hash of the undisturbed run of one process."""
    config = harness.tiny_config(
        tmp_path_factory.mktemp("golden") / "runs",
        cache,
        trainer__grad_accum_steps=4,
        trainer__eval_batches=4,
        distributed__reproducible_reduce=True,
    )
    return str(ranks.trained(config, 1)["state_sha256"])


def ended(nodes: list[Cli], timeout: float = 120) -> list[int]:
    return [one.wait(timeout) for one in nodes]


def outputs(nodes: list[Cli]) -> str:
    return "\n".join(f"--- node {number}\n{one.out}\n{one.err}" for number, one in enumerate(nodes))


@pytest.mark.parametrize(
    "address", ["127.0.0.2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("127.0.0.1", "localhost"))]
)
def test_two_nodes_train_as_one_process(tmp_path: Path, cache: Path, golden: str, address: str) -> None:
    """With one process per node, the node command itself trains."""
    nodes = two_nodes(tmp_path, "--config", config_file(tmp_path, cache), "--json", address=address)
    assert ended(nodes) == [0, 0], outputs(nodes)
    result = json.loads(nodes[0].out)
    assert (result["world_size"], result["state_sha256"]) == (2, golden)
    assert nodes[1].out == "", "only rank 0 prints the result"
    assert nodes[0].err.count("2 processes, backend gloo") == 1
    assert "2 processes, backend gloo" not in nodes[1].err
    table = [line.split()[1:4] for line in nodes[0].err.splitlines() if re.match(r"\[DDP\] +[01] ", line)]
    assert table == [["0", "0", "0"], ["1", "1", "0"]], "rank, node, local rank"


@pytest.mark.slow
def test_node_1_may_start_first(tmp_path: Path, cache: Path, golden: str) -> None:
    path, rendezvous = config_file(tmp_path, cache), ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    common = ["--nodes", 2, "--config", path, *rendezvous, "--json"]
    late = start_cli("node", "--node-rank", 1, *common, cwd=tmp_path)
    time.sleep(1.0)
    assert not late.is_over()
    nodes = [start_cli("node", "--node-rank", 0, *common, cwd=tmp_path), late]
    assert ended(nodes) == [0, 0], outputs(nodes)
    assert json.loads(nodes[0].out)["state_sha256"] == golden


def test_sigterm_on_one_node_saves_both_and_resumes(tmp_path: Path, cache: Path, golden: str) -> None:
    path = config_file(tmp_path, cache)
    nodes = two_nodes(tmp_path, "--config", path, env=({}, {"LLMTRAIN_FAULT": "after_optimizer:3:1:term"}))
    assert ended(nodes) == [75, 75], outputs(nodes)
    nodes = two_nodes(tmp_path, "--config", path, "--json")
    assert ended(nodes) == [0, 0], outputs(nodes)
    result = json.loads(nodes[0].out)
    assert (result["resumed_from"], result["state_sha256"]) == (3, golden)


@pytest.mark.slow
def test_killed_node_ends_peer_with_75(tmp_path: Path, cache: Path, golden: str) -> None:
    path = config_file(tmp_path, cache)
    nodes = two_nodes(tmp_path, "--config", path, env=({}, {"LLMTRAIN_FAULT": "after_optimizer:5:1:kill"}))
    assert ended(nodes) == [75, -9], outputs(nodes)

    nodes = two_nodes(tmp_path, "--config", path, "--json")
    assert ended(nodes) == [0, 0], outputs(nodes)
    assert json.loads(nodes[0].out)["state_sha256"] == golden


@pytest.mark.parametrize("per_node", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replaced_node_joins_the_next_start(tmp_path: Path, cache: Path, golden: str, per_node: int) -> None:
    """A new node 1 starts while node 0 has not noticed yet that the old one is gone."""
    flag = tmp_path / "flag"
    flag.touch()
    words = ["--nodes", 2, "--processes-per-node", per_node, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    words += ["--config", config_file(tmp_path, cache, trainer__grad_accum_steps=4), "--json"]
    waiting = {"LLMTRAIN_FAULT": "forward:5:0:wait", "LLMTRAIN_FAULT_FILE": str(flag)}
    old = [start_cli("node", "--node-rank", rank, *words, env=waiting, cwd=tmp_path) for rank in (0, 1)]
    old[0].wait_for(lambda: any(tmp_path.glob("runs/*/checkpoints/step_4")))
    time.sleep(0.5)  # node 0 waits, node 1 waits for it in a collective
    old[1].end()
    new = start_cli("node", "--node-rank", 1, *words, cwd=tmp_path)
    new.wait_for(lambda: "waiting for the earlier start of this run to end" in new.err)
    flag.unlink()
    assert old[0].wait() == 75, outputs(old)
    nodes = [start_cli("node", "--node-rank", 0, *words, cwd=tmp_path), new]
    assert ended(nodes) == [0, 0], outputs(nodes)
    assert json.loads(nodes[0].out)["state_sha256"] == golden


def test_short_command_waits_for_a_node_that_starts_late(tmp_path: Path) -> None:
    """Node 0 must not have ended before node 1 asks it where the others are."""
    words = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    script = "import os; open('rank-' + os.environ['RANK'], 'w').close()"
    command = ["--", sys.executable, "-c", script]
    first = start_cli("node", "--node-rank", 0, *words, *command, cwd=tmp_path)
    first.wait_for(lambda: "rendezvous" in first.err)
    time.sleep(1)
    assert not (tmp_path / "rank-0").exists()
    nodes = [first, start_cli("node", "--node-rank", 1, *words, *command, cwd=tmp_path)]
    assert ended(nodes) == [0, 0], outputs(nodes)
    assert (tmp_path / "rank-0").exists()
    assert (tmp_path / "rank-1").exists()


def test_error_on_one_node_ends_both(tmp_path: Path, cache: Path) -> None:
    """The file exists on one machine only (each has its own home directory)."""
    path = config_file(tmp_path, cache, data__name="text_files", data__files=["~/text.txt"], data__cache_dir="~/cache")
    homes = [tmp_path / "home-0", tmp_path / "home-1"]
    for home in homes:
        home.mkdir()
    (homes[0] / "text.txt").write_text("the pod waits for the master.\n" * 100)
    nodes = two_nodes(tmp_path, "--config", path, "--json", env=({"HOME": str(homes[0])}, {"HOME": str(homes[1])}))
    assert ended(nodes) == [65, 65], outputs(nodes)
    for one in nodes:
        error = json.loads(one.out)
        assert error["error"] == "DataError"
        assert "no file matches" in error["what"]
    assert "rank 1" in json.loads(nodes[0].out)["what"]


@pytest.mark.slow  # checks for ten seconds, as network storage may be late
def test_unshared_run_directory_is_refused(tmp_path: Path, cache: Path) -> None:
    path = config_file(tmp_path, cache, output__root_dir="runs")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    nodes = [
        start_cli("node", "--nodes", 2, "--node-rank", rank, *rendezvous, "--config", path, cwd=tmp_path / name)
        for rank, name in enumerate(("a", "b"))
    ]
    assert ended(nodes) == [64, 64], outputs(nodes)
    assert all("Rank 1 does not see" in one.err for one in nodes)


@pytest.mark.parametrize(("per_node", "address"), [(1, "127.0.0.1"), (1, "127.0.0.2"), (2, "127.0.0.1")])
@pytest.mark.slow
def test_torch_script_on_two_nodes(tmp_path: Path, per_node: int, address: str) -> None:
    nodes = two_nodes(
        tmp_path, "--processes-per-node", per_node, "--", sys.executable, "-c", ALL_REDUCE, address=address
    )
    assert ended(nodes) == [0, 0], outputs(nodes)
    size = 2 * per_node
    for rank in range(size):
        total = (tmp_path / f"sum-{rank}").read_text()
        assert total == f"{size * (size + 1) // 2} of {size}, local {rank % per_node}"


# SIGTERM while waiting for missing nodes


WAITS = [(0, "static", 2), (1, "static", 1), (0, "c10d", 1), (1, "c10d", 2)]
MORE_WAITS = [(0, "static", 1), (1, "static", 2), (0, "c10d", 2), (1, "c10d", 1)]


def start_alone(folder: Path, *words: object) -> Cli:
    """A node that waits for the others."""
    rendezvous = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    alone = start_cli("node", *rendezvous, *words, env={"LLMTRAIN_DEBUG": "1"}, cwd=folder)
    alone.wait_for(lambda: "[DDP]" in alone.err)  # some log this only when debugging
    time.sleep(0.5)
    assert not alone.is_over(), alone.err
    return alone


@pytest.mark.parametrize(
    ("rank", "backend", "per_node"), [*WAITS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE_WAITS)]
)
def test_sigterm_while_waiting_exits_75(tmp_path: Path, cache: Path, rank: int, backend: str, per_node: int) -> None:
    words = ["--node-rank", rank, "--processes-per-node", per_node, "--rdzv-backend", backend]
    alone = start_alone(tmp_path, *words, "--config", config_file(tmp_path, cache))
    started = time.monotonic()
    alone.send(signal.SIGTERM)
    assert alone.wait(20) == 75, alone.err
    assert time.monotonic() - started < limit(5)
    assert "Traceback" not in alone.err


@pytest.mark.parametrize(
    ("words", "per_node"),
    [
        (["--", "true"], 1),
        (["--", "true"], 2),
        (["--smoke"], 1),
    ],
    ids=["command", "command, 2 processes", "smoke"],
)
def test_sigterm_while_waiting_ends_other_commands(tmp_path: Path, words: list[str], per_node: int) -> None:
    alone = start_alone(tmp_path, "--node-rank", 1, "--processes-per-node", per_node, *words)
    alone.send(signal.SIGTERM)
    assert alone.wait(20) == 75, alone.err


@pytest.mark.parametrize(
    ("rank", "per_node"), [(0, 1), (1, 2), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((0, 2), (1, 1)))]
)
def test_missing_peer_is_join_error(tmp_path: Path, cache: Path, rank: int, per_node: int) -> None:
    alone = start_cli(
        *("node", "--nodes", 2, "--node-rank", rank, "--processes-per-node", per_node, "--json"),
        *("--master-addr", "127.0.0.1", "--master-port", free_port(), "--config", config_file(tmp_path, cache)),
        env={"LLMTRAIN_DIST_TIMEOUT": "2", "LLMTRAIN_MASTER_READY_TIMEOUT": "2"},
        cwd=tmp_path,
    )
    started = time.monotonic()
    assert alone.wait(60) == 69, alone.err
    assert time.monotonic() - started < limit(20)
    assert json.loads(alone.out)["error"] == "JoinError"
    assert "Traceback" not in alone.err


# Elastic

WAITING = """
import os, pathlib, sys, time
size = os.environ["WORLD_SIZE"]
pathlib.Path(f"size-{size}-rank-{os.environ['RANK']}").touch()
while size == "1" and not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


def test_elastic_job_with_one_node(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    words = ["node", "--nodes", "1:2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    one = start_cli(*words, "--rdzv-conf", "last_call_timeout=1", "--", sys.executable, "-c", WAITING, cwd=tmp_path)
    assert one.wait(60) == 0, one.err
    assert (tmp_path / "size-1-rank-0").exists()


@pytest.mark.slow
def test_replaced_node_joins_again(tmp_path: Path) -> None:
    """Node 1 is killed with its workers, as a pod is, and a new one replaces it."""
    words = ["--max-restarts", 3, "--", sys.executable, "-c", REPLACED]
    rendezvous = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    nodes = [start_cli("node", *rendezvous, "--node-rank", rank, *words, cwd=tmp_path) for rank in (0, 1)]
    nodes[0].wait_for(lambda: len(list(tmp_path.glob("first-*"))) == 2)
    nodes[1].end()
    (tmp_path / "crash").touch()
    new = start_cli("node", *rendezvous, "--node-rank", 1, *words, cwd=tmp_path)
    assert ended([nodes[0], new], 60) == [0, 0], outputs([nodes[0], new])
    assert len(list(tmp_path.glob("second-*"))) == 2


REPLACED = """
import os, pathlib, sys, time
if not pathlib.Path("crash").exists():
    pathlib.Path(f"first-{os.environ['RANK']}").touch()
    while not pathlib.Path("crash").exists():
        time.sleep(0.05)
    sys.exit(1)  # as a trainer does that has lost its peer
pathlib.Path(f"second-{os.environ['RANK']}").touch()
"""


@pytest.mark.slow
def test_elastic_job_accepts_second_node(tmp_path: Path) -> None:
    words = ["node", "--nodes", "1:2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    words += ["--rdzv-conf", "last_call_timeout=1", "--", sys.executable, "-c", WAITING]
    nodes = [start_cli(*words, cwd=tmp_path)]
    nodes[0].wait_for(lambda: (tmp_path / "size-1-rank-0").exists())
    nodes.append(start_cli(*words, cwd=tmp_path))
    assert ended(nodes, 30) == [0, 0], outputs(nodes)
    assert (tmp_path / "size-2-rank-0").exists()
    assert (tmp_path / "size-2-rank-1").exists()


# Restarts over two nodes, with the default rendezvous c10d


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_worker_restarts_both_nodes(tmp_path: Path, cache: Path, golden: str, killed: int) -> None:
    fault = {"LLMTRAIN_FAULT": f"after_optimizer:5:{killed}:kill:0"}
    words = ["--config", config_file(tmp_path, cache), "--max-restarts", 2, "--json"]
    nodes = two_nodes(tmp_path, *words, env=(fault, fault))
    assert ended(nodes, 200) == [0, 0], outputs(nodes)
    # The rendezvous decides which of the two nodes has rank 0.
    reporting = [one for one in nodes if one.out]
    assert len(reporting) == 1
    result = json.loads(reporting[0].out)
    assert (result["state_sha256"], result["generation"], result["resumed_from"]) == (golden, 2, 4)
    assert "rendezvous c10d" in nodes[0].err
    assert sum("SIGKILL" in one.err for one in nodes) == 1, outputs(nodes)


# Two network namespaces: no common loopback, no common hostname lookup


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two, connected by a veth pair: 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    tag = uuid.uuid4().hex[:6]
    names = [f"llmt{tag}a", f"llmt{tag}b"]

    def ip(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)

    try:
        for name in names:
            made = ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        cable = ip("link", "add", f"v{tag}a", "netns", names[0], "type", "veth", "peer", f"v{tag}b", "netns", names[1])
        if cable.returncode:
            pytest.skip(f"no veth here: {cable.stderr.strip()}")
        for number, name in enumerate(names):
            link = f"v{tag}{'ab'[number]}"
            for words in (
                ("addr", "add", f"10.77.0.{number + 1}/24", "dev", link),
                ("link", "set", link, "up"),
                ("link", "set", "lo", "up"),
            ):
                done = ip("-n", name, *words)
                assert done.returncode == 0, done.stderr
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.needs_root
@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_two_network_namespaces(tmp_path: Path, namespaces: list[str], per_node: int) -> None:
    port = free_port()
    nodes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-m", "llmtrain", "node", "--smoke", "--json"),
                *("--nodes", "2", "--node-rank", str(rank), "--processes-per-node", str(per_node)),
                *("--master-addr", "10.77.0.1", "--master-port", str(port), "--set", "run.device=cpu"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "LLMTRAIN_DEBUG": "1", "LLMTRAIN_DIST_TIMEOUT": "90"},
        )
        for rank, name in enumerate(namespaces)
    ]
    try:
        streams = [one.communicate() for one in nodes]
    finally:
        for one in nodes:
            one.kill()
    assert [one.returncode for one in nodes] == [0, 0], streams
    assert json.loads(streams[0][0])["world_size"] == 2 * per_node
    assert json.loads(streams[0][0])["accuracy"] > 0.9
    assert "GLOO_SOCKET_IFNAME=v" in streams[0][1], "the interface was detected"


@pytest.mark.slow
def test_elastic_job_without_node_ranks(tmp_path: Path) -> None:
    """torch decides which node hosts the rendezvous: no node may wait for another to open the port first."""
    words = ["node", "--nodes", "2:3", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words += ["--rdzv-conf", "last_call_timeout=1", "--smoke", "--json"]
    nodes = [start_cli(*words, cwd=tmp_path) for _ in range(2)]
    assert ended(nodes, 90) == [0, 0], outputs(nodes)
    (result,) = [json.loads(one.out) for one in nodes if one.out]
    assert result["world_size"] == 2


def test_option_overrides_environment(tmp_path: Path) -> None:
    alone = start_cli("node", "--nodes", 1, "--smoke", "--json", cwd=tmp_path, env={"NNODES": "2"})
    assert alone.wait(60) == 0, alone.err
    assert json.loads(alone.out)["world_size"] == 1
