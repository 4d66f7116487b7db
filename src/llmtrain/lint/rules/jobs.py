"""Jobs, standalone or inside a JobSet or runtime, StatefulSets and Deployments: restarts, replacements and counts."""

import re
from collections.abc import Iterator

from llmtrain.core.env import EXIT_CODES
from llmtrain.lint.kinds import JOBSET_KINDS
from llmtrain.lint.manifests import Pod
from llmtrain.lint.rules.rule import (
    Match,
    complete_pods,
    job_pods,
    multi_node_pods,
    rule,
    shorten,
    training_job_pods,
    training_pods,
)
from llmtrain.lint.yaml_nodes import Node

JOB_RESTART_POLICIES = ("Never", "OnFailure")
RESTARTED_KINDS = ("Deployment", "ReplicaSet", "DaemonSet")
_IDLING = re.compile(r"\bsleep\s+(?:infinity|inf)\b|\btail\s+-f\s+/dev/null|\bpause\b|\bwhile\s+(?:true|:)")


def _job(pod: Pod) -> Node:
    assert pod.job is not None
    return pod.job


@rule(
    "job-not-indexed",
    "error",
    "JOB_COMPLETION_INDEX or <job>-0 in a Job that is not Indexed",
    why="Only Indexed Jobs number their pods; otherwise the variable is unset and pod names are random.",
    remedy="Set completionMode: Indexed.",
    over=job_pods,
)
def job_not_indexed(pod: Pod) -> Iterator[Match]:
    mode = _job(pod).get("completionMode")
    # A JobSet sets Indexed where the mode is unset.
    if mode.text == "Indexed" or (not mode.exists and pod.workload.kind in JOBSET_KINDS):
        return
    if _has_index_in_name(pod) or any(_uses_index(container.node) for container in pod.all_containers):
        yield Match(mode, f"completionMode is {mode.text or 'unset (NonIndexed)'}")


def _has_index_in_name(pod: Pod) -> bool:
    pod_name = re.compile(rf"{re.escape(pod.workload.name)}-\d+(?:\.|$)")
    return any(pod_name.match(host) for host, _, _ in pod.endpoints)


def _uses_index(container: Node) -> bool:
    texts = [entry.text for entry in (*container.get("command"), *container.get("args"))]
    for variable in container.get("env"):
        texts.append(variable.get("value").text)
        texts.append(variable.get("valueFrom", "fieldRef", "fieldPath").text)
    return any("JOB_COMPLETION_INDEX" in text or "job-completion-index" in text for text in texts)


@rule(
    "completions-not-parallelism",
    "error",
    "completions and parallelism differ",
    why="All pods of a distributed run must run at the same time; otherwise the first ones wait for the rest forever.",
    remedy="Set both completions and parallelism to the number of pods.",
    over=training_job_pods,
)
def completions_not_parallelism(pod: Pod) -> Iterator[Match]:
    if not pod.is_distributed or pod.workload.kind not in ("Job", "JobSet"):
        return
    completions = _job(pod).get("completions")
    parallelism = _job(pod).get("parallelism")
    is_indexed = _job(pod).get("completionMode").text == "Indexed" or pod.workload.kind == "JobSet"
    if not completions.exists and (not is_indexed or not parallelism.exists):
        return
    completed = _count(completions)
    parallel = _count(parallelism)
    if completed is None or parallel is None or completed == parallel:
        return
    where = completions
    if parallelism.exists:
        where = parallelism
    yield Match(
        where, f"completions is {completions.text or 'unset'}, but parallelism is {parallelism.text or 'unset'}"
    )


def _count(field: Node) -> int | None:
    """1 is the default of Kubernetes; None if it is not a number, such as a variable of Kustomize."""
    if not field.exists:
        return 1
    return field.number


@rule(
    "job-restart-policy",
    "error",
    "Job without a valid restartPolicy",
    why="The API server rejects the Job: the default is Always, and a Job accepts only Never and OnFailure.",
    remedy="Set restartPolicy: Never (or OnFailure) in the pod template.",
    over=job_pods,
)
def job_restart_policy(pod: Pod) -> Iterator[Match]:
    if not _has_valid_restart_policy(pod):
        policy = pod.spec.get("restartPolicy")
        yield Match(policy, f"restartPolicy is {shorten(policy.text) or 'unset (Always)'}")


def _has_valid_restart_policy(pod: Pod) -> bool:
    policy = pod.spec.get("restartPolicy")
    if not policy.exists:
        return pod.workload.kind in JOBSET_KINDS  # where the default is OnFailure
    return policy.text in JOB_RESTART_POLICIES


@rule(
    "failure-policy-restart",
    "error",
    "podFailurePolicy with a restartPolicy other than Never",
    why="The API server rejects the Job: the policy does not apply to containers that are restarted in place.",
    remedy="Set restartPolicy: Never in the pod template.",
    over=training_job_pods,
)
def failure_policy_restart(pod: Pod) -> Iterator[Match]:
    policy = pod.spec.get("restartPolicy")
    has_policy = _job(pod).get("podFailurePolicy").exists
    if has_policy and policy.text != "Never" and _has_valid_restart_policy(pod):
        yield Match(policy, f"restartPolicy is {shorten(policy.text) or 'unset'}")


@rule(
    "no-failure-policy",
    "advice",
    "Job without podFailurePolicy",
    why="All failures count the same: evictions use up backoffLimit, and configuration errors are retried.",
    remedy="Add rules: FailJob on exit codes of user errors, Ignore on DisruptionTarget and on exit codes that "
    "ask for a restart.",
    over=training_job_pods,
)
def no_failure_policy(pod: Pod) -> Iterator[Match]:
    if pod.is_distributed and not _job(pod).get("podFailurePolicy").exists:
        yield Match(_job(pod), f"{pod.workload.kind} {pod.workload.name} has no podFailurePolicy")


@rule(
    "disruption-without-status",
    "error",
    "DisruptionTarget without a status in a JobSet or TrainingRuntime",
    why="In a Job the field has a default, but the CRDs of JobSet and TrainingRuntime require it and reject "
    "the object.",
    remedy='Add status: "True", in quotes.',
    over=training_job_pods,
)
def disruption_without_status(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in JOBSET_KINDS:
        return
    for row in _job(pod).get("podFailurePolicy", "rules"):
        for condition in row.get("onPodConditions"):
            if condition.get("type").text == "DisruptionTarget" and condition.get("status").value != "True":
                problem = "missing"
                if condition.get("status").text:
                    problem = 'not the string "True"'
                yield Match(condition.get("type"), f"status of DisruptionTarget is {problem}")


@rule(
    "replacement-policy",
    "error",
    "podReplacementPolicy other than Failed with podFailurePolicy",
    why="The API server rejects the Job: with podFailurePolicy only Failed is allowed.",
    remedy="Set podReplacementPolicy: Failed, or remove it.",
    over=training_job_pods,
)
def replacement_policy(pod: Pod) -> Iterator[Match]:
    policy = _job(pod).get("podReplacementPolicy")
    if _job(pod).get("podFailurePolicy").exists and policy.exists and policy.text != "Failed":
        yield Match(policy, f"podReplacementPolicy is {shorten(policy.text)}")


@rule(
    "backoff-per-index",
    "error",
    "backoffLimitPerIndex in synchronous training",
    why="It treats indexes as independent: one that has failed permanently is not replaced, and the others "
    "wait for it.",
    remedy="Use backoffLimit.",
    over=multi_node_pods,
)
def backoff_per_index(pod: Pod) -> Iterator[Match]:
    if pod.job is not None and pod.job.get("backoffLimitPerIndex").exists:
        yield Match(pod.job.get("backoffLimitPerIndex"), "backoffLimitPerIndex is set")


@rule(
    "success-policy",
    "warning",
    "successPolicy in synchronous training",
    why="It treats indexes as independent: the other pods are killed as soon as the listed ones have succeeded.",
    remedy="Remove it: the Job succeeds when every pod has. (Elastic training, --nnodes=1:4, may have one.)",
    over=multi_node_pods,
)
def success_policy(pod: Pod) -> Iterator[Match]:
    if pod.job is not None and pod.job.get("successPolicy").exists and not pod.is_elastic:
        yield Match(pod.job.get("successPolicy"), "successPolicy is set")


@rule(
    "jobset-restarts-in-place",
    "warning",
    "pods of a JobSet or runtime with a restartPolicy other than Never",
    why="Pods of a JobSet default to OnFailure: a crash restarts in place, policies do not see it, and its "
    "log is lost.",
    remedy="Set restartPolicy: Never in the pod template.",
    over=training_job_pods,
)
def jobset_restarts_in_place(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in JOBSET_KINDS or not pod.is_distributed:
        return
    if _job(pod).get("podFailurePolicy").exists or not _has_valid_restart_policy(pod):
        return  # failure-policy-restart and job-restart-policy report it
    policy = pod.spec.get("restartPolicy")
    if policy.text != "Never":
        yield Match(policy, f"restartPolicy is {shorten(policy.text) or 'unset (OnFailure)'}")


@rule(
    "statefulset-in-order",
    "warning",
    "StatefulSet that creates its pods in order",
    why="Pod 1 is created when pod 0 is ready, and with a readiness probe pod 0 is not ready before pod 1 has joined.",
    remedy="Set podManagementPolicy: Parallel.",
    over=multi_node_pods,
)
def statefulset_in_order(pod: Pod) -> Iterator[Match]:
    policy = pod.workload.node.get("spec", "podManagementPolicy")
    if pod.workload.kind == "StatefulSet" and policy.text != "Parallel":
        yield Match(policy, f"podManagementPolicy is {shorten(policy.text) or 'unset (OrderedReady)'}")


@rule(
    "statefulset-restart-policy",
    "error",
    "StatefulSet with a restartPolicy other than Always",
    why="The API server rejects it: a StatefulSet always restarts its pods.",
    remedy="Use a Job for work that ends, or remove restartPolicy.",
    over=complete_pods,
)
def statefulset_restart_policy(pod: Pod) -> Iterator[Match]:
    policy = pod.spec.get("restartPolicy")
    if pod.workload.kind == "StatefulSet" and policy.exists and policy.text != "Always":
        yield Match(policy, f"restartPolicy is {shorten(policy.text)}")


@rule(
    "statefulset-never-ends",
    "advice",
    "training in a StatefulSet that does not idle when it is done",
    why="A StatefulSet restarts containers that exit: runs that have finished or failed permanently start "
    "over forever.",
    remedy="Use an Indexed Job, let the program idle when it is done (as `llmtrain node` does), or scale to 0.",
    over=training_pods,
)
def statefulset_never_ends(pod: Pod) -> Iterator[Match]:
    # Without a command the program is in the image, and nothing is known about its end.
    has_command = any(container.entries for container in pod.containers)
    if pod.workload.kind == "StatefulSet" and has_command and not _idles(pod):
        yield Match(pod.workload.node.get("kind"), f"pods of StatefulSet {pod.workload.name} exit when training ends")


def _idles(pod: Pod) -> bool:
    """Whether its program keeps running when training has ended. `llmtrain node` does if EXIT_CODES is set."""
    for container in pod.containers:
        if EXIT_CODES in container.variables or _IDLING.search(container.command_line):
            return True
    return False


@rule(
    "training-in-deployment",
    "warning",
    "training in a Deployment, ReplicaSet or DaemonSet",
    why="It restarts pods that have finished, so training starts over forever, and its pods have random names: none "
    "of them is pod 0.",
    remedy="Use an Indexed Job with a headless Service.",
    over=training_pods,
)
def training_in_deployment(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in RESTARTED_KINDS:
        return
    if pod.is_multi_node or (pod.has_training_program and not _idles(pod)):
        yield Match(pod.workload.node.get("kind"), f"{pod.workload.kind} {pod.workload.name} runs training")


@rule(
    "sidecar-keeps-job-alive",
    "warning",
    "second container in the pods of a training job",
    why="A pod ends when all of its containers have: one that serves or ships logs keeps the pod and its GPUs after "
    "training has ended, and the job never completes.",
    remedy="Make it a native sidecar: an init container with restartPolicy: Always, which is stopped after the "
    "trainer. If it ends when the trainer does, ignore the rule there.",
    over=complete_pods,
)
def sidecar_keeps_job_alive(pod: Pod) -> Iterator[Match]:
    if pod.job is None and pod.workload.kind != "PyTorchJob":
        return  # pods of other kinds do not end, or are not part of a job
    for container in pod.sidecars:
        name = shorten(container.name) or "without a name"
        yield Match(container.node, f"container {name} runs beside the trainer")


RULES = (
    job_not_indexed,
    completions_not_parallelism,
    job_restart_policy,
    failure_policy_restart,
    no_failure_policy,
    disruption_without_status,
    replacement_policy,
    backoff_per_index,
    success_policy,
    jobset_restarts_in_place,
    statefulset_in_order,
    statefulset_restart_policy,
    statefulset_never_ends,
    training_in_deployment,
    sidecar_keeps_job_alive,
)
