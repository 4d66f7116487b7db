"""Comments in manifests: a sentence above each object, and above fields that need an explanation.
Those of the job are in its kind."""

from collections.abc import Iterator

import yaml

from llmtrain.core import libyaml
from llmtrain.launch.kinds.base import all_kinds

OBJECTS = {
    "ConfigMap": "The config of the run, mounted at /config in every pod, and how the run was launched.",
    "code": "The code of `launch --with-code`, mounted at /code in every pod, on PYTHONPATH.",
    "PersistentVolumeClaim": "A volume of the run (RUN-runs: checkpoints and logs). It stays when the run is deleted.",
    "NetworkPolicy": "The connections that pods of the run may make: to each other, to DNS, to the ports listed here.",
    "PodMonitor": "For the Prometheus Operator: pod 0 serves the metrics of the run.",
    "PodDisruptionBudget": "Keeps `kubectl drain` from evicting pods that the run needs.",
    "Service": "A headless Service: it gives each pod a DNS name, so that the others find pod 0.",
}
FIELDS = {
    "train.yaml": "All fields, including defaults.",
    "clusterIP": "Headless: the name of a pod resolves to that pod.",
    "publishNotReadyAddresses": "Pods have to find each other before they are ready.",
    "terminationGracePeriodSeconds": "Time to save a checkpoint after SIGTERM.",
    "automountServiceAccountToken": "Training does not use the Kubernetes API.",
    "enableServiceLinks": "No environment variables for every Service of the namespace.",
    "runAsNonRoot": "Required where a namespace enforces the Pod Security level `restricted`.",
    "topologySpreadConstraints": "Spread the pods over nodes if possible.",
    "subdomain": "The Service that gives the pods their names.",
    "command": "Reads the node rank, waits for pod 0, starts the processes of this pod and exits with their exit code.",
    "readOnlyRootFilesystem": "Only the volumes below are writable.",
    "emptyDir": "Shared memory for NCCL and data loaders; the default is 64 MB.",
}
_USER_FIELDS = ("nodeSelector", "affinity")  # with keys chosen by the user


def object_comments() -> dict[str, str]:
    """Kubernetes kind -> the sentence above such a manifest."""
    comments = dict(OBJECTS)
    for kind in all_kinds():
        comments |= kind.comments
    return comments


def with_comments(kind: str, text: str) -> str:
    """Add comments to a manifest; a field that occurs several times has one at its first occurrence."""
    lines = text.splitlines(keepends=True)
    comments: dict[int, str] = {}
    objects = object_comments()
    remaining = dict(FIELDS)
    for each in all_kinds():
        remaining |= each.field_comments
    for key, value in _fields(yaml.compose(text, Loader=libyaml.Loader)):
        if key.value in remaining and _applies(key.value, value):
            indent = " " * key.start_mark.column
            comments[key.start_mark.line] = f"{indent}# {remaining.pop(key.value)}\n"
    start = f"# {objects[kind]}\n" if kind in objects else ""
    return start + "".join(comments.get(number, "") + line for number, line in enumerate(lines))


def _applies(key: str, value: yaml.Node) -> bool:
    """Whether the comment about a field is true for this value."""
    if key == "emptyDir":
        return bool(value.value)  # /dev/shm has a medium and a limit
    if key == "command":  # not of an init container, and not a user's command
        return [word.value for word in value.value][1:4] == ["-m", "llmtrain", "node"]
    return key != "readOnlyRootFilesystem" or value.value == "true"


def _fields(node: yaml.Node | None) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """(key, value) of every mapping, from top to bottom, without strings' contents and user-chosen keys."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key, value
            if key.value not in _USER_FIELDS:
                yield from _fields(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _fields(item)
