"""What manifests say to people who read them: a sentence above each object, and at the fields that are no habit."""

import yaml

OBJECTS = {
    "ConfigMap": "The config of the run, which every pod mounts at /config, and how the run was launched.",
    "PersistentVolumeClaim": "A volume of the run (RUN-runs: checkpoints and logs). It stays when the run is deleted.",
    "NetworkPolicy": "The connections that pods of the run may make: to each other, to DNS, to the ports listed here.",
    "PodDisruptionBudget": "Keeps `kubectl drain` from evicting pods that the run cannot do without.",
    "Service": "A headless Service: it gives each pod a name in DNS, so that the others find pod 0.",
    "Job": "The run: an Indexed Job, one pod per node. The index of a pod (JOB_COMPLETION_INDEX) is its node rank.",
    "StatefulSet": "The run: one pod per node. The number at the end of a pod's name is its node rank.",
    "PyTorchJob": "The run, for the Kubeflow Training Operator, which creates one pod per node and their Services.",
    "JobSet": "The run, for the JobSet controller, which creates an Indexed Job and a headless Service for its pods.",
    "TrainingRuntime": "What the pods of the TrainJob look like. Kubeflow Trainer makes a JobSet of the two.",
    "TrainJob": "The run, for Kubeflow Trainer: how many nodes and processes, in which runtime.",
}
FIELDS = {
    "train.yaml": "All fields, also those that were left at their defaults.",
    "clusterIP": "No address of its own: the name of a pod leads to that pod.",
    "publishNotReadyAddresses": "Pods have to find each other before they are ready.",
    "nprocPerNode": "Processes per pod.",
    "podManagementPolicy": "All pods start at once; one after another they would wait for each other.",
    "cleanPodPolicy": "Finished pods stay, and so do their logs.",
    "completions": "The number of nodes. All pods run at once, so both numbers are the same.",
    "numNodes": "The number of nodes.",
    "numProcPerNode": "Processes per pod.",
    "maxRestarts": "The Job below replaces pods by itself; the whole set is not started over.",
    "backoffLimit": "Crashes after which the run is given up (launch.max_restarts).",
    "podReplacementPolicy": "A pod is replaced when it has ended, not while it still saves a checkpoint.",
    "podFailurePolicy": "No restart fixes 64 and 65. Interruptions (75, evictions) do not count as crashes.",
    "terminationGracePeriodSeconds": "Time to save a checkpoint after SIGTERM.",
    "automountServiceAccountToken": "Training needs nothing from the Kubernetes API.",
    "enableServiceLinks": "No variables for every Service of the namespace.",
    "runAsNonRoot": "Required where a namespace enforces the Pod Security level `restricted`.",
    "topologySpreadConstraints": "Spreads the pods over machines where possible.",
    "subdomain": "The Service that gives the pods their names.",
    "command": "Finds its rank, waits for pod 0, starts the processes of this pod and passes their exit code on.",
    "readOnlyRootFilesystem": "Only the volumes below can be written.",
    "emptyDir": "For processes that share memory (NCCL, data loaders): the default is 64 MB.",
}


_OF_THE_USER = ("nodeSelector", "affinity")


def with_comments(kind: str, text: str) -> str:
    """A manifest as text, with its comments; each field has one at its first place."""
    lines = text.splitlines(keepends=True)
    above: dict[int, str] = {}
    waiting = dict(FIELDS)
    for key, value in _fields(yaml.compose(text, Loader=yaml.SafeLoader)):
        if key.value in waiting and _is_meant(key.value, value):
            line, column = key.start_mark.line, key.start_mark.column
            above[line] = f"{' ' * column}# {waiting.pop(key.value)}\n"
    start = f"# {OBJECTS[kind]}\n" if kind in OBJECTS else ""
    return start + "".join(above.get(number, "") + line for number, line in enumerate(lines))


def _is_meant(key: str, value: yaml.Node) -> bool:
    """Whether what is said about a field is true of this value."""
    if key == "emptyDir":
        return bool(value.value)  # /dev/shm has a medium and a limit
    if key == "command":  # an init container, or a command of the user's own, does something else
        return [word.value for word in value.value][1:4] == ["-m", "llmtrain", "node"]
    return key != "readOnlyRootFilesystem" or value.value == "true"


def _fields(node: yaml.Node | None) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """(key, value) of every mapping, from top to bottom. What stands inside a text, such as the config, is no field,
    nor are the names that the user gives."""
    if isinstance(node, yaml.MappingNode):
        return [
            field
            for key, value in node.value
            for field in [(key, value), *(_fields(value) if key.value not in _OF_THE_USER else [])]
        ]
    if isinstance(node, yaml.SequenceNode):
        return [field for item in node.value for field in _fields(item)]
    return []
