"""Comments in manifests: a sentence above each object, and above fields that need an explanation."""

import yaml

OBJECTS = {
    "ConfigMap": "The config of the run, mounted at /config in every pod, and how the run was launched.",
    "code": "The code of `launch --with-code`, mounted at /code in every pod, on PYTHONPATH.",
    "PersistentVolumeClaim": "A volume of the run (RUN-runs: checkpoints and logs). It stays when the run is deleted.",
    "NetworkPolicy": "The connections that pods of the run may make: to each other, to DNS, to the ports listed here.",
    "PodMonitor": "For the Prometheus Operator: pod 0 serves the metrics of the run.",
    "PodDisruptionBudget": "Keeps `kubectl drain` from evicting pods that the run needs.",
    "Service": "A headless Service: it gives each pod a DNS name, so that the others find pod 0.",
    "Job": "The run: an Indexed Job, one pod per node. The index of a pod (JOB_COMPLETION_INDEX) is its node rank.",
    "StatefulSet": "The run: one pod per node. The number at the end of a pod's name is its node rank.",
    "PyTorchJob": "The run, for the Kubeflow Training Operator, which creates one pod per node and their Services.",
    "JobSet": "The run, for the JobSet controller, which creates an Indexed Job and a headless Service for its pods.",
    "TrainingRuntime": "The pod template of the TrainJob. Kubeflow Trainer creates a JobSet from the two.",
    "TrainJob": "The run, for Kubeflow Trainer: number of pods, processes per pod, and the runtime.",
}
FIELDS = {
    "train.yaml": "All fields, including defaults.",
    "clusterIP": "Headless: the name of a pod resolves to that pod.",
    "publishNotReadyAddresses": "Pods have to find each other before they are ready.",
    "nprocPerNode": "Processes per pod.",
    "podManagementPolicy": "Create all pods at once: pod 0 is not ready before the others have joined.",
    "cleanPodPolicy": "Keep finished pods and their logs.",
    "completions": "Number of pods. All run at once, so both numbers are equal.",
    "numNodes": "Number of pods.",
    "numProcPerNode": "Processes per pod.",
    "maxRestarts": "The Job below replaces failed pods; the JobSet itself is not restarted.",
    "backoffLimit": "Number of crashes after which the run fails (launch.max_restarts).",
    "podReplacementPolicy": "Replace a pod when it has ended, not while it is still saving a checkpoint.",
    "podFailurePolicy": "A restart does not fix 64 and 65. Interruptions (75, evictions) do not count as crashes.",
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


def with_comments(kind: str, text: str) -> str:
    """Add comments to a manifest; a field that occurs several times has one at its first occurrence."""
    lines = text.splitlines(keepends=True)
    comments: dict[int, str] = {}
    remaining = dict(FIELDS)
    for key, value in _fields(yaml.compose(text, Loader=yaml.SafeLoader)):
        if key.value in remaining and _applies(key.value, value):
            line, column = key.start_mark.line, key.start_mark.column
            comments[line] = f"{' ' * column}# {remaining.pop(key.value)}\n"
    start = f"# {OBJECTS[kind]}\n" if kind in OBJECTS else ""
    return start + "".join(comments.get(number, "") + line for number, line in enumerate(lines))


def _applies(key: str, value: yaml.Node) -> bool:
    """Whether the comment about a field is true for this value."""
    if key == "emptyDir":
        return bool(value.value)  # /dev/shm has a medium and a limit
    if key == "command":  # not of an init container, and not a user's command
        return [word.value for word in value.value][1:4] == ["-m", "llmtrain", "node"]
    return key != "readOnlyRootFilesystem" or value.value == "true"


def _fields(node: yaml.Node | None) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """(key, value) of every mapping, from top to bottom, without strings' contents and user-chosen keys."""
    if isinstance(node, yaml.MappingNode):
        return [
            field
            for key, value in node.value
            for field in [(key, value), *(_fields(value) if key.value not in _USER_FIELDS else [])]
        ]
    if isinstance(node, yaml.SequenceNode):
        return [field for item in node.value for field in _fields(item)]
    return []
