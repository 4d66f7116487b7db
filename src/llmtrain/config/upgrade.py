"""Documents of schema versions 1 and 2 as version 3, and version 3 as version 2 for older images."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from llmtrain.config.distributed import DEFAULT_MASTER_PORT
from llmtrain.config.document import KeyPath
from llmtrain.config.output import DEFAULT_MOUNT_PATH
from llmtrain.config.schema import KINDS, SECTIONS, Config, classes_of, section_class, subsection
from llmtrain.config.sizes import SIZES

GPT2_HEAD_DIM = 64

# What version 1 did and had no field for. A document that has the field anyway keeps its own value.
_IMPLIED_IN_V1: tuple[tuple[str, str, Any, str], ...] = (
    ("trainer", "scale_batch", True, "grad_accum_steps counts per process"),
    ("trainer", "keep_checkpoints", "all", "every checkpoint is kept"),
    ("logging", "all_ranks", True, "every rank logs"),
)
_TOKENIZERS_IN_V1 = {"hf_text": "gpt2"}

# Fields of version 2 with another name in version 3.
_RENAMED: dict[KeyPath, KeyPath] = {
    ("mlflow",): ("tracking", "mlflow"),
    ("logging", "tensorboard"): ("tracking", "tensorboard", "enabled"),
    ("trainer", "early_stopping"): ("trainer", "early_stopping_patience"),
    ("data", "long_rows"): ("data", "truncation"),
    ("data", "bad_rows"): ("data", "on_bad_example"),
}
_NEW_VALUES: dict[KeyPath, dict[str, str]] = {("data", "long_rows"): {"truncate": "right"}}
# Fields by which version 2 repeated others, for pods only.
_REPEATED: dict[KeyPath, KeyPath] = {
    ("launch", "name"): ("output", "run_id"),
    ("launch", "runs_volume", "mount_path"): ("output", "root_dir"),
    ("launch", "tracking_uri"): ("tracking", "mlflow", "tracking_uri"),
    ("launch", "master_port"): ("distributed", "master_port"),
}
_REPEATED_DEFAULTS: dict[KeyPath, Any] = {
    ("launch", "runs_volume", "mount_path"): DEFAULT_MOUNT_PATH,
    ("launch", "master_port"): DEFAULT_MASTER_PORT,
}
_ONLY_IN_V3: tuple[KeyPath, ...] = (
    ("launch", "image_schema"),
    ("model", "architecture"),
    ("trainer", "momentum"),
    ("trainer", "momentum_warmup_steps"),
    ("launch", "resources", "ephemeral_storage"),
    ("launch", "resources", "extra"),
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
_V3_DEFAULTS: tuple[Any, ...] = (None, False, {}, [], "gpt2")
# Fields that version 2 got after its first release: left out at their default, so that every image of version 2 reads
# the document.
_ADDED_TO_V2: tuple[KeyPath, ...] = (
    ("distributed", "rendezvous"),
    ("logging", "all_ranks"),
    ("launch", "queue_priority"),
    ("launch", "security"),
    ("model", "attention"),
)


_CHECKPOINTING: KeyPath = ("trainer", "activation_checkpointing")


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
    kinds = {section: {**_kind(done.values, section), **(chosen or {}).get(section, {})} for section in KINDS}
    if version == 1:
        _upgrade_v1(done, kinds["data"]["name"])
    for old, new in _RENAMED.items():
        _rename(done, old, new)
    for old, new in _REPEATED.items():
        _merge(done, old, new, for_launch)
    done.notes |= drop_other_kinds(done.values, kinds)
    done.values["schema_version"] = Config.model_fields["schema_version"].default
    return done


def upgraded_values(values: dict[str, Any]) -> dict[str, Any]:
    """Recorded values in the current schema, with the defaults of fields that were added to it later."""
    version = values.get("schema_version")
    current = upgrade(values, version).values if is_old(version) else copy.deepcopy(values)
    move_gradient_checkpointing(current)
    return {name: _with_added_fields(name, fields) for name, fields in current.items()}


def _with_added_fields(section: str, fields: Any) -> Any:
    kind = section_class(section, fields) if section in SECTIONS and isinstance(fields, dict) else None
    if kind is None or kind.model_fields.keys() <= fields.keys():
        return fields
    return {**kind.model_construct().model_dump(mode="json", warnings=False), **fields}


def move_gradient_checkpointing(values: dict[str, Any]) -> str | None:
    """model.gradient_checkpointing, which earlier versions had for Hugging Face models, as
    trainer.activation_checkpointing. Returns a note if that says something."""
    is_on = _take(values, ("model", "gradient_checkpointing"))
    if is_on is not True:
        if is_on not in (False, _MISSING):
            _put(values, ("model", "gradient_checkpointing"), is_on)  # the schema refuses it
        return None
    if _get(values, _CHECKPOINTING) is None:
        _put(values, _CHECKPOINTING, "blocks")
    return "model.gradient_checkpointing is now trainer.activation_checkpointing: blocks"


def downgrade(values: dict[str, Any]) -> dict[str, Any]:
    """The resolved config of a launch as a version-2 document, for images from before version 3."""
    old: dict[str, Any] = copy.deepcopy(values)
    for path in (*_ONLY_IN_V3, *(path for path in _ADDED_TO_V2 if _is_default(path, _get(old, path)))):
        _take(old, path)
    for path, new in _REPEATED.items():
        value = _get(old, new)
        _put(old, path, _REPEATED_DEFAULTS.get(path) if value is None else value)
    for path, new in _RENAMED.items():
        value = _take(old, new)
        names = {new_name: old_name for old_name, new_name in _NEW_VALUES.get(path, {}).items()}
        if value is not _MISSING:
            _put(old, path, names.get(value, value) if isinstance(value, str) else value)
    is_checkpointing = _take(old, _CHECKPOINTING) == "blocks"
    if _is_fine_tuning(old):
        _put(old, ("model", "gradient_checkpointing"), is_checkpointing)
    old.pop("tracking")
    return {**old, "schema_version": 2}


def lost_in_v2(values: dict[str, Any]) -> list[str]:
    """Fields of a resolved config with values that a version-2 document cannot hold."""
    paths = [path for path in _ONLY_IN_V3[1:] if _get(values, path) not in _V3_DEFAULTS]
    paths = [path for path in paths if path not in _OBSERVED_ONLY or not _is_default(path, _get(values, path))]
    if isinstance(_get(values, ("launch", "topology_spread")), list):
        paths.append(("launch", "topology_spread"))
    if _get(values, _CHECKPOINTING) not in (None, "none", *(["blocks"] if _is_fine_tuning(values) else [])):
        paths.append(_CHECKPOINTING)
    return [".".join(path) for path in paths]


def _is_fine_tuning(values: dict[str, Any]) -> bool:
    return bool(_get(values, ("model", "name")) == "hf_causal_lm")


def is_old_name(path: str, version: int) -> bool:
    """Whether `section.field` is a name that only documents of this earlier version have."""
    key = tuple(path.split("."))
    return key[0] == "mlflow" or (version == 1 and key[0] == "ddp") or key in _RENAMED or key in _REPEATED


def current_name(path: KeyPath) -> str | None:
    """The name that a field or section of an earlier version has now."""
    if path == ("ddp",):
        return "distributed"
    for old, new in (_RENAMED | _REPEATED).items():
        if path[: len(old)] == old:
            return ".".join((*new, *path[len(old) :]))
    return None


def moved_lines(lines: dict[KeyPath, int]) -> dict[KeyPath, int]:
    """Line numbers of an earlier document, by the names of the current schema."""
    moves = {("ddp",): ("distributed",), ("distributed", "enabled"): ("distributed", "strategy")} | _RENAMED
    moved = dict(lines)
    for old, new in moves.items():
        moved = {(*new, *path[len(old) :]) if path[: len(old)] == old else path: line for path, line in moved.items()}
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
    tokenizer = _TOKENIZERS_IN_V1.get(data_name) if isinstance(data_name, str) else None
    if tokenizer and _fill(values, "data", "tokenizer", tokenizer):
        done.notes["data.tokenizer"] = f"data.tokenizer is {tokenizer} (the default of {data_name})"


def _upgrade_ddp(section: Any) -> Any:
    """Section ddp -> distributed, enabled -> strategy. A wrong type is left for the schema to refuse."""
    if not isinstance(section, dict) or "enabled" not in section:
        return section
    strategy = {True: "ddp", False: "none"}
    enabled = section["enabled"]
    rest = {key: value for key, value in section.items() if key != "enabled"}
    return {**rest, "strategy": strategy[enabled] if isinstance(enabled, bool) else enabled}


def _fill(values: dict[str, Any], section: str, name: str, value: Any) -> bool:
    """Set a field that the document does not have; whether it was set."""
    present = values.get(section)
    present = {} if present is None else present
    if not isinstance(present, dict) or name in present:
        return False
    values[section] = {**present, name: value}
    return True


def _rename(done: Upgrade, old: KeyPath, new: KeyPath) -> None:
    value = _take(done.values, old)
    if value is _MISSING or (value is None and len(old) == 1):  # an empty section
        return
    before, after = ".".join(old), ".".join(new)
    if _get(done.values, new) is not None:
        done.problems.append(f"{before} and {after} are the same. A document of schema_version 2 has {before} only.")
    if isinstance(value, str):
        value = _NEW_VALUES.get(old, {}).get(value, value)
    _put(done.values, new, value)
    if not _is_default(new, value):
        done.notes[before] = f"{before} is now {after}"


def _merge(done: Upgrade, old: KeyPath, new: KeyPath, for_launch: bool) -> None:
    """A field that version 2 had for pods only: it decides a launch, and nothing else."""
    value, general = _take(done.values, old), _get(done.values, new)
    value = _REPEATED_DEFAULTS.get(old) if value is _MISSING else value
    before, after = ".".join(old), ".".join(new)
    is_set = value is not None and value != _REPEATED_DEFAULTS.get(old)
    if for_launch:
        if old == ("launch", "name") and None not in (value, general) and value != general:
            done.problems.append(f"launch.name is {value} but output.run_id is {general}. Set one of them.")
        if value is not None:
            _put(done.values, new, value)
        if is_set and value != general:
            done.notes[before] = f"{before} is now {after}"
    elif is_set and value != general:
        done.notes[before] = f"{before} applies to `llmtrain launch` only; it is now {after}"


def _kind(values: dict[str, Any], section: str) -> dict[str, Any]:
    present = values.get(section)
    default = {"name": Config.model_fields[section].default.name}
    return default | (chosen_kind(present) if isinstance(present, dict) else {})


def chosen_kind(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a section that decide its class: `name` and `architecture`, if it has them."""
    return {name: fields[name] for name in ("name", "architecture") if fields.get(name) is not None}


def drop_other_kinds(values: dict[str, Any], chosen: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Remove fields of `model` and `data` that only other kinds than the chosen ones have: version 2 had the fields of
    all kinds in one section, and `--set model.name=...` changes the kind of a document. Returns a note per field."""
    notes = {}
    for section, kind_fields in chosen.items():
        present = values.get(section)
        if not isinstance(present, dict) or not kind_fields:
            continue
        kind = section_class(section, {**chosen_kind(present), **kind_fields})
        if kind is None:
            continue
        name = kind_fields.get("architecture") or kind_fields.get("name")
        if "size" not in kind.model_fields and "n_layers" in kind.model_fields and present.get("size") in SIZES:
            _expand_size(present)
        for each in [each for each in present if each not in kind.model_fields and _is_known(section, each)]:
            if not _is_default((section, each), present.pop(each)):
                notes[f"{section}.{each}"] = f"{section}.{each} is left out ({name} does not have it)"
    return notes


def _expand_size(model: dict[str, Any]) -> None:
    """Replace `size` by the numbers it stands for, for an architecture without it."""
    n_layers, d_model = SIZES[model.pop("size")]
    for name, value in (("n_layers", n_layers), ("d_model", d_model), ("n_heads", d_model // GPT2_HEAD_DIM)):
        if model.get(name) is None:
            model[name] = value


def _is_known(section: str, name: str) -> bool:
    return any(name in kind.model_fields for kind in classes_of(section))


def _is_default(path: KeyPath, value: Any) -> bool:
    """Whether a value says nothing that leaving it out would not say."""
    if isinstance(value, dict):
        return all(_is_default((*path, name), item) for name, item in value.items())
    return value is None or any(value == default for default in _defaults(path))


def _defaults(path: KeyPath) -> Iterator[Any]:
    kinds = classes_of(path[0]) if path[0] in SECTIONS else []
    for part in path[1:-1]:
        kinds = [inner for kind in kinds if (inner := subsection(kind, part))]
    for kind in kinds:
        if path[-1] in kind.model_fields:
            default = kind.model_fields[path[-1]].default
            yield list(default) if isinstance(default, tuple) else default


_MISSING: Any = object()


def _get(values: dict[str, Any], path: KeyPath) -> Any:
    """The value at a path; None if there is none."""
    found: Any = values
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _take(values: dict[str, Any], path: KeyPath) -> Any:
    """Remove the value at a path and return it; _MISSING if there is none."""
    parent = _get(values, path[:-1]) if len(path) > 1 else values
    return parent.pop(path[-1], _MISSING) if isinstance(parent, dict) else _MISSING


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the value at a path; nothing if something else than a section is in the way (the schema refuses that)."""
    target: Any = values
    for name in path[:-1]:
        if not isinstance(target, dict):
            return
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
    if isinstance(target, dict):
        target[path[-1]] = value
