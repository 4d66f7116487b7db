"""A cluster on one's own machine: kind (Kubernetes in Docker), with its runs in a folder of that machine.

kind does the work. Added to it is a volume that all nodes write, and proof of who made the cluster: the place where the
folder is mounted has a random mark in its name, which is written down here before kind is asked. A container keeps its
mounts for life, so the mark is there from its first moment on and also when nothing in it runs any more; and whoever
makes a cluster of the same name by hand has no such mark.
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

from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.files import read_json, write_json
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.kubernetes.labels import COMMON_LABELS
from llmtrain.local_cluster.kind_cli import list_clusters, mounts_of, provider, run

CLAIM, NAMESPACE = "runs", "default"
MOUNTED_AT = "/llmtrain"  # in the nodes; below it is the mark
SIZE = "100Gi"  # a claim must have one; a folder of the host is as large as its disk
WAIT = "180s"


@dataclass(frozen=True)
class LocalCluster:
    """What is written down of a cluster that `up` makes."""

    name: str
    mark: str
    nodes: int
    runs: str
    """Folder of this machine."""
    kubeconfig: str | None
    """Where its context is, if it was named."""

    @property
    def context(self) -> str:
        return context_of(self.name)

    @property
    def mounted_at(self) -> str:
        return f"{MOUNTED_AT}/{self.mark}"

    def write(self) -> None:
        file = _record_file(self.mark)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, asdict(self))
        except OSError as problem:
            raise UsageError(
                f"{file.parent} cannot be written: {problem.strerror}. It says which clusters are ours.",
                remedy="Name a directory of yours in XDG_STATE_HOME.",
            ) from None

    def forget(self) -> None:
        _record_file(self.mark).unlink(missing_ok=True)


@dataclass(frozen=True)
class UpResult:
    cluster: LocalCluster
    is_new: bool
    has_new_claim: bool


def context_of(name: str) -> str:
    """The name kind gives to the context of a cluster."""
    return f"kind-{name}"


def up(name: str, nodes: int, runs: Path | None, image: str | None, kubeconfig: str | None) -> UpResult:
    """Make the cluster, or see that one that is ours has all it needs. One that fails on the way is taken back."""
    _check_name(name)
    if find_spec("kubernetes") is None:  # found out before minutes are spent
        raise UsageError(
            "The Kubernetes client is not installed.", remedy="Install the extra: pip install 'llmtrain[k8s]'."
        )
    if name in list_clusters():
        return _complete(_ours(name), runs, kubeconfig)
    folder = open_folder(runs or Path("runs"))
    file = str(Path(kubeconfig).expanduser().absolute()) if kubeconfig else None  # `down` may be typed elsewhere
    made = LocalCluster(name, secrets.token_hex(8), nodes, str(folder), file)
    made.write()
    try:
        options = ["--config=-", f"--wait={WAIT}", *([f"--image={image}"] if image else [])]
        run("kind", "create", "cluster", *_at(made), *options, input_=yaml.safe_dump(kind_config(made)))
        make_claim(Cluster.connect(file, made.context), made.mounted_at)
    except BaseException:  # Ctrl-C too
        with suppress(LlmtrainError):  # what went wrong first is what is told
            _take_back(made)
        raise
    return UpResult(made, is_new=True, has_new_claim=True)


def _complete(found: LocalCluster, runs: Path | None, kubeconfig: str | None) -> UpResult:
    """A cluster that is there already: its context becomes the current one, and a claim that is missing is made."""
    if runs is not None and str(_resolve(runs)) != found.runs:
        raise UsageError(
            f"Cluster {found.name} is there already, and keeps its runs in {found.runs}; that cannot be changed.",
            remedy=f"Leave --runs out, or make it anew: llmtrain cluster down --name {found.name}",
        )
    where = kubeconfig or found.kubeconfig
    try:
        run("kind", "export", "kubeconfig", f"--name={found.name}", *_kubeconfig(where))
        has_new_claim = make_claim(Cluster.connect(where, found.context), found.mounted_at)
    except ClusterError as problem:
        raise ClusterError(
            f"Cluster {found.name} is there, but does not work: {problem.what}",
            remedy=f"Its containers may have been stopped: start them, or llmtrain cluster down --name {found.name}.",
        ) from None
    return UpResult(found, is_new=False, has_new_claim=has_new_claim)


def _take_back(made: LocalCluster) -> None:
    """kind removes what it could not finish, but not if it is interrupted, or if it comes as far as the kubeconfig.
    Only containers with our mark are touched: somebody else may have been faster with the same name."""
    if _mark_of(made.name) == made.mark:
        run("kind", "delete", "cluster", *_at(made))
    elif made.name in list_clusters():
        return  # somebody else's, or one that does not say whose: what is written down does no harm
    made.forget()


def down(name: str) -> LocalCluster | None:
    """Remove a cluster that `up` made, and nothing else. None where there is none."""
    _check_name(name)
    if name not in list_clusters():
        return None
    found = _ours(name)
    run("kind", "delete", "cluster", *_at(found))
    found.forget()
    return found


def load_image(name: str, image: str) -> None:
    """Copy an image of this machine to the nodes of any kind cluster, ours or not."""
    _check_name(name)
    known = list_clusters()
    if name not in known:
        raise UsageError(f"There is no kind cluster {name}.", known=known, remedy="Make it: llmtrain cluster up")
    maker = provider()
    try:
        if maker == "docker":
            run("kind", "load", "docker-image", f"--name={name}", "--", image)
            return
        with TemporaryDirectory() as folder:  # `docker-image` asks docker, whatever the nodes are made with
            archive = f"{folder}/image.tar"
            run(maker, "save", "-o", archive, "--", image)
            run("kind", "load", "image-archive", f"--name={name}", "--", archive)
    except ClusterError as problem:
        raise UsageError(
            f"Image {image} was not loaded into {name}: {problem.what}",
            remedy=f"`{maker} image ls` lists the images that there are; `make k8s-build` builds ours.",
        ) from None


def kind_config(cluster: LocalCluster) -> Object:
    """What kind is asked for. A lone control plane takes pods; beside workers it does not."""
    mount = {"hostPath": cluster.runs, "containerPath": cluster.mounted_at}
    workers = cluster.nodes if cluster.nodes > 1 else 0
    roles = ["control-plane", *["worker"] * workers]
    nodes = [{"role": role, "extraMounts": [dict(mount)]} for role in roles]
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes}


def make_claim(cluster: Cluster, folder: str) -> bool:
    """The claim, with a volume for it alone. False where there is one already, whoever made it."""
    if cluster.get("v1", "PersistentVolumeClaim", CLAIM, NAMESPACE) is not None:
        return False
    for manifest in volume_manifests(folder, NAMESPACE, CLAIM):
        cluster.create(manifest)
    return True


def volume_manifests(folder: str, namespace: str, claim: str) -> list[Object]:
    """A folder of the nodes as a volume that all of them write, and the claim on it. kind's own storage class has only
    volumes for one node. No class: none is to be asked. A new name each time: a volume whose claim was deleted serves
    nobody else."""
    labels = dict(COMMON_LABELS)
    name = f"llmtrain-{claim}-{secrets.token_hex(3)}"
    shared: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        **shared,
        "capacity": {"storage": SIZE},
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim},
        "hostPath": {"path": folder, "type": "Directory"},
    }
    wish = {**shared, "volumeName": name, "resources": {"requests": {"storage": SIZE}}}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name, "labels": labels}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace, "labels": labels},
            "spec": wish,
        },
    ]


def open_folder(folder: Path) -> Path:
    """Made if it is missing, and opened to everybody: Kubernetes does not change who owns a folder of the host, and
    pods are user 1000, which may be anybody on this machine (with rootless Docker, nobody it knows). Sticky, so that
    files can still be removed only by those who own them."""
    path = _resolve(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        mode = S_IMODE(path.stat().st_mode)
        if mode & 0o007 != 0o007:
            path.chmod(mode | 0o1007)
    except OSError as problem:
        raise UsageError(
            f"{path} cannot be used for runs, which pods (user 1000) must be able to write there: {problem.strerror}.",
            remedy="Name a directory of yours with --runs; if this one is somebody else's, it needs chmod o+rwx.",
        ) from None
    return path


def _resolve(folder: Path) -> Path:
    path = folder.expanduser().resolve()
    if ":" in str(path):  # what is mounted where is written FROM:TO
        raise UsageError(f"{path} cannot be mounted: it has a colon in it.", remedy="Name another with --runs.")
    return path


def _ours(name: str) -> LocalCluster:
    """What was written down when `up` made the cluster of that name; refused where it did not."""
    mark = _mark_of(name)
    found = read_json(_record_file(mark)) if mark else None
    if not isinstance(found, dict) or found.get("name") != name:
        raise UsageError(
            f"The kind cluster {name} was not made by `llmtrain cluster up` of this account. Nothing was changed.",
            remedy=f"Choose another with --name. If it is yours, you can remove it: kind delete cluster --name {name}",
        )
    return LocalCluster(**found)


def _record_file(mark: str) -> Path:
    named = os.environ.get("XDG_STATE_HOME", "")
    state = Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "state"
    return state / "llmtrain" / "clusters" / f"{mark}.json"


def _at(cluster: LocalCluster) -> list[str]:
    return [f"--name={cluster.name}", *_kubeconfig(cluster.kubeconfig)]


def _kubeconfig(path: str | None) -> list[str]:
    return [f"--kubeconfig={path}"] if path else []


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,48}[a-z0-9])?", name):
        raise UsageError(
            f"A cluster cannot be called '{name}'.", remedy="Use up to 50 lower-case letters, digits, hyphens and dots."
        )


def _mark_of(name: str) -> str | None:
    """The mark on the control plane of a cluster. None: it is nothing of ours."""
    marks = (re.fullmatch(rf"{MOUNTED_AT}/([0-9a-f]{{16}})", place) for place in mounts_of(f"{name}-control-plane"))
    return next((found[1] for found in marks if found), None)
