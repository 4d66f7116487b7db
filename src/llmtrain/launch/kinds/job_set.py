"""job_set: a JobSet with one Job. The JobSet controller creates the headless Service."""

from typing import ClassVar

from llmtrain.launch.job import JobPlan, Manifest
from llmtrain.launch.kinds.base import Kind
from llmtrain.launch.kinds.indexed_job import INDEX_LABEL, job_spec
from llmtrain.launch.manifests import job_metadata
from llmtrain.launch.pod import pod_template, without_empty
from llmtrain.runs.state import RunState

JOB_NAME = "node"


class JobSet(Kind):
    api_version = "jobset.x-k8s.io/v1alpha2"
    object_kind = "JobSet"
    renders_service = False
    index_label = INDEX_LABEL
    index_variable = "JOB_COMPLETION_INDEX"
    inner_job = f"-{JOB_NAME}-0"
    controller = "the JobSet controller"
    installer = "JobSet, https://jobset.sigs.k8s.io/docs/installation"
    operator_kinds: ClassVar[tuple[str, ...]] = ("JobSet",)
    conditions: ClassVar = {
        "Completed": RunState.FINISHED,
        "Failed": RunState.FAILED,
        "Suspended": RunState.SUSPENDED,
    }
    comments: ClassVar = {
        "JobSet": "The run, for the JobSet controller, which creates an Indexed Job and a headless Service for its "
        "pods.",
    }
    field_comments: ClassVar = {
        "maxRestarts": "The Job below replaces failed pods; the JobSet itself is not restarted.",
    }

    def master_addr(self, run_id: str) -> str:
        return f"{run_id}-{JOB_NAME}-0-0.{run_id}"

    def render(self, plan: JobPlan) -> list[Manifest]:
        count = {"completions": plan.nodes, "parallelism": plan.nodes}
        job = {
            "apiVersion": self.api_version,
            "kind": self.object_kind,
            "metadata": job_metadata(plan),
            "spec": without_empty(
                {
                    **set_spec(plan, count),
                    "network": {
                        "enableDNSHostnames": True,
                        "subdomain": plan.service,
                        "publishNotReadyAddresses": True,
                    },
                    "ttlSecondsAfterFinished": plan.launch.ttl_sec,
                }
            ),
        }
        return [job]


def set_spec(plan: JobPlan, count: Manifest, labels: dict[str, str] | None = None) -> Manifest:
    """The spec that a JobSet and a TrainingRuntime share. The Job replaces failed pods up to its backoffLimit; the
    JobSet is never restarted, because it would also restart after a user error."""
    template: Manifest = {"spec": {**count, **job_spec(plan, pod_template(plan, "Never"))}}
    if labels:
        template = {"metadata": {"labels": labels}, **template}
    return {
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": JOB_NAME, "replicas": 1, "template": template}],
    }
