"""Prometheus: what rank 0 serves, and that a port in use stops nothing."""

import json
import re
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from llmtrain.config.schema import Config
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import begin_generation
from llmtrain.runs.heartbeats import Heartbeat
from llmtrain.tracking.base import TrackedRun
from llmtrain.tracking.prometheus import HELP, METRICS, PrometheusTracker

METRICS_OF_A_STEP = {metric: 0.25 for metric in METRICS.values() if metric != "val/loss"}


@pytest.fixture(autouse=True)
def _prometheus() -> None:
    pytest.importorskip("prometheus_client", reason="needs the prometheus extra")


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def run(tmp_path: Path, port: int) -> TrackedRun:
    directory = RunDirectory(tmp_path / "first")
    directory.path.mkdir()
    for _ in range(3):
        begin_generation(directory, 0, 2, is_unattended=False)
    Heartbeat(directory.heartbeats, 1, 3).write(step=1, progress=1)
    config = Config().with_values("trainer", max_steps=200).with_values("tracking.prometheus", port=port)
    return TrackedRun(directory, config, 40, 0, {"world_size": 2})


def scrape(port: int) -> dict[str, float]:
    """Gauge -> value, read with Prometheus' own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert {json.dumps(sample.labels) for sample in samples} == {'{"run": "first"}'}
    return {sample.name: sample.value for sample in samples}


def test_gauges_follow_the_run(run: TrackedRun, port: int) -> None:
    tracker = PrometheusTracker(run)
    before = scrape(port)
    assert (before["llmtrain_step"], before["llmtrain_max_steps"], before["llmtrain_restarts"]) == (40, 200, 2)
    assert 0 <= before["llmtrain_heartbeat_age_seconds"] < 600
    assert "llmtrain_train_loss" not in before, "a loss of 0 would be a lie"
    tracker.log(50, METRICS_OF_A_STEP)
    tracker.step(51, 99.0)
    after = scrape(port)
    assert (after["llmtrain_step"], after["llmtrain_seconds_left"], after["llmtrain_train_loss"]) == (51, 99, 0.25)
    assert "llmtrain_val_loss" not in after
    tracker.log(60, {"val/loss": 1.5})
    assert scrape(port)["llmtrain_val_loss"] == 1.5
    assert {f"llmtrain_{name}" for name in HELP} == set(scrape(port))
    tracker.finish("finished", None)
    with socket.socket() as free:
        assert free.connect_ex(("127.0.0.1", port)) != 0


def test_port_in_use_disables_tracker(run: TrackedRun, port: int) -> None:
    """As open_trackers does, which turns an error into a warning."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            PrometheusTracker(run)


def test_dashboard_shows_gauges_that_exist(repo: Path) -> None:
    text = (repo / "docs" / "grafana-dashboard.json").read_text()
    dashboard = json.loads(text)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(queries) >= 8
    used = {name for query in queries for name in re.findall(r"llmtrain_(\w+)", query)}
    assert used <= set(HELP)
    assert {"step", "train_loss", "val_loss", "tokens_per_second", "mfu", "restarts", "heartbeat_age_seconds"} <= used
