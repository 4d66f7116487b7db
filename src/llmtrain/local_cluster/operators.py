"""Operators for a cluster of one's own: the installs that their projects publish, at the versions we test with."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.local_cluster.kind_cli import run

WAIT = "300s"  # for images to be pulled


@dataclass(frozen=True)
class Operator:
    version: str
    source: tuple[str, str]
    """What `kubectl apply` is given: -k or -f, and an address."""
    namespace: str
    deployments: tuple[str, ...]


JOBSET = "jobset-controller-manager"
# The commands of docs/kinds/*.md; a test compares them.
OPERATORS = {
    "training-operator": Operator(
        "v1.9.3",
        ("-k", "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3"),
        "kubeflow",
        ("training-operator",),
    ),
    "jobset": Operator(
        "v0.10.1",
        ("-f", "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml"),
        "jobset-system",
        (JOBSET,),
    ),
    "trainer": Operator(
        "v2.1.0",
        ("-k", "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.1.0"),
        "kubeflow-system",
        ("kubeflow-trainer-controller-manager", JOBSET),  # it brings the same JobSet along
    ),
}


def choose_operators(given: str | None) -> list[str]:
    """Names out of `jobset,trainer`, in the order of installing. What is missing for that is told."""
    names = [] if given is None else [name.strip() for name in given.split(",")]
    if unknown := [name for name in names if name not in OPERATORS]:
        raise UsageError(f"--with: there is no operator '{unknown[0]}'.", known=OPERATORS, remedy="Separate by commas.")
    if names and shutil.which("kubectl") is None:
        raise UsageError(
            "kubectl is not installed, which --with installs operators by.",
            remedy="Install it (https://kubernetes.io/docs/tasks/tools), or leave --with out.",
        )
    return [name for name in OPERATORS if name in names and not (name == "jobset" and "trainer" in names)]


def install_operators(cluster: Cluster, names: Sequence[str], context: str, kubeconfig: str | None) -> None:
    """Apply each, and wait until it is available. One that is there already is brought to the version."""
    place = [f"--context={context}", *([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])]
    for name in names:
        operator = OPERATORS[name]
        if name == "jobset" and _has_jobset(cluster, OPERATORS["trainer"]):
            continue
        if name == "trainer" and _has_jobset(cluster, OPERATORS["jobset"]):
            raise UsageError(
                f"JobSet is installed in namespace {OPERATORS['jobset'].namespace}, and the Trainer brings its own: "
                "two controllers would handle the same objects.",
                remedy=f"Remove the first (kubectl delete {' '.join(OPERATORS['jobset'].source)}), then try again.",
            )
        try:
            run("kubectl", "apply", "--server-side", *operator.source, *place)
            for deployment in operator.deployments:
                wait = [f"--namespace={operator.namespace}", "--for=condition=Available", f"--timeout={WAIT}"]
                run("kubectl", "wait", f"deployment/{deployment}", *wait, *place)
        except ClusterError as problem:
            raise ClusterError(
                f"{name} {operator.version} was not installed: {problem.what}",
                remedy="The cluster itself is up. The same command tries again; kubectl needs git and a network.",
            ) from None


def _has_jobset(cluster: Cluster, operator: Operator) -> bool:
    return cluster.get("apps/v1", "Deployment", JOBSET, operator.namespace) is not None
