"""The run to fetch: from its record, or from its volume if it was deleted."""

from dataclasses import replace
from typing import Any

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.labels import IMAGE_ANNOTATION, belongs_to_run
from llmtrain.launch.record import Record, find_record
from llmtrain.launch.work import Work


def find_run_to_fetch(cluster: Cluster, run: str, namespace: str, claim: str | None, image: str | None) -> Record:
    """The record of the run. If it was deleted, one made from its volume claim."""
    if claim is None:
        try:
            record = find_record(cluster, run, namespace)
        except UsageError as problem:
            claim = f"{run}-runs"
            volume_claim = cluster.get("v1", "PersistentVolumeClaim", claim, namespace)
            if volume_claim is None or not belongs_to_run(volume_claim, run):
                problem.remedy = f"{problem.remedy or ''} If the run was deleted, pass its volume with --claim.".strip()
                raise
            image = image or (volume_claim["metadata"].get("annotations") or {}).get(IMAGE_ANNOTATION)
        else:
            return replace(record, config=record.config.with_values("launch", image=image)) if image else record
    return _record_of_claim(run, namespace, claim, image)


def _record_of_claim(run: str, namespace: str, claim: str, image: str | None) -> Record:
    launch: dict[str, Any] = {"namespace": namespace, "runs_volume": {"claim": claim}}
    launch |= {"image": image} if image else {}
    config = build_config(Document("--claim", {"launch": launch, "output": {"run_id": run}}))
    return Record(run, namespace, config, Work(), number=1, launched_at="", stopped_at=None)
