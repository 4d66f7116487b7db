"""pytorch_job: a PyTorchJob of the Kubeflow Training Operator (v1).

It has only workers unless launch.pytorch_master is set: with a Master the operator adds an init container with another
image to every worker, which fails in air-gapped clusters and restricted namespaces. The operator creates a headless
Service for each pod. It retries only exit codes >= 128, so LLMTRAIN_EXIT_CODES makes `llmtrain node` add 128 to 75 and
to the code of a crash (distributed/platform_codes.py).
"""

import re
from typing import ClassVar

from llmtrain.distributed.platform_codes import from_pytorchjob_code
from llmtrain.launch.job import JobPlan, Manifest
from llmtrain.launch.kinds.base import Kind, Object, PodExit
from llmtrain.launch.manifests import job_metadata
from llmtrain.launch.pod import env_from_label, exit_codes, pod_template, without_empty
from llmtrain.runs.state import RunState

PORT_NAME = "pytorchjob-port"
# The operator deletes a failed pod before it creates the next one, and says so in an event.
_EXITED = re.compile(r"Pod: \S+?\.(\S+-(worker|master)-(\d+)) exited with code (\d+)")


class PyTorchJob(Kind):
    api_version = "kubeflow.org/v1"
    object_kind = "PyTorchJob"
    container = "pytorch"
    renders_service = False
    index_label = "training.kubeflow.org/replica-index"
    role_label = "training.kubeflow.org/replica-type"
    limits_crashes = False
    exit_codes = "pytorchjob"
    controller = "the Kubeflow Training Operator"
    installer = "the Kubeflow Training Operator (v1), https://www.kubeflow.org/docs/components/trainer/legacy-v1"
    operator_kinds = ("PyTorchJob",)
    conditions: ClassVar = {
        "Succeeded": RunState.FINISHED,
        "Failed": RunState.FAILED,
        "Suspended": RunState.SUSPENDED,
    }
    unsuspend_patch: ClassVar = {"spec": {"runPolicy": {"suspend": False}}}
    comments: ClassVar = {
        "PyTorchJob": "The run, for the Kubeflow Training Operator, which creates one pod per node and their Services.",
    }
    field_comments: ClassVar = {
        "nprocPerNode": "Processes per pod.",
        "cleanPodPolicy": "Keep finished pods and their logs.",
    }

    @property
    def index_variable(self) -> str:
        # With a Master the operator sets PET_NODE_RANK in all pods; the label counts from 0 for each role.
        return "PET_NODE_RANK" if self.launch.pytorch_master else "POD_INDEX"

    @property
    def pod_0_role(self) -> str:
        return "master" if self.launch.pytorch_master else "worker"

    def master_addr(self, run_id: str) -> str:
        return f"{run_id}-{self.pod_0_role}-0"

    @property
    def pod_0_labels(self) -> dict[str, str]:
        return {self.index_label: "0", self.role_label: self.pod_0_role}

    def node_rank(self, pod: Object, run_id: str) -> int | None:
        index = super().node_rank(pod, run_id)
        if index is None:
            return None
        labels = pod["metadata"].get("labels") or {}
        return index + self._first_rank(labels.get(self.role_label))

    def exit_in_event(self, message: str) -> PodExit | None:
        match = _EXITED.search(message)
        if match is None:
            return None
        pod, role, index, code = match.groups()
        return PodExit(pod, int(index) + self._first_rank(role), int(code))

    def _first_rank(self, role: str | None) -> int:
        """Node rank of the first pod of a role: a Master has rank 0, and the Workers come after it."""
        return int(self.launch.pytorch_master and role == "worker")

    @staticmethod
    def llmtrain_code(code: int) -> int:
        return from_pytorchjob_code(code)

    def render(self, plan: JobPlan) -> list[Manifest]:
        launch = plan.launch
        job = {
            "apiVersion": self.api_version,
            "kind": self.object_kind,
            "metadata": job_metadata(plan),
            "spec": {
                "nprocPerNode": str(plan.processes_per_node),
                "runPolicy": without_empty(
                    {
                        "cleanPodPolicy": "None",  # finished pods keep their logs
                        "backoffLimit": launch.max_restarts,
                        "activeDeadlineSeconds": launch.active_deadline_sec,
                        "ttlSecondsAfterFinished": launch.ttl_sec,
                    }
                ),
                "pytorchReplicaSpecs": self._replicas(plan),
            },
        }
        return [job]

    def _replicas(self, plan: JobPlan) -> Manifest:
        codes = exit_codes(self.exit_codes)
        if not plan.launch.pytorch_master:
            env = [env_from_label(self.index_variable, self.index_label), codes]
            return {"Worker": _replica(plan, plan.nodes, env)}
        replicas = {"Master": _replica(plan, 1, [codes])}
        if plan.nodes > 1:
            replicas["Worker"] = _replica(plan, plan.nodes - 1, [codes])
        return replicas


def _replica(plan: JobPlan, count: int, env: list[Manifest]) -> Manifest:
    # The operator sets the restart policy of the pod.
    restart_policy = "ExitCode"
    if plan.task.launcher == "torchrun":  # which exits with 1 whatever its processes exited with
        restart_policy = "OnFailure"
    return {
        "replicas": count,
        "restartPolicy": restart_policy,
        "template": pod_template(plan, None, env, port_name=PORT_NAME),
    }
