"""indexed_job: an Indexed Job of Kubernetes. Needs no operator."""

from llmtrain.config.launch import LaunchSection
from llmtrain.launch.manifests import INDEX_LABEL, JOB_STATES, headless_service, job_metadata, job_spec
from llmtrain.launch.plan import JobPlan, Manifest
from llmtrain.launch.pod import pod_template, without_empty


class IndexedJob:
    api_version, kind = "batch/v1", "Job"
    container = "trainer"
    states = JOB_STATES

    @staticmethod
    def index_variable(launch: LaunchSection) -> str:  # noqa: ARG004
        return "JOB_COMPLETION_INDEX"

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:  # noqa: ARG004
        return f"{run_id}-0.{run_id}"

    @staticmethod
    def pod_0_labels(launch: LaunchSection) -> dict[str, str]:  # noqa: ARG004
        return {INDEX_LABEL: "0"}

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        template = pod_template(plan, "Never", subdomain=plan.service)
        job = {
            "apiVersion": IndexedJob.api_version,
            "kind": IndexedJob.kind,
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
