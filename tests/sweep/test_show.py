"""Tables of sweeps: fast, live, on the page and in reports."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo_sweep import write_sweep

from demo_runs import make_run
from limits import limit
from llmtrain.errors import ExitCode
from llmtrain.page.sweeps import best_runs, sweep_values
from llmtrain.sweep.show import at_edge, describe

Cli = Callable[..., Any]


def test_200_trials_are_listed_in_under_a_second(cli: Cli, workdir: Path) -> None:
    write_sweep(workdir / "runs", trials=200)
    cli("sweep", "show", "demo")  # imports
    began = time.perf_counter()
    shown = cli("sweep", "show", "demo")
    assert time.perf_counter() - began < limit(1.0)
    assert shown.code == 0
    assert len(re.findall(r"^ +\d+ ", shown.out, re.M)) == 200


def test_unfinished_sweep_says_how_to_continue(cli: Cli, workdir: Path) -> None:
    sweep = write_sweep(workdir / "elsewhere", trials=9, jobs=4)
    shown = cli("sweep", "show", "demo", "--root", "elsewhere")
    assert "llmtrain sweep --resume demo --root elsewhere" in shown.out
    assert describe(sweep)["winner"] is None
    assert cli("sweep", "show", "demo", "--root", "elsewhere", "--best").code == ExitCode.USAGE


def test_report_of_a_sweep(cli: Cli, workdir: Path) -> None:
    sweep = write_sweep(workdir / "runs")
    for row in describe(sweep)["rows"]:
        make_run(workdir / "runs", row["run_id"], steps=20)
    done = cli("report", "demo", "--to", "demo.html", "--json")
    assert done.code == 0, done.err
    assert len(done.json["runs"]) == 8
    text = (workdir / "demo.html").read_text()
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert data["sweep"]["name"] == "demo"
    assert data["sweep"]["winner"]["trial"] == describe(sweep)["winner"]["trial"]
    assert cli("report", "demo", "demo-1").code == ExitCode.USAGE


def test_best_value_near_the_end_of_its_range_is_named() -> None:
    space = {"trainer.lr": "log(1e-3,1e-1)", "model.n_layers": {"values": "int(2,8)", "when": {}}, "a.b": [1, 2]}
    found = at_edge(space, {"trainer.lr": 0.095, "model.n_layers": 2, "a.b": 2})
    assert [(each["field"], each["end"], each["range"]) for each in found] == [
        ("trainer.lr", "upper", "log(1e-3,1e-1)"),
        ("model.n_layers", "lower", "int(2,8)"),
    ]
    assert at_edge(space, {"trainer.lr": 0.03, "model.n_layers": 5}) == []


def test_values_are_in_the_order_of_the_space(workdir: Path) -> None:
    values = describe(write_sweep(workdir / "runs"))
    assert list(values["winner"]["values"]) == values["fields"] != sorted(values["fields"])
    assert "at_edge" in values["winner"]


@pytest.mark.parametrize(("metric", "best", "worst"), [("val/loss", 0, 6), ("tasks/grammar/acc", 6, 7)])
def test_best_is_first_in_table_and_report(cli: Cli, workdir: Path, metric: str, best: int, worst: int) -> None:
    """Of a loss the lowest is best, of an accuracy the highest."""
    sweep = write_sweep(workdir / "runs", metric=metric)
    values = describe(sweep)
    assert values["winner"]["trial"] == best
    shown = cli("sweep", "show", "demo").out.splitlines()
    assert shown[1].split()[0] == str(best)
    for row in values["rows"]:
        make_run(workdir / "runs", row["run_id"], steps=2)
    reported = [run.run_id for run in best_runs(sweep_values(sweep), str(workdir / "runs"))]
    assert reported[0] == f"demo-{best}"
    assert reported[-1] == f"demo-{worst}"


class TestPage:
    @pytest.fixture
    def client(self, workdir: Path) -> Any:
        pytest.importorskip("starlette")
        from starlette.testclient import TestClient

        from llmtrain.page.run_catalog import RunCatalog
        from llmtrain.page.security import Access
        from llmtrain.page.server import make_app

        access = Access(port=8642)
        client = TestClient(make_app(RunCatalog(str(workdir / "runs")), access), base_url="http://127.0.0.1:8642")
        client.get("/", params={"token": access.token})
        return client

    def test_sweeps_and_their_tables(self, client: Any, workdir: Path) -> None:
        sweep = write_sweep(workdir / "runs", jobs=6)
        (listed,) = client.get("/api/sweeps").json()["sweeps"]
        assert listed == {"name": "demo", "is_running": False, "runs": 6}
        found = client.get("/api/sweep", params={"name": "demo"}).json()
        assert [row["status"] for row in found["rows"]] == [row["status"] for row in describe(sweep)["rows"]]
        assert found["rows"][3]["key"] == "local/demo-3"

    @pytest.mark.parametrize("name", ["other", "../runs/demo", "/etc", "", "demo-0"])
    def test_other_directories_are_not_read(self, client: Any, workdir: Path, name: str) -> None:
        write_sweep(workdir / "runs")
        assert client.get("/api/sweep", params={"name": name}).status_code == 404

    def test_damaged_sweep_is_an_error_of_its_own(self, client: Any, workdir: Path) -> None:
        sweep = write_sweep(workdir / "runs")
        write_sweep(workdir / "runs", name="good")
        sweep.trials.write_text("[]")
        assert [row["name"] for row in client.get("/api/sweeps").json()["sweeps"]] == ["good"]
        assert client.get("/api/sweep", params={"name": "demo"}).status_code == 400


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package chromium)")
def test_sweep_in_a_browser(workdir: Path, cli: Cli) -> None:
    """The page shows table, lines and curves, and what is new; the report shows table and lines."""
    pytest.importorskip("playwright")
    import threading

    import uvicorn
    from playwright.sync_api import sync_playwright

    from llmtrain.page.run_catalog import RunCatalog
    from llmtrain.page.security import Access
    from llmtrain.page.server import make_app

    sweep = write_sweep(workdir / "runs", jobs=6)
    for row in describe(sweep)["rows"]:
        make_run(workdir / "runs", row["run_id"], steps=20)
    access = Access(port=8643)
    server = uvicorn.Server(
        uvicorn.Config(make_app(RunCatalog(str(workdir / "runs")), access), port=8643, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    errors: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(limit(60) * 1000)
        page.on("pageerror", lambda problem: errors.append(str(problem)))
        while not server.started:
            time.sleep(0.1)
        page.goto(f"http://127.0.0.1:8643/?token={access.token}")
        page.click("text=demo >> nth=0")
        page.wait_for_selector("svg.parallel polyline")
        assert page.locator("svg.parallel polyline").count() == 5  # trial 5 diverged
        page.wait_for_selector("[data-chart=loss]")
        shutil.rmtree(sweep.path)
        write_sweep(workdir / "runs")
        page.wait_for_selector("svg.parallel polyline.best")
        assert "Best: trial" in page.inner_text("main")
        assert page.locator("table.groups tbody tr").count() == 9
        page.screenshot(path=str(workdir / "page.png"), full_page=True)

        assert cli("report", "demo", "--to", "demo.html").code == 0
        page.goto(f"file://{workdir / 'demo.html'}")
        page.wait_for_selector("svg.parallel polyline.best")
        assert "Sweep demo" in page.inner_text("main")
        page.screenshot(path=str(workdir / "report.png"))
        browser.close()
    server.should_exit = True
    thread.join(limit(20))
    assert errors == []
