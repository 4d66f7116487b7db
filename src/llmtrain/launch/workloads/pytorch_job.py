"""pytorch_job: a PyTorchJob of the Kubeflow Training Operator (v1).

It has only workers unless launch.pytorch_master is set: with a Master the operator adds an init container with another
image to every worker, which fails in air-gapped clusters and restricted namespaces. The operator creates a headless
Service for each pod. It retries only exit codes >= 128, so LLMTRAIN_EXIT_CODES makes `llmtrain node` add 128 to 75 and
to the code of a crash.
"""

from typing import ClassVar

from llmtrain.config.launch import LaunchSection
from llmtrain.launch.manifests import job_metadata
from llmtrain.launch.plan import JobPlan, Manifest
from llmtrain.launch.pod import env_from_label, exit_codes, pod_template, without_empty

INDEX_LABEL = "training.kubeflow.org/replica-index"
TYPE_LABEL = "training.kubeflow.org/replica-type"
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
    def pod_0_labels(launch: LaunchSection) -> dict[str, str]:
        return {INDEX_LABEL: "0", TYPE_LABEL: "master" if launch.pytorch_master else "worker"}

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
                        "cleanPodPolicy": "None",  # finished pods keep their logs
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
    # With a Master the operator sets PET_NODE_RANK in all pods; the label counts from 0 for each role.
    master = {"Master": _replica(plan, 1, [codes])}
    return master | ({"Worker": _replica(plan, plan.nodes - 1, [codes])} if plan.nodes > 1 else {})


def _replica(plan: JobPlan, count: int, env: list[Manifest]) -> Manifest:
    # The operator sets the restart policy of the pod. torchrun exits with 1 whatever its processes exited with.
    return {
        "replicas": count,
        "restartPolicy": "OnFailure" if plan.work.launcher == "torchrun" else "ExitCode",
        "template": pod_template(plan, None, env, port_name=PORT_NAME),
    }
