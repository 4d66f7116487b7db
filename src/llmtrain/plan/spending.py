"""GPU-hours and cost of the runs of a directory, summed by name and by month."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llmtrain.config.plan import PricesSection
from llmtrain.plan.cost import costs_of_starts
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.view import RunView


@dataclass
class Sum:
    """Of the runs of one name, or of the starts in one month."""

    label: str
    runs: set[str] = field(default_factory=set)
    gpu_hours: float = 0.0
    costs: dict[str, float] = field(default_factory=dict)
    """By currency."""

    def add(self, run_id: str, gpu_hours: float, cost: float, currency: str | None) -> None:
        self.runs.add(run_id)
        self.gpu_hours += gpu_hours
        if currency is not None:
            self.costs[currency] = self.costs.get(currency, 0.0) + cost

    def as_dict(self) -> dict[str, Any]:
        costs = {currency: round(cost, 4) for currency, cost in sorted(self.costs.items())}
        return {"label": self.label, "runs": len(self.runs), "gpu_hours": round(self.gpu_hours, 4), "costs": costs}


@dataclass
class Spending:
    by_name: list[Sum]
    """The most GPU-hours first."""
    by_month: list[Sum]
    """`2026-11`, in order. Hours count in the month in which their start began."""
    total: Sum
    without_gpu: list[str]
    """Runs that used neither a GPU nor a node with a price. They are in no sum."""
    without_price: list[str]
    """Runs of which a start has no price. Their GPU-hours are in the sums."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "by_name": [each.as_dict() for each in self.by_name],
            "by_month": [each.as_dict() for each in self.by_month],
            "total": self.total.as_dict(),
            "without_gpu": self.without_gpu,
            "without_price": self.without_price,
        }


def sum_spending(runs: Iterable[RunDirectory], prices: PricesSection | None = None) -> Spending:
    """`prices`: instead of those that the config of each run has."""
    names: dict[str, Sum] = {}
    months: dict[str, Sum] = {}
    total = Sum("total")
    without_gpu = []
    without_price = []
    for run in runs:
        view = RunView(run)
        is_on_gpu = view.gpu_hours is not None
        starts = costs_of_starts(view, prices)
        if not is_on_gpu and all(rate is None for _, _, rate in starts):
            without_gpu.append(run.run_id)
            continue
        if any(rate is None for _, _, rate in starts):
            without_price.append(run.run_id)
        name = str(view.meta.get("name") or run.run_id)
        for row, hours, rate in starts:
            month = str(row.get("started_at"))[:7]
            currency = rate.currency if rate else None
            cost = hours * rate.per_hour if rate else 0.0
            of_name = names.setdefault(name, Sum(name))
            of_month = months.setdefault(month, Sum(month))
            for each in (of_name, of_month, total):
                each.add(run.run_id, hours if is_on_gpu else 0.0, cost, currency)
    return Spending(
        by_name=sorted(names.values(), key=lambda each: (-each.gpu_hours, each.label)),
        by_month=sorted(months.values(), key=lambda each: each.label),
        total=total,
        without_gpu=without_gpu,
        without_price=without_price,
    )
