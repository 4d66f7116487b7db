"""Hands on: pods with nothing running, files brought to them, commands run in all of them."""

import signal
import time
from collections.abc import Iterator

import pytest
from kube import Kube

from llmtrain.registry import KINDS

SCRIPT = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}", flush=True)
if dist.get_rank() == 0:
    os.makedirs(os.environ["LLMTRAIN_RUN_DIR"], exist_ok=True)
    with open(os.environ["LLMTRAIN_RUN_DIR"] + "/total.txt", "w") as file:
        file.write(str(total.item()))
"""


@pytest.fixture(scope="module")
def held(kube: Kube) -> Iterator[str]:
    kube.llmtrain(*kube.launch_words("indexed_job", "lab"), "--hold")
    yield "lab"
    kube.llmtrain("delete", "lab")


def test_files_are_brought_and_torchrun_finds_the_others(kube: Kube, held: str) -> None:
    code = kube.folder / "code"
    code.mkdir()
    (code / "total.py").write_text(SCRIPT)
    (code / ".env").write_text("HF_TOKEN=hf_secretsecretsecret")
    kube.llmtrain("push", held, "code")
    done = kube.llmtrain("exec", held, "--", "torchrun", "code/total.py")
    assert sorted(done.out.splitlines()) == ["[0] rank 0 of 2: 3.0", "[1] rank 1 of 2: 3.0"]
    listed = kube.llmtrain("exec", held, "--", "ls", "-A", "code").out.splitlines()
    assert sorted(listed) == ["[0] total.py", "[1] total.py"]
    kube.llmtrain("fetch", held)
    assert (kube.folder / "runs" / held / "total.txt").read_text() == "3.0"


def test_exit_codes_come_back(kube: Kube, held: str) -> None:
    words = ["--", "sh", "-c", "exit $(( PET_NODE_RANK * 3 ))"]
    failed = kube.llmtrain("exec", held, "--json", *words, expect=3)
    assert [(node["node"], node["exit_code"]) for node in failed.json["nodes"]] == [(0, 0), (1, 3)]
    assert "no-such-program: No such file" in kube.llmtrain("exec", held, "--", "no-such-program", expect=127).err


def test_left_running_and_ended(kube: Kube, held: str) -> None:
    kube.llmtrain("exec", held, "--detach", "--", "sh", "-c", "echo begun $PET_NODE_RANK; sleep 1000")
    again = kube.llmtrain("exec", held, "--detach", "--", "true", expect=64)
    assert "already running" in again.err
    assert "--kill" in again.err
    deadline = time.monotonic() + 20
    while "[1] begun 1" not in (log := kube.llmtrain("logs", held).out):
        assert time.monotonic() < deadline, log
        time.sleep(1)
    assert len(kube.llmtrain("exec", held, "--kill", "--json").json["ended"]) == 2
    assert kube.llmtrain("exec", held, "--kill", "--json").json["ended"] == []
    kept = kube.volume("runs") / held / "logs"
    assert (kept / "rank-0.log").read_text() == "begun 0\n"
    assert (kept / "rank-1.log").read_text() == "begun 1\n"


def test_one_pod_after_the_other(kube: Kube, held: str) -> None:
    """As a guide does that copies the script to each pod and starts the master, then the worker."""
    (kube.folder / "by_hand.py").write_text(SCRIPT)
    for pod in ("0", "1"):
        kube.llmtrain("push", held, "by_hand.py", "--pod", pod)
        started = kube.llmtrain("exec", held, "--pod", pod, "--detach", "--json", "--", "torchrun", "by_hand.py")
        assert len(started.json["started"]) == 1
    deadline = time.monotonic() + 60
    while not all(f"rank {rank} of 2: 3.0" in (log := kube.llmtrain("logs", held).out) for rank in (0, 1)):
        assert time.monotonic() < deadline, log
        time.sleep(1)
    assert kube.llmtrain("exec", held, "--pod", "2", "--json", "--", "true", expect=64).json["known"] == ["0", "1"]
    kube.llmtrain("exec", held, "--kill")


def test_ctrl_c_ends_it_in_the_pods(kube: Kube, held: str) -> None:
    at_work = ["exec", held, "--", "sh", "-c", "ps ax 2>/dev/null || cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]
    running = kube.start("exec", held, "--", "python3", "-c", "import time; print('up', flush=True); time.sleep(4321)")
    assert running.stdout is not None
    assert "up" in running.stdout.readline() + running.stdout.readline()
    assert "4321" in kube.llmtrain(*at_work).out
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == 130
    deadline = time.monotonic() + 20
    while "4321" in (left := kube.llmtrain(*at_work).out):
        assert time.monotonic() < deadline, left
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"indexed_job"}))
def test_on_the_other_kinds(kube: Kube, kind: str) -> None:
    run = f"{kind.replace('_', '-')}-lab"
    kube.llmtrain(*kube.launch_words(kind, run), "--hold")
    (kube.folder / "total.py").write_text(SCRIPT)
    kube.llmtrain("push", run, "total.py")
    done = kube.llmtrain("exec", run, "--", "torchrun", "total.py")
    assert sorted(done.out.splitlines()) == ["[0] rank 0 of 2: 3.0", "[1] rank 1 of 2: 3.0"]
    assert kube.llmtrain("why", run, "--json").json["cause"] == "healthy"
    began = time.monotonic()
    kube.llmtrain("delete", run)
    assert time.monotonic() - began < 40  # they end when told
