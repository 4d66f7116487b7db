"""job_set: a JobSet with one Job. The JobSet controller creates the headless Service."""

from typing import ClassVar

from llmtrain.config.launch import LaunchSection
from llmtrain.launch.manifests import INDEX_LABEL, job_metadata, job_spec
from llmtrain.launch.plan import JobPlan, Manifest
from llmtrain.launch.pod import pod_template, without_empty

JOB_NAME = "node"


class JobSet:
    api_version, kind = "jobset.x-k8s.io/v1alpha2", "JobSet"
    container = "trainer"
    states: ClassVar = {"Completed": "finished", "Failed": "failed", "Suspended": "suspended"}

    @staticmethod
    def index_variable(launch: LaunchSection) -> str:  # noqa: ARG004
        return "JOB_COMPLETION_INDEX"

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:  # noqa: ARG004
        return f"{run_id}-{JOB_NAME}-0-0.{run_id}"

    @staticmethod
    def pod_0_labels(launch: LaunchSection) -> dict[str, str]:  # noqa: ARG004
        return {INDEX_LABEL: "0"}

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        count = {"completions": plan.nodes, "parallelism": plan.nodes}
        job = {
            "apiVersion": JobSet.api_version,
            "kind": JobSet.kind,
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
