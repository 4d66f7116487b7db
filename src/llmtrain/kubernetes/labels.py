"""Labels and annotations that llmtrain writes on Kubernetes objects.

Runs of the first version have another run label (compat/records.py); the record says which key a run has
(`Record.run_label`). Lists of all runs select `app=llmtrain` and read either key, because a label selector has no OR.
"""

from collections.abc import Mapping
from typing import Any

from llmtrain.compat.records import FIRST_VERSION_RUN_LABEL

APP_LABEL = {"app": "llmtrain"}
COMMON_LABELS = {**APP_LABEL, "app.kubernetes.io/name": "llmtrain"}
RUN_LABEL = "llmtrain.dev/run"
READER_LABEL = "llmtrain/reader"  # of a pod that only reads the volume of a run
CODE_LABEL = {"llmtrain.dev/code": "true"}  # of the ConfigMap of `launch --with-code`, which is not a record
GUARD_LABELS = {**APP_LABEL, "llmtrain/guard": "true"}  # the immutable selector of the guard's Deployment

# Annotations of a run's ConfigMap. ENDED_AS: the state of the run before it was stopped. ATTEMPT: a random id of the
# resume or delete in progress, which identifies a change even if the response to it was lost.
STOPPED_AT = "llmtrain/stopped-at"
ENDED_AS = "llmtrain/ended-as"
DELETED_AT = "llmtrain/deleted-at"
ATTEMPT = "llmtrain/attempt"
# Annotations of a run's volume claims.
IMAGE_ANNOTATION = "llmtrain/image"
LAUNCH_ANNOTATION = "llmtrain/launch"
# Annotations of the guard's Deployment and of its pod.
AFTER_ANNOTATION = "llmtrain/after-sec"
INSTALLED_ANNOTATION = "llmtrain/installed-at"
# Annotation of a pod whose exit the guard has reported.
NOTIFIED = "llmtrain/guard-told"


def run_selector(run_id: str, run_label: str = RUN_LABEL) -> dict[str, str]:
    """Labels that select the objects of one run, in every version of llmtrain."""
    return {**APP_LABEL, run_label: run_id}


def run_label_of(manifest: Mapping[str, Any]) -> str | None:
    """The key under which an object carries its run id; None if it does not belong to a run."""
    labels = manifest["metadata"].get("labels") or {}
    for key in (RUN_LABEL, FIRST_VERSION_RUN_LABEL):
        if labels.get(key):
            return key
    return None


def run_id_of(manifest: Mapping[str, Any]) -> str | None:
    """The run that an object belongs to."""
    key = run_label_of(manifest)
    if key is None:
        return None
    return str(manifest["metadata"]["labels"][key])


def belongs_to_run(manifest: Mapping[str, Any], run_id: str) -> bool:
    """Whether llmtrain created an object for this run."""
    return has_labels(manifest, APP_LABEL) and run_id_of(manifest) == run_id


def has_labels(manifest: Mapping[str, Any], required: Mapping[str, str]) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in required.items())
