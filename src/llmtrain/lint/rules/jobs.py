"""Jobs, alone or inside a JobSet or runtime, and StatefulSets: what is restarted, replaced and counted."""

import re
from collections.abc import Iterator

from llmtrain.env import EXIT_CODES
from llmtrain.lint.model import JOBSET_KINDS, Pod
from llmtrain.lint.rules.rule import Seen, job_pods, joined_pods, rule, shown, training_pods, whole_pods
from llmtrain.lint.yaml_nodes import Node

_IDLING = re.compile(r"\bsleep\s+(?:infinity|inf)\b|\btail\s+-f\s+/dev/null|\bpause\b|\bwhile\s+(?:true|:)")


def _job(pod: Pod) -> Node:
    assert pod.job is not None
    return pod.job


@rule(
    "job-not-indexed",
    "error",
    "JOB_COMPLETION_INDEX in a Job that is not Indexed",
    why="Only Indexed Jobs number their pods; elsewhere the variable is empty and every pod believes the same.",
    fix="Set completionMode: Indexed.",
    over=lambda manifests: (pod for pod in manifests.pods if pod.job is not None),
)
def job_not_indexed(pod: Pod) -> Iterator[Seen]:
    mode = _job(pod).get("completionMode")
    is_indexed = mode.text == "Indexed" or (not mode.exists and pod.workload.kind in JOBSET_KINDS)
    if not is_indexed and any(_uses_index(container.node) for container in pod.all_containers):
        yield Seen(mode, f"completionMode is {mode.text or 'unset, which is NonIndexed'}")


def _uses_index(container: Node) -> bool:
    texts = [entry.text for part in ("command", "args") for entry in container.get(part)]
    for row in container.get("env"):
        texts += [row.get("value").text, row.get("valueFrom", "fieldRef", "fieldPath").text]
    return any("JOB_COMPLETION_INDEX" in text or "job-completion-index" in text for text in texts)


@rule(
    "completions-not-parallelism",
    "error",
    "completions and parallelism differ",
    why="All pods of a training have to run at once; with fewer at a time the first ones wait for the rest for ever.",
    fix="Set completions and parallelism both to the number of nodes.",
    over=job_pods,
)
def completions_not_parallelism(pod: Pod) -> Iterator[Seen]:
    if not pod.is_distributed or pod.workload.kind not in ("Job", "JobSet"):
        return
    completions, parallelism = _job(pod).get("completions"), _job(pod).get("parallelism")
    is_indexed = _job(pod).get("completionMode").text == "Indexed" or pod.workload.kind == "JobSet"
    if not completions.exists and (not is_indexed or not parallelism.exists):
        return
    ones = [1 if not node.exists else node.number for node in (completions, parallelism)]
    if None not in ones and ones[0] != ones[1]:
        where = parallelism if parallelism.exists else completions
        yield Seen(where, f"completions {_said(completions)}, parallelism {_said(parallelism)}")


def _said(node: Node) -> str:
    return node.text or "unset"


@rule(
    "failure-policy-restart",
    "error",
    "podFailurePolicy with a restartPolicy other than Never",
    why="The API refuses the Job: a container that is restarted in place never comes to the policy.",
    fix="Set restartPolicy: Never in the pod template.",
    over=job_pods,
)
def failure_policy_restart(pod: Pod) -> Iterator[Seen]:
    policy = pod.spec.get("restartPolicy")
    if _job(pod).get("podFailurePolicy").exists and policy.text != "Never":
        yield Seen(policy, f"restartPolicy is {shown(policy.text) or 'unset'}")


@rule(
    "no-failure-policy",
    "advice",
    "a Job without podFailurePolicy",
    why="Every failure counts alike: an eviction uses up backoffLimit, and a mistake in the config is tried again.",
    fix="Add rules: FailJob on codes of a user's mistake, Ignore on DisruptionTarget and on the code for `resume me`.",
    over=job_pods,
)
def no_failure_policy(pod: Pod) -> Iterator[Seen]:
    if pod.is_distributed and not _job(pod).get("podFailurePolicy").exists:
        yield Seen(_job(pod), f"{pod.workload.kind} {pod.workload.name} has none")


@rule(
    "disruption-without-status",
    "error",
    "DisruptionTarget without a status in a JobSet or TrainingRuntime",
    why="A Job fills the field in, but the CRDs of JobSet and TrainingRuntime demand it and refuse the object.",
    fix='Add status: "True", in quotes.',
    over=job_pods,
)
def disruption_without_status(pod: Pod) -> Iterator[Seen]:
    if pod.workload.kind not in JOBSET_KINDS:
        return
    for row in _job(pod).get("podFailurePolicy", "rules"):
        for condition in row.get("onPodConditions"):
            if condition.get("type").text == "DisruptionTarget" and condition.get("status").value != "True":
                said = condition.get("status").text
                yield Seen(condition.get("type"), f"its status is {'not the text True' if said else 'missing'}")


@rule(
    "replacement-policy",
    "error",
    "podReplacementPolicy other than Failed beside podFailurePolicy",
    why="The API refuses the Job: Failed is the only value allowed there.",
    fix="Set podReplacementPolicy: Failed, or leave it out.",
    over=job_pods,
)
def replacement_policy(pod: Pod) -> Iterator[Seen]:
    policy = _job(pod).get("podReplacementPolicy")
    if _job(pod).get("podFailurePolicy").exists and policy.exists and policy.text != "Failed":
        yield Seen(policy, f"podReplacementPolicy is {shown(policy.text)}")


@rule(
    "backoff-per-index",
    "error",
    "backoffLimitPerIndex in synchronous training",
    why="It treats indexes as independent: one that has failed for good is given up, and the others wait for it.",
    fix="Use backoffLimit.",
    over=joined_pods,
)
def backoff_per_index(pod: Pod) -> Iterator[Seen]:
    if pod.job is not None and pod.job.get("backoffLimitPerIndex").exists:
        yield Seen(pod.job.get("backoffLimitPerIndex"), "backoffLimitPerIndex is set")


@rule(
    "success-policy",
    "warning",
    "successPolicy in synchronous training",
    why="It treats indexes as independent: the pods that are left are killed as soon as the named ones are done.",
    fix="Leave it out: the Job is done when every pod is. (Elastic training, --nnodes=1:4, may have one.)",
    over=joined_pods,
)
def success_policy(pod: Pod) -> Iterator[Seen]:
    if pod.job is not None and pod.job.get("successPolicy").exists and not pod.is_elastic:
        yield Seen(pod.job.get("successPolicy"), "successPolicy is set")


@rule(
    "jobset-restarts-in-place",
    "warning",
    "pods of a JobSet or runtime with a restartPolicy other than Never",
    why="Pods of a JobSet default to OnFailure: a crash restarts in place, no policy sees it, and its log is lost.",
    fix="Set restartPolicy: Never in the pod template.",
    over=job_pods,
)
def jobset_restarts_in_place(pod: Pod) -> Iterator[Seen]:
    policy = pod.spec.get("restartPolicy")
    is_told = _job(pod).get("podFailurePolicy").exists  # failure-policy-restart says it
    if pod.workload.kind in JOBSET_KINDS and pod.is_distributed and policy.text != "Never" and not is_told:
        yield Seen(policy, f"restartPolicy is {shown(policy.text) or 'unset, which is OnFailure'}")


@rule(
    "statefulset-in-order",
    "warning",
    "a StatefulSet that starts its pods one after another",
    why="Pod 1 is made when pod 0 is ready, and with a readiness probe pod 0 is not ready before pod 1 has joined.",
    fix="Set podManagementPolicy: Parallel.",
    over=joined_pods,
)
def statefulset_in_order(pod: Pod) -> Iterator[Seen]:
    policy = pod.workload.node.get("spec", "podManagementPolicy")
    if pod.workload.kind == "StatefulSet" and policy.text != "Parallel":
        yield Seen(policy, f"podManagementPolicy is {shown(policy.text) or 'unset, which is OrderedReady'}")


@rule(
    "statefulset-restart-policy",
    "error",
    "a StatefulSet with a restartPolicy other than Always",
    why="The API refuses it: a StatefulSet always restarts its pods.",
    fix="Use a Job for work that ends, or leave restartPolicy out.",
    over=whole_pods,
)
def statefulset_restart_policy(pod: Pod) -> Iterator[Seen]:
    policy = pod.spec.get("restartPolicy")
    if pod.workload.kind == "StatefulSet" and policy.exists and policy.text != "Always":
        yield Seen(policy, f"restartPolicy is {shown(policy.text)}")


@rule(
    "statefulset-never-ends",
    "advice",
    "training in a StatefulSet that does not idle when it is done",
    why="A StatefulSet restarts what has ended: a finished run, and one that failed for good, start over for ever.",
    fix="Use an Indexed Job, or let the program wait when it is done (`llmtrain node` does), or scale to 0.",
    over=training_pods,
)
def statefulset_never_ends(pod: Pod) -> Iterator[Seen]:
    if pod.workload.kind != "StatefulSet" or not any(c.entries for c in pod.containers):
        return
    idles = any(_IDLING.search(c.command_line) or EXIT_CODES in c.variables for c in pod.containers)
    if not idles:
        yield Seen(pod.workload.node.get("kind"), f"nothing keeps the pods of {pod.workload.name} from ending")


RULES = (
    job_not_indexed,
    completions_not_parallelism,
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
)
