"""The ConfigMap with the user's own code (`launch --with-code`), and the volume that mounts it with its directories."""

import base64
import re

from llmtrain.launch.job import JobPlan, Manifest

MAX_KEY = 253  # characters of a key of a ConfigMap


def code_map_data(plan: JobPlan) -> Manifest:
    """The fields `data` (text) and `binaryData` of the ConfigMap."""
    assert plan.code
    text: dict[str, str] = {}
    binary: dict[str, str] = {}
    for path, key in _keys(plan.code.paths).items():
        content = plan.code.contents[path]
        try:
            text[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    return {"data": text} | ({"binaryData": binary} if binary else {})


def code_volume(plan: JobPlan) -> Manifest:
    """The `configMap` of the volume: a key cannot contain a slash, so each is mapped to its path."""
    assert plan.code
    keys = _keys(plan.code.paths)
    return {"name": plan.code_map, "items": [{"key": key, "path": path} for path, key in keys.items()]}


def _keys(paths: tuple[str, ...]) -> dict[str, str]:
    """Path -> key: the path with dots for slashes, numbered where two would be equal."""
    keys: dict[str, str] = {}
    for number, path in enumerate(paths):
        key = re.sub(r"[^A-Za-z0-9._-]", "_", path.replace("/", "."))[-MAX_KEY + 5 :]
        keys[path] = key if key not in keys.values() else f"{number}-{key}"
    return keys
