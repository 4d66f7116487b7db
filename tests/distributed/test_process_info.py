"""The environment of every platform, and every mistake that is made in it."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from llmtrain.config.distributed import DistributedSection, RendezvousSection
from llmtrain.distributed import machine_limits, platform_env
from llmtrain.distributed.machine_limits import gpu_count
from llmtrain.distributed.platform_env import split_ordinal
from llmtrain.distributed.process_info import (
    NodeInfo,
    NodeOptions,
    Problem,
    ProcessInfo,
    find_node_info,
    find_process_info,
    validate_environment,
)
from llmtrain.errors import UsageError

NOTHING = DistributedSection()
POD_0 = "train-0.train"
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": POD_0,
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "none",
}
TRAIN_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}


def pytorch_job(pod: int, pods: int, nproc: str) -> dict[str, str]:
    """The variables of Training Operator 1.9; it counts one process per pod where nproc is not a number."""
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "train-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(pods * (int(nproc) if nproc.isdecimal() else 1)),
        "RANK": str(pod),
        "PET_NODE_RANK": str(pod),
        "PET_NNODES": str(pods),
        "PET_NPROC_PER_NODE": nproc,
        "PET_MASTER_ADDR": "train-master-0",
        "PET_MASTER_PORT": "23456",
    }


def node_info(
    environ: Mapping[str, str], hostname: str = "box", config: DistributedSection = NOTHING, **options: Any
) -> NodeInfo:
    return find_node_info(environ, NodeOptions(**options), hostname, config)


def process_info(
    environ: Mapping[str, str], hostname: str = "box", config: DistributedSection = NOTHING
) -> ProcessInfo:
    return find_process_info(environ, hostname, config)


# (name, environment, hostname, (node rank, nodes, processes per node, master, port), source of the rank)
NODES: list[tuple[str, dict[str, str], str, tuple[int, int, int, str, int], str]] = [
    ("nothing", {}, "box", (0, 1, 1, "127.0.0.1", 29500), "default"),
    ("a machine with a number", {}, "gpu-box-7", (0, 1, 1, "127.0.0.1", 29500), "default"),
    (
        "indexed job",
        {"JOB_COMPLETION_INDEX": "3", "NNODES": "4", "MASTER_ADDR": POD_0},
        "train-3",
        (3, 4, 1, POD_0, 29500),
        "JOB_COMPLETION_INDEX",
    ),
    (
        "indexed job of one",
        {"JOB_COMPLETION_INDEX": "0"},
        "train-0",
        (0, 1, 1, "127.0.0.1", 29500),
        "JOB_COMPLETION_INDEX",
    ),
    (
        "stateful set, label",
        {"POD_INDEX": "2", "NNODES": "3", "NPROC_PER_NODE": "2", "MASTER_ADDR": POD_0},
        "train-2",
        (2, 3, 2, POD_0, 29500),
        "POD_INDEX",
    ),
    ("stateful set, hostname", {"NNODES": "3", "MASTER_ADDR": POD_0}, "train-2", (2, 3, 1, POD_0, 29500), "hostname"),
    (
        "pytorch job, nproc 1",
        pytorch_job(1, 2, "1"),
        "train-worker-0",
        (1, 2, 1, "train-master-0", 23456),
        "PET_NODE_RANK",
    ),
    (
        "pytorch job, nproc 4",
        pytorch_job(1, 2, "4"),
        "train-worker-0",
        (1, 2, 4, "train-master-0", 23456),
        "PET_NODE_RANK",
    ),
    (
        "pytorch job, auto on 4 gpus",
        {**pytorch_job(1, 2, "auto"), "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        "train-worker-0",
        (1, 2, 4, "train-master-0", 23456),
        "PET_NODE_RANK",
    ),
    (
        "pytorch job, replica index of the worker",
        {"RANK": "1", "WORLD_SIZE": "2", "POD_INDEX": "0", "MASTER_ADDR": "train-master-0"},
        "train-worker-0",
        (1, 2, 1, "train-master-0", 29500),
        "RANK",
    ),
    (
        "pytorch job without PET, nproc 4",
        {"RANK": "1", "WORLD_SIZE": "8", "NPROC_PER_NODE": "4", "MASTER_ADDR": "train-master-0"},
        "train-worker-0",
        (1, 2, 4, "train-master-0", 29500),
        "RANK",
    ),
    (
        "pytorch job, workers only",
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "MASTER_ADDR": "train-worker-0"},
        "train-worker-1",
        (1, 2, 4, "train-worker-0", 29500),
        "hostname",
    ),
    (
        "pytorch job, workers only, label",
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "MASTER_ADDR": "train-worker-0", "POD_INDEX": "1"},
        "train-worker-1",
        (1, 2, 1, "train-worker-0", 29500),
        "POD_INDEX",
    ),
    ("train job", TRAIN_JOB, "train-node-0-1", (1, 2, 1, "train-node-0-0.train", 29500), "PET_NODE_RANK"),
    (
        "job set",
        {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": "train-node-0-0.train"},
        "train-node-0-1",
        (1, 2, 2, "train-node-0-0.train", 29500),
        "JOB_COMPLETION_INDEX",
    ),
    (
        "job set of two jobs, rank by hand",
        {"JOB_COMPLETION_INDEX": "0", "NODE_RANK": "2", "NNODES": "4", "MASTER_ADDR": "train-node-0-0.train"},
        "train-node-1-0",
        (2, 4, 1, "train-node-0-0.train", 29500),
        "NODE_RANK",
    ),
    (
        "manifest by hand",
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "1234", "LOCAL_RANK": "0"},
        "some-pod-x2k4z",
        (1, 2, 1, "10.1.2.3", 1234),
        "RANK",
    ),
    (
        "empty variables are unset ones",
        {"RANK": "", "NNODES": " 2 ", "NODE_RANK": "1", "MASTER_ADDR": POD_0, "MASTER_PORT": ""},
        "box",
        (1, 2, 1, POD_0, 29500),
        "NODE_RANK",
    ),
    (
        "endpoint instead of a master",
        {"NNODES": "2", "NODE_RANK": "1", "PET_RDZV_ENDPOINT": f"{POD_0}:29400"},
        "box",
        (1, 2, 1, POD_0, 29400),
        "NODE_RANK",
    ),
    (
        "one name, written twice",
        {
            "NNODES": "2",
            "NODE_RANK": "1",
            "PET_MASTER_ADDR": POD_0,
            "MASTER_ADDR": f"{POD_0}.default.svc.cluster.local",
        },
        "box",
        (1, 2, 1, POD_0, 29500),
        "NODE_RANK",
    ),
]


@pytest.mark.parametrize(
    ("environ", "hostname", "expected", "source"), [row[1:] for row in NODES], ids=[r[0] for r in NODES]
)
def test_node_info(environ: dict[str, str], hostname: str, expected: tuple[object, ...], source: str) -> None:
    node = node_info(environ, hostname)
    got = (node.node_rank, node.nodes, node.processes_per_node, node.master_addr, node.master_port)
    assert got == expected
    assert node.sources["node_rank"] == source
    assert not node.is_elastic
    assert node.world_size == node.nodes * node.processes_per_node
    assert validate_environment(environ, hostname) == []


@pytest.mark.parametrize(
    ("environ", "hostname", "expected"),
    [
        # (rank, world size, local rank, local world size, node rank, is launched)
        (TORCHRUN, "train-1", (5, 8, 1, 4, 1, True)),
        # The pod's variables do not bind torchrun: c10d assigns node ranks, flags override PET_*.
        ({**TRAIN_JOB, **TORCHRUN, "JOB_COMPLETION_INDEX": "6", "PET_NNODES": "1:9"}, "t-6", (5, 8, 1, 4, 1, True)),
        # Nodes with different numbers of processes: torchrun's numbers are consistent.
        (
            {**TORCHRUN, "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "x",
            (4, 5, 0, 1, 1, True),
        ),
        ({}, "box", (0, 1, 0, 1, 0, False)),
        ({}, "train-3", (0, 1, 0, 1, 0, False)),
        ({"JOB_COMPLETION_INDEX": "0"}, "train-0", (0, 1, 0, 1, 0, False)),
        ({"LOCAL_RANK": "0"}, "box", (0, 1, 0, 1, 0, False)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "box", (0, 1, 0, 1, 0, True)),
        ({"WORLD_SIZE": "1"}, "box", (0, 1, 0, 1, 0, True)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": POD_0}, "box", (1, 2, 0, 1, 1, True)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": POD_0}, "box", (1, 2, 0, 1, 1, True)),
        # The spawn example of torch's tutorials: all processes are on this machine.
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}, "box", (1, 2, 1, 2, 0, True)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "box", (1, 2, 0, 1, 1, True)),
        (
            {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": POD_0},
            "t-1",
            (1, 2, 0, 1, 1, True),
        ),
        ({"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": POD_0}, "train-1", (1, 2, 0, 1, 1, True)),
        ({"NNODES": "2", "MASTER_ADDR": POD_0}, "train-1", (1, 2, 0, 1, 1, True)),
        (
            {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": POD_0},
            "box",
            (3, 4, 1, 2, 1, True),
        ),
        (TRAIN_JOB, "train-node-0-1", (1, 2, 0, 1, 1, True)),
        (pytorch_job(1, 2, "1"), "train-worker-0", (1, 2, 0, 1, 1, True)),
    ],
)
def test_process_info(environ: dict[str, str], hostname: str, expected: tuple[object, ...]) -> None:
    process = process_info(environ, hostname)
    got = (
        process.rank,
        process.world_size,
        process.local_rank,
        process.local_world_size,
        process.node_rank,
        process.is_launched,
    )
    assert got == expected
    assert validate_environment(environ, hostname) == []
    assert {"rank", "world_size", "local_rank", "local_world_size", "node_rank", "master_addr"} <= set(process.sources)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # (rank, world size, local rank, local world size, is launched)
        ({"rank": 1, "world_size": 2, "master_addr": POD_0, "master_port": 7}, (1, 2, 0, 1, True)),
        (
            {"rank": 1, "world_size": 2, "local_rank": 1, "master_addr": "127.0.0.1", "master_port": 7},
            (1, 2, 1, 2, True),
        ),
        ({"rank": 0, "world_size": 2, "init_method": f"tcp://{POD_0}:7"}, (0, 2, 0, 1, True)),
        ({"world_size": 1, "master_port": 7}, (0, 1, 0, 1, True)),
        ({"rank": 0, "master_port": 7}, (0, 1, 0, 1, False)),
    ],
)
def test_process_info_from_config(fields: dict[str, Any], expected: tuple[object, ...]) -> None:
    process = process_info({}, "box", DistributedSection(**fields))
    assert (
        process.rank,
        process.world_size,
        process.local_rank,
        process.local_world_size,
        process.is_launched,
    ) == expected
    assert process.master_port == 7
    assert process.master_addr == fields.get("master_addr", POD_0 if "init_method" in fields else "127.0.0.1")


def test_environment_overrides_config() -> None:
    config = DistributedSection(rank=0, world_size=4, master_addr="other", master_port=1)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": POD_0, "MASTER_PORT": "2"}
    process = process_info(environ, "box", config)
    assert (process.rank, process.world_size, process.master_addr, process.master_port) == (
        1,
        2,
        POD_0,
        2,
    )
    node = node_info({}, "box", config)
    assert (node.node_rank, node.nodes, node.master_addr, node.master_port) == (0, 4, "other", 1)
    assert node.sources["nodes"] == "distributed.world_size"


def test_options_override_everything() -> None:
    environ = {**TRAIN_JOB, "NNODES": "nonsense", "JOB_COMPLETION_INDEX": "9"}
    node = node_info(
        environ,
        nodes="3",
        processes_per_node="2",
        node_rank=0,
        master_addr="elsewhere",
        master_port=1,
        rdzv_backend="c10d",
        rdzv_id="run",
        rdzv_conf="join_timeout=5,read_timeout=60",
        rdzv_endpoint="meeting",
    )
    assert (node.node_rank, node.nodes, node.processes_per_node) == (0, 3, 2)
    assert (node.master_addr, node.master_port, node.world_size) == ("elsewhere", 1, 6)
    assert (node.rdzv_backend, node.rdzv_id, node.rdzv_endpoint) == ("c10d", "run", "meeting:29500")
    assert node.rdzv_conf == {"join_timeout": "5", "read_timeout": "60"}
    assert node.sources["nodes"] == "--nodes"
    assert node.sources["processes_per_node"] == "--processes-per-node"


def test_option_may_start_more_processes_than_operator_counted() -> None:
    node = node_info(pytorch_job(1, 2, "1"), processes_per_node="4")
    assert (node.nodes, node.world_size) == (2, 8)


@pytest.mark.parametrize(
    ("text", "host", "port", "written"),
    [
        ("pod", "pod", 29500, "pod:29500"),
        ("pod:1", "pod", 1, "pod:1"),
        ("[fd00::1]:7", "fd00::1", 7, "[fd00::1]:7"),
        ("fd00::1", "fd00::1", 29500, "[fd00::1]:29500"),
    ],
)
def test_parse_endpoint(text: str, host: str, port: int, written: str) -> None:
    node = node_info({"RDZV_ENDPOINT": text}, nodes="2", node_rank=1)
    assert (node.master_addr, node.master_port, node.rdzv_endpoint) == (host, port, written)


def test_elastic_node_range() -> None:
    environ = {"PET_NNODES": "2:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{POD_0}:29400"}
    node = node_info({**environ, "WORLD_SIZE": "3"})
    assert (node.node_rank, node.min_nodes, node.max_nodes, node.is_elastic) == (None, 2, 4, True)
    assert node_info(environ, "train-3").node_rank == 3
    with pytest.raises(UsageError, match="llmtrain node"):
        process_info(environ, "train-3")


def test_c10d_needs_no_rank() -> None:
    assert node_info({"NNODES": "2", "RDZV_BACKEND": "c10d", "MASTER_ADDR": POD_0}).node_rank is None


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8932f937,MIG-1", 2), ("NoDevFiles", 0)],
)
def test_gpu_count_of_visible_devices(visible: str, count: int) -> None:
    assert gpu_count({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_gpu_count_of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, devices = tmp_path / "gpus", tmp_path / "dev"
    monkeypatch.setattr(machine_limits, "GPU_LISTS", ((str(gpus), "*"), (str(devices), "nvidia[0-9]*")))
    assert gpu_count({}) == 0
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (devices / name).touch()
    assert gpu_count({}) == 2
    (gpus / "0000:01:00.0").mkdir(parents=True)
    assert gpu_count({}) == 1


@pytest.mark.parametrize(("word", "gpus", "count"), [("auto", "0,1", 2), ("auto", "", 1), ("gpu", "0,1", 2)])
def test_processes_auto_and_gpu(word: str, gpus: str, count: int) -> None:
    assert node_info({"CUDA_VISIBLE_DEVICES": gpus}, processes_per_node=word).processes_per_node == count


def test_process_per_core() -> None:
    assert 1 <= node_info({}, processes_per_node="cpu").processes_per_node <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("train-3", ("train", 3)), ("a-b-0-12.svc.x", ("a-b-0", 12)), ("box", None), ("box7", None), ("-7", None)],
)
def test_split_ordinal(name: str, expected: tuple[str, int] | None) -> None:
    assert split_ordinal(name) == expected


TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": POD_0}
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": POD_0}

# (environment, hostname, facts in the problem, facts in the remedy) of a node, and of a process that trains on it.
PROBLEMS: list[tuple[dict[str, str], str, str, str]] = [
    ({**TWO, "NNODES": "two"}, "box", "NNODES 'two'", "integer"),
    ({**TWO, "NNODES": "²"}, "box", "NNODES '²'", "integer"),
    ({**TWO, "NNODES": "9" * 5000}, "box", "NNODES", "integer"),
    ({**TWO, "NODE_RANK": "-1"}, "box", "NODE_RANK '-1'", "from 0"),
    ({**TWO, "NNODES": "0"}, "box", "NNODES '0'", "from 1"),
    ({**TWO, "NNODES": "4:2"}, "box", "NNODES '4:2'", "2:4"),
    ({**TWO, "NNODES": "0:2"}, "box", "NNODES '0:2'", "from 1"),
    ({**TWO, "NNODES": "2:"}, "box", "NNODES '2:'", "integer"),
    ({**TWO, "NPROC_PER_NODE": "many"}, "box", "NPROC_PER_NODE 'many'", "auto gpu cpu"),
    (
        {**TWO, "NPROC_PER_NODE": "gpu", "CUDA_VISIBLE_DEVICES": ""},
        "box",
        "NPROC_PER_NODE 'gpu' GPU",
        "nvidia.com/gpu",
    ),
    ({**TWO, "NODE_RANK": "2"}, "box", "NODE_RANK 2 NNODES", "NODE_RANK nodes"),
    (
        {"NNODES": "2", "JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": POD_0},
        "t-2",
        "JOB_COMPLETION_INDEX 2 NNODES",
        "completions",
    ),
    ({"NNODES": "2", "MASTER_ADDR": POD_0}, "box-7", "hostname 7 NNODES", "NODE_RANK"),
    (
        {**TWO, "WORLD_SIZE": "4"},
        "box",
        "WORLD_SIZE 4 (NNODES) (default)",
        "NPROC_PER_NODE",
    ),
    (
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": POD_0},
        "box",
        "RANK 2 (WORLD_SIZE)",
        "NODE_RANK",
    ),
    (
        {**HAND, "LOCAL_RANK": "1"},
        "box",
        "LOCAL_RANK 1 process:",
        "LOCAL_RANK 0",
    ),
    ({**TWO, "LOCAL_RANK": "1"}, "box", "LOCAL_RANK 1 process:", "LOCAL_WORLD_SIZE"),
    ({**HAND, "NODE_RANK": "0"}, "box", "NODE_RANK '0' RANK '1'", "Unset RANK"),
    ({**TWO, "PET_NNODES": "3"}, "box", "PET_NNODES '3' NNODES '2'", "Unset NNODES"),
    ({**TWO, "PET_MASTER_ADDR": "other"}, "box", f"PET_MASTER_ADDR 'other' MASTER_ADDR '{POD_0}'", "same"),
    (
        {**TWO, "MASTER_PORT": "1", "PET_MASTER_PORT": "2"},
        "box",
        "PET_MASTER_PORT '2' MASTER_PORT '1'",
        "same",
    ),
    (
        {**HAND, "RANK": "0", "JOB_COMPLETION_INDEX": "1"},
        "t-1",
        "RANK 0 JOB_COMPLETION_INDEX 1",
        "JOB_COMPLETION_INDEX",
    ),
    (
        {"NNODES": "2", "NODE_RANK": "1"},
        "train-1",
        "NNODES 2 MASTER_ADDR",
        "train-0.<headless service>",
    ),
    ({"NNODES": "2", "NODE_RANK": "1"}, "box", "MASTER_ADDR", "<job>-0.<headless service>"),
    ({**TWO, "MASTER_PORT": "70000"}, "box", "MASTER_PORT '70000'", "29500"),
    ({**TWO, "MASTER_PORT": "0"}, "box", "MASTER_PORT '0'", "29500"),
    ({**TWO, "MASTER_PORT": "tcp://10.0.0.1:80"}, "box", "MASTER_PORT", "enableServiceLinks: false"),
    ({**TWO, "RDZV_CONF": "join_timeout"}, "box", "RDZV_CONF 'join_timeout'", "key=value"),
    (
        {**TWO, "PET_RDZV_CONF": "timeout=60", "RDZV_BACKEND": "c10d"},
        "box",
        "PET_RDZV_CONF timeout=60",
        "join_timeout=60",
    ),
    ({**TWO, "RDZV_BACKEND": "zeus"}, "box", "RDZV_BACKEND 'zeus' c10d etcd etcd-v2 static", "c10d"),
    ({**TWO, "RDZV_ENDPOINT": "pod:x"}, "box", "RDZV_ENDPOINT 'pod:x'", "29500"),
    ({**TWO, "RDZV_ENDPOINT": ":1"}, "box", "RDZV_ENDPOINT ':1'", "host:port"),
    ({"JOB_COMPLETION_INDEX": "1"}, "train-1", "JOB_COMPLETION_INDEX 1", "NNODES"),
    ({"RANK": "0"}, "box", "RANK 0 WORLD_SIZE", "WORLD_SIZE"),
    (
        {"WORLD_SIZE": "2", "MASTER_ADDR": POD_0},
        "box",
        "WORLD_SIZE 2 NODE_RANK",
        "NODE_RANK",
    ),
    (
        {"NNODES": "2", "MASTER_ADDR": POD_0},
        "box",
        "NNODES 2 NODE_RANK",
        "Indexed Job",
    ),
]

NODE_PROBLEMS: list[tuple[dict[str, str], str, str, str]] = [
    ({"TORCHELASTIC_RUN_ID": "none"}, "box", "TORCHELASTIC_RUN_ID 'none'", "torchrun"),
    ({"NNODES": "1:2", "RDZV_BACKEND": "static", "MASTER_ADDR": "a"}, "t-0", "NNODES static", "c10d"),
    (
        {"NNODES": "2", "RDZV_BACKEND": "static", "MASTER_ADDR": "a"},
        "box",
        "NODE_RANK",
        "NODE_RANK",
    ),
    ({"WORLD_SIZE": "5", "RANK": "0", "NPROC_PER_NODE": "2"}, "box", "WORLD_SIZE 5", "NNODES"),
]

PROCESS_PROBLEMS: list[tuple[dict[str, str], str, str, str]] = [
    ({"PET_NPROC_PER_NODE": "4"}, "box", "PET_NPROC_PER_NODE 4 LOCAL_RANK", "`llmtrain node`"),
    (pytorch_job(1, 2, "4"), "box", "PET_NPROC_PER_NODE 4 LOCAL_RANK", "`llmtrain node`"),
    ({**TORCHRUN, "RANK": "8"}, "box", "RANK 8 (WORLD_SIZE)", "rank"),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, "box", "LOCAL_RANK 4", "LOCAL_RANK"),
    ({**TORCHRUN, "MASTER_ADDR": ""}, "box", "WORLD_SIZE 8 MASTER_ADDR", "MASTER_ADDR"),
    ({"LOCAL_RANK": "0", "RANK": "0"}, "box", "RANK 0 WORLD_SIZE", "WORLD_SIZE"),
    (
        {**HAND, "LOCAL_RANK": "0", "NNODES": "4"},
        "box",
        "WORLD_SIZE 2 4 (NNODES)",
        "WORLD_SIZE",
    ),
    ({**HAND, "LOCAL_RANK": "0", "NODE_RANK": "0"}, "box", "RANK 1 (NODE_RANK)", "RANK"),
    ({**HAND, "LOCAL_RANK": "x"}, "box", "LOCAL_RANK 'x'", "integer"),
    (
        {**HAND, "RANK": "0", "LOCAL_RANK": "0", "JOB_COMPLETION_INDEX": "1"},
        "t-1",
        "RANK 0 JOB_COMPLETION_INDEX 1",
        "JOB_COMPLETION_INDEX",
    ),
    (
        {"JOB_COMPLETION_INDEX": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        "t-1",
        "RANK~is~1 MASTER_ADDR~is~127.0.0.1 JOB_COMPLETION_INDEX~is~1",
        "MASTER_ADDR LOCAL_RANK",
    ),
    (
        {
            **HAND,
            "WORLD_SIZE": "6",
            "RANK": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2",
            "JOB_COMPLETION_INDEX": "2",
        },
        "t-2",
        "RANK~is~2 node~1 JOB_COMPLETION_INDEX~is~2",
        "RANK JOB_COMPLETION_INDEX",
    ),
]


def check(raised: UsageError, what: str, remedy: str) -> None:
    """Exactly this problem, in the message and in the details. `what`: its facts; ~ is a space inside one."""
    problems = raised.details["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 1, raised
    assert all(fact.replace("~", " ") in problems[0]["what"] for fact in what.split()), raised
    assert all(fact in problems[0]["remedy"] for fact in remedy.split()), raised
    assert problems[0]["what"] in str(raised)
    assert problems[0]["remedy"] in str(raised)
    assert raised.exit_code == 64


@pytest.mark.parametrize(("environ", "hostname", "what", "remedy"), PROBLEMS + NODE_PROBLEMS)
def test_node_problem(environ: dict[str, str], hostname: str, what: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        node_info(environ, hostname)
    check(caught.value, what, remedy)


@pytest.mark.parametrize(("environ", "hostname", "what", "remedy"), PROBLEMS + PROCESS_PROBLEMS)
def test_process_problem(environ: dict[str, str], hostname: str, what: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        process_info(environ, hostname)
    check(caught.value, what, remedy)


def test_option_problems() -> None:
    with pytest.raises(UsageError) as caught:
        node_info({}, nodes="2", node_rank=-1, master_port=0, rdzv_conf="x", processes_per_node="0")
    problems = caught.value.details["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 5
    for option in ("--node-rank", "--master-port", "--rdzv-conf", "--processes-per-node", "MASTER_ADDR"):
        assert any(option in problem["what"] for problem in problems)


def test_all_problems_are_reported_at_once() -> None:
    environ = {
        "NNODES": "2",
        "PET_NNODES": "3",
        "NODE_RANK": "x",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "0",
        "RDZV_BACKEND": "c10d",
        "RDZV_CONF": "timeout=5",
        "TORCHELASTIC_RUN_ID": "none",
    }
    problems = validate_environment({**environ, "LOCAL_RANK": ""}, "train-1")
    with pytest.raises(UsageError) as caught:
        node_info(environ, "train-1")
    text = str(caught.value)
    for name in ("PET_NNODES", "NODE_RANK", "LOCAL_RANK is 1", "MASTER_PORT", "timeout=5", "TORCHELASTIC_RUN_ID"):
        assert name in text
    assert text.startswith("6 problems")
    assert len(problems) == 5
    for problem in problems:
        assert isinstance(problem, Problem)
        assert problem.what in text
        assert problem.remedy in text


def test_validate_environment_reads_os_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for row in platform_env.NAMES.values() for name in row]:
        monkeypatch.delenv(name, raising=False)
    assert validate_environment() == []
    monkeypatch.setenv("NODE_RANK", "x")
    (problem,) = validate_environment()
    assert "NODE_RANK" in problem.what
    assert "'x'" in problem.what


def worker(node: NodeInfo, local_rank: int) -> dict[str, str]:
    """The variables that torchrun sets for a process of this node."""
    assert node.node_rank is not None
    return {
        "RANK": str(node.node_rank * node.processes_per_node + local_rank),
        "WORLD_SIZE": str(node.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.processes_per_node),
        "GROUP_RANK": str(node.node_rank),
        "MASTER_ADDR": node.master_addr,
        "MASTER_PORT": str(node.master_port),
    }


@for_all(
    nodes=st.integers(2, 5),
    processes=st.integers(1, 4),
    kind=st.sampled_from(["job", "set", "pytorch", "train", "hand"]),
)
def test_ranks_of_all_pods_cover_the_world(nodes: int, processes: int, kind: str) -> None:
    workers = []
    for pod in range(nodes):
        variables = {"NNODES": str(nodes), "NPROC_PER_NODE": str(processes), "MASTER_ADDR": POD_0}
        environ = {
            "job": {**variables, "JOB_COMPLETION_INDEX": str(pod)},
            "set": variables,
            "pytorch": pytorch_job(pod, nodes, str(processes)),
            "train": {**TRAIN_JOB, "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(processes)}
            | {"JOB_COMPLETION_INDEX": str(pod), "PET_NODE_RANK": str(pod)},
            "hand": {"RANK": str(pod), "WORLD_SIZE": str(nodes * processes), "NPROC_PER_NODE": str(processes)}
            | {"MASTER_ADDR": POD_0},
        }[kind]
        node = node_info(environ, f"train-{pod}")
        workers += [process_info({**environ, **worker(node, local)}, f"train-{pod}") for local in range(processes)]
    assert sorted(process.rank for process in workers) == list(range(nodes * processes))
    assert {process.world_size for process in workers} == {nodes * processes}
    assert len({(process.node_rank, process.local_rank) for process in workers}) == nodes * processes


VARIABLES = [name for row in platform_env.NAMES.values() for name in row] + ["TORCHELASTIC_RUN_ID"]
VALUES = st.sampled_from(["", "0", "1", "2", "-1", "x", "1:2", "auto", "c10d", "a=b", "pod-0", "pod:1"])


@for_all(environ=st.dictionaries(st.sampled_from(VARIABLES), VALUES), hostname=st.sampled_from(["box", "train-1"]))
def test_any_environment_gives_valid_numbers_or_problems(environ: dict[str, str], hostname: str) -> None:
    with contextlib.suppress(UsageError):
        process = process_info(environ, hostname)
        assert 0 <= process.rank < process.world_size
        assert 0 <= process.local_rank < process.local_world_size <= process.world_size
        assert process.master_addr
    with contextlib.suppress(UsageError):
        node = node_info(environ, hostname)
        assert node.node_rank is None or 0 <= node.node_rank < node.max_nodes
        assert node.min_nodes <= node.max_nodes
        assert node.master_addr


class TestRendezvousFromConfig:
    AT_ETCD = DistributedSection(rendezvous=RendezvousSection(backend="etcd-v2", endpoint="etcd:2379"))
    TWO = NodeOptions(nodes="2", node_rank=1, master_addr="a")

    def test_config_is_the_default(self) -> None:
        node = find_node_info({}, NodeOptions(nodes="2"), "host", self.AT_ETCD)
        assert (node.rdzv_backend, node.rdzv_endpoint, node.node_rank) == ("etcd-v2", "etcd:2379", None)
        c10d = DistributedSection(rendezvous=RendezvousSection(backend="c10d"))
        node = find_node_info({}, self.TWO, "host", c10d)
        assert (node.rdzv_backend, node.rdzv_endpoint) == ("c10d", None)

    @pytest.mark.parametrize(
        ("environ", "options", "expected"),
        [
            ({}, {"rdzv_endpoint": "other:2379"}, ("etcd-v2", "other:2379")),
            ({}, {"rdzv_backend": "c10d"}, ("c10d", None)),
            ({}, {"rdzv_backend": "static"}, ("static", None)),
            ({"PET_RDZV_BACKEND": "c10d"}, {}, ("c10d", None)),
            ({"PET_RDZV_ENDPOINT": "other:2379"}, {}, ("etcd-v2", "other:2379")),
            ({"PET_RDZV_BACKEND": "c10d"}, {"rdzv_backend": "etcd-v2"}, ("etcd-v2", "etcd:2379")),
        ],
    )
    def test_options_and_variables_override(
        self, environ: dict[str, str], options: dict[str, str], expected: tuple[str, str | None]
    ) -> None:
        """The config's endpoint is an etcd server: no other backend uses it."""
        node = find_node_info(environ, dataclasses.replace(self.TWO, **options), "host", self.AT_ETCD)
        assert (node.rdzv_backend, node.rdzv_endpoint) == expected

    def test_training_process_ignores_rendezvous(self) -> None:
        environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
        plain = find_process_info(environ, "host", DistributedSection())
        assert find_process_info(environ, "host", self.AT_ETCD) == plain
        assert find_process_info({}, "host", self.AT_ETCD).world_size == 1

    @pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
    def test_etcd_needs_an_endpoint(self, backend: str) -> None:
        with pytest.raises(UsageError) as raised:
            find_node_info({}, dataclasses.replace(self.TWO, rdzv_backend=backend), "host", DistributedSection())
        assert len(raised.value.details["problems"]) == 1
