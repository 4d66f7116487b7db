"""Config documents of schema versions 1 and 2 as version 3. (The other way, for older images: downgrade.py.)"""

import copy
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from llmtrain.config.distributed import DEFAULT_MASTER_PORT
from llmtrain.config.document import MISSING, KeyPath, put_value, take_value, value_at
from llmtrain.config.kind_change import chosen_kind, drop_other_kinds, is_default
from llmtrain.config.output import DEFAULT_MOUNT_PATH
from llmtrain.config.schema import SECTIONS, SECTIONS_BY_NAME, Config, section_class

# What version 1 did and had no field for. A document that has the field anyway keeps its own value.
_IMPLIED_IN_V1: tuple[tuple[str, str, Any, str], ...] = (
    ("trainer", "scale_batch", True, "grad_accum_steps counts per process"),
    ("trainer", "keep_checkpoints", "all", "every checkpoint is kept"),
    ("logging", "all_ranks", True, "every rank logs"),
)
_TOKENIZERS_IN_V1 = {"hf_text": "gpt2"}

# Fields of version 2 with another name in version 3.
RENAMED: dict[KeyPath, KeyPath] = {
    ("mlflow",): ("tracking", "mlflow"),
    ("logging", "tensorboard"): ("tracking", "tensorboard", "enabled"),
    ("trainer", "early_stopping"): ("trainer", "early_stopping_patience"),
    ("data", "long_rows"): ("data", "truncation"),
    ("data", "bad_rows"): ("data", "on_bad_example"),
}
NEW_VALUES: dict[KeyPath, dict[str, str]] = {("data", "long_rows"): {"truncate": "right"}}
# Fields by which version 2 repeated others, for pods only.
REPEATED: dict[KeyPath, KeyPath] = {
    ("launch", "name"): ("output", "run_id"),
    ("launch", "runs_volume", "mount_path"): ("output", "root_dir"),
    ("launch", "tracking_uri"): ("tracking", "mlflow", "tracking_uri"),
    ("launch", "master_port"): ("distributed", "master_port"),
}
REPEATED_DEFAULTS: dict[KeyPath, Any] = {
    ("launch", "runs_volume", "mount_path"): DEFAULT_MOUNT_PATH,
    ("launch", "master_port"): DEFAULT_MASTER_PORT,
}
IMAGE: KeyPath = ("launch", "image")
FORMER_IMAGE = "llmtrain:latest"
"""The default of `launch.image` before version 3."""
TEXT_COLUMN = ("data", "text_column")  # in version 2 of hf_text only
CHECKPOINTING: KeyPath = ("trainer", "activation_checkpointing")


@dataclass
class Upgrade:
    """A document in the current schema, and what the user should know about it."""

    values: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)
    """Field -> what the upgrade did with it."""
    problems: list[str] = field(default_factory=list)


def is_old(version: object) -> TypeGuard[int]:
    return type(version) is int and version in (1, 2)  # True == 1 in Python


def upgrade(
    values: dict[str, Any], version: int, chosen: dict[str, Any] | None = None, *, for_launch: bool = False
) -> Upgrade:
    """A version-1 or version-2 document as version 3. `chosen`: what overrides choose (see chosen_kind), by section.
    `for_launch`: the fields that version 2 had for pods decide, as they did in `llmtrain launch`."""
    done = Upgrade(copy.deepcopy(values))
    kinds = {}
    for section in SECTIONS_BY_NAME:
        overridden = (chosen or {}).get(section, {})
        kinds[section] = _kind(done.values, section) | overridden
    if version == 1:
        _upgrade_v1(done, kinds["data"]["name"])
        if for_launch and value_at(done.values, ("launch", "nodes")) is None:
            done.notes["launch.nodes"] = "launch.nodes is 1 (version 1 had no such field): pass --nodes for more pods"
    for old, new in RENAMED.items():
        _rename(done, old, new)
    for old, new in REPEATED.items():
        _merge(done, old, new, for_launch)
    if for_launch and value_at(done.values, IMAGE) is None:
        put_value(done.values, IMAGE, FORMER_IMAGE)
    if kinds["data"]["name"] == "text_files":
        _drop_text_column(done)
    done.notes |= drop_other_kinds(done.values, kinds)
    done.values["schema_version"] = Config.model_fields["schema_version"].default
    return done


def _drop_text_column(done: Upgrade) -> None:
    """Earlier versions recorded it for every kind of data, but text_files read all files as plain text."""
    column = take_value(done.values, TEXT_COLUMN)
    if column is not MISSING and not is_default(TEXT_COLUMN, column):
        done.notes["data.text_column"] = "data.text_column is left out (text_files did not have it)"


def upgraded_values(values: dict[str, Any]) -> dict[str, Any]:
    """Recorded values in the current schema, with the defaults of fields that were added to it later."""
    version = values.get("schema_version")
    current = upgrade(values, version).values if is_old(version) else copy.deepcopy(values)
    move_gradient_checkpointing(current)
    return {name: _with_added_fields(name, fields) for name, fields in current.items()}


def _with_added_fields(section: str, fields: Any) -> Any:
    if section not in SECTIONS or not isinstance(fields, dict):
        return fields
    kind = section_class(section, fields)
    if kind is None or kind.model_fields.keys() <= fields.keys():
        return fields
    return {**kind.model_construct().model_dump(mode="json", warnings=False), **fields}


def move_gradient_checkpointing(values: dict[str, Any]) -> str | None:
    """model.gradient_checkpointing, which earlier versions had for Hugging Face models, as
    trainer.activation_checkpointing. Returns a note if that says something."""
    is_on = take_value(values, ("model", "gradient_checkpointing"))
    if is_on is not True:
        if is_on not in (False, MISSING):
            put_value(values, ("model", "gradient_checkpointing"), is_on)  # the schema refuses it
        return None
    if value_at(values, CHECKPOINTING) is None:
        put_value(values, CHECKPOINTING, "blocks")
    return "model.gradient_checkpointing is now trainer.activation_checkpointing: blocks"


def is_old_name(path: str, version: int) -> bool:
    """Whether `section.field` is a name that only documents of this earlier version have."""
    key = tuple(path.split("."))
    return key[0] == "mlflow" or (version == 1 and key[0] == "ddp") or key in RENAMED or key in REPEATED


def current_name(path: KeyPath) -> str | None:
    """The name that a field or section of an earlier version has now."""
    if path == ("ddp",):
        return "distributed"
    for old, new in (RENAMED | REPEATED).items():
        if path[: len(old)] == old:
            return ".".join((*new, *path[len(old) :]))
    return None


def moved_lines(lines: dict[KeyPath, int]) -> dict[KeyPath, int]:
    """Line numbers of an earlier document, by the names of the current schema."""
    moves = {("ddp",): ("distributed",), ("distributed", "enabled"): ("distributed", "strategy")} | RENAMED
    moved = {}
    for path, line in lines.items():
        for old, new in moves.items():
            if path[: len(old)] == old:
                path = (*new, *path[len(old) :])  # which another move may concern: ddp.enabled
        moved[path] = line
    return moved


def _upgrade_v1(done: Upgrade, data_name: Any) -> None:
    values = done.values
    if "ddp" in values:
        if "distributed" in values:
            done.problems.append("ddp and distributed are the same section. A version-1 document has ddp only.")
        values["distributed"] = _upgrade_ddp(values.pop("ddp"))
    for section, name, value, reason in _IMPLIED_IN_V1:
        if _fill(values, section, name, value):
            done.notes[f"{section}.{name}"] = f"{section}.{name} is {str(value).lower()} ({reason})"
    tokenizer = _TOKENIZERS_IN_V1.get(str(data_name))
    if tokenizer and _fill(values, "data", "tokenizer", tokenizer):
        done.notes["data.tokenizer"] = f"data.tokenizer is {tokenizer} (the default of {data_name})"


def _upgrade_ddp(section: Any) -> Any:
    """Section ddp -> distributed, enabled -> strategy. A wrong type is left for the schema to refuse."""
    if not isinstance(section, dict) or "enabled" not in section:
        return section
    upgraded = dict(section)
    enabled = upgraded.pop("enabled")
    if isinstance(enabled, bool):
        enabled = "ddp" if enabled else "none"
    upgraded["strategy"] = enabled
    return upgraded


def _fill(values: dict[str, Any], section: str, name: str, value: Any) -> bool:
    """Set a field that the document does not have; whether it was set."""
    present = values.get(section)
    if present is None:
        present = {}
    if not isinstance(present, dict) or name in present:
        return False
    values[section] = {**present, name: value}
    return True


def _rename(done: Upgrade, old: KeyPath, new: KeyPath) -> None:
    value = take_value(done.values, old)
    if value is MISSING or (value is None and len(old) == 1):  # an empty section
        return
    before = ".".join(old)
    after = ".".join(new)
    if value_at(done.values, new) is not None:
        done.problems.append(f"{before} and {after} are the same. A document of schema_version 2 has {before} only.")
    if isinstance(value, str):
        value = NEW_VALUES.get(old, {}).get(value, value)
    put_value(done.values, new, value)
    if not is_default(new, value):
        done.notes[before] = f"{before} is now {after}"


def _merge(done: Upgrade, old: KeyPath, new: KeyPath, for_launch: bool) -> None:
    """A field that version 2 had for pods only: it decides a launch, and nothing else."""
    default = REPEATED_DEFAULTS.get(old)
    value = take_value(done.values, old)
    if value is MISSING:
        value = default
    general = value_at(done.values, new)
    before = ".".join(old)
    after = ".".join(new)
    is_set = value is not None and value != default
    if for_launch:
        if old == ("launch", "name") and None not in (value, general) and value != general:
            done.problems.append(f"launch.name is {value} but output.run_id is {general}. Set one of them.")
        if value is not None:
            put_value(done.values, new, value)
        if is_set and value != general:
            done.notes[before] = f"{before} is now {after}"
    elif is_set and value != general:
        done.notes[before] = f"{before} applies to `llmtrain launch` only; it is now {after}"


def _kind(values: dict[str, Any], section: str) -> dict[str, Any]:
    kind = {"name": Config.model_fields[section].default.name}
    present = values.get(section)
    if isinstance(present, dict):
        kind |= chosen_kind(present)
    return kind
