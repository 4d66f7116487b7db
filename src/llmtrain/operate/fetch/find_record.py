"""The run to fetch: from its record, or from its volume if it was deleted."""

from dataclasses import replace
from typing import Any

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.labels import IMAGE_ANNOTATION, belongs_to_run
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import Record, find_record


def find_run_to_fetch(cluster: Cluster, run: str, namespace: str, claim: str | None, image: str | None) -> Record:
    """The record of the run. If it was deleted, one made from its volume claim."""
    if claim is not None:
        return _record_of_claim(run, namespace, claim, image)
    try:
        record = find_record(cluster, run, namespace)
    except UsageError as problem:
        claim = f"{run}-runs"  # what a launch creates, and `delete` keeps
        volume_claim = cluster.get("v1", "PersistentVolumeClaim", claim, namespace)
        if volume_claim is None or not belongs_to_run(volume_claim, run):
            problem.remedy = f"{problem.remedy or ''} If the run was deleted, pass its volume with --claim.".strip()
            raise
        annotations = volume_claim["metadata"].get("annotations") or {}
        return _record_of_claim(run, namespace, claim, image or annotations.get(IMAGE_ANNOTATION))
    if image:
        return replace(record, config=record.config.with_values("launch", image=image))
    return record


def _record_of_claim(run: str, namespace: str, claim: str, image: str | None) -> Record:
    launch: dict[str, Any] = {"namespace": namespace, "runs_volume": {"claim": claim}}
    if image:
        launch["image"] = image
    config = build_config(Document("--claim", {"launch": launch, "output": {"run_id": run}}))
    return Record(run, namespace, config, PodTask(), number=1, launched_at="", stopped_at=None)
