"""PyTorchJob (Training Operator v1) and TrainJob with its runtimes (Kubeflow Trainer v2)."""

import re
from collections.abc import Iterator

from llmtrain.core.env import EXIT_CODES
from llmtrain.lint.kinds import RUNTIMES
from llmtrain.lint.manifests import Pod, Workload
from llmtrain.lint.rules.rule import Match, rule, shorten, training_pods, workloads
from llmtrain.lint.yaml_nodes import Node

NPROC = "nprocPerNode"
INJECTED = "PET_"
OVERRIDES = ("podTemplateOverrides", "podSpecOverrides")
NOT_OVERRIDABLE = ("securityContext", "terminationGracePeriodSeconds", "podFailurePolicy")
_RFC_1035 = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
pytorch_jobs = workloads("PyTorchJob")
train_jobs = workloads("TrainJob")
runtimes = workloads(*RUNTIMES)


@rule(
    "nproc-misspelt",
    "error",
    "misspelled nprocPerNode in a PyTorchJob",
    why="The field is rejected or silently dropped, and every pod runs one process on one of its GPUs.",
    remedy='Use the exact spelling, directly below spec: nprocPerNode: "8".',
    over=pytorch_jobs,
)
def nproc_misspelt(job: Workload) -> Iterator[Match]:
    for key, node in job.node.get("spec").items():
        letters = key.lower().replace("_", "")
        if key != NPROC and letters in ("nprocpernode", "numprocpernode", "nprocspernode"):
            yield Match(node, f"{key} is not a field of a PyTorchJob")


@rule(
    "nproc-not-a-string",
    "error",
    "nprocPerNode is not a string",
    why="The CRD requires a string and rejects a number.",
    remedy='Quote it: nprocPerNode: "8".',
    over=pytorch_jobs,
)
def nproc_not_a_string(job: Workload) -> Iterator[Match]:
    node = job.node.get("spec", NPROC)
    if node.exists and not isinstance(node.value, str):
        yield Match(node, f"nprocPerNode is the number {shorten(node.text)}, not a string")


@rule(
    "pytorch-container-name",
    "error",
    "PyTorchJob without a container named pytorch",
    why="The operator requires a container of that name and rejects the job without it.",
    remedy="Name the training container pytorch.",
    over=training_pods,
)
def pytorch_container_name(pod: Pod) -> Iterator[Match]:
    names = [container.name for container in pod.containers]
    if pod.workload.kind == "PyTorchJob" and names and "pytorch" not in names:
        listed = _listed(names) or "unnamed"
        yield Match(pod.containers[0].node.get("name"), f"no container is named pytorch, only {listed}")


def _listed(names: list[str]) -> str:
    """Names of containers; those without a name are left out."""
    return shorten(", ".join(name for name in names if name))


@rule(
    "master-replicas",
    "error",
    "Master without `replicas: 1`",
    why="The operator's webhook rejects a Master whose replicas are not set, or are not 1.",
    remedy="Set replicas: 1 in Master.",
    over=pytorch_jobs,
)
def master_replicas(job: Workload) -> Iterator[Match]:
    master = job.node.get("spec", "pytorchReplicaSpecs", "Master")
    if master.exists and master.get("replicas").number != 1:
        yield Match(master.get("replicas"), f"replicas of Master is {shorten(master.get('replicas').text) or 'unset'}")


@rule(
    "master-in-restricted",
    "error",
    "PyTorchJob with Master and workers in a namespace that enforces `restricted`",
    why="With a Master every worker gets an init container (alpine, without securityContext), which Pod "
    "Security rejects.",
    remedy="Use workers only, without Master and elasticPolicy, and <job>-worker-0 as the endpoint.",
    over=pytorch_jobs,
)
def master_in_restricted(job: Workload) -> Iterator[Match]:
    specs = job.node.get("spec", "pytorchReplicaSpecs")
    if not specs.get("Master").exists or not specs.get("Worker").exists:
        return
    if job.is_in_restricted_namespace:
        yield Match(specs.get("Master"), "workers are rejected because of their init container (init-pytorch)")


@rule(
    "exit-code-permanent",
    "advice",
    "restartPolicy: ExitCode with a program that exits with small codes",
    why="Exit codes 1 to 127 are permanent: torchrun and any Python error exit with 1, so a lost peer fails the job.",
    remedy="Use OnFailure with runPolicy.backoffLimit, or exit with 128 or more if a restart may help.",
    over=training_pods,
)
def exit_code_permanent(pod: Pod) -> Iterator[Match]:
    policy = _replica(pod).get("restartPolicy")
    # With EXIT_CODES `llmtrain node` adds 128 to the codes of failures that a restart may help.
    is_translated = any(EXIT_CODES in container.variables for container in pod.containers)
    if policy.text == "ExitCode" and not is_translated:
        yield Match(policy, "restartPolicy is ExitCode")


@rule(
    "never-restarts",
    "advice",
    "restartPolicy: Never in a PyTorchJob",
    why="One evicted pod fails the whole job.",
    remedy="Use OnFailure with runPolicy.backoffLimit, and resume from the last checkpoint.",
    over=training_pods,
)
def never_restarts(pod: Pod) -> Iterator[Match]:
    policy = _replica(pod).get("restartPolicy")
    if policy.text == "Never":
        yield Match(policy, "restartPolicy is Never")


@rule(
    "endless-restarts",
    "advice",
    "OnFailure in a PyTorchJob without a limit",
    why="OnFailure restarts after any exit code: a configuration error is retried forever.",
    remedy="Set runPolicy.backoffLimit.",
    over=pytorch_jobs,
)
def endless_restarts(job: Workload) -> Iterator[Match]:
    limit = job.node.get("spec", "runPolicy", "backoffLimit")
    policies = {_replica(pod).get("restartPolicy").text for pod in job.pods}
    if policies & {"", "OnFailure", "Always"} and not limit.exists:
        yield Match(limit, f"PyTorchJob {job.name} has no backoffLimit")


def _replica(pod: Pod) -> Node:
    """The pod's entry in pytorchReplicaSpecs; for other kinds a missing field."""
    if pod.workload.kind != "PyTorchJob":
        return Node(None, pod.workload.node.line, pod.workload.node.source)
    return pod.workload.node.get("spec", "pytorchReplicaSpecs", pod.role)


@rule(
    "pod-rank-as-process-rank",
    "error",
    "RANK and WORLD_SIZE of a PyTorchJob with several processes per pod",
    why="The operator's RANK counts pods and its WORLD_SIZE processes: without torchrun most processes are "
    "missing, and as --nnodes the WORLD_SIZE is too large.",
    remedy="Use torchrun, which reads PET_NNODES and PET_NODE_RANK, and pass it neither of the two.",
    over=training_pods,
)
def pod_rank_as_process_rank(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind != "PyTorchJob" or (pod.workload.processes.number or 1) < 2:
        return
    for container in pod.containers:
        nnodes = container.flags.get("nnodes")
        if nnodes is not None and "WORLD_SIZE" in nnodes.value:
            yield Match(nnodes.node, f"--nnodes is {shorten(nnodes.raw)}", nnodes.line)
        elif re.search(r"\bpython[\d.]*\b", container.command_line) and not container.is_launched:
            processes = pod.workload.processes.number
            yield Match(container.entries[0], f"{processes} processes per pod, started without torchrun")


@rule(
    "trainjob-sets-pet",
    "error",
    "TrainJob that sets PET_ variables",
    why="The operator injects them, and its webhook rejects a TrainJob that sets them.",
    remedy="Remove them; use trainer.numNodes and trainer.numProcPerNode.",
    over=train_jobs,
)
def trainjob_sets_pet(job: Workload) -> Iterator[Match]:
    for row in job.node.get("spec", "trainer", "env"):
        name = row.get("name")
        if name.text.startswith(INJECTED):
            yield Match(name, f"the TrainJob sets {shorten(name.text)}")


@rule(
    "trainjob-name",
    "error",
    "name of a TrainJob is not RFC 1035",
    why="It becomes the name of a Service, which must start with a letter; the webhook rejects other names.",
    remedy="Use at most 63 lowercase letters, digits and hyphens, starting with a letter.",
    over=train_jobs,
)
def trainjob_name(job: Workload) -> Iterator[Match]:
    if job.name and not _RFC_1035.fullmatch(job.name):
        yield Match(job.node.get("metadata", "name"), f"name {shorten(job.name)} is not RFC 1035")


@rule(
    "trainjob-override-field",
    "error",
    "TrainJob override of a field that cannot be overridden",
    why="podTemplateOverrides and podSpecOverrides do not have this field: it is rejected or dropped, and the "
    "pods are unchanged.",
    remedy="Create your own TrainingRuntime with the whole pod template, and refer to it in runtimeRef.",
    over=train_jobs,
)
def trainjob_override_field(job: Workload) -> Iterator[Match]:
    for field in OVERRIDES:
        for row in job.node.get("spec", field):
            spec = row.get("spec")
            containers = [*row.get("containers"), *spec.get("containers"), *spec.get("initContainers")]
            for place in (row, spec, *containers):
                for name in NOT_OVERRIDABLE:
                    if place.get(name).exists:
                        yield Match(place.get(name), f"{field} sets {name}")


@rule(
    "trainjob-stock-runtime",
    "advice",
    "TrainJob with a cluster-wide runtime that is not in the files",
    why="Stock runtimes set no securityContext, podFailurePolicy or grace period, fail in `restricted` "
    "namespaces, and cannot be changed from the TrainJob.",
    remedy="Create a TrainingRuntime for the run, with the whole pod template, and lint it together with the TrainJob.",
    over=train_jobs,
)
def trainjob_stock_runtime(job: Workload) -> Iterator[Match]:
    reference = job.node.get("spec", "runtimeRef")
    if job.runtime is None and reference.get("kind").text in ("", "ClusterTrainingRuntime"):
        yield Match(reference, f"runtimeRef is the cluster-wide {shorten(reference.get('name').text)}")


@rule(
    "runtime-container-name",
    "error",
    "trainer container in a runtime is not named node",
    why="The operator applies image, command and variables of the TrainJob to the container `node` only.",
    remedy="Name the replicated job and its container node.",
    over=runtimes,
)
def runtime_container_name(runtime: Workload) -> Iterator[Match]:
    for row in runtime.node.get("spec", "template", "spec", "replicatedJobs"):
        step = row.get("template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step").text
        if row.get("name").text != "node" and step != "trainer":
            continue
        containers = list(row.get("template", "spec", "template", "spec", "containers"))
        names = [container.get("name").text for container in containers]
        if containers and "node" not in names:
            yield Match(containers[0].get("name"), f"no container is named node, only {_listed(names)}")


RULES = (
    nproc_misspelt,
    nproc_not_a_string,
    pytorch_container_name,
    master_replicas,
    master_in_restricted,
    exit_code_permanent,
    never_restarts,
    endless_restarts,
    pod_rank_as_process_rank,
    trainjob_sets_pet,
    trainjob_name,
    trainjob_override_field,
    trainjob_stock_runtime,
    runtime_container_name,
)
