"""The config of a run as flat parameters, such as `model.lora.rank`, for trackers that compare runs by them."""

import re
from typing import Any

from llmtrain.core.redact import redact_values
from llmtrain.runs.view import RunView
from llmtrain.tracking.base import TrackedRun


def flat_parameters(run: TrackedRun) -> dict[str, Any]:
    """Without the sections that the run does not use: `launch` outside of a cluster, `distributed` in a single
    process."""
    starts = RunView(run.directory).generations
    is_launched = any(row.get("launch") for row in starts)
    is_parallel = any(row.get("world_size") != 1 for row in starts)
    values = redact_values(run.config.as_dict())
    values.pop("schema_version")
    if not is_launched:
        values.pop("launch")
    if not is_parallel:
        values.pop("distributed")
    # The characters that MLflow accepts; names of the user's own may have others.
    return {re.sub(r"[^\w./ :-]", "_", name): value for name, value in _flat(values)}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows
