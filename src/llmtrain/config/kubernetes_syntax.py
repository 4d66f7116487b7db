"""Values of the `launch` section that the API server or the kubelet would refuse, found before a run is submitted."""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from llmtrain.config.kubernetes_types import LABEL_VALUE_PATTERN, NAME_LIMIT, amount
from llmtrain.config.launch import OWN_RESOURCES, LaunchSection
from llmtrain.config.section import Problem

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
_PLAIN_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_QUALIFIED_NAME = re.compile(rf"(?:(?=[^/]{{1,253}}/){_LABEL}(?:\.{_LABEL})*/)?{_PLAIN_NAME}")
_HUGE_PAGES = re.compile(r"hugepages-[1-9]\d*(?:[KMGT]i)?")
# The grammar of container registries: [HOST[:PORT]/]PATH[:TAG][@DIGEST].
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])"
_PATH = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:{_HOST}(?::[0-9]+)?/)?{_PATH}(?:/{_PATH})*(?::\w[\w.-]{{0,127}})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[+._-][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
_MAX_IMAGE = 500
_TOLERATION_FIELDS = ("key", "operator", "value", "effect", "tolerationSeconds")
_OPERATORS = ("Exists", "Equal", "Gt", "Lt")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")

_NAME_RULE = "lowercase letters, digits, '-' and '.', with a letter or digit at both ends of each part"
_KEY_RULE = "a name such as disk or example.com/disk: letters, digits, '-', '_' and '.', at most 63 after the slash"
_VALUE_RULE = "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"


def image_problem(image: str) -> str | None:
    if len(image) <= _MAX_IMAGE and _IMAGE.fullmatch(image):
        return None
    return (
        f"{_shown(image)} is not the name of an image. Use [REGISTRY/]NAME[:TAG][@sha256:DIGEST], NAME in lowercase, "
        "such as registry.example.com/team/llmtrain:1.0."
    )


def syntax_problems(launch: LaunchSection) -> Iterator[Problem]:
    if launch.image and (problem := image_problem(launch.image)):
        yield ("image",), f"launch.image {problem}"
    yield from _name_problems(launch)
    for key, value in launch.node_selector.items():
        yield from _key_problems("node_selector", "launch.node_selector", key)
        yield from _value_problems("node_selector", f"launch.node_selector.{key}", value)
    for key in (*launch.labels, *launch.annotations):
        field = "labels" if key in launch.labels else "annotations"
        yield from _key_problems(field, f"launch.{field}", key)
    yield from _resource_problems(launch)
    for number, toleration in enumerate(launch.tolerations):
        for text in _toleration_problems(toleration):
            yield ("tolerations",), f"launch.tolerations[{number}]: {text}"
    unknown = [key for key in launch.affinity if key not in _AFFINITIES]
    if unknown:
        yield ("affinity",), f"launch.affinity.{unknown[0]} is unknown. Known: {', '.join(_AFFINITIES)}."


def _name_problems(launch: LaunchSection) -> Iterator[Problem]:
    fields = ("service_account", "runtime_class", "scheduler_name", "priority_class", "queue", "queue_priority")
    names: list[tuple[str, str, str | None]] = [(name, name, getattr(launch, name)) for name in fields]
    for field in ("runs_volume", "data_volume", "models_volume"):
        volume = getattr(launch, field)
        parts = ("claim", "storage_class") if volume else ()
        names += [(field, f"{field}.{part}", getattr(volume, part)) for part in parts]
    for field in ("env_secrets", "image_pull_secrets"):
        names += [(field, field, name) for name in getattr(launch, field)]
    names.append(("hf_token_secret", "hf_token_secret.name", launch.hf_token_secret.name))
    for field, path, name in names:
        if name is not None and not _SUBDOMAIN.fullmatch(name):
            yield (field,), f"launch.{path} must be {_NAME_RULE}, got {_shown(name)}."
        elif name is not None and field in ("queue", "queue_priority") and len(name) > NAME_LIMIT:
            yield (field,), f"launch.{path} must have at most {NAME_LIMIT} characters: it is the value of a label."
    if launch.hf_token_secret.key in (".", ".."):
        yield ("hf_token_secret",), "launch.hf_token_secret.key must be the name of a key, such as token."


def _resource_problems(launch: LaunchSection) -> Iterator[Problem]:
    resources = launch.resources
    if "/" not in resources.gpu_resource or not _QUALIFIED_NAME.fullmatch(resources.gpu_resource):
        yield (
            ("resources",),
            f"launch.resources.gpu_resource must be DOMAIN/NAME, such as nvidia.com/gpu or amd.com/gpu, got "
            f"{_shown(resources.gpu_resource)}.",
        )
    for name, quantity in resources.extra.items():
        is_extended = "/" in name and _QUALIFIED_NAME.fullmatch(name)
        if not is_extended and name not in OWN_RESOURCES and not _HUGE_PAGES.fullmatch(name):
            yield (
                ("resources",),
                f"launch.resources.extra: {_shown(name)} is not the name of a resource. Use DOMAIN/NAME, such as "
                "rdma/ib, or hugepages-SIZE, such as hugepages-2Mi.",
            )
        elif is_extended and amount(quantity) % 1 != Decimal(0):
            yield ("resources",), f"launch.resources.extra.{name} must be a whole number, got {quantity}."


def _toleration_problems(toleration: dict[str, Any]) -> Iterator[str]:
    unknown = [name for name in toleration if name not in _TOLERATION_FIELDS]
    if unknown:
        yield f"{unknown[0]} is unknown. Known: {', '.join(_TOLERATION_FIELDS)}."
    key = toleration.get("key")
    value = toleration.get("value")
    operator = toleration.get("operator")
    effect = toleration.get("effect")
    if key and (not isinstance(key, str) or not _QUALIFIED_NAME.fullmatch(key)):
        yield f"key must be {_KEY_RULE}, got {_shown(key)}."
    if operator not in (None, "", *_OPERATORS):
        yield f"operator must be {', '.join(_OPERATORS[:-1])} or {_OPERATORS[-1]}, got {_shown(operator)}."
    elif not key and operator != "Exists":
        yield "without a key, operator must be Exists. Set key, or operator: Exists to tolerate every taint."
    elif operator == "Exists" and value:
        yield "operator Exists takes no value. Remove value, or use operator: Equal."
    if value is not None and (not isinstance(value, str) or not re.fullmatch(LABEL_VALUE_PATTERN, value)):
        yield f"value must be text of {_VALUE_RULE}, got {_shown(value)}."
    if effect not in (None, "", *_EFFECTS):
        yield f"effect must be {', '.join(_EFFECTS[:-1])} or {_EFFECTS[-1]}, got {_shown(effect)}."
    seconds = toleration.get("tolerationSeconds")
    if seconds is not None and (not isinstance(seconds, int) or isinstance(seconds, bool) or effect != "NoExecute"):
        yield "tolerationSeconds must be an integer, with effect: NoExecute."


def _key_problems(field: str, path: str, key: str) -> Iterator[Problem]:
    if not _QUALIFIED_NAME.fullmatch(key):
        yield (field,), f"{path}: a key must be {_KEY_RULE}, got {_shown(key)}."


def _value_problems(field: str, path: str, value: str) -> Iterator[Problem]:
    if not re.fullmatch(LABEL_VALUE_PATTERN, value):
        yield (field,), f"{path} must be {_VALUE_RULE}, got {_shown(value)}."


def _shown(value: object) -> str:
    return f"{value!r:.100}"
