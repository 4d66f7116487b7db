"""Kind: a way to run the pods of a run on Kubernetes (`launch.kind`), and every answer that differs between kinds.

A new kind is one module in this package and one row in registry.KINDS: docs/extending.md shows one. Nothing outside
this package asks which kind a run has; it asks the kind. The defaults are the answers of a kind whose pods exit when
they have ended, and that needs no operator.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from llmtrain import registry
from llmtrain.config.launch import LaunchSection
from llmtrain.launch.job import JobPlan, Manifest
from llmtrain.launch.pod_task import PodTask
from llmtrain.runs.state import RunState

Object = dict[str, Any]


class PodExit(NamedTuple):
    """The exit of a container, as reported in an event of the job."""

    pod: str
    node_rank: int
    code: int
    """The code that the platform reports."""


class Kind:
    # What it creates.
    api_version: ClassVar[str]
    object_kind: ClassVar[str]
    """Kubernetes kind of the job."""
    container: ClassVar[str] = "trainer"
    """Name of the training container; some platforms require one."""
    renders_service: ClassVar[bool] = True
    """Whether `render` has the headless Service. Else a controller creates it, or one per pod."""
    comments: ClassVar[Mapping[str, str]] = {}
    """Kubernetes kind -> a sentence above such a manifest."""
    field_comments: ClassVar[Mapping[str, str]] = {}
    """Field of its manifests -> a comment above the field."""
    unchecked: ClassVar[Mapping[str, str]] = {}
    """Kubernetes kind -> why a server-side dry run cannot check such a manifest."""

    # What it supports.
    unsupported_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the launch section that it cannot honor: of `ttl_sec` and `active_deadline_sec`."""
    limits_crashes: ClassVar[bool] = True
    """Whether it gives up after launch.max_restarts crashes. Else llmtrain counts them on the runs volume."""
    status_port: ClassVar[int | None] = None
    """Port of its controller to which a training process reports its progress."""

    # What its operator is called. Empty: a controller of Kubernetes itself creates its pods.
    controller: ClassVar[str] = "its operator"
    """What has to run so that pods are created, for messages."""
    installer: ClassVar[str] = ""
    """What installs its `operator_kinds`, and where to find it."""
    operator_kinds: ClassVar[tuple[str, ...]] = ()
    """Kubernetes kinds among its manifests that `kubectl delete all` does not cover."""

    # How its pods are numbered.
    index_label: ClassVar[str]
    """Label of a pod with its number."""
    role_label: ClassVar[str] = ""
    """Label of a pod with its role, if each role is numbered from 0."""
    has_ordinal_names: ClassVar[bool] = False
    """Whether a pod without the label has its number at the end of its name: RUN-0, RUN-1, ..."""

    # How its pods and its job end.
    exit_codes: ClassVar[str | None] = None
    """Value of LLMTRAIN_EXIT_CODES, by which `llmtrain node` adapts exit codes (distributed/platform_codes.py)."""
    pods_idle_at_end: ClassVar[bool] = False
    """Whether a pod that has ended for good stays Running, until it is deleted: its container would be restarted."""
    conditions: ClassVar[Mapping[str, RunState]] = {}
    """Condition type of the job -> FINISHED, FAILED or SUSPENDED. Empty: it never ends."""
    unsuspend_patch: ClassVar[Mapping[str, Any]] = {"spec": {"suspend": False}}
    """Merge patch that resumes a suspended job."""
    inner_job: ClassVar[str | None] = None
    """Suffix of the run id in the name of the batch/v1 Job that its controller creates."""
    pods_own_queue_entry: ClassVar[bool] = False
    """Whether Kueue's Workload belongs to the pods instead of the job."""

    def __init__(self, launch: LaunchSection) -> None:
        self.launch = launch

    @property
    def index_variable(self) -> str:
        """The environment variable that holds the node rank in a pod."""
        raise NotImplementedError

    def render(self, plan: JobPlan) -> list[Manifest]:
        """The job, preceded by the objects that it needs."""
        raise NotImplementedError

    def job_name(self, run_id: str) -> str:
        """Name of the object that stands for the whole job."""
        return run_id

    def master_addr(self, run_id: str) -> str:
        """The DNS name of pod 0; never that of the Service, which resolves to every pod."""
        return f"{run_id}-0.{run_id}"

    @property
    def pod_0_labels(self) -> dict[str, str]:
        """Labels that of all pods of the run only pod 0 has."""
        return {self.index_label: "0"}

    def check_task(self, task: PodTask) -> None:
        """Raise UsageError for a task that it cannot run."""

    def node_rank(self, pod: Object, run_id: str) -> int | None:
        """Node rank of a pod; None for a pod that is not part of the run, such as a reader pod."""
        index = pod_index(pod)
        if index is None and self.has_ordinal_names:
            ordinal = re.fullmatch(rf"{re.escape(run_id)}-([0-9]+)", pod["metadata"]["name"])
            if ordinal is not None:
                index = ordinal[1]
        # Anybody with write access may have set the label to anything.
        if index is None or not re.fullmatch("[0-9]{1,9}", index):
            return None
        return int(index)

    def state(self, job: Object) -> RunState | None:
        """FAILED, FINISHED or SUSPENDED; None while the job is active."""
        rows = (job.get("status") or {}).get("conditions") or []
        states = {self.conditions.get(row["type"]) for row in rows if row.get("status") == "True"}
        # A failed Job that is suspended, or had succeeded on some pods, has several of the conditions.
        for state in (RunState.FAILED, RunState.FINISHED, RunState.SUSPENDED):
            if state in states:
                return state
        return None

    def replicas(self, job: Object) -> int | None:
        """Number of pods, where `kubectl scale` can change it; None elsewhere, as here."""

    def exit_in_event(self, message: str) -> PodExit | None:
        """An exit that is known from an event only, as the operator has deleted the pod; None here."""

    @staticmethod
    def llmtrain_code(code: int) -> int:
        """The exit code of llmtrain's contract for one that `exit_codes` has translated."""
        return code


def find_kind(launch: LaunchSection) -> Kind:
    kind: Kind = registry.resolve("launch.kind", launch.kind, registry.KINDS)(launch)
    return kind


def all_kinds() -> list[type[Kind]]:
    return registry.all_kinds()


def pod_index(pod: Object) -> str | None:
    """The number of a pod of any kind: pods of an earlier launch with another kind may still be there."""
    labels = pod["metadata"].get("labels") or {}
    for kind in all_kinds():
        if kind.index_label in labels:
            return str(labels[kind.index_label])
    return None
