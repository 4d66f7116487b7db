"""stateful_set: a StatefulSet, for clusters whose tools only support long-lived workloads.

Its containers are always restarted, whatever their exit code, so LLMTRAIN_EXIT_CODES makes `llmtrain node` idle instead
of exiting when the run has finished or failed permanently.
"""

from typing import ClassVar

from llmtrain.errors import UsageError
from llmtrain.launch.job import JobPlan, Manifest
from llmtrain.launch.kinds.base import Kind, Object
from llmtrain.launch.manifests import headless_service, job_metadata
from llmtrain.launch.pod import env_from_label, exit_codes, pod_template
from llmtrain.launch.pod_task import PodTask


class StatefulSet(Kind):
    api_version = "apps/v1"
    object_kind = "StatefulSet"
    index_label = "apps.kubernetes.io/pod-index"  # Kubernetes >= 1.28; `llmtrain node` falls back to the host name
    index_variable = "POD_INDEX"
    has_ordinal_names = True
    unsupported_fields = ("ttl_sec", "active_deadline_sec")  # it never finishes
    limits_crashes = False
    exit_codes = "statefulset"
    pods_idle_at_end = True
    pods_own_queue_entry = True  # Kueue cannot suspend a StatefulSet, so it gates the pods
    comments: ClassVar = {
        "StatefulSet": "The run: one pod per node. The number at the end of a pod's name is its node rank.",
    }
    field_comments: ClassVar = {
        "podManagementPolicy": "Create all pods at once: pod 0 is not ready before the others have joined.",
    }

    def check_task(self, task: PodTask) -> None:
        if task.launcher == "torchrun":
            raise UsageError(
                "A StatefulSet restarts containers that exit, so a run that torchrun has finished would start over.",
                remedy="Pass --kind indexed_job, or --launcher llmtrain if the image has llmtrain.",
            )

    def replicas(self, job: Object) -> int:
        return int((job.get("spec") or {}).get("replicas", 1))

    def render(self, plan: JobPlan) -> list[Manifest]:
        env = [env_from_label(self.index_variable, self.index_label), exit_codes(self.exit_codes)]
        job = {
            "apiVersion": self.api_version,
            "kind": self.object_kind,
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
