"""PyTorchJob (Training Operator v1) and TrainJob with its runtimes (Kubeflow Trainer v2)."""

import re
from collections.abc import Iterator

from llmtrain.env import EXIT_CODES
from llmtrain.lint.model import RUNTIMES, Pod, Workload
from llmtrain.lint.rules.rule import Seen, rule, shown, training_pods, workloads
from llmtrain.lint.yaml_nodes import Node

NPROC = "nprocPerNode"
INJECTED = "PET_"
OVERRIDES = ("podTemplateOverrides", "podSpecOverrides")
NOT_OVERRIDABLE = ("securityContext", "terminationGracePeriodSeconds", "podFailurePolicy")
_RFC_1035 = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
pytorch_jobs, train_jobs, runtimes = workloads("PyTorchJob"), workloads("TrainJob"), workloads(*RUNTIMES)


@rule(
    "nproc-misspelt",
    "error",
    "nprocPerNode of a PyTorchJob in another spelling",
    why="The field is refused, or dropped without a word, and every pod runs one process on one of its GPUs.",
    fix='Write nprocPerNode: "8", spelled exactly so, directly below spec.',
    over=pytorch_jobs,
)
def nproc_misspelt(job: Workload) -> Iterator[Seen]:
    for key, node in job.node.get("spec").items():
        if key != NPROC and key.lower().replace("_", "") in ("nprocpernode", "numprocpernode", "nprocspernode"):
            yield Seen(node, f"{key} is not a field of a PyTorchJob")


@rule(
    "nproc-not-a-string",
    "error",
    "nprocPerNode is not a string",
    why="The CRD wants a string and refuses a number.",
    fix='Put it in quotes: nprocPerNode: "8".',
    over=pytorch_jobs,
)
def nproc_not_a_string(job: Workload) -> Iterator[Seen]:
    node = job.node.get("spec", NPROC)
    if node.exists and not isinstance(node.value, str):
        yield Seen(node, f"nprocPerNode is {shown(node.text)} without quotes")


@rule(
    "pytorch-container-name",
    "error",
    "no container of a PyTorchJob is called pytorch",
    why="The operator looks for the container of that name and refuses the job without it.",
    fix="Name the training container pytorch.",
    over=training_pods,
)
def pytorch_container_name(pod: Pod) -> Iterator[Seen]:
    names = [container.name for container in pod.containers]
    if pod.workload.kind == "PyTorchJob" and names and "pytorch" not in names:
        where = pod.containers[0].node.get("name")
        yield Seen(where, f"{pod.role} has {shown(', '.join(names)) or 'no name'}")


@rule(
    "master-replicas",
    "error",
    "a Master without `replicas: 1`",
    why="The operator's webhook refuses a Master whose number is not written out, or is not 1.",
    fix="Write replicas: 1 in Master.",
    over=pytorch_jobs,
)
def master_replicas(job: Workload) -> Iterator[Seen]:
    master = job.node.get("spec", "pytorchReplicaSpecs", "Master")
    if master.exists and master.get("replicas").number != 1:
        yield Seen(master.get("replicas"), f"replicas is {shown(master.get('replicas').text) or 'missing'}")


@rule(
    "master-in-restricted",
    "error",
    "a PyTorchJob with Master and workers in a namespace that enforces `restricted`",
    why="Beside a Master every worker gets an init container (alpine, no securityContext), which Pod Security refuses.",
    fix="Use workers only, without Master and elasticPolicy, and meet at <job>-worker-0.",
    over=pytorch_jobs,
)
def master_in_restricted(job: Workload) -> Iterator[Seen]:
    specs = job.node.get("spec", "pytorchReplicaSpecs")
    is_restricted = any(_is_restricted(node, job) for node in job.manifests.of_kind("Namespace"))
    if specs.get("Master").exists and specs.get("Worker").exists and is_restricted:
        yield Seen(specs.get("Master"), "its workers will be refused (init-pytorch)")


def _is_restricted(namespace: Node, job: Workload) -> bool:
    metadata = namespace.get("metadata")
    is_its_own = not job.namespace or metadata.get("name").text == job.namespace
    return is_its_own and metadata.get("labels", "pod-security.kubernetes.io/enforce").text == "restricted"


@rule(
    "exit-code-permanent",
    "advice",
    "restartPolicy: ExitCode with a program that ends with small codes",
    why="1 to 127 is permanent there: torchrun, and any Python error, ends with 1, so that a lost peer fails the job.",
    fix="Use OnFailure with runPolicy.backoffLimit, or end with 128 and more when a restart may help.",
    over=training_pods,
)
def exit_code_permanent(pod: Pod) -> Iterator[Seen]:
    policy = _replica(pod).get("restartPolicy")
    if policy.text == "ExitCode" and not any(EXIT_CODES in c.variables for c in pod.containers):
        yield Seen(policy, f"{pod.role} has restartPolicy ExitCode")


@rule(
    "never-restarts",
    "advice",
    "restartPolicy: Never in a PyTorchJob",
    why="One evicted pod ends the whole job.",
    fix="Use OnFailure with runPolicy.backoffLimit, and resume from the last checkpoint.",
    over=training_pods,
)
def never_restarts(pod: Pod) -> Iterator[Seen]:
    policy = _replica(pod).get("restartPolicy")
    if policy.text == "Never":
        yield Seen(policy, f"{pod.role} has restartPolicy Never")


@rule(
    "endless-restarts",
    "advice",
    "OnFailure in a PyTorchJob without a limit",
    why="OnFailure restarts whatever the exit code was: a mistake in the config is tried for ever, on paid GPUs.",
    fix="Set runPolicy.backoffLimit.",
    over=pytorch_jobs,
)
def endless_restarts(job: Workload) -> Iterator[Seen]:
    policies = [_replica(pod).get("restartPolicy") for pod in job.pods]
    is_endless = any(policy.text in ("", "OnFailure", "Always") for policy in policies)
    limit = job.node.get("spec", "runPolicy", "backoffLimit")
    if is_endless and not limit.exists:
        yield Seen(limit, f"PyTorchJob {job.name} has no backoffLimit")


def _replica(pod: Pod) -> Node:
    if pod.workload.kind != "PyTorchJob":
        return pod.workload.node.get("no such field")
    return pod.workload.node.get("spec", "pytorchReplicaSpecs", pod.role)


@rule(
    "pod-rank-as-process-rank",
    "error",
    "RANK and WORLD_SIZE of a PyTorchJob with several processes in a pod",
    why="The operator's RANK counts pods and its WORLD_SIZE processes: without torchrun most processes are missing, "
    "and as --nnodes the WORLD_SIZE is too large.",
    fix="Start with torchrun, which reads PET_NNODES and PET_NODE_RANK, and pass it neither of the two.",
    over=training_pods,
)
def pod_rank_as_process_rank(pod: Pod) -> Iterator[Seen]:
    if pod.workload.kind != "PyTorchJob" or (pod.workload.processes.number or 1) < 2:
        return
    for container in pod.containers:
        nnodes = container.flags.get("nnodes")
        if nnodes is not None and "WORLD_SIZE" in nnodes.value:
            yield Seen(nnodes.node, f"--nnodes is {shown(nnodes.raw)}", nnodes.line)
        elif re.search(r"\bpython[\d.]*\b", container.command_line) and not container.is_launched:
            processes = pod.workload.processes.number
            yield Seen(container.entries[0], f"{processes} processes per pod, started without torchrun")


@rule(
    "trainjob-sets-pet",
    "error",
    "a TrainJob that sets PET_ variables itself",
    why="The operator injects them and its webhook refuses a TrainJob that sets them.",
    fix="Leave them out; use trainer.numNodes and trainer.numProcPerNode.",
    over=train_jobs,
)
def trainjob_sets_pet(job: Workload) -> Iterator[Seen]:
    for row in job.node.get("spec", "trainer", "env"):
        name = row.get("name")
        if name.text.startswith(INJECTED):
            yield Seen(name, f"{shown(name.text)} is set")


@rule(
    "trainjob-name",
    "error",
    "the name of a TrainJob is not RFC 1035",
    why="It becomes the name of a Service, which has to begin with a letter; the webhook refuses others.",
    fix="Use lower-case letters, digits and hyphens, a letter first, at most 63.",
    over=train_jobs,
)
def trainjob_name(job: Workload) -> Iterator[Seen]:
    if job.name and not _RFC_1035.fullmatch(job.name):
        yield Seen(job.node.get("metadata", "name"), f"the name is {shown(job.name)}")


@rule(
    "trainjob-override-field",
    "error",
    "an override of a TrainJob that sets what overrides cannot",
    why="podTemplateOverrides and podSpecOverrides have no such field: it is refused or dropped, and the pods stay as "
    "they were.",
    fix="Render a TrainingRuntime of your own with the whole pod template, and refer to it in runtimeRef.",
    over=train_jobs,
)
def trainjob_override_field(job: Workload) -> Iterator[Seen]:
    for field in OVERRIDES:
        for row in job.node.get("spec", field):
            containers = [one for part in ("containers", "initContainers") for one in (row.get("spec", part))]
            for place in (row, row.get("spec"), *row.get("containers"), *containers):
                for name in NOT_OVERRIDABLE:
                    if place.get(name).exists:
                        yield Seen(place.get(name), f"{field} sets {name}")


@rule(
    "trainjob-stock-runtime",
    "advice",
    "a TrainJob with a cluster-wide runtime that is not in the files",
    why="Stock runtimes set no securityContext, podFailurePolicy or grace period, fail in `restricted` namespaces, and "
    "cannot be changed from the TrainJob.",
    fix="Render a TrainingRuntime for the run, with the whole pod template, and lint it along with the TrainJob.",
    over=train_jobs,
)
def trainjob_stock_runtime(job: Workload) -> Iterator[Seen]:
    reference = job.node.get("spec", "runtimeRef")
    if job.runtime is None and reference.get("kind").text in ("", "ClusterTrainingRuntime"):
        yield Seen(reference, f"the runtime is {shown(reference.get('name').text)}")


@rule(
    "runtime-container-name",
    "error",
    "the trainer's container in a runtime is not called node",
    why="The operator puts image, command and variables of the TrainJob into the container `node`; others get nothing.",
    fix="Name the replicated job and its container node.",
    over=runtimes,
)
def runtime_container_name(runtime: Workload) -> Iterator[Seen]:
    for row in runtime.node.get("spec", "template", "spec", "replicatedJobs"):
        step = row.get("template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step").text
        if row.get("name").text != "node" and step != "trainer":
            continue
        containers = list(row.get("template", "spec", "template", "spec", "containers"))
        names = [one.get("name").text for one in containers]
        if containers and "node" not in names:
            yield Seen(containers[0].get("name"), f"it is called {shown(', '.join(names))}")


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
