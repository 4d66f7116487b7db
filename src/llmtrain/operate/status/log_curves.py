"""The losses of a run on a cluster, from the log of rank 0: that of its pods, or from the volume once they are gone."""

import math

from llmtrain.operate.logs.merged_logs import line_as_dict, merged_logs
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.progress import RunProgress

Curves = dict[str, tuple[list[float], list[float]]]


def log_curves(run: ObservedRun) -> Curves:
    """`training` and `validation`: steps and losses. A step that was trained twice has its last value."""
    training: dict[int, float] = {}
    validation: dict[int, float] = {}
    for line in merged_logs(run, rank=0):
        text = line_as_dict(line, run.record.config.launch.processes_per_node)["text"]
        progress = RunProgress().after(text)
        for points, value in ((training, progress.loss), (validation, progress.val_loss)):
            if progress.step is not None and value is not None and math.isfinite(value):
                points[progress.step] = value
    return {"training": _curve(training), "validation": _curve(validation)}


def _curve(points: dict[int, float]) -> tuple[list[float], list[float]]:
    """(Steps, losses), by step: after a resume from an older checkpoint the log goes back."""
    steps = sorted(points)
    return [*steps], [points[step] for step in steps]
