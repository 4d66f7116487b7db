"""The `plan` section: prices."""

from typing import Any

import pytest

from llmtrain.compat.downgrade import downgrade, lost_in_v2
from llmtrain.config.load import load_config
from llmtrain.config.schema import may_change
from llmtrain.errors import ConfigError


def with_prices(**prices: Any) -> dict[str, Any]:
    return {"plan": {"prices": prices}}


def test_prices_are_read_and_recorded() -> None:
    config = load_config(with_prices(gpu_hour={"h100": 2, "A100-80GB": 1.5}, spot_factor=0.4, currency="EUR"))
    assert config.plan.prices.gpu_hour == {"h100": 2, "A100-80GB": 1.5}
    assert config.plan.prices.are_given
    assert load_config(config.as_dict()) == config


def test_no_prices_are_built_in() -> None:
    assert not load_config({}).plan.prices.are_given


def test_all_unknown_gpus_are_named_with_the_known() -> None:
    with pytest.raises(ConfigError) as problem:
        load_config(with_prices(gpu_hour={"h10": 1, "l4": 1, "tpu": 2}))
    text = "\n".join(problem.value.problems)
    assert "'h10' is not a known GPU." in text
    assert "'tpu' is not a known GPU." in text
    assert "'l4'" not in text
    assert "h200-141g" in text


@pytest.mark.parametrize(
    "prices",
    [
        {"gpu_hour": {"h100": -1}},
        {"gpu_hour": {"h100": "2"}},
        {"gpu_hour": 2},
        {"node_hour": {"p5.48xlarge": float("inf")}},
        {"spot_factor": 0},
        {"spot_factor": 1.1},
        {"currency": ""},
        {"gpu_hours": {}},
    ],
)
def test_bad_prices_are_refused(prices: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as problem:
        load_config(with_prices(**prices))
    assert len(problem.value.problems) == 1
    assert f"plan.prices.{next(iter(prices))}" in problem.value.problems[0]


def test_prices_may_change_when_a_run_is_resumed() -> None:
    assert may_change("plan.prices")


def test_images_of_schema_2_get_no_prices() -> None:
    values = load_config(with_prices(gpu_hour={"h100": 2})).as_dict()
    assert "plan" not in downgrade(values)
    assert not [path for path in lost_in_v2(values) if path.startswith("plan")]
