"""Another kind of model or data than that of the document below: an override, or a config that extends another, may
choose one. The fields that only the former kind has are left out."""

from collections.abc import Iterator
from typing import Any

from llmtrain.config.document import KeyPath
from llmtrain.config.objective import DEFAULT_OBJECTIVE
from llmtrain.config.schema import SECTIONS, classes_of, section_class, subsections
from llmtrain.config.section import Section
from llmtrain.config.sizes import SIZES

GPT2_HEAD_DIM = 64


def chosen_kind(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a section that decide its class: `name` and `architecture`, if it has them."""
    chosen = {}
    for name in ("name", "architecture"):
        if fields.get(name) is not None:
            chosen[name] = fields[name]
    return chosen


def drop_other_kinds(values: dict[str, Any], chosen: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Remove fields of `model` and `data` that only other kinds than the chosen ones have. Returns a note per field."""
    notes = {}
    for section, kind_fields in chosen.items():
        present = values.get(section)
        if not isinstance(present, dict) or not kind_fields:
            continue
        kind = section_class(section, {**chosen_kind(present), **kind_fields})
        if kind is None:
            continue
        name = kind_fields.get("architecture") or kind_fields.get("name")
        has_numbers_only = "n_layers" in kind.model_fields and "size" not in kind.model_fields
        if has_numbers_only and str(present.get("size")) in SIZES:
            _expand_size(present)
        for field in list(present):
            if field in kind.model_fields or not _is_known(section, field):
                continue
            if not is_default((section, field), present.pop(field)):
                notes[f"{section}.{field}"] = f"{section}.{field} is left out ({name} does not have it)"
    return notes


def drop_other_objective(values: dict[str, Any], name: Any) -> None:
    """Remove the fields of trainer.objective if another objective is chosen (None: none is): each has fields and
    defaults of its own."""
    trainer = values.get("trainer")
    if name is None or not isinstance(trainer, dict) or not isinstance(trainer.get("objective"), dict):
        return
    if trainer["objective"].get("name", DEFAULT_OBJECTIVE) != name:
        trainer["objective"] = {}


def _expand_size(model: dict[str, Any]) -> None:
    """Replace `size` by the numbers it stands for, for an architecture without it."""
    n_layers, d_model = SIZES[model.pop("size")]
    shape = {"n_layers": n_layers, "d_model": d_model, "n_heads": d_model // GPT2_HEAD_DIM}
    for name, value in shape.items():
        if model.get(name) is None:
            model[name] = value


def _is_known(section: str, field: str) -> bool:
    return any(field in kind.model_fields for kind in classes_of(section))


def is_default(path: KeyPath, value: Any) -> bool:
    """Whether a value says nothing that leaving it out would not say."""
    if isinstance(value, dict):
        return all(is_default((*path, name), item) for name, item in value.items())
    return value is None or any(value == default for default in _defaults(path))


def _defaults(path: KeyPath) -> Iterator[Any]:
    """The default of a field, in each kind of its section that has it."""
    section, *parents, field = path
    kinds: list[type[Section]] = []
    if section in SECTIONS:
        kinds = classes_of(section)
    for parent in parents:
        kinds = [inner for kind in kinds for inner in subsections(kind, parent).values()]
    for kind in kinds:
        if field not in kind.model_fields:
            continue
        default = kind.model_fields[field].default
        if isinstance(default, tuple):  # YAML has lists only
            default = list(default)
        yield default
