"""Runs on a cluster that llmtrain 0.1.0 launched, and images that contain it.

Its ConfigMaps have schema 1 or 2 and its objects another run label, which a run keeps for its whole life, also when it
is resumed: the selector of a StatefulSet is immutable, and pods that are still terminating on an unreachable node, the
volume claims and the record carry the old key. Its images do not read schema 3 (`launch.image_schema: 2`).
"""

from collections.abc import Mapping
from typing import Any

from llmtrain.compat.downgrade import downgrade, lost_in_v2
from llmtrain.compat.upgrade import Upgrade, is_old, upgrade
from llmtrain.config.document import dump_document
from llmtrain.config.load import dump_config
from llmtrain.config.schema import SCHEMA_VERSION, Config
from llmtrain.errors import UsageError

FIRST_VERSION_RUN_LABEL = "llmtrain/run"
IMAGE_SCHEMA = 2
"""The schema that images of 0.1.0 read."""


def upgraded_record(values: dict[str, Any]) -> Upgrade:
    """The values of a record's config, in the current schema."""
    version = values.get("schema_version")
    if not is_old(version):
        return Upgrade(values)
    return upgrade(values, version, for_launch=True)


def with_image_schema(config: Config, recorded: Mapping[str, Any]) -> Config:
    """The config of a record. The image of an old one may not read a later schema."""
    if is_old(recorded.get("schema_version")):
        return config.with_values("launch", image_schema=IMAGE_SCHEMA)
    return config


def config_for_image(config: Config) -> str:
    """The config for the ConfigMap, in a schema that the image can read."""
    if config.launch.image_schema == SCHEMA_VERSION:
        return dump_config(config)
    return dump_document(downgrade(config.as_dict()))


def check_plugins_in_image(plugins: list[str], image_schema: int) -> None:
    if plugins and image_schema != SCHEMA_VERSION:
        raise UsageError(
            f"{', '.join(plugins)} cannot be used with launch.image_schema {image_schema}: an image from before schema "
            "3 accepts its own classes only.",
            remedy="Use an image with a newer llmtrain, and leave launch.image_schema out.",
        )


def check_nothing_lost(config: Config) -> None:
    """Refuse values that the schema of the image cannot express."""
    if config.launch.image_schema != IMAGE_SCHEMA:
        return
    lost = lost_in_v2(config.as_dict())
    if lost:
        raise UsageError(
            f"{', '.join(lost)} cannot be recorded with launch.image_schema 2, so `resume` would lose the value.",
            remedy="Use an image of this version of llmtrain and leave image_schema out, or remove the fields.",
        )
