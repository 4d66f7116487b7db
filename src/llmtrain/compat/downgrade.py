"""The resolved config of a launch as a document of schema version 2, for images from before version 3."""

import copy
from typing import Any

from llmtrain.compat.upgrade import CHECKPOINTING, NEW_VALUES, RENAMED, REPEATED, REPEATED_DEFAULTS, TEXT_COLUMN
from llmtrain.config.best_metric import VAL_LOSS
from llmtrain.config.document import MISSING, KeyPath, put_value, take_value, value_at
from llmtrain.config.kind_change import is_default
from llmtrain.config.launch import HF_TOKEN
from llmtrain.config.objective import DEFAULT_OBJECTIVE

_ONLY_IN_V3: tuple[KeyPath, ...] = (
    ("launch", "image_schema"),
    ("data", "on_bad_record"),
    ("data", "split_by"),
    ("data", "max_documents"),
    ("data", "deduplicate"),
    ("data", "add_bos"),
    ("data", "document_mask"),
    ("model", "architecture"),
    ("trainer", "objective"),
    ("trainer", "best_metric"),
    ("trainer", "eval_tasks"),
    ("trainer", "momentum"),
    ("trainer", "momentum_warmup_steps"),
    ("launch", "resources", "ephemeral_storage"),
    ("launch", "resources", "extra"),
    ("launch", "hf_token_secret", "variable"),
    ("launch", "labels"),
    ("launch", "annotations"),
    ("launch", "service_account"),
    ("launch", "runtime_class"),
    ("launch", "scheduler_name"),
    ("launch", "host_network"),
    ("launch", "run_as_user"),
    ("launch", "run_as_group"),
    ("launch", "fs_group"),
    ("launch", "capabilities"),
    ("launch", "extra_volumes"),
    ("launch", "extra_mounts"),
    ("launch", "pod_patch"),
    ("launch", "pod_monitor"),
    ("output", "report"),
    ("tracking", "wandb"),
    ("tracking", "prometheus"),
)
# Fields that change what is recorded of a run, and not the run: their defaults lose nothing in version 2.
_OBSERVED_ONLY: tuple[KeyPath, ...] = (("output", "report"), ("tracking", "wandb"), ("tracking", "prometheus"))
_V3_DEFAULTS: tuple[Any, ...] = (
    None,
    False,
    {},
    [],
    "gpt2",
    "error",
    "position",
    HF_TOKEN,
    {"name": DEFAULT_OBJECTIVE},
    VAL_LOSS,
)
# Fields that version 2 got after its first release: left out at their default, so that every image of version 2 reads
# the document.
_ADDED_TO_V2: tuple[KeyPath, ...] = (
    ("distributed", "rendezvous"),
    ("logging", "all_ranks"),
    ("launch", "queue_priority"),
    ("launch", "security"),
    ("model", "attention"),
)


def downgrade(values: dict[str, Any]) -> dict[str, Any]:
    """The resolved config of a launch as a version-2 document, for images from before version 3."""
    old: dict[str, Any] = copy.deepcopy(values)
    for path in _ONLY_IN_V3:
        take_value(old, path)
    for path in _ADDED_TO_V2:
        if is_default(path, value_at(old, path)):
            take_value(old, path)
    if value_at(old, ("data", "name")) == "text_files":
        take_value(old, TEXT_COLUMN)
    for path, new in REPEATED.items():
        value = value_at(old, new)
        put_value(old, path, REPEATED_DEFAULTS.get(path) if value is None else value)
    for path, new in RENAMED.items():
        value = take_value(old, new)
        for old_value, new_value in NEW_VALUES.get(path, {}).items():
            if value == new_value:
                value = old_value
        if value is not MISSING:
            put_value(old, path, value)
    is_checkpointing = take_value(old, CHECKPOINTING) == "blocks"
    if _is_fine_tuning(old):
        put_value(old, ("model", "gradient_checkpointing"), is_checkpointing)
    old.pop("tracking")
    old.pop("plan", None)
    return {**old, "schema_version": 2}


def lost_in_v2(values: dict[str, Any]) -> list[str]:
    """Fields of a resolved config with values that a version-2 document cannot hold."""
    paths = []
    for path in _ONLY_IN_V3[1:]:  # not launch.image_schema itself
        value = value_at(values, path)
        if value not in _V3_DEFAULTS and not (path in _OBSERVED_ONLY and is_default(path, value)):
            paths.append(path)
    if value_at(values, ("launch", "runs_volume")) is None:
        paths.append(("launch", "runs_volume"))
    if isinstance(value_at(values, ("launch", "topology_spread")), list):
        paths.append(("launch", "topology_spread"))
    checkpointing = value_at(values, CHECKPOINTING)
    # Version 2 had model.gradient_checkpointing, for Hugging Face models only.
    is_in_v2 = checkpointing == "blocks" and _is_fine_tuning(values)
    if checkpointing not in (None, "none") and not is_in_v2:
        paths.append(CHECKPOINTING)
    kind = value_at(values, ("data", "name"))
    if kind == "text_files" and value_at(values, TEXT_COLUMN) is not None:
        paths.append(TEXT_COLUMN)
    if kind == "mixture":
        paths.append(("data", "name"))
    return [".".join(path) for path in paths]


def _is_fine_tuning(values: dict[str, Any]) -> bool:
    return bool(value_at(values, ("model", "name")) == "hf_causal_lm")
