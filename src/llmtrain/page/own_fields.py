"""Which fields of a recorded config somebody has set: a recorded one has the values that follow from others, too."""

from typing import Any

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.schema import changed_fields
from llmtrain.errors import LlmtrainError
from llmtrain.runs.json_values import dictionary

Values = dict[str, Any]
_DECISIVE = {"model": ("name", "architecture", "size", "n_layers", "d_model"), "trainer": ("optimizer",)}
"""Fields from which others follow: they are shown, never what follows from them."""
_RECORDED = {"run": ("threads",), "output": ("run_id",)}
"""Fields that a start fills in."""


def own_fields(config: Values) -> Values:
    """The fields of a resolved config that differ from their defaults and do not follow from others, by section. A
    config that cannot be loaded here has all that differ from their defaults."""
    found: Values = {}
    for section, fields in changed_fields(config).items():
        if isinstance(fields, dict):
            recorded = _RECORDED.get(section, ())
            fields = {name: value for name, value in fields.items() if name not in recorded}
        if fields:
            found[section] = fields
    whole = _resolved(config)
    if whole is None:
        return found
    document = {"schema_version": config.get("schema_version"), **_copied(found)}
    if _resolved(_with_recorded(document, config)) != whole:
        return found
    for section in ("model", "trainer"):
        fields = dictionary(document.get(section))
        for name in list(fields):
            if name in _DECISIVE[section] or fields[name] is None:
                continue
            value = fields.pop(name)
            if _resolved(_with_recorded(document, config)) == whole:
                del found[section][name]
            else:
                fields[name] = value
    return {section: fields for section, fields in found.items() if fields}


def _resolved(values: Values) -> Values | None:
    """The whole config; None if it cannot be loaded."""
    try:
        return build_config(Document("config", values), is_recorded=True).as_dict()
    except (LlmtrainError, ValueError, TypeError, KeyError):
        return None


def _with_recorded(document: Values, config: Values) -> Values:
    """With what a start has filled in, as the whole config has it."""
    values = _copied(document)
    for section, names in _RECORDED.items():
        recorded = dictionary(config.get(section))
        for name in names:
            if name in recorded:
                values.setdefault(section, {})[name] = recorded[name]
    return values


def _copied(values: Values) -> Values:
    return {section: dict(fields) if isinstance(fields, dict) else fields for section, fields in values.items()}
