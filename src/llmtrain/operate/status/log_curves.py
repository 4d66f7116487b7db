"""The losses of a run on a cluster, from the log of rank 0: that of its pods, or from the volume once they are gone."""

import math

from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.record import Record
from llmtrain.operate.logs.merged_logs import line_as_dict, merged_logs
from llmtrain.operate.status.progress import RunProgress

Curves = dict[str, tuple[list[float], list[float]]]


def log_curves(cluster: Cluster, record: Record) -> Curves:
    """`training` and `validation`: steps and losses. A step that was trained twice has its last value."""
    found: dict[str, dict[int, float]] = {"training": {}, "validation": {}}
    for line in merged_logs(cluster, record, rank=0):
        text = line_as_dict(line, record.config.launch.processes_per_node)["text"]
        progress = RunProgress().after(text)
        for name, value in (("training", progress.loss), ("validation", progress.val_loss)):
            if progress.step is not None and value is not None and math.isfinite(value):
                found[name][progress.step] = value
    rows = {name: sorted(values.items()) for name, values in found.items()}
    return {name: ([step for step, _ in pairs], [value for _, value in pairs]) for name, pairs in rows.items()}
