"""pytorch_job: a PyTorchJob of the Kubeflow Training Operator (v1).

Workers only, unless launch.pytorch_master is set: beside a Master the operator gives every worker an init container
from another image, which neither an air-gapped cluster nor a restricted namespace allows. The operator makes a
headless Service for each pod. It retries exit codes from 128 only: `llmtrain node` adds 128 to 75 and to a crash's
code when LLMTRAIN_EXIT_CODES says so.
"""

from typing import ClassVar

from llmtrain.config.launch import LaunchSection
from llmtrain.launch.manifests import job_metadata
from llmtrain.launch.plan import JobPlan, Manifest
from llmtrain.launch.pod import env_from_label, exit_codes, pod_template, without_empty

INDEX_LABEL = "training.kubeflow.org/replica-index"
PORT_NAME = "pytorchjob-port"


class PyTorchJob:
    api_version, kind = "kubeflow.org/v1", "PyTorchJob"
    container = "pytorch"
    states: ClassVar = {"Succeeded": "finished", "Failed": "failed", "Suspended": "suspended"}

    @staticmethod
    def index_variable(launch: LaunchSection) -> str:
        return "PET_NODE_RANK" if launch.pytorch_master else "POD_INDEX"

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:
        return f"{run_id}-{'master' if launch.pytorch_master else 'worker'}-0"

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        launch = plan.launch
        job = {
            "apiVersion": PyTorchJob.api_version,
            "kind": PyTorchJob.kind,
            "metadata": job_metadata(plan),
            "spec": {
                "nprocPerNode": str(plan.processes_per_node),
                "runPolicy": without_empty(
                    {
                        "cleanPodPolicy": "None",  # a finished pod still has its log
                        "backoffLimit": launch.max_restarts,
                        "activeDeadlineSeconds": launch.active_deadline_sec,
                        "ttlSecondsAfterFinished": launch.ttl_sec,
                    }
                ),
                "pytorchReplicaSpecs": _replicas(plan),
            },
        }
        return [job]


def _replicas(plan: JobPlan) -> Manifest:
    codes = exit_codes("pytorchjob")
    if not plan.launch.pytorch_master:
        return {"Worker": _replica(plan, plan.nodes, [env_from_label("POD_INDEX", INDEX_LABEL), codes])}
    # Beside a Master the operator numbers all pods itself (PET_NODE_RANK); the label starts at 0 for each role.
    master = {"Master": _replica(plan, 1, [codes])}
    return master | ({"Worker": _replica(plan, plan.nodes - 1, [codes])} if plan.nodes > 1 else {})


def _replica(plan: JobPlan, count: int, env: list[Manifest]) -> Manifest:
    # The operator writes the pod's own restart policy. torchrun ends with 1 whatever its processes ended with.
    return {
        "replicas": count,
        "restartPolicy": "OnFailure" if plan.work.launcher == "torchrun" else "ExitCode",
        "template": pod_template(plan, None, env, port_name=PORT_NAME),
    }
