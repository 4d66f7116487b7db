"""What hours of training cost, before, while and after a run. All prices are the user's."""

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from llmtrain.config.load import load_config
from llmtrain.config.plan import PricesSection
from llmtrain.core.gpus import Gpu, gpu_of_device, gpus_named
from llmtrain.errors import UsageError
from llmtrain.plan.target import Target
from llmtrain.runs.json_values import dictionary, finite, integer
from llmtrain.runs.state import RunState
from llmtrain.runs.view import RunView

NODE_TYPE_LABEL = "node.kubernetes.io/instance-type"
HOW_TO_GIVE_PRICES = "Set plan.prices in the config, or pass --prices FILE: docs/planning.md#cost"
_HOUR = 3600


@dataclass(frozen=True)
class Rate:
    """The price of one process for an hour."""

    per_hour: float
    spot_per_hour: float | None
    currency: str
    source: str
    """`2.49 USD per GPU-hour (h100-80g)`"""


@dataclass(frozen=True)
class CostEstimate:
    """What a planned run costs. A part that is not known is None; `source` says where the price is from, or how to
    give one."""

    gpu_hours: float | None
    """None on CPUs, or if the time is not known."""
    cost: float | None
    spot_cost: float | None
    currency: str | None
    source: str


@dataclass(frozen=True)
class RunCost:
    """What a run has cost so far."""

    cost: float
    projected: float | None
    """At the end of the run, if it goes on as fast. None if it is not running."""
    currency: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rate_of(
    prices: PricesSection, gpu: Gpu | None, node_type: str | None = None, processes_per_node: int = 1
) -> Rate | None:
    """The price of one process with this GPU, or of its share of a node of this type; None if none is given."""
    if node_type in prices.node_hour:
        price = prices.node_hour[node_type]
        source = f"{price:g} {prices.currency} per node-hour ({node_type})"
        return _rate(prices, price / processes_per_node, source)
    if gpu is None:
        return None
    matching = []
    for name, price in prices.gpu_hour.items():
        named = gpus_named(name)
        if gpu in named:
            matching.append((len(named), price))
    if not matching:
        return None
    _, price = min(matching)  # the most specific name
    return _rate(prices, price, f"{price:g} {prices.currency} per GPU-hour ({gpu.name})")


def _rate(prices: PricesSection, per_hour: float, source: str) -> Rate:
    spot = None if prices.spot_factor is None else per_hour * prices.spot_factor
    return Rate(per_hour, spot, prices.currency, source)


def estimate_cost(
    prices: PricesSection, target: Target, seconds: float | None, node_type: str | None = None
) -> CostEstimate:
    """The cost of all processes of the target for this time. `node_type`: see node_type_of."""
    hours = None if seconds is None else seconds / _HOUR * target.world_size
    gpu_hours = hours if target.device == "cuda" else None
    rate = rate_of(prices, target.gpu, node_type, target.processes_per_node)
    if rate is None:
        return CostEstimate(gpu_hours, None, None, None, _why_no_rate(prices, target, node_type))
    if hours is None:
        return CostEstimate(None, None, None, rate.currency, f"{rate.source}; the time is not known")
    spot = None if rate.spot_per_hour is None else hours * rate.spot_per_hour
    return CostEstimate(gpu_hours, hours * rate.per_hour, spot, rate.currency, rate.source)


def _why_no_rate(prices: PricesSection, target: Target, node_type: str | None) -> str:
    if not prices.are_given:
        return f"no prices are given. {HOW_TO_GIVE_PRICES}"
    if node_type is not None and target.gpu is None:
        return f"no price of {node_type} is given. Add it to plan.prices.node_hour."
    if target.gpu is None and target.device == "cuda":
        return "the price of a GPU is found by its name, which is not known. Pass it with --gpu."
    if target.gpu is None:
        return (
            "no price of the node is given. Add it to plan.prices.node_hour, and its type to launch.node_selector as "
            f"{NODE_TYPE_LABEL}."
        )
    return f"no price of {target.gpu.name} is given. Add it to plan.prices.gpu_hour."


def node_type_of(node_selector: dict[str, Any]) -> str | None:
    """The type of the nodes that launch.node_selector selects."""
    found = node_selector.get(NODE_TYPE_LABEL)
    return None if found is None else str(found)


def cost_of_run(view: RunView, prices: PricesSection | None = None) -> RunCost | None:
    """The cost of all starts of a run; None without a price of the devices of each of them. `prices`: instead of those
    that its config has."""
    starts = costs_of_starts(view, prices)
    rates = [rate for _, _, rate in starts if rate is not None]
    if not starts or len(rates) < len(starts):
        return None
    total = sum(hours * rate.per_hour for (_, hours, _), rate in zip(starts, rates, strict=True))
    left = seconds_left(view)
    projected = None
    if left is not None:
        processes = integer(view.last_start.get("world_size")) or 1
        projected = round(total + left / _HOUR * processes * rates[-1].per_hour, 4)
    return RunCost(round(total, 4), projected, rates[-1].currency)


def costs_of_starts(
    view: RunView, prices: PricesSection | None = None
) -> list[tuple[dict[str, Any], float, Rate | None]]:
    """Each start of a run, the hours of all its processes, and what one of these hours costs."""
    prices = recorded_prices(view) if prices is None else prices
    rates: list[Rate | None] = [None] * len(view.generations)
    if prices.are_given:
        rates = _rates_of_starts(view, prices)
    return [(row, hours, rate) for (row, hours), rate in zip(view.process_hours(), rates, strict=True)]


def _rates_of_starts(view: RunView, prices: PricesSection) -> list[Rate | None]:
    node_type = None
    processes_per_node = 1
    if prices.node_hour:  # reading the whole config is slow
        launch = dictionary(view.current_config.get("launch"))
        node_type = node_type_of(dictionary(launch.get("node_selector")))
        processes_per_node = integer(launch.get("processes_per_node")) or 1
    rates = []
    for row in view.generations:
        # A start without a launch was on a machine of the user's own, whatever the config says about nodes.
        on_node = node_type if row.get("launch") else None
        rates.append(rate_of(prices, gpu_of_device(str(row.get("device_name"))), on_node, processes_per_node))
    return rates


def seconds_left(view: RunView) -> float | None:
    """Until the last step, at the current speed; None for a run that is not running."""
    if view.state != RunState.RUNNING:
        return None
    return finite(view.last_rows[0].get("train/seconds_left"))


def recorded_prices(view: RunView) -> PricesSection:
    """The prices in the config of a run; none if they are damaged."""
    values = dictionary(view.setting("plan").get("prices"))
    try:
        return PricesSection(**values)
    except (ValidationError, TypeError):
        return PricesSection()


def read_prices(path: str) -> PricesSection:
    """The prices of a config, or of a file that has only a `plan` section."""
    prices = load_config(path, for_launch=True).plan.prices
    if not prices.are_given:
        raise UsageError(
            f"{path} has no prices.",
            remedy="Write them as in a config, such as `plan: {prices: {gpu_hour: {h100-80g: 2.5}}}`.",
        )
    return prices


def cost_text(gpu_hours: float | None, cost: RunCost | None) -> str | None:
    """`0.75 GPU-hours, 1.87 USD so far, 5.20 USD at the end`; None for a run on a CPU without a price."""
    parts = []
    if gpu_hours is not None:
        parts.append(f"{gpu_hours:,.2f} GPU-hours")
    if cost is not None:
        amount = money(cost.cost, cost.currency)
        if cost.projected is not None:
            amount += f" so far, {money(cost.projected, cost.currency)} at the end"
        parts.append(amount)
    return ", ".join(parts) or None


def money(amount: float, currency: str) -> str:
    """`1.87 USD`, `12,300 USD`"""
    return f"{money_number(amount)} {currency}"


def money_number(amount: float) -> str:
    if 0 < amount < 0.01:
        return "<0.01"
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.2f}"
