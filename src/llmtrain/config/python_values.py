"""Values from Python as YAML would have them."""

import os
from collections.abc import Mapping
from typing import Any

from llmtrain.config.yaml_values import MAX_LEVELS, MAX_VALUES


def plain_value(value: object) -> Any:
    """Mappings as dicts, tuples as lists, paths as text. Raises ValueError for a value that is too deep, such as one
    that contains itself, or too large."""
    count = 0

    def convert(item: object, level: int) -> Any:
        nonlocal count
        count += 1
        if level > MAX_LEVELS:
            raise ValueError(f"a value is nested more than {MAX_LEVELS} levels deep, or contains itself")
        if count > MAX_VALUES:  # also for one that contains itself twice: its size doubles with each level
            raise ValueError(f"it has more than {MAX_VALUES:,} values")
        if isinstance(item, Mapping):
            return {key: convert(each, level + 1) for key, each in item.items()}
        if isinstance(item, list | tuple):
            return [convert(each, level + 1) for each in item]
        if isinstance(item, os.PathLike):
            return str(item)
        return item

    return convert(value, 0)
