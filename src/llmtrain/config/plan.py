"""The `plan` section: prices, for the cost that is shown before, while and after a run."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from llmtrain.config.section import NotNegative, Problem, Section
from llmtrain.core.gpus import GPUS, gpus_named, near_names


class PricesSection(Section):
    """What an hour costs. There are no built-in prices."""

    gpu_hour: dict[str, NotNegative] = {}
    """Price of one GPU for an hour, by its name: `{h100-80g: 2.49, a100: 1.8}`. A name without memory, such as a100,
    counts for all GPUs of that name that have no price of their own."""
    node_hour: dict[str, NotNegative] = {}
    """Price of a whole node for an hour, by its type: the label node.kubernetes.io/instance-type in
    launch.node_selector. It replaces the price of the GPUs for runs on such nodes."""
    spot_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Price on spot nodes as a share of the price, such as 0.4. null shows no spot price."""
    currency: Annotated[str, Field(min_length=1, max_length=8)] = "USD"
    """Currency of all prices."""

    @property
    def are_given(self) -> bool:
        return bool(self.gpu_hour or self.node_hour)


class PlanSection(Section):
    """Prices, for the cost of a run before, while and after it trains. They do not influence training."""

    prices: PricesSection = PricesSection()
    """Prices per hour. Without them only GPU-hours are shown."""

    def problems(self) -> Iterator[Problem]:
        for name in self.prices.gpu_hour:
            if gpus_named(name):
                continue
            near = near_names(name)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            yield (
                ("prices",),
                f"plan.prices.gpu_hour: {name!r} is not a known GPU.{meant} Known: "
                f"{', '.join(gpu.name for gpu in GPUS)}.",
            )
