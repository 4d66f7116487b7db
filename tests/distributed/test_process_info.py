"""Every platform's environment, and every mistake people make in it."""

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
from llmtrain.distributed import env as sources
from llmtrain.distributed.env import gpu_count, split_ordinal
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
    """What Training Operator 1.9 injects; it counts one process a pod where nproc is no number."""
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


def place_of(
    environ: Mapping[str, str], hostname: str = "box", config: DistributedSection = NOTHING, **options: Any
) -> NodeInfo:
    return find_node_info(environ, NodeOptions(**options), hostname, config)


def seat_of(environ: Mapping[str, str], hostname: str = "box", config: DistributedSection = NOTHING) -> ProcessInfo:
    return find_process_info(environ, hostname, config)


# (name, environment, hostname, (node rank, nodes, processes per node, master, port), source of the rank)
PLACES: list[tuple[str, dict[str, str], str, tuple[int, int, int, str, int], str]] = [
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
    ("environ", "hostname", "expected", "source"), [row[1:] for row in PLACES], ids=[r[0] for r in PLACES]
)
def test_places(environ: dict[str, str], hostname: str, expected: tuple[object, ...], source: str) -> None:
    place = place_of(environ, hostname)
    got = (place.node_rank, place.nodes, place.processes_per_node, place.master_addr, place.master_port)
    assert got == expected
    assert place.sources["node_rank"] == source
    assert not place.is_elastic
    assert place.world_size == place.nodes * place.processes_per_node
    assert validate_environment(environ, hostname) == []


@pytest.mark.parametrize(
    ("environ", "hostname", "expected"),
    [
        # (rank, world size, local rank, local world size, node rank, is launched)
        (TORCHRUN, "train-1", (5, 8, 1, 4, 1, True)),
        # What the pod was told does not bind torchrun: c10d ranks nodes anew, flags overrule PET_*.
        ({**TRAIN_JOB, **TORCHRUN, "JOB_COMPLETION_INDEX": "6", "PET_NNODES": "1:9"}, "t-6", (5, 8, 1, 4, 1, True)),
        # Nodes with different numbers of processes: torchrun's own numbers are right.
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
        # The spawn example of torch's tutorials: everybody is on this machine.
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
def test_seats(environ: dict[str, str], hostname: str, expected: tuple[object, ...]) -> None:
    process = seat_of(environ, hostname)
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
def test_seats_from_the_config(fields: dict[str, Any], expected: tuple[object, ...]) -> None:
    process = seat_of({}, "box", DistributedSection(**fields))
    assert (
        process.rank,
        process.world_size,
        process.local_rank,
        process.local_world_size,
        process.is_launched,
    ) == expected
    assert process.master_port == 7
    assert process.master_addr == fields.get("master_addr", POD_0 if "init_method" in fields else "127.0.0.1")


def test_the_environment_wins_over_the_config() -> None:
    config = DistributedSection(rank=0, world_size=4, master_addr="other", master_port=1)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": POD_0, "MASTER_PORT": "2"}
    process = seat_of(environ, "box", config)
    assert (process.rank, process.world_size, process.master_addr, process.master_port) == (
        1,
        2,
        POD_0,
        2,
    )
    place = place_of({}, "box", config)
    assert (place.node_rank, place.nodes, place.master_addr, place.master_port) == (0, 4, "other", 1)
    assert place.sources["nodes"] == "distributed.world_size"


def test_options_override_everything() -> None:
    environ = {**TRAIN_JOB, "NNODES": "nonsense", "JOB_COMPLETION_INDEX": "9"}
    place = place_of(
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
    assert (place.node_rank, place.nodes, place.processes_per_node) == (0, 3, 2)
    assert (place.master_addr, place.master_port, place.world_size) == ("elsewhere", 1, 6)
    assert (place.rdzv_backend, place.rdzv_id, place.rdzv_endpoint) == ("c10d", "run", "meeting:29500")
    assert place.rdzv_conf == {"join_timeout": "5", "read_timeout": "60"}
    assert place.sources["nodes"] == "--nodes"
    assert place.sources["processes_per_node"] == "--processes-per-node"


def test_an_option_may_start_more_processes_than_the_operator_counted() -> None:
    place = place_of(pytorch_job(1, 2, "1"), processes_per_node="4")
    assert (place.nodes, place.world_size) == (2, 8)


@pytest.mark.parametrize(
    ("text", "host", "port", "written"),
    [
        ("pod", "pod", 29500, "pod:29500"),
        ("pod:1", "pod", 1, "pod:1"),
        ("[fd00::1]:7", "fd00::1", 7, "[fd00::1]:7"),
        ("fd00::1", "fd00::1", 29500, "[fd00::1]:29500"),
    ],
)
def test_endpoints(text: str, host: str, port: int, written: str) -> None:
    place = place_of({"RDZV_ENDPOINT": text}, nodes="2", node_rank=1)
    assert (place.master_addr, place.master_port, place.rdzv_endpoint) == (host, port, written)


def test_elastic_ranges() -> None:
    environ = {"PET_NNODES": "2:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{POD_0}:29400"}
    place = place_of({**environ, "WORLD_SIZE": "3"})
    assert (place.node_rank, place.min_nodes, place.max_nodes, place.is_elastic) == (None, 2, 4, True)
    assert place_of(environ, "train-3").node_rank == 3
    with pytest.raises(UsageError, match="llmtrain node"):
        seat_of(environ, "train-3")


def test_c10d_needs_no_rank() -> None:
    assert place_of({"NNODES": "2", "RDZV_BACKEND": "c10d", "MASTER_ADDR": POD_0}).node_rank is None


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8932f937,MIG-1", 2), ("NoDevFiles", 0)],
)
def test_gpus_that_are_visible(visible: str, count: int) -> None:
    assert gpu_count({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_gpus_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, devices = tmp_path / "gpus", tmp_path / "dev"
    monkeypatch.setattr(sources, "GPU_LISTS", ((str(gpus), "*"), (str(devices), "nvidia[0-9]*")))
    assert gpu_count({}) == 0
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (devices / name).touch()
    assert gpu_count({}) == 2
    (gpus / "0000:01:00.0").mkdir(parents=True)
    assert gpu_count({}) == 1


@pytest.mark.parametrize(("word", "gpus", "count"), [("auto", "0,1", 2), ("auto", "", 1), ("gpu", "0,1", 2)])
def test_words_for_processes(word: str, gpus: str, count: int) -> None:
    assert place_of({"CUDA_VISIBLE_DEVICES": gpus}, processes_per_node=word).processes_per_node == count


def test_a_process_for_each_core() -> None:
    assert 1 <= place_of({}, processes_per_node="cpu").processes_per_node <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("train-3", ("train", 3)), ("a-b-0-12.svc.x", ("a-b-0", 12)), ("box", None), ("box7", None), ("-7", None)],
)
def test_ordinals(name: str, expected: tuple[str, int] | None) -> None:
    assert split_ordinal(name) == expected


TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": POD_0}
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": POD_0}

# (environment, hostname, words of the problem, words of the remedy): of a node, and of a process that trains in it.
PROBLEMS: list[tuple[dict[str, str], str, str, str]] = [
    ({**TWO, "NNODES": "two"}, "box", "NNODES is 'two', which is no number", "whole number"),
    ({**TWO, "NNODES": "²"}, "box", "NNODES is '²', which is no number", "whole number"),
    ({**TWO, "NNODES": "9" * 5000}, "box", "which is no number", "whole number"),
    ({**TWO, "NODE_RANK": "-1"}, "box", "NODE_RANK is '-1', which is negative", "from 0"),
    ({**TWO, "NNODES": "0"}, "box", "NNODES is '0', which must be at least 1", "from 1"),
    ({**TWO, "NNODES": "4:2"}, "box", "NNODES is '4:2', whose first number is above the second", "2:4"),
    ({**TWO, "NNODES": "0:2"}, "box", "NNODES is '0:2', which must be at least 1", "from 1"),
    ({**TWO, "NNODES": "2:"}, "box", "NNODES is '2:', which is no number", "whole number"),
    ({**TWO, "NPROC_PER_NODE": "many"}, "box", "NPROC_PER_NODE is 'many', which is no number", "auto, gpu or cpu"),
    (
        {**TWO, "NPROC_PER_NODE": "gpu", "CUDA_VISIBLE_DEVICES": ""},
        "box",
        "NPROC_PER_NODE is 'gpu', but this machine",
        "nvidia.com/gpu",
    ),
    ({**TWO, "NODE_RANK": "2"}, "box", "NODE_RANK is 2, but there are 2 nodes (NNODES)", "number of nodes"),
    (
        {"NNODES": "2", "JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": POD_0},
        "t-2",
        "JOB_COMPLETION_INDEX is 2, but there are 2",
        "completions",
    ),
    ({"NNODES": "2", "MASTER_ADDR": POD_0}, "box-7", "hostname is 7, but there are 2 nodes", "NODE_RANK"),
    (
        {**TWO, "WORLD_SIZE": "4"},
        "box",
        "WORLD_SIZE is 4, but 2 nodes (NNODES) x 1 processes per node (default) are 2",
        "NPROC_PER_NODE",
    ),
    (
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": POD_0},
        "box",
        "RANK is 2, but there are 2 nodes (WORLD_SIZE)",
        "raise",
    ),
    (
        {**HAND, "LOCAL_RANK": "1"},
        "box",
        "LOCAL_RANK is 1, but this node runs 1 process:",
        "with one process a pod it is 0",
    ),
    ({**TWO, "LOCAL_RANK": "1"}, "box", "LOCAL_RANK is 1, but this node runs 1 process:", "LOCAL_WORLD_SIZE"),
    ({**HAND, "NODE_RANK": "0"}, "box", "NODE_RANK is '0' but RANK is '1'", "Unset RANK"),
    ({**TWO, "PET_NNODES": "3"}, "box", "PET_NNODES is '3' but NNODES is '2'", "Unset NNODES"),
    ({**TWO, "PET_MASTER_ADDR": "other"}, "box", f"PET_MASTER_ADDR is 'other' but MASTER_ADDR is '{POD_0}'", "same"),
    (
        {**TWO, "MASTER_PORT": "1", "PET_MASTER_PORT": "2"},
        "box",
        "PET_MASTER_PORT is '2' but MASTER_PORT is '1'",
        "same",
    ),
    (
        {**HAND, "RANK": "0", "JOB_COMPLETION_INDEX": "1"},
        "t-1",
        "RANK is 0, but JOB_COMPLETION_INDEX is 1",
        "take it from JOB_COMPLETION_INDEX",
    ),
    (
        {"NNODES": "2", "NODE_RANK": "1"},
        "train-1",
        "NNODES says there are 2 nodes, but MASTER_ADDR is not set",
        "train-0.<headless service>",
    ),
    ({"NNODES": "2", "NODE_RANK": "1"}, "box", "MASTER_ADDR is not set", "<job>-0.<headless service>"),
    ({**TWO, "MASTER_PORT": "70000"}, "box", "MASTER_PORT is '70000', which is no port", "1 to 65535"),
    ({**TWO, "MASTER_PORT": "0"}, "box", "MASTER_PORT is '0', which is no port", "1 to 65535"),
    ({**TWO, "MASTER_PORT": "tcp://10.0.0.1:80"}, "box", "which is no port", "enableServiceLinks: false"),
    ({**TWO, "RDZV_CONF": "join_timeout"}, "box", "RDZV_CONF is 'join_timeout', which is not a list", "key=value"),
    (
        {**TWO, "PET_RDZV_CONF": "timeout=60", "RDZV_BACKEND": "c10d"},
        "box",
        "PET_RDZV_CONF has timeout=60",
        "join_timeout=60",
    ),
    ({**TWO, "RDZV_BACKEND": "zeus"}, "box", "RDZV_BACKEND is 'zeus', which is unknown", "c10d, etcd, etcd-v2, static"),
    ({**TWO, "RDZV_ENDPOINT": "pod:x"}, "box", "RDZV_ENDPOINT is 'pod:x', whose port is none", "65535"),
    ({**TWO, "RDZV_ENDPOINT": ":1"}, "box", "RDZV_ENDPOINT is ':1', which is no host:port", "pod 0's own name"),
    ({"JOB_COMPLETION_INDEX": "1"}, "train-1", "JOB_COMPLETION_INDEX is 1, but nothing says how many nodes", "NNODES"),
    ({"RANK": "0"}, "box", "RANK is 0, but WORLD_SIZE is not set", "Set WORLD_SIZE"),
    (
        {"WORLD_SIZE": "2", "MASTER_ADDR": POD_0},
        "box",
        "WORLD_SIZE says there are 2 nodes, but nothing says which one this is: RANK",
        "NODE_RANK",
    ),
    (
        {"NNODES": "2", "MASTER_ADDR": POD_0},
        "box",
        "NNODES says there are 2 nodes, but nothing says which one",
        "Indexed Job",
    ),
]

NODE_PROBLEMS: list[tuple[dict[str, str], str, str, str]] = [
    ({"TORCHELASTIC_RUN_ID": "none"}, "box", "TORCHELASTIC_RUN_ID is 'none'", "`llmtrain node` without it"),
    ({"NNODES": "1:2", "RDZV_BACKEND": "static", "MASTER_ADDR": "a"}, "t-0", "NNODES is 1:2, but the static", "c10d"),
    (
        {"NNODES": "2", "RDZV_BACKEND": "static", "MASTER_ADDR": "a"},
        "box",
        "nothing says which one this is",
        "NODE_RANK",
    ),
    ({"WORLD_SIZE": "5", "RANK": "0", "NPROC_PER_NODE": "2"}, "box", "WORLD_SIZE is 5, which is no multiple", "NNODES"),
]

SEAT_PROBLEMS: list[tuple[dict[str, str], str, str, str]] = [
    ({"PET_NPROC_PER_NODE": "4"}, "box", "PET_NPROC_PER_NODE asks for 4 processes", "`llmtrain node`"),
    (pytorch_job(1, 2, "4"), "box", "PET_NPROC_PER_NODE asks for 4 processes", "`llmtrain node`"),
    ({**TORCHRUN, "RANK": "8"}, "box", "RANK is 8, but there are 8 processes (WORLD_SIZE)", "own rank"),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, "box", "LOCAL_RANK is 4, but this node runs 4 processes", "pod's index"),
    ({**TORCHRUN, "MASTER_ADDR": ""}, "box", "WORLD_SIZE says there are 8 processes, but MASTER_ADDR", "pod 0's"),
    ({"LOCAL_RANK": "0", "RANK": "0"}, "box", "RANK is 0, but WORLD_SIZE is not set", "WORLD_SIZE"),
    (
        {**HAND, "LOCAL_RANK": "0", "NNODES": "4"},
        "box",
        "WORLD_SIZE is 2, which is not 4 (NNODES) nodes x 1",
        "nodes x",
    ),
    ({**HAND, "LOCAL_RANK": "0", "NODE_RANK": "0"}, "box", "RANK is 1, but node 0 (NODE_RANK) x 1", "Set RANK"),
    ({**HAND, "LOCAL_RANK": "x"}, "box", "LOCAL_RANK is 'x', which is no number", "whole number"),
    (
        {**HAND, "RANK": "0", "LOCAL_RANK": "0", "JOB_COMPLETION_INDEX": "1"},
        "t-1",
        "RANK is 0, but JOB_COMPLETION_INDEX is 1",
        "take it from",
    ),
]


def check(raised: UsageError, what: str, remedy: str) -> None:
    """Exactly this problem, in the text and for programs."""
    problems = raised.details["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 1, raised
    assert what in problems[0]["what"]
    assert remedy in problems[0]["remedy"]
    assert what in str(raised)
    assert remedy in str(raised)
    assert raised.exit_code == 64


@pytest.mark.parametrize(("environ", "hostname", "what", "remedy"), PROBLEMS + NODE_PROBLEMS)
def test_problems_of_a_node(environ: dict[str, str], hostname: str, what: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        place_of(environ, hostname)
    check(caught.value, what, remedy)


@pytest.mark.parametrize(("environ", "hostname", "what", "remedy"), PROBLEMS + SEAT_PROBLEMS)
def test_problems_of_a_process(environ: dict[str, str], hostname: str, what: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        seat_of(environ, hostname)
    check(caught.value, what, remedy)


def test_problems_of_options() -> None:
    with pytest.raises(UsageError) as caught:
        place_of({}, nodes="2", node_rank=-1, master_port=0, rdzv_conf="x", processes_per_node="0")
    for words in ("--node-rank is '-1'", "--master-port is '0'", "--rdzv-conf is 'x'", "--processes-per-node is '0'"):
        assert words in str(caught.value)
    assert "--nodes says there are 2 nodes, but MASTER_ADDR" in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
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
        place_of(environ, "train-1")
    text = str(caught.value)
    for name in (
        "PET_NNODES",
        "NODE_RANK is 'x'",
        "LOCAL_RANK is 1",
        "MASTER_PORT",
        "timeout=5",
        "TORCHELASTIC_RUN_ID",
    ):
        assert name in text
    assert text.startswith("6 problems with")
    assert len(problems) == 5
    for problem in problems:
        assert isinstance(problem, Problem)
        assert problem.what in text
        assert problem.remedy in text


def test_validate_reads_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for row in sources.NAMES.values() for name in row]:
        monkeypatch.delenv(name, raising=False)
    assert validate_environment() == []
    monkeypatch.setenv("NODE_RANK", "x")
    assert [problem.what for problem in validate_environment()] == ["NODE_RANK is 'x', which is no number."]


def worker(place: NodeInfo, local_rank: int) -> dict[str, str]:
    """What torchrun gives a process of this place."""
    assert place.node_rank is not None
    return {
        "RANK": str(place.node_rank * place.processes_per_node + local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(place.processes_per_node),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
    }


@for_all(
    nodes=st.integers(2, 5),
    processes=st.integers(1, 4),
    kind=st.sampled_from(["job", "set", "pytorch", "train", "hand"]),
)
def test_the_seats_of_all_pods_cover_the_world(nodes: int, processes: int, kind: str) -> None:
    seats = []
    for pod in range(nodes):
        said = {"NNODES": str(nodes), "NPROC_PER_NODE": str(processes), "MASTER_ADDR": POD_0}
        environ = {
            "job": {**said, "JOB_COMPLETION_INDEX": str(pod)},
            "set": said,
            "pytorch": pytorch_job(pod, nodes, str(processes)),
            "train": {**TRAIN_JOB, "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(processes)}
            | {"JOB_COMPLETION_INDEX": str(pod), "PET_NODE_RANK": str(pod)},
            "hand": {"RANK": str(pod), "WORLD_SIZE": str(nodes * processes), "NPROC_PER_NODE": str(processes)}
            | {"MASTER_ADDR": POD_0},
        }[kind]
        place = place_of(environ, f"train-{pod}")
        seats += [seat_of({**environ, **worker(place, local)}, f"train-{pod}") for local in range(processes)]
    assert sorted(process.rank for process in seats) == list(range(nodes * processes))
    assert {process.world_size for process in seats} == {nodes * processes}
    assert len({(process.node_rank, process.local_rank) for process in seats}) == nodes * processes


VARIABLES = [name for row in sources.NAMES.values() for name in row] + ["TORCHELASTIC_RUN_ID"]
VALUES = st.sampled_from(["", "0", "1", "2", "-1", "x", "1:2", "auto", "c10d", "a=b", "pod-0", "pod:1"])


@for_all(environ=st.dictionaries(st.sampled_from(VARIABLES), VALUES), hostname=st.sampled_from(["box", "train-1"]))
def test_any_environment_gives_sane_numbers_or_problems(environ: dict[str, str], hostname: str) -> None:
    with contextlib.suppress(UsageError):
        process = seat_of(environ, hostname)
        assert 0 <= process.rank < process.world_size
        assert 0 <= process.local_rank < process.local_world_size <= process.world_size
        assert process.master_addr
    with contextlib.suppress(UsageError):
        place = place_of(environ, hostname)
        assert place.node_rank is None or 0 <= place.node_rank < place.max_nodes
        assert place.min_nodes <= place.max_nodes
        assert place.master_addr


class TestRendezvousOfTheConfig:
    AT_ETCD = DistributedSection(rendezvous=RendezvousSection(backend="etcd-v2", endpoint="etcd:2379"))
    TWO = NodeOptions(nodes="2", node_rank=1, master_addr="a")

    def test_it_is_the_default(self) -> None:
        place = find_node_info({}, NodeOptions(nodes="2"), "host", self.AT_ETCD)
        assert (place.rdzv_backend, place.rdzv_endpoint, place.node_rank) == ("etcd-v2", "etcd:2379", None)
        c10d = DistributedSection(rendezvous=RendezvousSection(backend="c10d"))
        place = find_node_info({}, self.TWO, "host", c10d)
        assert (place.rdzv_backend, place.rdzv_endpoint) == ("c10d", None)

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
    def test_options_and_variables_win(
        self, environ: dict[str, str], options: dict[str, str], expected: tuple[str, str | None]
    ) -> None:
        """The config's endpoint is an etcd server: no other backend meets there."""
        place = find_node_info(environ, dataclasses.replace(self.TWO, **options), "host", self.AT_ETCD)
        assert (place.rdzv_backend, place.rdzv_endpoint) == expected

    def test_a_process_that_trains_does_not_care(self) -> None:
        environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
        plain = find_process_info(environ, "host", DistributedSection())
        assert find_process_info(environ, "host", self.AT_ETCD) == plain
        assert find_process_info({}, "host", self.AT_ETCD).world_size == 1

    @pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
    def test_etcd_needs_an_endpoint(self, backend: str) -> None:
        with pytest.raises(UsageError) as raised:
            find_node_info({}, dataclasses.replace(self.TWO, rdzv_backend=backend), "host", DistributedSection())
        assert len(raised.value.details["problems"]) == 1
