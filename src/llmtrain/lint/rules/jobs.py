"""Jobs, standalone or inside a JobSet or runtime, StatefulSets and Deployments: restarts, replacements and counts."""

import re
from collections.abc import Iterator

from llmtrain.env import EXIT_CODES
from llmtrain.lint.manifests import JOBSET_KINDS, Pod
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
    fix="Set completionMode: Indexed.",
    over=job_pods,
)
def job_not_indexed(pod: Pod) -> Iterator[Match]:
    mode = _job(pod).get("completionMode")
    is_indexed = mode.text == "Indexed" or (not mode.exists and pod.workload.kind in JOBSET_KINDS)
    pod_name = re.compile(rf"{re.escape(pod.workload.name)}-\d+(?:\.|$)")
    is_used = any(_uses_index(container.node) for container in pod.all_containers) or any(
        pod_name.match(host) for host, _, _ in pod.endpoints
    )
    if not is_indexed and is_used:
        yield Match(mode, f"completionMode is {mode.text or 'unset (NonIndexed)'}")


def _uses_index(container: Node) -> bool:
    texts = [entry.text for part in ("command", "args") for entry in container.get(part)]
    for row in container.get("env"):
        texts += [row.get("value").text, row.get("valueFrom", "fieldRef", "fieldPath").text]
    return any("JOB_COMPLETION_INDEX" in text or "job-completion-index" in text for text in texts)


@rule(
    "completions-not-parallelism",
    "error",
    "completions and parallelism differ",
    why="All pods of a distributed run must run at the same time; otherwise the first ones wait for the rest forever.",
    fix="Set both completions and parallelism to the number of pods.",
    over=training_job_pods,
)
def completions_not_parallelism(pod: Pod) -> Iterator[Match]:
    if not pod.is_distributed or pod.workload.kind not in ("Job", "JobSet"):
        return
    completions, parallelism = _job(pod).get("completions"), _job(pod).get("parallelism")
    is_indexed = _job(pod).get("completionMode").text == "Indexed" or pod.workload.kind == "JobSet"
    if not completions.exists and (not is_indexed or not parallelism.exists):
        return
    counts = [1 if not node.exists else node.number for node in (completions, parallelism)]
    if None not in counts and counts[0] != counts[1]:
        where = parallelism if parallelism.exists else completions
        yield Match(where, f"completions is {_text(completions)}, but parallelism is {_text(parallelism)}")


def _text(node: Node) -> str:
    return node.text or "unset"


@rule(
    "job-restart-policy",
    "error",
    "Job without a valid restartPolicy",
    why="The API server rejects the Job: the default is Always, and a Job accepts only Never and OnFailure.",
    fix="Set restartPolicy: Never (or OnFailure) in the pod template.",
    over=job_pods,
)
def job_restart_policy(pod: Pod) -> Iterator[Match]:
    if not _has_valid_restart_policy(pod):
        policy = pod.spec.get("restartPolicy")
        yield Match(policy, f"restartPolicy is {shorten(policy.text) or 'unset (Always)'}")


def _has_valid_restart_policy(pod: Pod) -> bool:
    policy = pod.spec.get("restartPolicy")
    has_default = pod.workload.kind in JOBSET_KINDS  # OnFailure
    return policy.text in JOB_RESTART_POLICIES or (has_default and not policy.exists)


@rule(
    "failure-policy-restart",
    "error",
    "podFailurePolicy with a restartPolicy other than Never",
    why="The API server rejects the Job: the policy does not apply to containers that are restarted in place.",
    fix="Set restartPolicy: Never in the pod template.",
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
    fix="Add rules: FailJob on exit codes of user errors, Ignore on DisruptionTarget and on exit codes that "
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
    fix='Add status: "True", in quotes.',
    over=training_job_pods,
)
def disruption_without_status(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in JOBSET_KINDS:
        return
    for row in _job(pod).get("podFailurePolicy", "rules"):
        for condition in row.get("onPodConditions"):
            if condition.get("type").text == "DisruptionTarget" and condition.get("status").value != "True":
                problem = 'not the string "True"' if condition.get("status").text else "missing"
                yield Match(condition.get("type"), f"status of DisruptionTarget is {problem}")


@rule(
    "replacement-policy",
    "error",
    "podReplacementPolicy other than Failed with podFailurePolicy",
    why="The API server rejects the Job: with podFailurePolicy only Failed is allowed.",
    fix="Set podReplacementPolicy: Failed, or remove it.",
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
    fix="Use backoffLimit.",
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
    fix="Remove it: the Job succeeds when every pod has. (Elastic training, --nnodes=1:4, may have one.)",
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
    fix="Set restartPolicy: Never in the pod template.",
    over=training_job_pods,
)
def jobset_restarts_in_place(pod: Pod) -> Iterator[Match]:
    policy = pod.spec.get("restartPolicy")
    is_reported = _job(pod).get("podFailurePolicy").exists or not _has_valid_restart_policy(pod)  # by other rules
    if pod.workload.kind in JOBSET_KINDS and pod.is_distributed and policy.text != "Never" and not is_reported:
        yield Match(policy, f"restartPolicy is {shorten(policy.text) or 'unset (OnFailure)'}")


@rule(
    "statefulset-in-order",
    "warning",
    "StatefulSet that creates its pods in order",
    why="Pod 1 is created when pod 0 is ready, and with a readiness probe pod 0 is not ready before pod 1 has joined.",
    fix="Set podManagementPolicy: Parallel.",
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
    fix="Use a Job for work that ends, or remove restartPolicy.",
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
    fix="Use an Indexed Job, let the program idle when it is done (as `llmtrain node` does), or scale to 0.",
    over=training_pods,
)
def statefulset_never_ends(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind == "StatefulSet" and any(c.entries for c in pod.containers) and not _idles(pod):
        yield Match(pod.workload.node.get("kind"), f"pods of StatefulSet {pod.workload.name} exit when training ends")


def _idles(pod: Pod) -> bool:
    """Whether its program keeps running when training has ended."""
    return any(_IDLING.search(c.command_line) or EXIT_CODES in c.variables for c in pod.containers)


@rule(
    "training-in-deployment",
    "warning",
    "training in a Deployment, ReplicaSet or DaemonSet",
    why="It restarts pods that have finished, so training starts over forever, and its pods have random names: none "
    "of them is pod 0.",
    fix="Use an Indexed Job with a headless Service.",
    over=training_pods,
)
def training_in_deployment(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in RESTARTED_KINDS:
        return
    if pod.is_multi_node or (pod.has_training_program and not _idles(pod)):
        yield Match(pod.workload.node.get("kind"), f"{pod.workload.kind} {pod.workload.name} runs training")


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
)
