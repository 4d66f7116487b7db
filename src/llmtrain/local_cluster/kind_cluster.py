"""A local cluster made with kind (Kubernetes in Docker) that stores its runs in a local directory.

Two things are added to what kind does: a volume that all nodes can write, and a proof that `up` created the cluster.
The mount path of the directory contains a random token, which is recorded locally before kind is started. A container
keeps its mounts for life, so the token identifies the cluster from its first moment on, also when it is stopped; a
cluster of the same name created by hand has no such token.
"""

import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from stat import S_IMODE
from tempfile import TemporaryDirectory

import yaml

from llmtrain.core.files import read_json, write_json
from llmtrain.core.install import install_command
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import COMMON_LABELS
from llmtrain.local_cluster import kind_cli

CLAIM = "runs"
NAMESPACE = "default"
MOUNT_ROOT = "/llmtrain"  # in the nodes; the mount path is a subdirectory named by the token
SIZE = "100Gi"  # required by a claim; a host directory is not limited by it
WAIT = "180s"  # until the control plane is ready


@dataclass(frozen=True)
class LocalCluster:
    """The local record of a cluster that `up` created."""

    name: str
    mark: str
    nodes: int
    runs: str
    """Local directory."""
    kubeconfig: str | None
    """The kubeconfig with its context, if one was passed."""

    @property
    def context(self) -> str:
        return context_of(self.name)

    @property
    def mounted_at(self) -> str:
        return f"{MOUNT_ROOT}/{self.mark}"

    def write(self) -> None:
        file = _record_file(self.mark)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, asdict(self))
        except OSError as problem:
            raise UsageError(
                f"Cannot write {file.parent}, which records the clusters created by llmtrain: {problem.strerror}.",
                remedy="Set XDG_STATE_HOME to a directory you can write to.",
            ) from None

    def delete_record(self) -> None:
        _record_file(self.mark).unlink(missing_ok=True)


@dataclass(frozen=True)
class UpResult:
    cluster: LocalCluster
    is_new: bool
    has_new_claim: bool


def context_of(name: str) -> str:
    """The context name that kind gives a cluster."""
    return f"kind-{name}"


def up(name: str, nodes: int, runs: Path | None, image: str | None, kubeconfig: str | None) -> UpResult:
    """Create the cluster, or complete one that `up` created earlier. A failed creation is rolled back."""
    _check_name(name)
    if find_spec("kubernetes") is None:  # checked before the cluster, which takes minutes
        raise UsageError(
            "The Kubernetes client is not installed.", remedy=f"Install the extra: {install_command('k8s')}"
        )
    if name in kind_cli.list_clusters():
        return _complete(_find_own(name), runs, kubeconfig)
    directory = open_directory(runs or Path("runs"))
    if kubeconfig:  # absolute, because `down` may run in another directory
        kubeconfig = str(Path(kubeconfig).expanduser().absolute())
    cluster = LocalCluster(name, secrets.token_hex(8), nodes, str(directory), kubeconfig or None)
    cluster.write()  # before the cluster exists: a process that is killed must not leave one that nothing identifies
    options = [*_options(cluster), "--config=-", f"--wait={WAIT}"]
    if image:
        options.append(f"--image={image}")
    try:
        kind_cli.run("kind", "create", "cluster", *options, input_=yaml.safe_dump(cluster_config(cluster)))
        create_claim(Cluster.connect(cluster.kubeconfig, cluster.context), cluster.mounted_at)
    except BaseException:  # Ctrl-C too
        with suppress(LlmtrainError):  # the first error is the one to report
            _roll_back(cluster)
        raise
    return UpResult(cluster, is_new=True, has_new_claim=True)


def _complete(cluster: LocalCluster, runs: Path | None, kubeconfig: str | None) -> UpResult:
    """Make the context of an existing cluster the current one and create a missing claim."""
    if runs is not None and str(_resolve(runs)) != cluster.runs:
        raise UsageError(
            f"Cluster {cluster.name} already exists and stores its runs in {cluster.runs}, which cannot be changed.",
            remedy=f"Omit --runs, or delete the cluster first: llmtrain cluster down --name {cluster.name}",
        )
    kubeconfig = kubeconfig or cluster.kubeconfig
    try:
        kind_cli.run("kind", "export", "kubeconfig", f"--name={cluster.name}", *_kubeconfig_option(kubeconfig))
        has_new_claim = create_claim(Cluster.connect(kubeconfig, cluster.context), cluster.mounted_at)
    except ClusterError as problem:
        raise ClusterError(
            f"Cluster {cluster.name} exists but does not respond: {problem.what}",
            remedy="Start its containers if they are stopped, or delete it: llmtrain cluster down --name "
            f"{cluster.name}.",
        ) from None
    return UpResult(cluster, is_new=False, has_new_claim=has_new_claim)


def _roll_back(cluster: LocalCluster) -> None:
    """Delete an incomplete cluster: kind does not if it was interrupted or failed late. Only containers with our token
    are deleted, because another process may have created a cluster of the same name."""
    if _token_of(cluster.name) == cluster.mark:
        kind_cli.run("kind", "delete", "cluster", *_options(cluster))
    elif cluster.name in kind_cli.list_clusters():
        return  # of another owner, or unknown: keep the record, which is harmless
    cluster.delete_record()


def down(name: str) -> LocalCluster | None:
    """Delete a cluster that `up` created, and no other. None if it does not exist."""
    _check_name(name)
    if name not in kind_cli.list_clusters():
        return None
    cluster = _find_own(name)
    kind_cli.run("kind", "delete", "cluster", *_options(cluster))
    cluster.delete_record()
    return cluster


def load_image(name: str, image: str, engine: str | None = None) -> None:
    """Copy a local image to the nodes of any kind cluster, also one not created by `up`. `engine`: the program that has
    the image, if not kind's container provider."""
    _check_name(name)
    known = kind_cli.list_clusters()
    if name not in known:
        raise UsageError(f"There is no kind cluster {name}.", known=known, remedy="Create it: llmtrain cluster up")
    program = kind_cli.provider()
    try:
        if program == "docker" and engine in (None, program):
            kind_cli.run("kind", "load", "docker-image", f"--name={name}", "--", image)
            return
        program = engine or program
        with TemporaryDirectory() as directory:  # `load docker-image` only works with docker
            archive = f"{directory}/image.tar"
            if program == "buildah":
                kind_cli.run(program, "push", "--", image, f"docker-archive:{archive}:{image}")
            else:
                kind_cli.run(program, "save", "-o", archive, "--", image)
            kind_cli.run("kind", "load", "image-archive", f"--name={name}", "--", archive)
    except ClusterError as problem:
        raise UsageError(
            f"Image {image} was not loaded into {name}: {problem.what}",
            remedy=f"List local images with `{program} image ls`; build the llmtrain image with `make k8s-build`.",
        ) from None


def own_cluster_of(context: str) -> str | None:
    """The cluster of a context, if `up` of this user created it."""
    name = context.removeprefix(context_of(""))
    if context != context_of(name):
        return None
    # Not every machine with such a context has kind: ask it only about a cluster that is recorded here.
    recorded = [read_json(file) for file in _record_file("*").parent.glob("*.json")]
    if not any(isinstance(record, dict) and record.get("name") == name for record in recorded):
        return None
    if name not in kind_cli.list_clusters():
        return None
    try:
        return _find_own(name).name
    except UsageError:
        return None


def cluster_config(cluster: LocalCluster) -> Object:
    """The config file of kind (the tool). A single control-plane node also runs pods; with workers it does not."""
    mount = {"hostPath": cluster.runs, "containerPath": cluster.mounted_at}
    roles = ["control-plane"]
    if cluster.nodes > 1:
        roles += ["worker"] * cluster.nodes
    nodes = [{"role": role, "extraMounts": [dict(mount)]} for role in roles]
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes}


def create_claim(cluster: Cluster, directory: str) -> bool:
    """Create the claim and its volume. False if the claim exists."""
    if cluster.get("v1", "PersistentVolumeClaim", CLAIM, NAMESPACE) is not None:
        return False
    for manifest in volume_manifests(directory, NAMESPACE, CLAIM):
        cluster.create(manifest)
    return True


def volume_manifests(directory: str, namespace: str, claim: str) -> list[Object]:
    """A ReadWriteMany volume on a directory of the nodes, and the claim bound to it. kind's storage class only has
    ReadWriteOnce volumes, so no class is used. The name is new each time, because a volume whose claim was deleted
    cannot be bound again."""
    labels = dict(COMMON_LABELS)
    name = f"llmtrain-{claim}-{secrets.token_hex(3)}"
    shared: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume_spec = {
        **shared,
        "capacity": {"storage": SIZE},
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim},
        "hostPath": {"path": directory, "type": "Directory"},
    }
    claim_spec = {**shared, "volumeName": name, "resources": {"requests": {"storage": SIZE}}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name, "labels": labels},
            "spec": volume_spec,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace, "labels": labels},
            "spec": claim_spec,
        },
    ]


def open_directory(directory: Path) -> Path:
    """Create the directory if needed and make it writable for all users: Kubernetes does not change the owner of a host
    directory, and pods run as user 1000. The sticky bit keeps users from deleting each other's files."""
    path = _resolve(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        mode = S_IMODE(path.stat().st_mode)
        if mode & 0o007 != 0o007:
            path.chmod(mode | 0o1007)
    except OSError as problem:
        raise UsageError(
            f"{path} cannot be made writable for pods (user 1000): {problem.strerror}.",
            remedy="Choose a directory you own with --runs, or ask the owner to run chmod o+rwx on it.",
        ) from None
    return path


def _resolve(directory: Path) -> Path:
    path = directory.expanduser().resolve()
    if ":" in str(path):  # mounts are written as FROM:TO
        raise UsageError(f"--runs must not contain a colon, got '{path}'.", remedy="Choose another directory.")
    return path


def _find_own(name: str) -> LocalCluster:
    """The record of a cluster that `up` created. Other clusters are refused."""
    token = _token_of(name)
    record = read_json(_record_file(token)) if token else None
    if not isinstance(record, dict) or record.get("name") != name:
        raise UsageError(
            f"The kind cluster {name} was not created by `llmtrain cluster up` of this user. Nothing was changed.",
            remedy=f"Choose another --name, or delete the cluster yourself: kind delete cluster --name {name}",
        )
    return LocalCluster(**record)


def _record_file(token: str) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # unset, or invalid by the XDG specification
        state = Path.home() / ".local" / "state"
    return state / "llmtrain" / "clusters" / f"{token}.json"


def _options(cluster: LocalCluster) -> list[str]:
    return [f"--name={cluster.name}", *_kubeconfig_option(cluster.kubeconfig)]


def _kubeconfig_option(path: str | None) -> list[str]:
    return [f"--kubeconfig={path}"] if path else []


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,48}[a-z0-9])?", name):
        raise UsageError(f"--name must be up to 50 lowercase letters, digits, hyphens and dots, got '{name}'.")


def _token_of(name: str) -> str | None:
    """The token in the mounts of a cluster's control plane; None if `up` did not create it."""
    for path in kind_cli.mounts_of(f"{name}-control-plane"):
        if match := re.fullmatch(rf"{MOUNT_ROOT}/([0-9a-f]{{16}})", path):
            return match[1]
    return None
