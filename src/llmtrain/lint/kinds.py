"""Kubernetes kinds that create pods: where each has its pod templates, how many pods it creates, and which labels the
cluster adds to them. The rest of the linter does not need to know these differences."""

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.lint.yaml_nodes import Node

RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
OPERATOR_KINDS = ("PyTorchJob", "TrainJob", *RUNTIMES)
JOBSET_KINDS = ("JobSet", *RUNTIMES)
REPLICATED = ("StatefulSet", "Deployment", "ReplicaSet", "DaemonSet")
KINDS = ("Job", "CronJob", "Pod", "PodTemplate", "JobSet", *REPLICATED, *OPERATOR_KINDS)
"""Kinds that are checked; others are skipped."""
ANY = "*"
"""The value of a label that the cluster sets."""


@dataclass(frozen=True)
class PodGroup:
    """Pods with one template."""

    template: Node
    count: int | None
    """Number of pods; None if the files do not contain it."""
    role: str = ""
    job: Node | None = None
    """The spec of the Job that creates them."""


def pod_groups(node: Node) -> Iterator[PodGroup]:
    """The pods of an object, except those of a TrainJob: the larger part of their template is in its runtime."""
    spec = node.get("spec")
    kind = node.get("kind").text
    if kind == "Pod":
        yield PodGroup(node, 1)
    elif kind == "PodTemplate":
        yield PodGroup(node.get("template"), None)
    elif kind == "DaemonSet":
        yield PodGroup(spec.get("template"), None)  # one per node of the cluster
    elif kind in REPLICATED:
        yield PodGroup(spec.get("template"), _replicas(spec))
    elif kind == "Job":
        yield _job_pods(spec)
    elif kind == "CronJob":
        yield _job_pods(spec.get("jobTemplate", "spec"))
    elif kind == "PyTorchJob":
        for role, replica in spec.get("pytorchReplicaSpecs").items():
            yield PodGroup(replica.get("template"), _replicas(replica), role)
    elif kind == "JobSet":
        for replicated in spec.get("replicatedJobs"):
            yield _replicated_pods(replicated)
    elif kind in RUNTIMES:
        for replicated in spec.get("template", "spec", "replicatedJobs"):
            # The number of pods is the TrainJob's.
            job = replicated.get("template", "spec")
            yield PodGroup(job.get("template"), None, replicated.get("name").text, job)


def _job_pods(job: Node) -> PodGroup:
    return PodGroup(job.get("template"), _job_size(job), job=job)


def _replicated_pods(replicated: Node) -> PodGroup:
    """The pods of all copies of a Job in a JobSet."""
    job = replicated.get("template", "spec")
    size = _job_size(job)
    copies = _replicas(replicated)
    count = None
    if size is not None and copies is not None:
        count = size * copies
    return PodGroup(job.get("template"), count, replicated.get("name").text, job)


def _replicas(node: Node) -> int | None:
    """1 is the default of Kubernetes; None if it is not a number, such as a variable of Kustomize."""
    replicas = node.get("replicas")
    if not replicas.exists:
        return 1
    return replicas.number


def _job_size(job: Node) -> int | None:
    """Number of pods: the larger of completions and parallelism; None if one of them is not a number."""
    sizes = []
    for name in ("completions", "parallelism"):
        field = job.get(name)
        if not field.exists:
            continue
        if field.number is None:
            return None
        sizes.append(field.number)
    return max(sizes, default=1)


def cluster_labels(kind: str, name: str, group: PodGroup) -> dict[str, str]:
    """The labels that controllers add to the pods of this object; Services may select by them."""
    if kind == "PyTorchJob":
        return {
            "training.kubeflow.org/job-name": name,
            "training.kubeflow.org/replica-type": group.role.lower(),
            "training.kubeflow.org/replica-index": ANY,
            "training.kubeflow.org/operator-name": ANY,
            "training.kubeflow.org/job-role": group.role.lower(),
        }
    if kind == "StatefulSet":
        return {"statefulset.kubernetes.io/pod-name": ANY, "apps.kubernetes.io/pod-index": ANY}
    labels: dict[str, str] = {}
    if group.job is not None:
        # A CronJob or JobSet creates Jobs under names of its own making.
        job_name = name if kind == "Job" else ANY
        labels = {
            "batch.kubernetes.io/job-name": job_name,
            "job-name": job_name,
            "batch.kubernetes.io/job-completion-index": ANY,
            "batch.kubernetes.io/controller-uid": ANY,
            "controller-uid": ANY,
        }
    if kind in JOBSET_KINDS:
        labels |= {
            "jobset.sigs.k8s.io/jobset-name": name if kind == "JobSet" else ANY,
            "jobset.sigs.k8s.io/replicatedjob-name": group.role,
            "jobset.sigs.k8s.io/job-index": ANY,
            "jobset.sigs.k8s.io/job-key": ANY,
            "jobset.sigs.k8s.io/replicatedjob-replicas": ANY,
        }
    return labels
