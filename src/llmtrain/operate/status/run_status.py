"""The status of one run, built from what was observed, without requests to the cluster."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llmtrain.core.redact import redacted_line
from llmtrain.errors import UsageError
from llmtrain.launch.record import Record, UnreadableRecord
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.run_cost import ClusterCost, find_cost
from llmtrain.operate.status.state import Observation, age_sec, explain_state, find_exit_code, find_state
from llmtrain.runs.state import RunState


@dataclass(frozen=True)
class RunStatus:
    run_id: str
    namespace: str
    kind: str
    mode: str
    state: RunState
    why_short: str | None
    nodes: int
    processes_per_node: int
    world_size: int
    pods: list[PodStatus]
    restarts: int
    """Restarts of existing pods; those of deleted pods are not counted."""
    step: int | None
    max_steps: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    time_left: str | None
    exit_code: int | None
    """None until the run has ended."""
    launched_at: str
    age_sec: float
    has_files: bool = True
    """Whether it leaves files that `fetch` can download."""
    unseen: str | None = None
    """What could not be read, and why."""
    costs: ClusterCost = field(default_factory=ClusterCost)

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["costs"]
        return values | self.costs.as_dict()

    @property
    def has_ended(self) -> bool:
        return self.state.has_ended


def make_status(record: Record, observed: Observation) -> RunStatus:
    launch = record.config.launch
    progress = observed.progress or RunProgress()
    state = find_state(record, observed)
    is_running = state == RunState.RUNNING
    nodes = launch.node_range[1]
    return RunStatus(
        run_id=record.run_id,
        namespace=record.namespace,
        kind=launch.kind,
        mode=record.task.mode,
        state=state,
        why_short=explain_state(record, state, observed),
        nodes=nodes,
        processes_per_node=launch.processes_per_node,
        world_size=nodes * launch.processes_per_node,
        pods=observed.pods,
        restarts=sum(pod.restarts for pod in observed.pods),
        step=progress.step,
        max_steps=progress.max_steps or _steps_of(record),
        loss=progress.loss,
        val_loss=progress.val_loss,
        tokens_per_second=progress.tokens_per_second if is_running else None,
        time_left=progress.time_left if is_running else None,
        exit_code=find_exit_code(state, observed),
        launched_at=record.launched_at,
        age_sec=round(age_sec(record), 1),
        has_files=record.has_files,
        costs=find_cost(record, observed.pods, progress, state == RunState.FINISHED),
    )


def _steps_of(record: Record) -> int | None:
    trainer = record.config.trainer
    if record.task.mode != "train" or (trainer.max_steps is None and trainer.max_epochs is not None):
        return None
    return trainer.steps


def unreadable_status(record: UnreadableRecord) -> RunStatus:
    """The status of a run whose record cannot be read."""
    return RunStatus(
        run_id=record.run_id,
        namespace=record.namespace,
        kind="-",
        mode="-",
        state=RunState.UNREADABLE,
        why_short=record.problem,
        nodes=0,
        processes_per_node=0,
        world_size=0,
        pods=[],
        restarts=0,
        step=None,
        max_steps=None,
        loss=None,
        val_loss=None,
        tokens_per_second=None,
        time_left=None,
        exit_code=None,
        launched_at=record.launched_at,
        age_sec=round(age_sec(record), 1),
    )


def malformed_status(record: Record, problem: UsageError) -> RunStatus:
    """The status of a run whose record can be read but whose objects are malformed."""
    unknown = UnreadableRecord(record.run_id, record.namespace, redacted_line(problem.what), record.launched_at)
    return replace(
        unreadable_status(unknown), kind=record.config.launch.kind, mode=record.task.mode, state=RunState.UNKNOWN
    )
