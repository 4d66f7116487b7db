"""train_job: a TrainJob of the Kubeflow Trainer (v2), with a TrainingRuntime of its own.

The overrides of a TrainJob cannot set the security context, the grace period or the pod failure policy, so each run has
its own runtime, with its name and in its namespace. It is created first: the webhook of the TrainJob requires it. The
Trainer creates a JobSet from the two, so pods and Service are those of a JobSet.
"""

from typing import ClassVar

from llmtrain.launch.job import JobPlan, Manifest
from llmtrain.launch.kinds.indexed_job import IndexedJob
from llmtrain.launch.kinds.job_set import JobSet, set_spec
from llmtrain.launch.manifests import job_metadata, metadata
from llmtrain.tracking.train_job import PORT as STATUS_PORT

API_GROUP = "trainer.kubeflow.org"
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # the Job that spec.trainer applies to


class TrainJob(JobSet):
    api_version = f"{API_GROUP}/v1alpha1"
    object_kind = "TrainJob"
    container = "node"  # required by Kubeflow Trainer
    index_variable = "PET_NODE_RANK"
    unsupported_fields = ("ttl_sec",)
    status_port = STATUS_PORT
    controller = "the Kubeflow Trainer"
    installer = "the Kubeflow Trainer (v2), https://www.kubeflow.org/docs/components/trainer"
    operator_kinds = ("TrainJob", "TrainingRuntime")
    conditions = IndexedJob.conditions
    # Its webhook looks up the runtime, which a dry run has not created.
    unchecked: ClassVar = {"TrainJob": "its runtime does not exist yet"}
    comments: ClassVar = {
        "TrainingRuntime": "The pod template of the TrainJob. Kubeflow Trainer creates a JobSet from the two.",
        "TrainJob": "The run, for Kubeflow Trainer: number of pods, processes per pod, and the runtime.",
    }
    field_comments: ClassVar = {"numNodes": "Number of pods.", "numProcPerNode": "Processes per pod."}

    def render(self, plan: JobPlan) -> list[Manifest]:
        runtime = {
            "apiVersion": self.api_version,
            "kind": "TrainingRuntime",
            "metadata": metadata(plan, labels={"trainer.kubeflow.org/framework": "torch"}),
            "spec": {
                "mlPolicy": {"numNodes": plan.nodes, "torch": {"numProcPerNode": plan.processes_per_node}},
                "template": {"spec": set_spec(plan, {}, STEP_LABEL)},
            },
        }
        job = {
            "apiVersion": self.api_version,
            "kind": self.object_kind,
            "metadata": job_metadata(plan),
            "spec": {
                "runtimeRef": {"apiGroup": API_GROUP, "kind": "TrainingRuntime", "name": plan.run_id},
                "trainer": {"numNodes": plan.nodes, "numProcPerNode": plan.processes_per_node},
            },
        }
        return [runtime, job]
