"""Operators for a local cluster: the manifests their projects publish, at the versions llmtrain is tested with."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.local_cluster import kind_cli

WAIT = "300s"  # for images to be pulled


@dataclass(frozen=True)
class Operator:
    version: str
    source: tuple[str, str]
    """Arguments of `kubectl apply`: -k or -f, and a URL."""
    namespace: str
    deployments: tuple[str, ...]


JOBSET = "jobset-controller-manager"
# The same commands as in docs/kinds/*.md; a test compares them.
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
        ("kubeflow-trainer-controller-manager", JOBSET),  # its manifests include the same JobSet
    ),
}


def choose_operators(names_option: str | None) -> list[str]:
    """Parse `jobset,trainer` into names in install order. Raises if kubectl is missing."""
    if names_option is None:
        return []
    names = [name.strip() for name in names_option.split(",")]
    for name in names:
        if name not in OPERATORS:
            raise UsageError(f"--with '{name}' is unknown.", known=OPERATORS, remedy="Separate names by commas.")
    if "trainer" in names and "jobset" in names:
        names = [name for name in names if name != "jobset"]  # the Trainer includes it
    if shutil.which("kubectl") is None:
        raise UsageError(
            "--with needs kubectl, which is not installed.",
            remedy="Install it (https://kubernetes.io/docs/tasks/tools), or omit --with.",
        )
    return [name for name in OPERATORS if name in names]


def install_operators(cluster: Cluster, names: Sequence[str], context: str, kubeconfig: str | None) -> None:
    """Apply each operator and wait until it is available. An installed one is changed to the tested version."""
    options = [f"--context={context}"]
    if kubeconfig:
        options.append(f"--kubeconfig={kubeconfig}")
    for name in names:
        operator = OPERATORS[name]
        if name == "jobset" and _has_jobset(cluster, OPERATORS["trainer"]):
            continue
        if name == "trainer" and _has_jobset(cluster, OPERATORS["jobset"]):
            raise UsageError(
                f"JobSet is already installed in namespace {OPERATORS['jobset'].namespace}, and the Trainer includes "
                "its own: two controllers would reconcile the same objects.",
                remedy=f"Remove the first one (kubectl delete {' '.join(OPERATORS['jobset'].source)}), then try again.",
            )
        try:
            kind_cli.run("kubectl", "apply", "--server-side", *operator.source, *options)
            for deployment in operator.deployments:
                wait = [f"--namespace={operator.namespace}", "--for=condition=Available", f"--timeout={WAIT}"]
                kind_cli.run("kubectl", "wait", f"deployment/{deployment}", *wait, *options)
        except ClusterError as problem:
            raise ClusterError(
                f"{name} {operator.version} was not installed: {problem.what}",
                remedy="The cluster itself is running. Run the command again; kubectl needs git and network access.",
            ) from None


def _has_jobset(cluster: Cluster, operator: Operator) -> bool:
    return cluster.get("apps/v1", "Deployment", JOBSET, operator.namespace) is not None
