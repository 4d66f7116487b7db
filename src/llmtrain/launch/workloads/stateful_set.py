"""stateful_set: a StatefulSet, for clusters whose tools only support long-lived workloads.

Its containers are always restarted, whatever their exit code, so LLMTRAIN_EXIT_CODES makes `llmtrain node` idle instead
of exiting when the run has finished or failed permanently.
"""

from typing import ClassVar

from llmtrain.config.launch import LaunchSection
from llmtrain.launch.manifests import headless_service, job_metadata
from llmtrain.launch.plan import JobPlan, Manifest
from llmtrain.launch.pod import env_from_label, exit_codes, pod_template

INDEX_LABEL = "apps.kubernetes.io/pod-index"  # Kubernetes >= 1.28; `llmtrain node` falls back to the host name


class StatefulSet:
    api_version, kind = "apps/v1", "StatefulSet"
    container = "trainer"
    states: ClassVar[dict[str, str]] = {}

    @staticmethod
    def index_variable(launch: LaunchSection) -> str:  # noqa: ARG004
        return "POD_INDEX"

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:  # noqa: ARG004
        return f"{run_id}-0.{run_id}"

    @staticmethod
    def pod_0_labels(launch: LaunchSection) -> dict[str, str]:  # noqa: ARG004
        return {INDEX_LABEL: "0"}

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        env = [env_from_label("POD_INDEX", INDEX_LABEL), exit_codes("statefulset")]
        job = {
            "apiVersion": StatefulSet.api_version,
            "kind": StatefulSet.kind,
            "metadata": job_metadata(plan),
            "spec": {
                "replicas": plan.nodes,
                "serviceName": plan.service,
                "podManagementPolicy": "Parallel",  # else pod 1 is created when pod 0 is ready, which waits for pod 1
                "selector": {"matchLabels": plan.selector},
                "template": pod_template(plan, "Always", env),
            },
        }
        return [headless_service(plan), job]
