"""`llmtrain plan --probe --in-pod`. The pod is a process of this machine."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_runs import FakeRun

from kube_server import KubeServer
from limits import limit, wait_until
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.job import JobPlan
from llmtrain.operate import cluster_run, probe
from llmtrain.operate.fetch import reader_pod
from llmtrain.operate.fetch.fetch_run import fetch_run
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.start import start_run
from local_pods_cluster import LocalPodsCluster

WORDS = ("plan", "--config", "gpt_smoke", "--set", "run.device=cpu", "--set", "launch.image=me/train:1", "--json")
IN_POD = (*WORDS, "--probe", "--in-pod")


@pytest.fixture
def pods(kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurry: None) -> Path:  # noqa: ARG001
    """Pods of launched runs train on this machine. Returns the directory of the runs volume."""
    volume = tmp_path / "volume"
    volume.mkdir()

    def train(run: FakeRun) -> None:
        run.pod(0)
        config = kube.objects["configmaps", run.plan.namespace, run.plan.config_map]["data"]["train.yaml"]
        path = tmp_path / "train.yaml"
        path.write_text(config)
        words = [sys.executable, "-m", "llmtrain", "train", "--config", str(path)]
        words += ["--set", f"output.root_dir={volume}", "--set", "run.threads=1"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit(90), check=False)
        run.say(0, *done.stderr.splitlines())
        run.end(0, done.returncode)
        if done.returncode:
            run.finish("Failed", reason="PodFailurePolicy", message="Container trainer failed")
            return
        run.finish()
        job = ("jobs", run.plan.namespace, run.plan.run_id)
        wait_until(lambda: job not in kube.objects, 60)
        del kube.objects["pods", run.plan.namespace, run.pods[0]]  # as the job's controller does

    def start(cluster: Cluster, plan: JobPlan, resume: bool) -> list[str]:
        lost = start_run(cluster, plan, resume)
        threading.Thread(target=train, args=(FakeRun(kube, plan),), daemon=True).start()
        return lost

    def fetch(observed: ObservedRun, *arguments: Any) -> Any:
        local: Any = LocalPodsCluster(volume)
        local.claims = {observed.record.runs_claim: {}}
        return fetch_run(ObservedRun(local, observed.record), *arguments)

    monkeypatch.setattr(probe, "start_run", start)
    monkeypatch.setattr(cluster_run, "fetch_run", fetch)
    monkeypatch.setattr(reader_pod, "POLL_SEC", 0.01)
    return volume


def names(kube: KubeServer, kind: str) -> list[str]:
    return [name for plural, _, name in kube.objects if plural == kind]


@pytest.mark.slow
def test_plan_uses_what_a_pod_measured(call: Any, kube: KubeServer, pods: Path, workdir: Path) -> None:
    done = call(*IN_POD, "--set", "launch.resources.memory=4Gi")
    assert done.code == 0, done.err
    (run,) = pods.iterdir()
    plan = done.json
    assert plan["memory"]["measured_by"] == plan["time"]["run_id"] == run.name
    assert plan["memory"]["predicted_peak"] > 0
    assert plan["target"]["memory_bytes"] == 4 << 30
    assert (workdir / "runs" / run.name / "finished.json").is_file()
    assert names(kube, "jobs") == names(kube, "configmaps") == []  # nothing is left of it
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["launch"]["nodes"] == 1


def test_probe_that_fails_is_kept_for_a_diagnosis(call: Any, kube: KubeServer, pods: Path) -> None:
    done = call(*IN_POD, "--set", "data.name=text_files", "--set", "data.files=[nowhere.txt]")
    assert done.code not in (0, 1, 2)
    assert "llmtrain why" in done.err
    assert len(names(kube, "jobs")) == 1
    assert not list(pods.glob("*/finished.json"))


@pytest.mark.parametrize(
    "words",
    [
        (*WORDS, "--in-pod"),
        (*WORDS, "--namespace", "team"),
        (*WORDS, "--probe", "--namespace", "team"),
        (*IN_POD, "--gpu", "h100-80g"),
        (*IN_POD, "--nodes", 2),
        (*IN_POD, "--set", "launch.runs_volume=null"),
        (*IN_POD, "--set", "launch.image=null"),
    ],
)
def test_options_that_say_nothing_are_refused(call: Any, kube: KubeServer, words: tuple[str, ...]) -> None:
    done = call(*words)
    assert done.code == 64, done.out
    assert "Traceback" not in done.err
    assert names(kube, "jobs") == []
