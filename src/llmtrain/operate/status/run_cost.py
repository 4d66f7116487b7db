"""GPU-hours and cost of a run on a cluster, and its memory and time as they were predicted."""

from dataclasses import dataclass
from typing import Any

from llmtrain.launch.record import Record
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.progress import RunProgress
from llmtrain.plan.cost import RunCost, node_type_of, rate_of
from llmtrain.plan.launch_target import gpu_of_launch, launch_target, uses_gpu
from llmtrain.plan.prediction import Prediction, predict

_HOUR = 3600


@dataclass(frozen=True)
class ClusterCost:
    """What is not known is None."""

    gpu_hours: float | None = None
    """Of the pods that still exist; None on CPUs."""
    cost: RunCost | None = None
    predicted: Prediction | None = None
    """By the formula; None for tasks other than training, and on CPUs, whose speed is not known here."""
    peak_memory_bytes: float | None = None
    seconds: float | None = None
    """Of the whole run: since its first pod started, with the time that is left. None if that is not known."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpu_hours": self.gpu_hours,
            "cost": self.cost.as_dict() if self.cost else None,
            "predicted": self.predicted.as_dict() if self.predicted else None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "seconds": self.seconds,
        }


def find_cost(record: Record, pods: list[PodStatus], progress: RunProgress, has_finished: bool) -> ClusterCost:
    config = record.config
    launch = config.launch
    is_gpu = uses_gpu(config)
    hours = sum(pod.held_seconds for pod in pods) / _HOUR * launch.processes_per_node
    left = None if has_finished else progress.seconds_left
    gpu = gpu_of_launch(launch) if is_gpu else None
    rate = rate_of(config.plan.prices, gpu, node_type_of(launch.node_selector), launch.processes_per_node)
    cost = None
    if rate is not None:
        projected = None
        if left is not None:
            more = left / _HOUR * launch.processes_per_node * max(1, len(pods))
            projected = round((hours + more) * rate.per_hour, 4)
        cost = RunCost(round(hours * rate.per_hour, 4), projected, rate.currency)
    seconds = None
    if pods and (has_finished or left is not None):
        seconds = max(pod.held_seconds for pod in pods) + (left or 0.0)
    return ClusterCost(
        gpu_hours=round(hours, 2) if is_gpu else None,
        cost=cost,
        predicted=predict(config, launch_target(config)) if is_gpu and record.task.mode == "train" else None,
        peak_memory_bytes=progress.peak_memory_bytes,
        seconds=seconds,
    )
