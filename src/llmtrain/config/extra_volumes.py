"""Checks of what `launch` takes in Kubernetes syntax: additional volumes and mounts, variables of a pod patch."""

import re
from collections.abc import Iterator
from typing import Any

from llmtrain.config.section import Problem

OWN_VOLUMES = ("config", "tmp", "cache", "shm", "work", "code", "runs", "data", "models")
"""Names of the volumes of every pod, and of those that have a section of their own."""
OWN_MOUNTS = ("/config", "/tmp", "/cache", "/dev/shm")
VOLUME_NAME_PATTERN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def extra_volume_problems(volumes: list[dict[str, Any]], mounts: list[dict[str, Any]]) -> Iterator[Problem]:
    names = [volume.get("name") for volume in volumes]
    for volume in volumes:
        name = volume.get("name")
        if not isinstance(name, str) or not re.fullmatch(VOLUME_NAME_PATTERN, name):
            yield ("extra_volumes",), f"launch.extra_volumes: name must be lowercase letters and digits, got {name!r}."
        elif name in OWN_VOLUMES or names.count(name) > 1:
            yield ("extra_volumes",), f"launch.extra_volumes: the name {name} is already used. Choose another name."
        elif len(volume) != 2:
            yield (
                ("extra_volumes",),
                f"launch.extra_volumes: {name} must have exactly one source, such as persistentVolumeClaim: "
                "{claimName: NAME}.",
            )
        elif name not in [mount.get("name") for mount in mounts]:
            yield ("extra_volumes", "extra_mounts"), f"launch.extra_volumes: {name} is not in launch.extra_mounts."
    for mount in mounts:
        yield from _mount_problems(mount, names)


def _mount_problems(mount: dict[str, Any], names: list[Any]) -> Iterator[Problem]:
    path = mount.get("mountPath")
    if mount.get("name") not in names:
        yield (
            ("extra_mounts", "extra_volumes"),
            f"launch.extra_mounts: {mount.get('name')!r} is not one of launch.extra_volumes.",
        )
    if not isinstance(path, str) or not path.startswith("/"):
        yield ("extra_mounts",), f"launch.extra_mounts: mountPath must be an absolute path, got {path!r}."
    elif path.rstrip("/") in OWN_MOUNTS or path.startswith("/config/"):
        yield ("extra_mounts",), f"launch.extra_mounts: {path} is already used in pods. Choose another path."


def env_in(value: Any) -> Iterator[tuple[str, str]]:
    """(name, value) of every environment variable with a literal value in a part of a pod template."""
    if isinstance(value, dict):
        name = value.get("name")
        text = value.get("value")
        if isinstance(name, str) and isinstance(text, str):
            yield name, text
        for item in value.values():
            yield from env_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from env_in(item)
