"""Training pods: values, images, volumes, shared memory, signals and secrets."""

import re
from collections.abc import Iterator

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
from llmtrain.redact import has_token, is_secret_setting

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
_TRAINER = re.compile(r"\bpython[\d.]*\s|\btorchrun\b|\baccelerate\s+launch\b|\bdeepspeed\b|\bllmtrain\b")


@rule(
    "value-not-a-string",
    "error",
    "value in env, command or args that is not a string",
    why="The API server rejects the object: YAML reads 1, 1e5, true and yes as numbers and booleans.",
    fix='Quote it: value: "1".',
    over=all_pods,
)
def value_not_a_string(pod: Pod) -> Iterator[Match]:
    """Without the value, which may be a secret."""
    for container in pod.all_containers:
        rows = [
            (row.get("value"), f"the value of {shorten(row.get('name').text)}") for row in container.node.get("env")
        ]
        rows += [(entry, f"an entry of {part}") for part in ("command", "args") for entry in container.node.get(part)]
        for node, what in rows:
            if node.exists and not isinstance(node.value, str):
                yield Match(node, f"container {shorten(container.name)}: {what} is {_type(node)}, not a string")


def _type(node: Node) -> str:
    names = {bool: "a boolean", dict: "a mapping", list: "a list"}
    return names.get(type(node.value), "a number")


@rule(
    "image-not-pinned",
    "advice",
    "image without a tag, or with the tag latest",
    why="Pods that start later, after a restart or on another node, may run another version.",
    fix="Use a version as the tag, or a digest: image@sha256:...",
    over=training_pods,
)
def image_not_pinned(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        image = container.node.get("image")
        tag = image.text.rpartition("/")[2].partition(":")[2]
        if image.text and "@" not in image.text and "$" not in image.text and tag in ("", "latest"):
            problem = f"has the tag {tag}" if tag else "has no tag"
            yield Match(image, f"image {shorten(image.text)} {problem}")


@rule(
    "install-at-start",
    "advice",
    "packages are installed when the container starts",
    why="Every restart downloads them again, fails if the index is unreachable, and may install other versions.",
    fix="Install them in the image.",
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
    fix="Mount a PersistentVolumeClaim (ReadWriteMany with several nodes) and write the results there.",
    over=complete_pods,
)
def artifacts_in_pod(pod: Pod) -> Iterator[Match]:
    persistent = {volume.get("name").text for volume in pod.spec.get("volumes") if _is_persistent(volume)}
    claims = pod.workload.node.get("spec", "volumeClaimTemplates")
    persistent |= {claim.get("metadata", "name").text for claim in claims}
    for container in pod.containers:
        texts = [container.script, *(row.get("value").text for row in container.node.get("env"))]
        is_written = any(
            mount.get("name").text in persistent and mount.get("readOnly").value is not True
            for mount in container.node.get("volumeMounts")
        )
        if is_written or any(_STORE.search(text) for text in texts):
            return
    yield Match(pod.spec.get("volumes"), "no persistent volume is mounted for writing")


def _is_persistent(volume: Node) -> bool:
    kinds = {key for key, _ in volume.items()} - {"name"}
    return bool(kinds) and not kinds & set(EPHEMERAL_VOLUMES)


@rule(
    "rwo-on-many-nodes",
    "error",
    "ReadWriteOnce claim mounted by pods on several nodes",
    why="The volume attaches to one node; pods on other nodes stay in ContainerCreating, and training never starts.",
    fix="Use a ReadWriteMany claim (NFS, CephFS, EFS, Filestore), or one node.",
    over=multi_node_pods,
)
def rwo_on_many_nodes(pod: Pod) -> Iterator[Match]:
    for volume in pod.spec.get("volumes"):
        name = volume.get("persistentVolumeClaim", "claimName")
        claim = pod.workload.manifests.beside(pod.workload, "PersistentVolumeClaim", name.text)
        modes = {mode.text for mode in claim.get("spec", "accessModes")} if claim is not None else set()
        if modes and not modes & {"ReadWriteMany", "ReadOnlyMany"}:
            access = ", ".join(sorted(modes))
            yield Match(name, f"claim {name.text} is {access} but {pod.workload.nodes} pods mount it")


@rule(
    "small-shm",
    "warning",
    "default /dev/shm of 64 MB in a pod with GPUs or several processes",
    why="NCCL and data loader workers share memory there; when it is full they die with a bus error.",
    fix="Mount emptyDir {medium: Memory, sizeLimit: ...} at /dev/shm; it counts against the memory limit.",
    over=complete_pods,
)
def small_shm(pod: Pod) -> Iterator[Match]:
    if pod.spec.get("hostIPC").value is True:
        return
    in_memory = {
        volume.get("name").text
        for volume in pod.spec.get("volumes")
        if volume.get("emptyDir", "medium").text == "Memory"
    }
    for container in pod.containers:
        is_large = any(
            mount.get("mountPath").text.rstrip("/") == "/dev/shm" and mount.get("name").text in in_memory
            for mount in container.node.get("volumeMounts")
        )
        needs = container.gpus or (container.is_launched and (pod.processes or 1) > 1)
        if needs and not is_large:
            yield Match(
                container.node.get("volumeMounts"), f"container {container.name} has no Memory emptyDir at /dev/shm"
            )


@rule(
    "istio-sidecar",
    "warning",
    "Istio sidecar injection is not disabled",
    why="The sidecar breaks connections between ranks and keeps the pod of a finished Job running.",
    fix='Add the label and annotation sidecar.istio.io/inject: "false" (in quotes) to the pod template.',
    over=multi_node_pods,
)
def istio_sidecar(pod: Pod) -> Iterator[Match]:
    if not pod.is_complete or not _may_be_in_mesh(pod):
        return
    metadata = pod.template.get("metadata")
    values = [metadata.get(part, NO_SIDECAR) for part in ("labels", "annotations")]
    if not any(node.value == "false" for node in values):
        quoted = 'not the string "false"'
        where = next((node for node in values if node.exists), metadata if metadata.exists else pod.template)
        yield Match(where, f"{NO_SIDECAR} is {quoted if any(n.exists for n in values) else 'unset'}")


def _may_be_in_mesh(pod: Pod) -> bool:
    """Whether the pod, its namespace or the other objects in the files mention Istio."""
    manifests, namespace = pod.workload.manifests, pod.workload.namespace
    beside = [one for one in manifests.of_kind("Namespace") if one.get("metadata", "name").text == namespace]
    if any(one.get("metadata", "labels", "istio-injection").text == "disabled" for one in beside):
        return False
    metadata = [pod.template.get("metadata"), *(one.get("metadata") for one in beside)]
    if not namespace:  # decided when the files are applied
        metadata += [one.get("metadata") for one in manifests.of_kind("Namespace")]
    keys = [key for one in metadata for part in ("labels", "annotations") for key, _ in one.get(part).items()]
    return any("istio" in key for key in keys) or any(
        ".istio.io/" in one.get("apiVersion").text for one in manifests.objects
    )


@rule(
    "grace-too-short",
    "warning",
    "grace period is not longer than the shutdown timeout of torchrun",
    why="torchrun waits 30 s for its processes to exit; a pod with as little is killed while they still write "
    "a checkpoint.",
    fix="Set terminationGracePeriodSeconds above --shutdown-timeout and long enough for a checkpoint (120 or more).",
    over=complete_pods,
)
def grace_too_short(pod: Pod) -> Iterator[Match]:
    grace = pod.spec.get("terminationGracePeriodSeconds")
    for container in pod.containers:
        settings = container.settings(("shutdown-timeout",), ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",))
        shutdown = settings[0].number if settings else SHUTDOWN_SEC
        seconds = grace.number if grace.exists else SHUTDOWN_SEC
        if container.is_torchrun and seconds is not None and shutdown is not None and seconds <= shutdown:
            default = "" if grace.exists else " (the default)"
            problem = f"not above torchrun's shutdown timeout of {shutdown} s"
            yield Match(grace, f"terminationGracePeriodSeconds is {seconds}{default}, {problem}")


@rule(
    "shell-without-exec",
    "warning",
    "trainer is started by a shell without exec",
    why="The shell is PID 1 and does not forward SIGTERM: training is killed without a final checkpoint.",
    fix="Use the exec form (command: [torchrun, ...]), or `exec` the trainer in the script.",
    over=training_pods,
)
def shell_without_exec(pod: Pod) -> Iterator[Match]:
    for container in pod.containers:
        script = container.shell_script
        if script is None or re.search(
            r"(?m)(?:^|[;&|]|\bthen\b|\belse\b|\bdo\b)[^\S\n]*(?:exec|trap)\s", container.script
        ):
            continue
        found = next(container.find(_TRAINER), None)
        if found is not None:
            yield Match(
                script,
                f"`{shorten(found[2])}` runs below {shorten(container.entries[0].text)} -c without exec",
                found[1],
            )


@rule(
    "env-dump",
    "warning",
    "whole environment is written to a file",
    why="It contains HF_TOKEN and other secrets, and the file is stored with the results.",
    fix="Write only the variables you need, by name.",
    over=all_pods,
)
def env_dump(pod: Pod) -> Iterator[Match]:
    yield from matches_in_commands(pod, _DUMP, "writes all variables")


@rule(
    "secret-in-manifest",
    "warning",
    "secret as a literal value or argument",
    why="Everyone who can read the manifest, the pod, the process list or the repository can read it.",
    fix="Use valueFrom.secretKeyRef or mount the Secret as a file, and rotate the secret.",
    over=all_pods,
)
def secret_in_manifest(pod: Pod) -> Iterator[Match]:
    for container in pod.all_containers:
        yield from _secrets(container)


def _secrets(container: Container) -> Iterator[Match]:
    """Lines and names, never the value."""
    places: dict[tuple[int, int], Match] = {}
    for setting in container.assignments:
        if (
            setting.is_literal
            and (is_secret_setting(setting.name, setting.value) or has_token(setting.value))
            and _is_value(setting.value)
        ):
            seen = Match(setting.node, f"{shorten(setting.name)} has a literal value", setting.line)
            places[(setting.line, 0)] = seen
    for name, flag in container.flags.items():
        if is_secret_setting(name, flag.value) and _is_value(flag.value):
            places.setdefault((flag.line, 0), Match(flag.node, f"--{name} has a literal value", flag.line))
    for entry in container.entries:
        finder = LineFinder(entry)
        for line in entry.text.splitlines():
            if has_token(line):
                number = finder.line_of(line)
                places.setdefault((number, 0), Match(entry, "the command contains a token", number))
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
