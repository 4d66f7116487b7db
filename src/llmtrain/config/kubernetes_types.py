"""Field types of the `launch` section: the syntax of Kubernetes names, quantities and labels."""

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

NAME_LIMIT = 63  # characters of a DNS label, which pod names and label values must fit
MOUNT_PATH_PATTERN = r"^(/[A-Za-z0-9._-]+)+$"
NAMESPACE_PATTERN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
LABEL_KEY_PATTERN = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE_PATTERN = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"

AUTO = "auto"
"""The memory that the config needs, by an estimate."""
SUFFIXES: dict[str, int | Decimal] = {
    "": 1,
    "m": Decimal("0.001"),
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
}
SUFFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def _as_text(value: object) -> object:
    """A number as text, which Kubernetes requires."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return str(value)


def _quantity(value: object) -> object:
    text = _as_text(value)
    if isinstance(text, str) and not re.fullmatch(r"[0-9]+(\.[0-9]+)?(m|[kMGTP]|[KMGTP]i)?", text):
        raise PydanticCustomError("quantity", "must be a quantity such as 500m, 2 or 4Gi")
    return text


def _quantity_or_auto(value: object) -> object:
    return value if value == AUTO else _quantity(value)


def _nodes(value: object) -> object:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    is_range = isinstance(value, str) and re.fullmatch(r"[1-9][0-9]{0,5}:[1-9][0-9]{0,5}", value)
    if not is_count and not is_range:
        raise PydanticCustomError("nodes", "must be an integer >= 1, or 'MIN:MAX' such as '2:4'")
    return value


def _texts(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {key: _as_text(item) for key, item in value.items()}


def _namespace(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(NAMESPACE_PATTERN, value):
        raise PydanticCustomError("namespace", "must be lowercase letters, digits and hyphens")
    return value


def _labels(value: object) -> object:
    """Labels or annotation keys: only the values of labels have a restricted syntax."""
    labels = _texts(value)
    if not isinstance(labels, dict):
        return labels
    for key, text in labels.items():
        if not isinstance(key, str) or not re.fullmatch(LABEL_KEY_PATTERN, key):
            raise PydanticCustomError("label", "keys must be names such as team or example.com/team")
        if isinstance(text, str) and not re.fullmatch(LABEL_VALUE_PATTERN, text):
            raise PydanticCustomError(
                "label", "values must have at most 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"
            )
    return labels


def _annotations(value: object) -> object:
    annotations = _texts(value)
    if not isinstance(annotations, dict):
        return annotations
    for key in annotations:
        if not isinstance(key, str) or not re.fullmatch(LABEL_KEY_PATTERN, key):
            raise PydanticCustomError("annotation", "keys must be names such as example.com/owner")
    return annotations


def _spread(value: object) -> object:
    is_list = isinstance(value, list) and all(isinstance(row, dict) and "topologyKey" in row for row in value)
    if not isinstance(value, bool) and not is_list:
        raise PydanticCustomError("spread", "must be true, false, or a list of topologySpreadConstraints")
    return value


Quantity = Annotated[str, BeforeValidator(_quantity, json_schema_input_type=str | float)]
QuantityOrAuto = Annotated[str, BeforeValidator(_quantity_or_auto, json_schema_input_type=str | float)]
NodeCount = Annotated[int | str, BeforeValidator(_nodes, json_schema_input_type=int | str)]
KubeName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
Namespace = Annotated[str, BeforeValidator(_namespace), Field(pattern=NAMESPACE_PATTERN, max_length=NAME_LIMIT)]
MountPath = Annotated[str, Field(pattern=MOUNT_PATH_PATTERN)]
AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"]
EnvVariables = Annotated[dict[str, str], BeforeValidator(_texts, json_schema_input_type=dict[str, str | float])]
Labels = Annotated[dict[str, str], BeforeValidator(_labels, json_schema_input_type=dict[str, str | float])]
Annotations = Annotated[dict[str, str], BeforeValidator(_annotations, json_schema_input_type=dict[str, str | float])]
Spread = Annotated[
    bool | list[dict[str, Any]], BeforeValidator(_spread, json_schema_input_type=bool | list[dict[str, Any]])
]
Capability = Annotated[str, Field(pattern=r"^[A-Z][A-Z_]*$")]
UserId = Annotated[int, Field(ge=0, lt=2**31)]


def not_json(value: object, path: str) -> Iterator[str]:
    """What JSON, and so a manifest, cannot have: dates, binary data, sets, nan, and keys that are not text."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from not_json(item, f"{path}.{key}")
            else:
                yield f"{path}: the key {key!r} must be text. Put it in quotes."
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from not_json(item, f"{path}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} must be a finite number, got {value}."
    elif not isinstance(value, str | int | float | None):
        yield f"{path} must be text, a number, true, false, null, a list or a map, got {value!r:.100}. Use quotes."


def amount(quantity: str) -> Decimal:
    """Value of a quantity in bytes or cores."""
    number = quantity.rstrip("mkMGTPi")
    return Decimal(number) * SUFFIXES[quantity[len(number) :]]
