"""compat/records.py: configs for images of 0.1.0, and the records that it wrote."""

import pytest
import yaml

from llmtrain.compat.records import (
    check_nothing_lost,
    check_plugins_in_image,
    config_for_image,
    upgraded_record,
    with_image_schema,
)
from llmtrain.config.load import load_config
from llmtrain.errors import UsageError


def test_config_has_the_schema_of_the_image() -> None:
    config = load_config("ddp_smoke")
    assert yaml.safe_load(config_for_image(config))["schema_version"] == 3
    old = config.with_values("launch", image_schema=2)
    assert yaml.safe_load(config_for_image(old))["schema_version"] == 2


def test_old_record_is_upgraded_and_keeps_the_schema_of_its_image() -> None:
    config = load_config("ddp_smoke")
    values = yaml.safe_load(config_for_image(config.with_values("launch", image_schema=2)))
    assert upgraded_record(values).values["schema_version"] == 3
    assert values["schema_version"] == 2, "the record itself is unchanged"
    assert with_image_schema(config, values).launch.image_schema == 2


def test_current_record_is_unchanged() -> None:
    config = load_config("ddp_smoke")
    values = yaml.safe_load(config_for_image(config))
    assert upgraded_record(values).values == values
    assert with_image_schema(config, values) is config


def test_plugins_need_an_image_of_this_version() -> None:
    check_plugins_in_image(["mine:Bag"], 3)
    check_plugins_in_image([], 2)
    with pytest.raises(UsageError):
        check_plugins_in_image(["mine:Bag"], 2)


def test_values_that_schema_2_cannot_express_are_refused() -> None:
    check_nothing_lost(load_config("ddp_smoke", ["launch.runs_volume=null"]))
    check_nothing_lost(load_config("ddp_smoke", ["launch.image_schema=2"]))
    with pytest.raises(UsageError, match="runs_volume"):
        check_nothing_lost(load_config("ddp_smoke", ["launch.image_schema=2", "launch.runs_volume=null"]))
