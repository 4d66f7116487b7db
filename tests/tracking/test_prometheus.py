"""Prometheus: what rank 0 serves, and that a port in use stops nothing."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from limits import limit
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

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=limit(10)) as answer:
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


def test_checkpoint_age_starts_at_the_checkpoint_and_again_at_each_save(run: TrackedRun, port: int) -> None:
    folder = run.directory.checkpoints / "step_40"
    folder.mkdir(parents=True)
    long_ago = time.time() - 5000
    os.utime(folder, (long_ago, long_ago))
    tracker = PrometheusTracker(run)
    assert 5000 <= scrape(port)["llmtrain_checkpoint_age_seconds"] < 6000
    tracker.saved(50)
    assert scrape(port)["llmtrain_checkpoint_age_seconds"] < 1000
    tracker.finish("finished", None)


def test_alerts_use_gauges_that_exist(repo: Path) -> None:
    rule = yaml.safe_load((repo / "docs" / "prometheus-rule.yaml").read_text())
    assert rule["kind"] == "PrometheusRule"
    [group] = rule["spec"]["groups"]
    used = {name for alert in group["rules"] for name in re.findall(r"llmtrain_(\w+)", alert["expr"])}
    assert used <= set(HELP)
    assert {"heartbeat_age_seconds", "restarts", "train_loss", "checkpoint_age_seconds", "seconds_left"} <= used


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian's package prometheus)")
def test_alerts_fire_when_they_should(repo: Path, tmp_path: Path) -> None:
    """With Prometheus' own evaluation: `bad` needs each alert, `good` none."""
    rule = yaml.safe_load((repo / "docs" / "prometheus-rule.yaml").read_text())
    (tmp_path / "rules.yaml").write_text(json.dumps(rule["spec"]))
    series = {
        "heartbeat_age_seconds": ("200x60", "3x60"),
        "restarts": ("0x30 1 2 3 4 5x60", "1x60"),
        "train_loss": ("2x10 9x60", "2-0.01x60"),
        "checkpoint_age_seconds": ("20000x60", "60x60"),
        "seconds_left": ("700000x60", "60x60"),
        "step": ("1x60", "1+1x60"),
    }
    inputs = [
        {"series": f'llmtrain_{name}{{run="{run}"}}', "values": values}
        for name, pair in series.items()
        for run, values in zip(("bad", "good"), pair, strict=True)
    ]
    inputs += [
        {"series": 'llmtrain_step{run="gone"}', "values": "5x20"},
        {"series": 'llmtrain_max_steps{run="gone"}', "values": "100x20"},
        {"series": 'llmtrain_train_loss{run="broken"}', "values": "2x10" + " NaN" * 50},
    ]
    expected = {"TrainingGone": ["gone"], "TrainingDiverges": ["bad", "broken"]}
    query = []
    for alert in rule["spec"]["groups"][0]["rules"]:
        name = alert["alert"]
        firing = f'count by (run) (ALERTS{{alertname="{name}", alertstate="firing"}})'
        samples = [{"labels": f'{{run="{run}"}}', "value": 1} for run in expected.get(name, ["bad"])]
        # `gone` reports until minute 20.
        query.append({"expr": firing, "eval_time": "33m" if name == "TrainingGone" else "50m", "exp_samples": samples})
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [{"interval": "1m"}]}
    tests["tests"][0] |= {"input_series": inputs, "promql_expr_test": query}
    (tmp_path / "tests.yaml").write_text(json.dumps(tests))
    done = subprocess.run(["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
