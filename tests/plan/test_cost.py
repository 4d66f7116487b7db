"""Cost of planned runs, and of runs that exist."""

import json
from pathlib import Path
from typing import Any

import pytest

from demo_runs import make_run
from llmtrain.config.plan import PricesSection
from llmtrain.core.gpus import find_gpu
from llmtrain.errors import ConfigError, UsageError
from llmtrain.plan.cost import NODE_TYPE_LABEL, RunCost, cost_of_run, estimate_cost, money, rate_of, read_prices
from llmtrain.plan.target import Target
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.view import RunView

H100 = find_gpu("h100-80g")
PRICES = PricesSection(gpu_hour={"h100": 3, "h100-80g": 2.5, "l4": 0.7}, node_hour={"p5": 24}, spot_factor=0.4)


def gpus(nodes: int = 1, processes: int = 1) -> Target:
    return Target("cuda", None, H100, nodes, processes)


def test_most_specific_price_counts() -> None:
    rates = {name: rate_of(PRICES, find_gpu(name)) for name in ("h100-80g", "h100-94g", "l4", "t4")}
    assert {name: rate and rate.per_hour for name, rate in rates.items()} == {
        "h100-80g": 2.5,
        "h100-94g": 3,
        "l4": 0.7,
        "t4": None,
    }


def test_cost_of_a_plan() -> None:
    found = estimate_cost(PRICES, gpus(nodes=2, processes=8), 1800)
    assert found.gpu_hours == 8
    assert found.cost == 20
    assert found.spot_cost == pytest.approx(8)
    assert found.currency == "USD"
    assert found.source == "2.5 USD per GPU-hour (h100-80g)"


def test_price_of_a_node_is_shared_by_its_processes() -> None:
    found = estimate_cost(PRICES, gpus(nodes=2, processes=8), 3600, "p5")
    assert found.gpu_hours == 16
    assert found.cost == 48
    cpu = estimate_cost(PRICES, Target("cpu", None, nodes=2), 3600, "p5")
    assert cpu.gpu_hours is None
    assert cpu.cost == 48


@pytest.mark.parametrize(
    ("prices", "target", "hint"),
    [
        (PricesSection(), gpus(), "no prices are given"),
        (PricesSection(gpu_hour={"l4": 1}), gpus(), "no price of h100-80g"),
        (PRICES, Target("cuda", 24 << 30), "--gpu"),
        (PRICES, Target("cpu", None), "plan.prices.node_hour"),
    ],
)
def test_no_price_is_made_up(prices: PricesSection, target: Target, hint: str) -> None:
    found = estimate_cost(prices, target, 3600)
    assert found.cost is None
    assert found.spot_cost is None
    assert found.gpu_hours == (1 if target.device == "cuda" else None)
    assert hint in found.source


def test_unknown_time_has_no_cost() -> None:
    found = estimate_cost(PRICES, gpus(), None)
    assert (found.gpu_hours, found.cost) == (None, None)
    assert "time is not known" in found.source


def two_starts(run: Path, **first: Any) -> None:
    """Hours 1 and 0.5, on 4 processes."""
    rows = json.loads((run / "generations.json").read_text())
    base = {**rows[0], "world_size": 4}
    begin = {**base, "ended": "stopped", "started_at": "2026-01-01T00:00:00+0000", **first}
    resumed = {**base, "generation": 2, "started_at": "2026-01-01T01:00:00+0000"}
    (run / "generations.json").write_text(json.dumps([begin, resumed]))
    for path in (run / "exits").glob("*.json"):
        path.unlink()
    row = {"step": 100, "time": 1767231000, "train/loss": 1.0}  # 2026-01-01T01:30
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def cost(run: Path, prices: PricesSection | None = None) -> RunCost | None:
    return cost_of_run(RunView(RunDirectory(run)), prices)


def test_cost_of_a_run_has_all_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", prices="{gpu_hour: {h200: 3.0}, currency: EUR}", extras=False)
    two_starts(run)
    assert cost(run) == RunCost(cost=18.0, projected=None, currency="EUR")
    assert cost(run, PricesSection(gpu_hour={"h200": 1})) == RunCost(6.0, None, "USD")


def test_each_start_has_the_price_of_its_gpu(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", prices="{gpu_hour: {h200: 3.0, l4: 1.0}}", extras=False)
    two_starts(run, device_name="NVIDIA L4")
    assert cost(run) == RunCost(4 * 1.0 + 2 * 3.0, None, "USD")


@pytest.mark.parametrize("prices", ["", "{gpu_hour: {l4: 1.0}}", "{gpu_hour: 3}", "[1]"])
def test_run_without_a_price_has_no_cost(tmp_path: Path, prices: str) -> None:
    assert cost(make_run(tmp_path, "one", prices=prices, extras=False)) is None


def test_start_on_an_unknown_device_has_no_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", prices="{gpu_hour: {h200: 3.0}}", extras=False)
    two_starts(run, device_name=None)  # of a version that did not record it
    assert cost(run) is None


def test_price_of_a_node_is_for_launched_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", prices="{node_hour: {p5: 24.0}}", extras=False)
    with (run / "config.yaml").open("a") as file:
        file.write(f"launch:\n  processes_per_node: 8\n  node_selector: {{{NODE_TYPE_LABEL}: p5}}\n")
    two_starts(run, launch="a")
    assert cost(run) is None  # the second start is not from a launch
    rows = json.loads((run / "generations.json").read_text())
    (run / "generations.json").write_text(json.dumps([{**row, "launch": "a"} for row in rows]))
    assert cost(run) == RunCost(6 * 3.0, None, "USD")


def test_running_run_has_a_projected_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", state="running", prices="{gpu_hour: {h200: 3.0}}", world_size=2, extras=False)
    row = {"step": 100, "time": 1767231000, "train/loss": 1.0, "train/seconds_left": 7200}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = cost(run)
    assert found is not None
    assert found.projected == pytest.approx(found.cost + 12.0, abs=0.01)


def test_prices_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("plan:\n  prices:\n    gpu_hour: {h200: 3.1}\n    currency: EUR\n")
    assert read_prices(str(path)).gpu_hour == {"h200": 3.1}
    path.write_text("plan: {}\n")
    with pytest.raises(UsageError, match="has no prices"):
        read_prices(str(path))
    path.write_text("plan: {prices: {gpu_hour: {h2: -1}}}\n")
    with pytest.raises(ConfigError):
        read_prices(str(path))


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0.00 USD"), (0.004, "<0.01 USD"), (1.866, "1.87 USD"), (12345.6, "12,346 USD")],
)
def test_money(amount: float, text: str) -> None:
    assert money(amount, "USD") == text
