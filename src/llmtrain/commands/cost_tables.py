"""The text of `llmtrain runs cost`."""

from collections.abc import Sequence

from llmtrain.core.terminal import format_table
from llmtrain.core.text import first_names, plural
from llmtrain.plan.cost import HOW_TO_GIVE_PRICES, money_number
from llmtrain.plan.spending import Spending, Sum


def spending_text(spending: Spending, root: str) -> str:
    lines = []
    if spending.by_name:
        currencies = sorted(spending.total.costs)
        lines += [_table("name", [*spending.by_name, spending.total], currencies), ""]
        lines += [_table("month", spending.by_month, currencies), ""]
    elif not spending.without_gpu:
        return f"No runs in {root}."
    if spending.without_price:
        lines += [f"No price: {_runs(spending.without_price)}.", HOW_TO_GIVE_PRICES]
    if spending.without_gpu:
        lines.append(f"Not counted, because they used no GPU: {_runs(spending.without_gpu)}.")
    return "\n".join(lines).rstrip()


def _runs(names: Sequence[str]) -> str:
    return f"{plural(len(names), 'run')} ({first_names(names, 2)})"


def _table(head: str, sums: Sequence[Sum], currencies: Sequence[str]) -> str:
    rows = [[head, "runs", "GPU-hours", *currencies]]
    for each in sums:
        costs = [money_number(each.costs[name]) if name in each.costs else "-" for name in currencies]
        hours = f"{each.gpu_hours:,.2f}" if each.gpu_hours else "-"
        rows.append([each.label, str(len(each.runs)), hours, *costs])
    return format_table(rows)
