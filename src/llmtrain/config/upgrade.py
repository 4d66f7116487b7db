"""Config documents of schema version 1, read with the meaning they had."""

from typing import Any

# What version 1 did and had no field for. A document that has the field anyway keeps its own value.
_MEANT: tuple[tuple[str, str, Any, str], ...] = (
    ("trainer", "scale_batch", True, "grad_accum_steps counts per process"),
    ("trainer", "keep_checkpoints", "all", "every checkpoint is kept"),
    ("logging", "all_ranks", True, "every rank logs"),
)
_TOKENIZERS = {"hf_text": "gpt2"}
"""The tokenizer of a dataset in version 1, which had no data.tokenizer; other datasets have the default of today."""


def upgrade_v1(values: dict[str, Any], data_name: str | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with the fields of version 2, and a note on each field that was filled in, by its name. `data_name`
    is the dataset where an override replaces the document's."""
    upgraded = {key: value for key, value in values.items() if key != "ddp"}
    if "ddp" in values:
        upgraded["distributed"] = _upgrade_ddp(values["ddp"])
    notes: dict[str, str] = {}
    for section, field, value, reason in _MEANT:
        if _fill(upgraded, section, field, value):
            notes[f"{section}.{field}"] = f"{section}.{field} {str(value).lower()} ({reason})"
    data = upgraded.get("data")
    name = data_name or (data.get("name") if isinstance(data, dict) else None)
    tokenizer = _TOKENIZERS.get(name) if isinstance(name, str) else None
    if tokenizer and _fill(upgraded, "data", "tokenizer", tokenizer):
        notes["data.tokenizer"] = f"data.tokenizer {tokenizer} (of {name})"
    return upgraded, notes


def _upgrade_ddp(section: Any) -> Any:
    """Section ddp -> distributed, enabled -> strategy. What has the wrong type is left for the schema to refuse."""
    if not isinstance(section, dict) or "enabled" not in section:
        return section
    strategy = {True: "ddp", False: "none"}
    enabled = section["enabled"]
    rest = {key: value for key, value in section.items() if key != "enabled"}
    return {**rest, "strategy": strategy[enabled] if isinstance(enabled, bool) else enabled}


def _fill(values: dict[str, Any], section: str, field: str, value: Any) -> bool:
    """Set a field that the document does not have; whether it was set."""
    given = values.get(section)
    given = {} if given is None else given
    if not isinstance(given, dict) or field in given:
        return False
    values[section] = {**given, field: value}
    return True
