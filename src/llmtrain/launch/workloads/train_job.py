"""train_job: a TrainJob of the Kubeflow Trainer (v2), with a TrainingRuntime of its own.

The overrides of a TrainJob cannot set the security context, the grace period or the pod failure policy, so each run has
its own runtime, with its name and in its namespace. It is created first: the webhook of the TrainJob requires it.
"""

from llmtrain.config.launch import LaunchSection
from llmtrain.launch.manifests import INDEX_LABEL, JOB_STATES, job_metadata, metadata
from llmtrain.launch.plan import JobPlan, Manifest
from llmtrain.launch.workloads.job_set import JOB_NAME, set_spec

API_GROUP = "trainer.kubeflow.org"
API_VERSION = f"{API_GROUP}/v1alpha1"
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # the Job that spec.trainer applies to


class TrainJob:
    api_version, kind = API_VERSION, "TrainJob"
    container = "node"  # required by Kubeflow Trainer
    states = JOB_STATES

    @staticmethod
    def index_variable(launch: LaunchSection) -> str:  # noqa: ARG004
        return "PET_NODE_RANK"

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:  # noqa: ARG004
        return f"{run_id}-{JOB_NAME}-0-0.{run_id}"

    @staticmethod
    def pod_0_labels(launch: LaunchSection) -> dict[str, str]:  # noqa: ARG004
        return {INDEX_LABEL: "0"}

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        runtime = {
            "apiVersion": API_VERSION,
            "kind": "TrainingRuntime",
            "metadata": metadata(plan, labels={"trainer.kubeflow.org/framework": "torch"}),
            "spec": {
                "mlPolicy": {"numNodes": plan.nodes, "torch": {"numProcPerNode": plan.processes_per_node}},
                "template": {"spec": set_spec(plan, {}, STEP_LABEL)},
            },
        }
        job = {
            "apiVersion": API_VERSION,
            "kind": TrainJob.kind,
            "metadata": job_metadata(plan),
            "spec": {
                "runtimeRef": {"apiGroup": API_GROUP, "kind": "TrainingRuntime", "name": plan.run_id},
                "trainer": {"numNodes": plan.nodes, "numProcPerNode": plan.processes_per_node},
            },
        }
        return [runtime, job]
