"""A further launch kind needs one module and one row: the bare pods of docs/extending.md, through all commands."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_runs import STEP, ended, running

from kube_server import KubeServer, kube_server, now
from llmtrain import registry
from llmtrain.guard.watch import RunOutcome, find_outcome
from llmtrain.launch import lifecycle
from llmtrain.operate.cluster_run import ClusterRun

Cli = Callable[..., Any]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
LAUNCH = ("launch", "--config", "ddp_smoke", "--name", "demo", "--image", "me/train:1", "--kind", "bare_pods")
TWO = ("--nodes", "2", "--set", "trainer.max_steps=30")


@pytest.fixture(autouse=True)
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module of the page, and its row."""
    found = re.search(r"<!-- file: bare_pods.py -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found
    (tmp_path / "bare_pods.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setitem(registry.KINDS, "bare_pods", "bare_pods:BarePods")
    yield
    sys.modules.pop("bare_pods", None)


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    monkeypatch.setattr(lifecycle, "POLL_SEC", 0.02)
    with kube_server() as server:
        yield server


@pytest.fixture
def launched(kube: KubeServer, call: Cli) -> KubeServer:
    done = call(*LAUNCH, *TWO, "--detach", "--json")
    assert done.code == 0, done.err
    assert (done.json["kind"], done.json["state"]) == ("bare_pods", "pending")
    return kube


def pods(kube: KubeServer) -> list[str]:
    return sorted(name for plural, _, name in kube.objects if plural == "pods")


def set_pods(kube: KubeServer, *states: dict[str, Any]) -> None:
    for rank, state in enumerate(states):
        phase = "Running"
        if "terminated" in state:
            phase = "Failed" if state["terminated"]["exitCode"] else "Succeeded"
        row = {"name": "trainer", "state": state, "lastState": {}, "restartCount": 0}
        status = {"phase": phase, "startTime": now(), "containerStatuses": [row]}
        kube.change("Pod", f"demo-{rank}", {"spec": {"nodeName": f"k8s-node{rank}"}, "status": status})
        kube.say(f"demo-{rank}", STEP.format(12))


def test_dry_run_shows_a_pod_per_node(kube: KubeServer, call: Cli) -> None:
    done = call(*LAUNCH, *TWO, "--dry-run", "--json")
    assert done.code == 0, done.err
    found = [each for each in done.json["manifests"] if each["kind"] == "Pod"]
    assert [pod["metadata"]["name"] for pod in found] == ["demo-0", "demo-1"]
    assert [pod["metadata"]["labels"]["example.com/node-rank"] for pod in found] == ["0", "1"]
    assert "--master-addr demo-0.demo" in " ".join(found[1]["spec"]["containers"][0]["command"])
    text = call(*LAUNCH, *TWO, "--dry-run").out
    assert text.count("# One node of the run. Nothing restarts it.\n") == 2
    assert call(*LAUNCH, "--dry-run=server").code == 0
    assert kube.objects == {}


def test_unsupported_field_is_refused(call: Cli) -> None:
    done = call(*LAUNCH, "--set", "launch.ttl_sec=60", "--dry-run", "--json")
    assert done.code == 64
    assert "launch.kind bare_pods" in done.err + done.out


def test_status_follows_the_pods(launched: KubeServer, call: Cli) -> None:
    assert pods(launched) == ["demo-0", "demo-1"]
    set_pods(launched, running(), running())
    status = call("status", "demo", "--json").json
    assert (status["state"], status["step"], status["max_steps"]) == ("running", 12, 30)
    assert [(pod["index"], pod["name"]) for pod in status["pods"]] == [(0, "demo-0"), (1, "demo-1")]
    (row,) = call("status", "--json").json["runs"]
    assert (row["state"], row["kind"]) == ("running", "bare_pods")
    set_pods(launched, ended(0), ended(0))
    assert call("status", "demo", "--json").json["state"] == "finished"
    assert find_outcome(pod for key, pod in launched.objects.items() if key[0] == "pods") == RunOutcome("finished", 0)


def test_why_names_the_exit(launched: KubeServer, call: Cli) -> None:
    set_pods(launched, running(), running())
    assert call("why", "demo", "--json").json["cause"] == "healthy"
    set_pods(launched, ended(137, "OOMKilled"), ended(69))
    done = call("why", "demo", "--json")
    assert (done.json["cause"], done.json["state"]) == ("oom_killed", "failed")


def test_logs_of_a_rank_and_the_handle(launched: KubeServer, call: Cli) -> None:
    set_pods(launched, running(), running())
    assert call("logs", "demo", "--rank", "1").out == f"[1] {STEP.format(12)}\n"
    run = ClusterRun.find(launched.cluster(), "demo")
    assert (run.status().step, run.why().cause) == (12, "healthy")
    assert run.stop().state == "stopped"
    assert run.resume() == []
    assert run.delete(data=True).kept_claim is None
    assert launched.objects == {}


def test_stop_resume_and_delete(launched: KubeServer, call: Cli) -> None:
    set_pods(launched, running(), running())
    done = call("stop", "demo", "--json")
    assert done.code == 0, done.err
    assert pods(launched) == []
    assert call("status", "demo", "--json").json["state"] == "stopped"
    done = call("resume", "demo", "--detach", "--json")
    assert done.code == 0, done.err
    assert pods(launched) == ["demo-0", "demo-1"]
    done = call("delete", "demo", "--data", "--yes", "--json")
    assert done.code == 0, done.err
    assert launched.objects == {}
