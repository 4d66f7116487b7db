"""Faults of the test cluster: machines that die or lose their cable, an API server that goes away. And runs that can be
caught in the middle of a save: they wait there for as long as a file is on their volume."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kube import HOME, SET, TOOLS, Kube

SAVE_STEP = 30
SAVE_EVERY = 10


def tool(*words: str) -> None:
    subprocess.run([str(TOOLS / "cluster"), *words], check=True, capture_output=True, timeout=120)


@contextmanager
def broken(machine: str, breaks: str, mends: str) -> Iterator[float]:
    """A machine in a state that is over at the end; when it began."""
    number = machine.removeprefix("node")
    tool(breaks, number)
    try:
        yield time.monotonic()
    finally:
        tool(mends, number)
        wait_for(lambda: _is_ready(machine), 90, f"{machine} to be ready again")


def _is_ready(machine: str) -> bool:
    kubectl = [str(HOME / "bin" / "kubectl"), "--kubeconfig", str(HOME / "run" / "admin.kubeconfig")]
    words = ["get", "node", machine, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}"]
    return subprocess.run([*kubectl, *words], capture_output=True, text=True, timeout=30).stdout == "True"


@contextmanager
def waiting_at(kube: Kube, run: str, point: str, step: int) -> Iterator[list[str]]:
    """Words for launch. Rank 0 waits at that point of the step until the context ends: else a small run may be over
    before anybody has looked."""
    flag = kube.volume("runs") / f"wait-{run}"
    flag.touch()
    fault = {"LLMTRAIN_FAULT": f"{point}:{step}:0:wait", "LLMTRAIN_FAULT_FILE": f"/out/{flag.name}"}
    try:
        yield [word for name, value in fault.items() for word in ("--set", f"launch.env.{name}={value}")]
    finally:
        flag.unlink()


class Caught:
    """A run of two nodes whose rank 0 waits in the middle of a save, just before the checkpoint is published."""

    def __init__(self, kube: Kube, kind: str, run: str) -> None:
        self.kube, self.run = kube, run
        self.folder = kube.volume("runs") / run
        self._flag = kube.volume("runs") / f"wait-{run}"
        self._flag.touch()
        fault = [f"save_before_rename:{SAVE_STEP}:0:wait", f"/out/{self._flag.name}"]
        env = [
            word
            for name, value in zip(("LLMTRAIN_FAULT", "LLMTRAIN_FAULT_FILE"), fault, strict=True)
            for word in ("--set", f"launch.env.{name}={value}")
        ]
        # Room for both pods on one machine: the other is going to be lost.
        kube.llmtrain(*kube.launch_words(kind, run, *SET, *env, "--set", "launch.resources.cpu=600m"), "--detach")
        wait_for(self._is_saving, 120, f"{run} to save step {SAVE_STEP}")
        assert kube.status(run)["step"] == SAVE_STEP

    def _is_saving(self) -> bool:
        return any(self.folder.glob(f"checkpoints/.tmp-step_{SAVE_STEP}-*"))

    def machine(self, index: int) -> str:
        return next(str(pod["node"]) for pod in self.kube.status(self.run)["pods"] if pod["index"] == index)

    def go_on(self) -> None:
        """Whoever comes to that save from now on does not wait."""
        self._flag.unlink()

    def processes(self) -> list[int]:
        """Of its pods, on whatever machine: all machines are this one."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                is_ours = path.name.isdigit() and f"/out/{self._flag.name}".encode() in (path / "environ").read_bytes()
            except OSError:
                continue
            found += [int(path.name)] if is_ours else []
        return found

    def of_rank_zero(self) -> list[int]:
        """Processes of pod 0: where more than one has the name, a parent and its child."""
        host = self._beat()["host"]
        return [pid for pid in self.processes() if f"HOSTNAME={host}\0".encode() in _environment(pid)]

    def _beat(self) -> dict[str, Any]:
        try:
            beat = json.loads((self.folder / "heartbeats" / "rank-0.json").read_text())
        except (OSError, ValueError):
            return {"generation": 0, "step": 0, "host": ""}
        assert isinstance(beat, dict)
        return beat

    def trains_again(self, within: float) -> None:
        """A newer generation has come further than the newest checkpoint."""
        before = SAVE_STEP - SAVE_EVERY
        wait_for(lambda: self._beat()["generation"] > 1 and self._beat()["step"] > before, within, "training again")

    def generations(self) -> list[dict[str, Any]]:
        rows = json.loads((self.folder / "generations.json").read_text())
        assert isinstance(rows, list)
        return rows


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def processes_of(kube: Kube, pod: str) -> list[int]:
    """Of a pod's container, as this machine numbers them. They cannot be frozen from inside: one of them is init."""
    path = "jsonpath={.status.containerStatuses[0].containerID}"
    container = kube.kubectl("get", "pod", pod, "-o", path).rpartition("/")[2]
    assert container

    def is_inside(process: Path) -> bool:
        try:
            return container in (process / "cgroup").read_text()
        except OSError:  # it has ended
            return False

    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if is_inside(process)]


def kill_pod(kube: Kube, pod: str) -> None:
    """As a machine that runs out of memory does: no signal that could be handled."""
    found = processes_of(kube, pod)
    if not found:
        pytest.fail("the pod has ended, or its processes are not on this machine")
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def freeze(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def wait_for(is_so: Callable[[], bool], within: float, what: str | Callable[[], str]) -> None:
    """`what` is called when the time is over, to say how things are then."""
    deadline = time.monotonic() + within
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {within} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.2)
