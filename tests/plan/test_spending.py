"""GPU-hours and cost of many runs: `llmtrain runs cost`, and the line of `runs show`."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from demo_runs import make_run
from llmtrain.commands.cost_tables import spending_text
from llmtrain.commands.runs import app
from llmtrain.config.plan import PricesSection
from llmtrain.plan.cost import RunCost, cost_text
from llmtrain.plan.spending import sum_spending
from llmtrain.runs.directory import list_runs

HOUR = 3600
USD = "{gpu_hour: {h200: 3.0}}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Runs of an hour each; the second of `a` has the name of the first."""
    options = {"steps": HOUR - 10, "step_sec": 1, "extras": False}
    make_run(tmp_path, "a1", world_size=8, prices=USD, started=_at("2026-01-31"), **options)
    make_run(tmp_path, "a2", prices=USD, started=_at("2026-02-01"), **options)
    meta = json.loads((tmp_path / "a2" / "meta.json").read_text())
    (tmp_path / "a2" / "meta.json").write_text(json.dumps({**meta, "name": "a1"}))
    euro = "{gpu_hour: {l4: 0.5}, currency: EUR}"
    make_run(tmp_path, "bb", prices=euro, device_name="NVIDIA L4", started=_at("2026-02-02"), **options)
    make_run(tmp_path, "cc", started=_at("2026-02-03"), **options)
    make_run(tmp_path, "dd", device="cpu", device_name="Some CPU", **options)
    return tmp_path


def _at(day: str) -> float:
    return time.mktime(time.strptime(f"{day} 12:00", "%Y-%m-%d %H:%M"))


def test_sums_by_name_and_month(root: Path) -> None:
    found = sum_spending(list_runs(str(root))).as_dict()
    by_name = {row["label"]: (row["runs"], round(row["gpu_hours"], 1)) for row in found["by_name"]}
    assert by_name == {"a1": (2, 9.0), "bb": (1, 1.0), "cc": (1, 1.0)}
    by_month = {row["label"]: row for row in found["by_month"]}
    assert [row["label"] for row in found["by_month"]] == ["2026-01", "2026-02"]
    assert by_month["2026-01"]["costs"] == {"USD": pytest.approx(24, rel=0.01)}
    assert by_month["2026-02"]["costs"] == {"EUR": pytest.approx(0.5, rel=0.01), "USD": pytest.approx(3, rel=0.01)}
    assert found["total"]["runs"] == 4
    assert found["total"]["costs"]["USD"] == pytest.approx(27, rel=0.01)
    assert (found["without_gpu"], found["without_price"]) == (["dd"], ["cc"])


def test_given_prices_replace_those_of_the_runs(root: Path) -> None:
    found = sum_spending(list_runs(str(root)), PricesSection(gpu_hour={"h200": 1}))
    assert found.total.costs == {"USD": pytest.approx(10, rel=0.01)}
    assert found.without_price == ["bb"]


def test_table_fits_and_counts_what_it_leaves_out(root: Path) -> None:
    text = spending_text(sum_spending(list_runs(str(root))), str(root))
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert ["name", "runs", "GPU-hours", "EUR", "USD"] in lines
    assert ["month", "runs", "GPU-hours", "EUR", "USD"] in lines
    assert "No price: 1 run (cc)." in text
    assert "used no GPU: 1 run (dd)." in text


def test_command_prints_json_and_reads_a_file_of_prices(root: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("plan: {prices: {gpu_hour: {h200: 2, l4: 1}, currency: EUR}}\n")
    done = CliRunner().invoke(app, ["cost", "--root", str(root), "--prices", str(prices), "--json"])
    assert done.exit_code == 0
    value = json.loads(done.stdout)
    assert value["total"]["costs"] == {"EUR": pytest.approx(21, rel=0.01)}
    assert value["prices"] == str(prices)


def test_no_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["cost", "--root", str(tmp_path / "none")])
    assert done.stdout == f"No runs in {tmp_path / 'none'}.\n"


def test_show_has_gpu_hours_and_cost(root: Path) -> None:
    done = CliRunner().invoke(app, ["show", "a2", "--root", str(root), "--json"])
    value = json.loads(done.stdout)
    assert value["gpu_hours"] == pytest.approx(1, abs=0.01)
    assert value["cost"] == {"cost": pytest.approx(3, abs=0.02), "projected": None, "currency": "USD"}
    assert "1.00 GPU-hours, 3.00 USD" in CliRunner().invoke(app, ["show", "a2", "--root", str(root)]).stdout
    assert "GPU-hours" not in CliRunner().invoke(app, ["show", "dd", "--root", str(root)]).stdout


def test_cost_of_a_run_in_a_line() -> None:
    assert cost_text(0.75, RunCost(1.866, 5.2, "EUR")) == "0.75 GPU-hours, 1.87 EUR so far, 5.20 EUR at the end"
    assert cost_text(0.75, None) == "0.75 GPU-hours"
    assert cost_text(None, RunCost(1.866, None, "EUR")) == "1.87 EUR"
    assert cost_text(None, None) is None
