"""Commands in messages can be copied: they repeat the options that select namespace and cluster."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kube_runs import STEP, FakeRun, launch, running, waiting
from typer.testing import CliRunner
from why_runs import say

from kube_server import KubeServer
from llmtrain.config.load import load_config
from llmtrain.errors import LlmtrainError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch import lifecycle as apply
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import find_record
from llmtrain.operate.exec.run_in_pods import check_held
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.all_runs import all_status
from llmtrain.operate.status.startup_failures import never_started
from llmtrain.operate.why import explain as why_module
from llmtrain.operate.why.explain import explain
from llmtrain.operate.why.snapshot import Stall

PLACE = " -n team --kubeconfig '/srv/me/my config' --context there"
SILENT = [{"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": "2026-01-01T00:00:00Z"}]


@pytest.fixture
def cluster(kube: KubeServer) -> Cluster:
    from kubernetes import client

    settings = client.Configuration()
    settings.host = f"http://127.0.0.1:{kube.port}"
    return Cluster(settings, "there", "default", " --kubeconfig '/srv/me/my config' --context there")


def commands(text: str) -> list[str]:
    return re.findall(r"(?:llmtrain|kubectl) [a-z].*?(?=[.;,`)]|(?:llmtrain|kubectl) [a-z]|$)", text)


def check(text: str | None) -> None:
    found = commands(text or "")
    assert found, text
    assert [command for command in found if PLACE not in command] == []


def raised(act: Callable[[], object]) -> str:
    with pytest.raises(LlmtrainError) as caught:
        act()
    return str(caught.value.remedy)


def both(kube: KubeServer) -> FakeRun:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    return run


def test_status_of_a_lost_node(kube: KubeServer, cluster: Cluster) -> None:
    run = both(kube)
    run.set(1, running(), conditions=SILENT)
    check(ObservedRun(cluster, run.record).status.why_short)
    check(all_status(cluster, "team")[0].why_short)
    check(explain(ObservedRun(cluster, run.record)).remedy)


def test_status_of_an_interrupted_launch(kube: KubeServer, cluster: Cluster) -> None:
    run = launch(kube)
    kube.remove("Job", "demo")
    check(ObservedRun(cluster, run.record).status.why_short)
    check(explain(ObservedRun(cluster, run.record)).remedy)


def test_why_of_hung_ranks(kube: KubeServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    run = both(kube)
    say(run, 0, STEP.format(7), ago_sec=300)
    monkeypatch.setattr(why_module, "watch_heartbeats", lambda *_: Stall(300, [1], [], {0: 7, 1: 7}))
    check(explain(ObservedRun(cluster, run.record)).remedy)


def test_missing_secret(kube: KubeServer, cluster: Cluster) -> None:
    run = launch(kube, "indexed_job", "launch.hf_token_secret.name=hf-token")
    for index in (0, 1):
        run.pod(index, waiting("CreateContainerConfigError", 'secret "hf-token" not found'))
    error = never_started(ObservedRun(cluster, run.record))
    assert error is not None
    check((error.remedy or "").replace(".env", "FILE"))


def test_refusals_of_launch_and_resume(kube: KubeServer, cluster: Cluster) -> None:
    run = launch(kube)
    check(raised(lambda: apply.submit(cluster, run.plan)))
    given = ["output.run_id=demo", "launch.namespace=team", "launch.image=me/train:1", "launch.nodes=2"]
    larger = plan_job(load_config("ddp_smoke", [*given, "launch.runs_volume.size=99Gi"]))
    record = find_record(cluster, "demo", "team")
    check(raised(lambda: apply.resume(cluster, record, larger)))
    for note in ("stopped-at", "deleted-at"):  # by another command, since the record was read
        kube.change(
            "ConfigMap", "demo-config", {"metadata": {"annotations": {f"llmtrain/{note}": "2026-01-01T00:00:00Z"}}}
        )
        check(raised(lambda: apply.resume(cluster, record, run.plan)))
    deleted = find_record(cluster, "demo", "team")
    check(raised(lambda: apply.resume(cluster, deleted, run.plan)))
    kube.remove("ConfigMap", "demo-config")
    check(raised(lambda: apply.submit(cluster, run.plan, keep_data=False)))


def test_missing_right(kube: KubeServer, cluster: Cluster) -> None:
    kube.forbidden = {"pods"}
    check(raised(lambda: cluster.find("v1", "Pod", "team")))


def test_pods_without_hold(kube: KubeServer, cluster: Cluster) -> None:
    run = launch(kube, task=PodTask())
    check(raised(lambda: check_held(ObservedRun(cluster, run.record), "push")).replace("me/train:1", "IMAGE"))


def test_options_are_quoted(kube: KubeServer, tmp_path: Path) -> None:
    directory = tmp_path / "my config"
    directory.mkdir()
    cluster = Cluster.connect(str(kube.kubeconfig(directory)), "here")
    assert cluster.place("team") == f" --kubeconfig '{directory / 'kubeconfig'}' --context here"


def test_recover_deletes_a_hung_pod(kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain.cli import app

    run = both(kube)
    say(run, 0, STEP.format(7), ago_sec=300)
    monkeypatch.setattr(why_module, "watch_heartbeats", lambda *_: Stall(300, [1], [], {0: 7, 1: 7}))

    def recover(*words: str) -> Any:
        done = CliRunner().invoke(
            app, ["recover", "demo", "--json", "--kubeconfig", str(kube.kubeconfig(tmp_path)), *words]
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert recover("--after", "900")["frozen"] == []
    assert ("pods", "team", run.pods[1]) in kube.objects
    done = recover()
    assert [row["name"] for row in done["frozen"]] == [run.pods[1]]
    assert (done["recovered"], done["too_early"]) == ([], [])
    assert ("pods", "team", run.pods[1]) not in kube.objects
    assert ("pods", "team", run.pods[0]) in kube.objects
