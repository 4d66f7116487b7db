"""What a training pod needs to work and to keep its results: volumes, memory, signals, and secrets out of sight."""

import re
from collections.abc import Iterator

from llmtrain.lint.command import Container
from llmtrain.lint.model import Pod
from llmtrain.lint.rules.rule import Seen, all_pods, joined_pods, rule, shown, training_pods, whole_pods
from llmtrain.lint.yaml_nodes import Node
from llmtrain.redact import has_token, is_secret_setting

SHUTDOWN_SEC = 30
"""What torchrun gives its processes, and Kubernetes a pod, by default."""
GONE_WITH_THE_POD = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "image")
NO_SIDECAR = "sidecar.istio.io/inject"
_DUMP = re.compile(
    r"(?<![\w./-])(?:env|printenv|export\s+-p)\s*(?:\|\s*sort\s*)?(?:>>?\s*(?!/dev/|&)|\|\s*tee\s+)\S+"
    r"|\bdumps?\([^)\n]{0,200}os\.environ[^\n]*"
)
_STORE = re.compile(r"\b(?:s3|gs|gcs|abfss?|hdfs|oss|hf)://")
_TRAINER = re.compile(r"\bpython[\d.]*\s|\btorchrun\b|\baccelerate\s+launch\b|\bdeepspeed\b|\bllmtrain\b")


@rule(
    "artifacts-in-pod",
    "warning",
    "results are written inside the pod only",
    why="Checkpoints are lost with the pod: its successor starts at 0, and `kubectl cp` cannot read a finished pod.",
    fix="Mount a PersistentVolumeClaim (ReadWriteMany on several nodes) and write the results there.",
    over=whole_pods,
)
def artifacts_in_pod(pod: Pod) -> Iterator[Seen]:
    lasting = {volume.get("name").text for volume in pod.spec.get("volumes") if _lasts(volume)}
    claims = pod.workload.node.get("spec", "volumeClaimTemplates")
    lasting |= {claim.get("metadata", "name").text for claim in claims}
    for container in pod.containers:
        texts = [container.script, *(row.get("value").text for row in container.node.get("env"))]
        is_written = any(
            mount.get("name").text in lasting and mount.get("readOnly").value is not True
            for mount in container.node.get("volumeMounts")
        )
        if is_written or any(_STORE.search(text) for text in texts):
            return
    yield Seen(pod.spec.get("volumes"), "no volume that outlives the pod is mounted for writing")


def _lasts(volume: Node) -> bool:
    kinds = {key for key, _ in volume.items()} - {"name"}
    return bool(kinds) and not kinds & set(GONE_WITH_THE_POD)


@rule(
    "rwo-on-many-nodes",
    "error",
    "a ReadWriteOnce claim mounted by pods on several nodes",
    why="The volume attaches to one node; pods on the others stay in ContainerCreating and training never starts.",
    fix="Use a ReadWriteMany claim (NFS, CephFS, EFS, Filestore), or one node.",
    over=joined_pods,
)
def rwo_on_many_nodes(pod: Pod) -> Iterator[Seen]:
    for volume in pod.spec.get("volumes"):
        name = volume.get("persistentVolumeClaim", "claimName")
        claim = pod.workload.manifests.beside(pod.workload, "PersistentVolumeClaim", name.text)
        modes = {mode.text for mode in claim.get("spec", "accessModes")} if claim is not None else set()
        if modes and not modes & {"ReadWriteMany", "ReadOnlyMany"}:
            yield Seen(name, f"{name.text} is {', '.join(sorted(modes))}, and the pods are {pod.workload.nodes}")


@rule(
    "small-shm",
    "warning",
    "the default /dev/shm of 64 MB in a pod with GPUs or several processes",
    why="NCCL and the workers of data loaders share memory there; when it is full they die with a bus error.",
    fix="Mount emptyDir {medium: Memory, sizeLimit: ...} at /dev/shm; it counts against the memory limit.",
    over=whole_pods,
)
def small_shm(pod: Pod) -> Iterator[Seen]:
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
            yield Seen(container.node.get("volumeMounts"), f"container {container.name} has no memory at /dev/shm")


@rule(
    "istio-sidecar",
    "warning",
    "Istio's sidecar is not switched off",
    why="In a mesh the sidecar cuts connections between ranks off and keeps a finished Job's pod running.",
    fix='Add the label and annotation sidecar.istio.io/inject: "false" (in quotes) to the pod template.',
    over=joined_pods,
)
def istio_sidecar(pod: Pod) -> Iterator[Seen]:
    if not pod.is_whole or any(_has_no_mesh(one, pod) for one in pod.workload.manifests.of_kind("Namespace")):
        return
    metadata = pod.template.get("metadata")
    said = [metadata.get(part, NO_SIDECAR) for part in ("labels", "annotations")]
    if not any(node.value == "false" for node in said):
        where = next((node for node in said if node.exists), metadata if metadata.exists else pod.template)
        yield Seen(where, f"{NO_SIDECAR} is {'not the text false' if any(n.exists for n in said) else 'not set'}")


def _has_no_mesh(namespace: Node, pod: Pod) -> bool:
    metadata = namespace.get("metadata")
    is_its_own = metadata.get("name").text == pod.workload.namespace
    return is_its_own and metadata.get("labels", "istio-injection").text == "disabled"


@rule(
    "grace-too-short",
    "warning",
    "the grace period is not longer than torchrun's own",
    why="torchrun gives its processes 30 s to end; a pod with as little is killed while they still write a checkpoint.",
    fix="Set terminationGracePeriodSeconds above --shutdown-timeout and long enough for a checkpoint (120 and more).",
    over=whole_pods,
)
def grace_too_short(pod: Pod) -> Iterator[Seen]:
    grace = pod.spec.get("terminationGracePeriodSeconds")
    for container in pod.containers:
        given = container.settings(("shutdown-timeout",), ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",))
        shutdown = given[0].number if given else SHUTDOWN_SEC
        seconds = grace.number if grace.exists else SHUTDOWN_SEC
        if container.is_torchrun and seconds is not None and shutdown is not None and seconds <= shutdown:
            unset = "" if grace.exists else " (unset)"
            yield Seen(grace, f"the pod has {seconds} s{unset}, torchrun takes up to {shutdown} s")


@rule(
    "shell-without-exec",
    "warning",
    "the trainer runs below a shell",
    why="The shell is PID 1 and passes SIGTERM on to nobody: training is killed without a last checkpoint.",
    fix="Use the exec form (command: [torchrun, ...]), or write `exec` before the trainer in the script.",
    over=training_pods,
)
def shell_without_exec(pod: Pod) -> Iterator[Seen]:
    for container in pod.containers:
        script = container.shell_script
        if script is None or re.search(
            r"(?m)(?:^|[;&|]|\bthen\b|\belse\b|\bdo\b)[^\S\n]*(?:exec|trap)\s", container.script
        ):
            continue
        found = next(container.find(_TRAINER), None)
        if found is not None:
            yield Seen(
                script, f"`{shown(found[2])}` below {shown(container.entries[0].text)} -c, without exec", found[1]
            )


@rule(
    "env-dump",
    "warning",
    "the whole environment is written to a file",
    why="HF_TOKEN and other secrets are in it, and the file ends up beside the results.",
    fix="Write down the variables you need, by name.",
    over=all_pods,
)
def env_dump(pod: Pod) -> Iterator[Seen]:
    for container in pod.all_containers or pod.containers:
        for entry, line, what in container.find(_DUMP):
            yield Seen(entry, shown(what), line)


@rule(
    "secret-in-manifest",
    "warning",
    "a secret as a literal value or argument",
    why="Everybody who may read the manifest, the pod or the process list has it, and so has the repository.",
    fix="Use valueFrom.secretKeyRef or mount the Secret as a file; change the secret that was written here.",
    over=all_pods,
)
def secret_in_manifest(pod: Pod) -> Iterator[Seen]:
    for container in pod.all_containers or pod.containers:
        yield from _secrets(container)


def _secrets(container: Container) -> Iterator[Seen]:
    """Places and names, never the value."""
    places: dict[tuple[int, int], Seen] = {}
    for setting in container.assignments:
        if (
            setting.is_literal
            and (is_secret_setting(setting.name, setting.value) or has_token(setting.value))
            and _is_value(setting.value)
        ):
            seen = Seen(setting.node, f"{shown(setting.name)} has its value written out", setting.line)
            places[(setting.line, 0)] = seen
    for name, flag in container.flags.items():
        if is_secret_setting(name, flag.value) and _is_value(flag.value):
            places.setdefault((flag.line, 0), Seen(flag.node, f"--{name} has its value written out", flag.line))
    for entry in container.entries:
        number = 0
        for line in entry.text.splitlines():
            if has_token(line):
                number = entry.line_of(line, number)
                places.setdefault((number, 0), Seen(entry, "a token stands in the command", number))
    yield from places.values()


def _is_value(text: str) -> bool:
    """A value itself: no reference, no path, no switch."""
    return bool(text) and "$" not in text and not text.startswith("/") and text.lower() not in ("true", "false", "none")


RULES = (
    artifacts_in_pod,
    rwo_on_many_nodes,
    small_shm,
    istio_sidecar,
    grace_too_short,
    shell_without_exec,
    env_dump,
    secret_in_manifest,
)
