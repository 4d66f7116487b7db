"""indexed_job: an Indexed Job of Kubernetes. Needs no operator."""

from typing import ClassVar

from llmtrain.errors import ExitCode
from llmtrain.launch.job import PREFETCH, JobPlan, Manifest
from llmtrain.launch.kinds.base import Kind
from llmtrain.launch.manifests import headless_service, job_metadata
from llmtrain.launch.pod import pod_template, without_empty
from llmtrain.runs.state import RunState

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"  # Kubernetes >= 1.28


class IndexedJob(Kind):
    api_version = "batch/v1"
    object_kind = "Job"
    index_label = INDEX_LABEL
    index_variable = "JOB_COMPLETION_INDEX"
    conditions: ClassVar = {
        "Complete": RunState.FINISHED,
        "Failed": RunState.FAILED,
        "Suspended": RunState.SUSPENDED,
    }
    comments: ClassVar = {
        "Job": "The run: an Indexed Job, one pod per node. The index of a pod (JOB_COMPLETION_INDEX) is its node rank.",
    }
    field_comments: ClassVar = {
        "completions": "Number of pods. All run at once, so both numbers are equal.",
        "backoffLimit": "Number of crashes after which the run fails (launch.max_restarts).",
        "podReplacementPolicy": "Replace a pod when it has ended, not while it is still saving a checkpoint.",
        "podFailurePolicy": "A restart does not fix 64 and 65. Interruptions (75, evictions) do not count as crashes.",
    }

    def render(self, plan: JobPlan) -> list[Manifest]:
        template = pod_template(plan, "Never", subdomain=plan.service)
        job = {
            "apiVersion": self.api_version,
            "kind": self.object_kind,
            "metadata": job_metadata(plan),
            "spec": without_empty(
                {
                    "completions": plan.nodes,
                    "parallelism": plan.nodes,
                    "ttlSecondsAfterFinished": plan.launch.ttl_sec,
                    **job_spec(plan, template),
                }
            ),
        }
        return [headless_service(plan), job]


def job_spec(plan: JobPlan, template: Manifest) -> Manifest:
    """The spec of a batch/v1 Job, which three kinds use, without the number of pods.

    Exit codes 64 and 65 fail the job. Interruptions (75, evictions) do not count as failures, all other codes do.
    Ignore needs no limit: llmtrain gives up with 65 if restarts produce no newer checkpoint. The rules name our
    containers, because the codes of a sidecar mean something else.
    """
    containers = [plan.container]
    if plan.is_fetching:
        containers.append(PREFETCH)

    def on_codes(action: str, *codes: int) -> list[Manifest]:
        exits = {"operator": "In", "values": [int(code) for code in codes]}
        return [{"action": action, "onExitCodes": {"containerName": name, **exits}} for name in containers]

    rules = [
        *on_codes("FailJob", ExitCode.USAGE, ExitCode.FAILED),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        *on_codes("Ignore", ExitCode.INTERRUPTED),
    ]
    success_policy = None
    if plan.min_nodes < plan.nodes:
        # Some pods of an elastic run may never be scheduled: it has finished when pod 0 has.
        success_policy = {"rules": [{"succeededIndexes": "0"}]}
    return without_empty(
        {
            "completionMode": "Indexed",
            "backoffLimit": plan.launch.max_restarts,
            "activeDeadlineSeconds": plan.launch.active_deadline_sec,
            "podReplacementPolicy": "Failed",
            "successPolicy": success_policy,
            "podFailurePolicy": {"rules": rules},
            "template": template,
        }
    )
