"""Images with an older llmtrain get a config they can read, and runs launched by an older llmtrain stay readable."""

from typing import Any

import pytest
import yaml

from llmtrain.compat.downgrade import downgrade
from llmtrain.config.document import dump_document, parse_document
from llmtrain.config.load import build_config, load_config
from llmtrain.errors import UsageError
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import CONFIG_FILE
from llmtrain.launch.record import read_record

BASE = [
    "output.run_id=demo",
    "launch.namespace=team",
    "launch.image=me/train:1",
    "launch.nodes=2",
    "tracking.mlflow.tracking_uri=http://mlflow:5000",
]


def make(*sets: str) -> JobPlan:
    return plan_job(load_config("k8s_indexed_job", [*BASE, *sets]))


def config_map(plan: JobPlan, **changes: Any) -> dict[str, Any]:
    """The record of a launch as an older llmtrain writes it: with a config of schema 2."""
    found = render(plan)[0]
    values = downgrade(plan.config.as_dict())
    values["launch"] |= changes
    return {**found, "data": {**found["data"], CONFIG_FILE: dump_document(values)}}


def test_launch_writes_the_current_schema() -> None:
    assert yaml.safe_load(make().config_text)["schema_version"] == 3


def test_launch_writes_schema_2_for_an_older_image() -> None:
    plan = make("launch.image_schema=2")
    written = yaml.safe_load(plan.config_text)
    assert written["schema_version"] == 2
    assert written["mlflow"]["tracking_uri"] == "http://mlflow:5000"
    assert "tracking" not in written
    assert "image_schema" not in written["launch"]


def test_manifests_differ_only_in_the_config() -> None:
    current, older = make(), make("launch.image_schema=2")
    assert render(current)[1:] == render(older)[1:]


def test_pods_of_a_newer_image_read_schema_2() -> None:
    """Without `for_launch`, as `llmtrain node` loads it."""
    plan = make("launch.image_schema=2", "output.root_dir=/mnt/runs", "distributed.master_port=5000")
    config = build_config(parse_document(plan.config_text, "train.yaml"))
    assert (config.output.run_id, config.output.root_dir) == ("demo", "/mnt/runs")
    assert config.tracking == plan.config.tracking
    assert (config.model, config.data, config.trainer) == (plan.config.model, plan.config.data, plan.config.trainer)


def test_record_of_schema_2_is_read() -> None:
    plan = make("output.root_dir=/mnt/runs", "distributed.master_port=5000")
    record = read_record(config_map(plan))
    assert record.unknown == ()
    assert record.run_id == "demo"
    assert record.config.output.mount_path == "/mnt/runs"
    assert record.plan.master_port == 5000
    assert record.config.model == plan.config.model


def test_resumed_run_of_schema_2_keeps_schema_2() -> None:
    record = read_record(config_map(make()))
    assert record.config.launch.image_schema == 2
    assert yaml.safe_load(record.plan.config_text)["schema_version"] == 2


def test_record_of_schema_2_with_unknown_fields_is_read() -> None:
    record = read_record(config_map(make(), from_the_future=1))
    assert record.unknown == ("launch.from_the_future",)


def test_record_of_schema_2_for_another_run_is_refused() -> None:
    with pytest.raises(UsageError, match=r"launch\.name"):
        read_record(config_map(make(), name="other"))
