"""Runs that pods track on a real MLflow server in the cluster: one MLflow run each, with every step once, whatever
happens to the pods meanwhile."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_faults import kill_pod, wait_for, waiting_at
from kube import SET, Kube, finished_hash
from services import from_here, start_service

from llmtrain.runs.metrics import read_metrics

pytestmark = pytest.mark.slow  # needs an image with the extra mlflow

PORT = 5000
SERVER = [
    *("mlflow", "server", "--host", "0.0.0.0", "--port", str(PORT), "--workers", "1", "--allowed-hosts", "*"),
    *("--backend-store-uri", "sqlite:////cache/mlflow.db", "--artifacts-destination", "/cache/artifacts"),
]
LOSSES = ("train/loss", "train/lr", "val/loss")
EVERY_STEP = ["--set", "trainer.log_every_steps=1", "--set", "tracking.mlflow.experiment=e2e"]
TRACKED = [
    "--set",
    "tracking.mlflow.enabled=true",
    "--set",
    f"tracking.mlflow.tracking_uri=http://mlflow:{PORT}",
    *EVERY_STEP,
]


@pytest.fixture(scope="module")
def server(kube: Kube) -> Iterator[str]:
    """The URI by which this machine reaches it."""
    pytest.importorskip("mlflow", reason="needs the mlflow extra")
    start_service(kube, "mlflow", SERVER, PORT, env=[{"name": "HOME", "value": "/cache"}], memory="1Gi")
    with from_here(kube, "mlflow", PORT) as address:
        yield f"http://{address}"


@pytest.fixture(scope="module")
def client(server: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=server)


def runs_of(client: Any, run: str) -> list[Any]:
    experiment = client.get_experiment_by_name("e2e")
    if experiment is None:
        return []
    return list(client.search_runs([experiment.experiment_id], f"tags.`llmtrain.run_id` = '{run}'"))


def logged(client: Any, run: str) -> list[int]:
    found = runs_of(client, run)
    return sorted(row.step for row in client.get_metric_history(found[0].info.run_id, "train/loss")) if found else []


def check_complete(kube: Kube, client: Any, run: str, mlflow_run: Any) -> None:
    """Every metric of metrics.jsonl is there, at its steps, once. (Of a step that was trained twice, the speed is that
    of the first time.)"""
    wanted: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(kube.folder / "runs" / run / "metrics.jsonl"):
        for name, value in row.items():
            if name not in ("step", "time"):
                wanted.setdefault(name, []).append((row["step"], value))
    assert set(wanted) == set(mlflow_run.data.metrics)
    for name, rows in wanted.items():
        found = [(row.step, row.value) for row in client.get_metric_history(mlflow_run.info.run_id, name)]
        if name in LOSSES:
            assert sorted(found) == rows, name
        else:  # the first step of a process has no speed
            assert {step for step, _ in rows} <= {step for step, _ in found}, name
    assert [step for step, _ in wanted["train/loss"]] == list(range(1, 121))


@pytest.mark.parametrize("index", [0, 1])
def test_tracked_live_although_a_pod_is_killed(kube: Kube, client: Any, reference: str, index: int) -> None:
    """Pod 0 is the one that tracks. It is killed in the middle of a save: steps that MLflow has are trained again."""
    run = f"tracked-{index}"
    with waiting_at(kube, run, "save_before_rename", 40) as wait:
        kube.llmtrain(*kube.launch_words("indexed_job", run, *SET, *TRACKED, *wait), "--detach")
        wait_for(lambda: len(logged(client, run)) >= 25, 150, f"25 steps of {run} in MLflow")
        [live] = runs_of(client, run)
        assert live.info.status == "RUNNING"
        assert live.data.params["trainer.max_steps"] == "120"
        kill_pod(kube, next(pod["name"] for pod in kube.status(run)["pods"] if pod["index"] == index))
    kube.llmtrain("status", run, "--watch")
    assert finished_hash(kube, run) == reference
    [ended] = runs_of(client, run)
    assert (ended.info.run_id, ended.info.status) == (live.info.run_id, "FINISHED")
    assert len(json.loads((kube.folder / "runs" / run / "generations.json").read_text())) == 2
    check_complete(kube, client, run, ended)
    assert {"config.yaml", "meta.json"} <= {item.path for item in client.list_artifacts(ended.info.run_id)}


def test_fetch_to_mlflow(kube: Kube, server: str, client: Any, reference: str) -> None:
    """A run that knew of no server is put into it afterwards. Again, or for one that was tracked live: nothing new."""
    run = "replayed"
    kube.llmtrain(*kube.launch_words("indexed_job", run, *SET, *EVERY_STEP))
    assert runs_of(client, run) == []
    words = ["--to-mlflow", "--mlflow-uri", server, "--json"]
    value = kube.llmtrain("fetch", run, *words).json
    [found] = runs_of(client, run)
    assert value["mlflow"]["is_new"]
    assert (value["mlflow"]["mlflow_run_id"], found.info.status) == (found.info.run_id, "FINISHED")
    check_complete(kube, client, run, found)
    assert finished_hash(kube, run) == reference
    again = kube.llmtrain("fetch", run, *words).json["mlflow"]
    assert (again["is_new"], again["metrics"]) == (False, 0)
    for tracked in [name for name in ("tracked-0", "tracked-1") if runs_of(client, name)]:
        again = kube.llmtrain("fetch", tracked, *words).json["mlflow"]
        assert (again["is_new"], again["metrics"]) == (False, 0)
        assert len(runs_of(client, tracked)) == 1
