"""Training pods: values, images, volumes, shared memory, signals and secrets."""

import re
from collections.abc import Iterator
from itertools import islice

from llmtrain.core.redact import has_token, is_secret_setting
from llmtrain.lint.container_command import Container
from llmtrain.lint.manifests import Pod
from llmtrain.lint.rules.rule import (
    Match,
    all_pods,
    complete_pods,
    matches_in_commands,
    multi_node_pods,
    rule,
    shorten,
    training_pods,
)
from llmtrain.lint.yaml_nodes import LineFinder, Node

SHUTDOWN_SEC = 30
"""Default shutdown timeout of torchrun, and default grace period of a pod."""
EPHEMERAL_VOLUMES = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "image")
NO_SIDECAR = "sidecar.istio.io/inject"
_DUMP = re.compile(
    r"(?<![\w./-])(?:env|printenv|export\s+-p)\s*(?:\|\s*sort\s*)?(?:>>?\s*(?!/dev/|&)|\|\s*tee\s+)\S+"
    r"|\bdumps?\([^)\n]{0,200}os\.environ[^\n]*"
)
_INSTALL = re.compile(
    r"\b(?:pip3?|conda|mamba|micromamba|apt-get|apt|apk|dnf|yum)\s+(?:-\S+\s+){0,5}(?:install|add)\b[^\n;&|]{0,100}"
)
_STORE = re.compile(r"\b(?:s3|gs|gcs|abfss?|hdfs|oss|hf)://")
_FORWARDS_SIGNALS = re.compile(r"(?m)(?:^|[;&|]|\bthen\b|\belse\b|\bdo\b)[^\S\n]*(?:exec|trap)\s")
_TRAINER = re.compile(r"\bpython[\d.]*\s|\btorchrun\b|\baccelerate\s+launch\b|\bdeepspeed\b|\bllmtrain\b")


@rule(
    "value-not-a-string",
    "error",
    "value in env, command or args that is not a string",
    why="The API server rejects the object: YAML reads 1, 1e5, true and yes as numbers and booleans.",
    remedy='Quote it: value: "1".',
    over=all_pods,
)
def value_not_a_string(pod: Pod) -> Iterator[Match]:
    """Without the value, which may be a secret."""
    for container in pod.all_containers:
        for node, what in _values(container.node):
            if node.exists and not isinstance(node.value, str):
                yield Match(node, f"container {shorten(container.name)}: {what} is {_type(node)}, not a string")


def _values(container: Node) -> Iterator[tuple[Node, str]]:
    """(value, name for a message) of everything that must be a string."""
    for row in container.get("env"):
        yield row.get("value"), f"the value of {shorten(row.get('name').text)}"
    for part in ("command", "args"):
        for entry in container.get(part):
            yield entry, f"an entry of {part}"


def _type(node: Node) -> str:
    names = {bool: "a boolean", dict: "a mapping", list: "a list"}
    return names.get(type(node.value), "a number")


@rule(
    "image-not-pinned",
    "advice",
    "image without a tag, or with the tag latest",
    why="Pods that start later, after a restart or on another node, may run another version.",
    remedy="Use a version as the tag, or a digest: image@sha256:...",
    over=training_pods,
)
def image_not_pinned(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        image = container.node.get("image")
        tag = image.text.rpartition("/")[2].partition(":")[2]  # the registry before the slash may have a port
        is_known = image.text and "$" not in image.text
        has_digest = "@" in image.text
        if is_known and not has_digest and tag in ("", "latest"):
            problem = "has no tag"
            if tag:
                problem = f"has the tag {tag}"
            yield Match(image, f"image {shorten(image.text)} {problem}")


@rule(
    "install-at-start",
    "advice",
    "packages are installed when the container starts",
    why="Every restart downloads them again, fails if the index is unreachable, and may install other versions.",
    remedy="Install them in the image.",
    over=training_pods,
)
def install_at_start(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        found = list(container.find(_INSTALL))
        if not found and (match := _INSTALL.search(container.command_line)):  # [pip, install, ...]
            found = [(container.entries[0], container.entries[0].line, match[0])]
        for entry, line, text in found:
            yield Match(entry, f"`{shorten(text)}` runs at every start", line)


@rule(
    "artifacts-in-pod",
    "warning",
    "results are only written inside the pod",
    why="Checkpoints are deleted with the pod: a replacement starts at step 0, and `kubectl cp` cannot read a "
    "finished pod.",
    remedy="Mount a PersistentVolumeClaim (ReadWriteMany with several nodes) and write the results there.",
    over=complete_pods,
)
def artifacts_in_pod(pod: Pod) -> Iterator[Match]:
    persistent = _persistent_volumes(pod)
    for container in pod.containers:
        for mount in container.node.get("volumeMounts"):
            if mount.get("name").text in persistent and mount.get("readOnly").value is not True:
                return
        if _STORE.search(container.script):
            return
        for variable in container.node.get("env"):
            if _STORE.search(variable.get("value").text):
                return
    yield Match(pod.spec.get("volumes"), "no persistent volume is mounted for writing")


def _persistent_volumes(pod: Pod) -> set[str]:
    names = set()
    for volume in pod.spec.get("volumes"):
        if _is_persistent(volume):
            names.add(volume.get("name").text)
    for claim in pod.workload.node.get("spec", "volumeClaimTemplates"):  # of a StatefulSet
        names.add(claim.get("metadata", "name").text)
    return names


def _is_persistent(volume: Node) -> bool:
    kinds = {key for key, _ in volume.items()} - {"name"}
    return bool(kinds) and not kinds & set(EPHEMERAL_VOLUMES)


@rule(
    "rwo-on-many-nodes",
    "error",
    "ReadWriteOnce claim mounted by pods on several nodes",
    why="The volume attaches to one node; pods on other nodes stay in ContainerCreating, and training never starts.",
    remedy="Use a ReadWriteMany claim (NFS, CephFS, EFS, Filestore), or one node.",
    over=multi_node_pods,
)
def rwo_on_many_nodes(pod: Pod) -> Iterator[Match]:
    for volume in pod.spec.get("volumes"):
        name = volume.get("persistentVolumeClaim", "claimName")
        claim = pod.workload.manifests.beside(pod.workload, "PersistentVolumeClaim", name.text)
        if claim is None:
            continue
        modes = {mode.text for mode in claim.get("spec", "accessModes")}
        if modes and not modes & {"ReadWriteMany", "ReadOnlyMany"}:
            access = ", ".join(sorted(modes))
            yield Match(name, f"claim {name.text} is {access} but {pod.workload.nodes} pods mount it")


@rule(
    "small-shm",
    "warning",
    "default /dev/shm of 64 MB in a pod with GPUs or several processes",
    why="NCCL and data loader workers share memory there; when it is full they die with a bus error.",
    remedy="Mount emptyDir {medium: Memory, sizeLimit: ...} at /dev/shm; it counts against the memory limit.",
    over=complete_pods,
)
def small_shm(pod: Pod) -> Iterator[Match]:
    if pod.spec.get("hostIPC").value is True:
        return
    for container in pod.containers:
        needs_memory = container.gpus or (container.is_launched and (pod.processes or 1) > 1)
        mounts = container.node.get("volumeMounts")
        if needs_memory and not _has_memory_at_shm(pod, mounts):
            yield Match(mounts, f"container {container.name} has no Memory emptyDir at /dev/shm")


def _has_memory_at_shm(pod: Pod, mounts: Node) -> bool:
    names = [mount.get("name").text for mount in mounts if mount.get("mountPath").text.rstrip("/") == "/dev/shm"]
    for volume in pod.spec.get("volumes"):
        if volume.get("name").text in names and volume.get("emptyDir", "medium").text == "Memory":
            return True
    return False


@rule(
    "istio-sidecar",
    "warning",
    "Istio sidecar injection is not disabled",
    why="The sidecar breaks connections between ranks and keeps the pod of a finished Job running.",
    remedy='Add the label and annotation sidecar.istio.io/inject: "false" (in quotes) to the pod template.',
    over=multi_node_pods,
)
def istio_sidecar(pod: Pod) -> Iterator[Match]:
    if not pod.is_complete or not _may_be_in_mesh(pod):
        return
    metadata = pod.template.get("metadata")
    label = metadata.get("labels", NO_SIDECAR)
    annotation = metadata.get("annotations", NO_SIDECAR)
    if "false" in (label.value, annotation.value):
        return
    for field in (label, annotation):
        if field.exists:
            yield Match(field, f'{NO_SIDECAR} is not the string "false"')
            return
    place = pod.template
    if metadata.exists:
        place = metadata
    yield Match(place, f"{NO_SIDECAR} is unset")


def _may_be_in_mesh(pod: Pod) -> bool:
    """Whether the pod, its namespace or the other objects in the files mention Istio."""
    metadata = [pod.template.get("metadata")]
    manifests = pod.workload.manifests
    for namespace in manifests.of_kind("Namespace"):
        is_namespace_of_pod = namespace.get("metadata", "name").text == pod.workload.namespace
        if is_namespace_of_pod and namespace.get("metadata", "labels", "istio-injection").text == "disabled":
            return False
        if is_namespace_of_pod or not pod.workload.namespace:  # unset: decided when the files are applied
            metadata.append(namespace.get("metadata"))
    for each in metadata:
        for key, _ in (*each.get("labels").items(), *each.get("annotations").items()):
            if "istio" in key:
                return True
    return any(".istio.io/" in node.get("apiVersion").text for node in manifests.objects)


@rule(
    "grace-too-short",
    "warning",
    "grace period is not longer than the shutdown timeout of torchrun",
    why="torchrun waits 30 s for its processes to exit; a pod with as little is killed while they still write "
    "a checkpoint.",
    remedy="Set terminationGracePeriodSeconds above --shutdown-timeout and long enough for a checkpoint (120 or more).",
    over=complete_pods,
)
def grace_too_short(pod: Pod) -> Iterator[Match]:
    grace = pod.spec.get("terminationGracePeriodSeconds")
    seconds: int | None = SHUTDOWN_SEC
    text = f"{seconds} (the default)"
    if grace.exists:
        seconds = grace.number
        text = f"{seconds}"
    for container in pod.containers:
        shutdown: int | None = SHUTDOWN_SEC
        settings = container.settings(("shutdown-timeout",), ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",))
        if settings:
            shutdown = settings[0].number
        if not container.is_torchrun or seconds is None or shutdown is None:
            continue
        if seconds <= shutdown:
            problem = f"not above torchrun's shutdown timeout of {shutdown} s"
            yield Match(grace, f"terminationGracePeriodSeconds is {text}, {problem}")


@rule(
    "shell-without-exec",
    "warning",
    "trainer is started by a shell without exec",
    why="The shell is PID 1 and does not forward SIGTERM: training is killed without a final checkpoint.",
    remedy="Use the exec form (command: [torchrun, ...]), or `exec` the trainer in the script.",
    over=training_pods,
)
def shell_without_exec(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        script = container.shell_script
        if script is None or _FORWARDS_SIGNALS.search(container.script):
            continue
        for _, line, trainer in islice(container.find(_TRAINER), 1):  # one finding per script
            shell = shorten(container.entries[0].text)
            yield Match(script, f"`{shorten(trainer)}` runs below {shell} -c without exec", line)


@rule(
    "env-dump",
    "warning",
    "whole environment is written to a file",
    why="It contains HF_TOKEN and other secrets, and the file is stored with the results.",
    remedy="Write only the variables you need, by name.",
    over=all_pods,
)
def env_dump(pod: Pod) -> Iterator[Match]:
    yield from matches_in_commands(pod, _DUMP, "writes all variables")


@rule(
    "secret-in-manifest",
    "warning",
    "secret as a literal value or argument",
    why="Everyone who can read the manifest, the pod, the process list or the repository can read it.",
    remedy="Use valueFrom.secretKeyRef or mount the Secret as a file, and rotate the secret.",
    over=all_pods,
)
def secret_in_manifest(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        yield from _secrets(container)


def _secrets(container: Container) -> Iterator[Match]:
    """Lines and names, never the value."""
    places: dict[int, Match] = {}  # one finding per line
    for setting in container.assignments:
        is_secret = is_secret_setting(setting.name, setting.value) or has_token(setting.value)
        if setting.is_literal and is_secret and _is_value(setting.value):
            match = Match(setting.node, f"{shorten(setting.name)} has a literal value", setting.line)
            places[setting.line] = match
    for name, flag in container.flags.items():
        if is_secret_setting(name, flag.value) and _is_value(flag.value):
            places.setdefault(flag.line, Match(flag.node, f"--{name} has a literal value", flag.line))
    for entry in container.entries:
        finder = LineFinder(entry)
        for line in entry.text.splitlines():
            if has_token(line):
                number = finder.line_of(line)
                places.setdefault(number, Match(entry, "the command contains a token", number))
    yield from places.values()


def _is_value(text: str) -> bool:
    """Whether it is a literal value, not a reference, a path or a switch."""
    return bool(text) and "$" not in text and not text.startswith("/") and text.lower() not in ("true", "false", "none")


RULES = (
    value_not_a_string,
    image_not_pinned,
    install_at_start,
    artifacts_in_pod,
    rwo_on_many_nodes,
    small_shm,
    istio_sidecar,
    grace_too_short,
    shell_without_exec,
    env_dump,
    secret_in_manifest,
)
