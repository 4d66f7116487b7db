"""The page in a real browser: Debian's chromium, driven by Playwright."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs playwright")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from demo_runs import HOSTILE, add_starts, make_run, write_heartbeats, write_rows
from limits import limit, wait_until
from llmtrain.page import local_runs
from llmtrain.runs import lock
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.task_scores import write_task_scores

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package chromium)")
WAIT_SEC = 100
"""A limit, not a time that is expected."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local_runs, "REFRESH_SEC", 0.2)
    monkeypatch.setattr(lock, "STALE_AFTER_SEC", 1e6)  # nothing refreshes the locks of running runs
    return tmp_path / "runs"


class Viewer:
    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(limit(WAIT_SEC) * 1000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda problem: self.errors.append(str(problem)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)

    def enter(self, served: Any, place: str = "") -> Any:
        self.page.goto(f"{served.base}/?token={served.access.token}")
        self.page.wait_for_url(f"{served.base}/")
        if place:
            self.page.goto(f"{served.base}/#{place}")
        return self.page

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_text(self, selector: str, pattern: str) -> None:
        script = "([s, p]) => new RegExp(p).test(document.querySelector(s)?.innerText ?? '')"
        self.page.wait_for_function(script, arg=[selector, pattern])


@pytest.fixture
def viewer(browser: Any) -> Iterator[Viewer]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    viewer = Viewer(context)
    yield viewer
    context.close()


Serve = Callable[..., Any]
LOSS = "[data-chart=loss] .shown"


def test_page_opens_with_token_and_is_refused_without(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    make_run(root, "first", steps=30)
    served = serve_page(root)
    stranger = viewer.page.context.new_page()  # the browser logs the refusal as an error, at any time
    answer = stranger.goto(served.base)
    assert answer.status == 401
    assert "first" not in stranger.inner_text("body")
    viewer.enter(served)
    viewer.wait_text(".runs tbody", "first")
    assert "token" not in viewer.page.url
    assert viewer.page.evaluate("document.cookie") == ""  # HttpOnly
    assert viewer.errors == []


def test_columns_are_chosen_and_remembered_and_useless_ones_hidden(
    root: Path, serve_page: Serve, viewer: Viewer
) -> None:
    for seed, lr in enumerate((3e-4, 1e-3)):
        make_run(root, f"run-{seed}", steps=30, seed=seed, lr=lr, device="cpu", extras=False)
    served = serve_page(root)
    page = viewer.enter(served)
    viewer.wait_text(".runs thead", "Best val")

    def is_useful_only() -> bool:
        """The first answer may come before every run was read."""
        head = viewer.text(".runs thead")
        useless = ("ETA", "Processes", "Restarts", "GPU h", "Parameters", "Dataset")
        return all(label in head for label in ("LR", "Seed", "MFU", "Age")) and not any(map(head.__contains__, useless))

    wait_until(is_useful_only, WAIT_SEC, what=lambda: viewer.text(".runs thead"))
    viewer.wait_text(".runs tbody", "3e-4")
    page.click(".menu summary")
    page.check("[data-column=dataset]")
    page.uncheck("[data-column=mfu]")
    viewer.wait_text(".runs tbody", "web.txt")
    assert "MFU" not in viewer.text(".runs thead")

    def is_remembered() -> bool:
        """The page may be loaded in another process, which sees what was stored only after a moment."""
        page.goto(served.base)
        viewer.wait_text(".runs tbody", "run-0")
        head = viewer.text(".runs thead")
        return "Dataset" in head and "MFU" not in head

    wait_until(is_remembered, WAIT_SEC, what=lambda: viewer.text(".runs thead"))
    page.click(".menu summary")
    page.click(".menu-panel button")
    viewer.wait_text(".runs thead", "MFU")
    assert viewer.errors == []


def test_cost_is_shown_where_a_run_has_prices(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    make_run(root, "priced", steps=7200, step_sec=1, prices="{gpu_hour: {h200: 3.0}}", extras=False)
    make_run(root, "plain", steps=30, extras=False)
    page = viewer.enter(serve_page(root))
    viewer.wait_text(".runs thead", "Cost")
    viewer.wait_text(".runs tbody", "6.00 USD")
    page.click("text=priced")
    viewer.wait_text(".facts", "6.00 USD")
    assert "Cost at the end" not in viewer.text(".facts")  # it is finished
    assert viewer.errors == []


def test_runs_are_grouped_by_config_field(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    for number, lr in enumerate((3e-4, 3e-4, 1e-3)):
        make_run(root, f"run-{number}", steps=30, seed=number, lr=lr, extras=False)
    page = viewer.enter(serve_page(root))
    page.wait_for_selector("option[value='trainer.lr']", state="attached")
    page.select_option("[aria-label='Group by']", "trainer.lr")
    viewer.wait_text(".groups", r"0.0003\s+2\s+\d\.\d+ ± 0\.\d+")
    assert viewer.text(".groups tr.best td") == "0.001"
    page.fill("input[type=search]", "run-0")
    viewer.wait_text(".groups", r"0.0003\s+1\s+\d\.\d+\s")
    page.select_option("[aria-label='Group by']", "")
    viewer.wait_text(".runs tbody", "run-0")
    assert viewer.errors == []


EDGES = """() => {
  const rightEdges = (selector) => {
    const rows = new Map();
    for (const element of document.querySelectorAll(selector)) {
      const { top, right } = element.getBoundingClientRect();
      rows.set(top, Math.max(rows.get(top) ?? 0, right));
    }
    return [...rows.values()];
  };
  const charts = rightEdges(".charts > figure:not([hidden])");
  return [Math.max(...charts), charts, rightEdges(".fact")];
}"""
"""The right edges of the rows of charts and of tiles."""


@pytest.mark.parametrize("width", [1440, pytest.param(1000, marks=pytest.mark.slow), 390])
def test_tiles_and_charts_fill_their_rows(root: Path, serve_page: Serve, browser: Any, width: int) -> None:
    make_run(root, "laptop", steps=40, device="cpu", extras=False)
    context = browser.new_context(viewport={"width": width, "height": 800})
    viewer = Viewer(context)
    page = viewer.enter(serve_page(root), "/run/local/laptop")
    page.wait_for_selector("[data-chart=bits] canvas", state="attached")
    page.wait_for_selector("[data-chart=memory] canvas", state="attached")
    widest, charts, tiles = page.evaluate(EDGES)
    assert charts == pytest.approx([widest] * len(charts), abs=2)
    assert tiles == pytest.approx([widest] * len(tiles), abs=4)
    facts = viewer.text(".facts")
    assert all(name in facts for name in ("Processes", "Parameters", "Duration", "Best validation loss"))
    assert "Pods" not in facts
    assert viewer.errors == []
    context.close()


def test_smoothing_of_few_points_and_click_on_legend(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    make_run(root, "short", steps=12, device="cpu", extras=False)
    page = viewer.enter(serve_page(root), "/run/local/short")
    viewer.wait_text(LOSS, "12 of 12 points")
    viewer.wait_text(".smoothing", "0.00")
    before = page.evaluate("document.querySelector('[data-chart=loss] canvas').toDataURL()")
    page.evaluate(
        "(() => { const s = document.querySelector('input[type=range]'); s.value = 0.9;"
        " for (const name of ['input', 'change']) s.dispatchEvent(new Event(name)); })()"
    )
    viewer.wait_text(".smoothing", "0.90")
    script = "before => document.querySelector('[data-chart=loss] canvas').toDataURL() !== before"
    page.wait_for_function(script, arg=before)
    line = page.locator("[data-chart=loss] .legend button", has_text="training")
    assert line.get_attribute("aria-pressed") == "true"
    before = page.evaluate("document.querySelector('[data-chart=loss] canvas').toDataURL()")
    line.click()
    assert line.get_attribute("aria-pressed") == "false"
    page.wait_for_function(script, arg=before)
    assert viewer.errors == []


def test_end_sample_is_shown_on_samples_tab(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    make_run(root, "done", steps=20, extras=False)
    viewer.enter(serve_page(root), "/run/local/done/samples")
    viewer.wait_text(".sample", "a model that had finished")


def test_samples_of_several_runs_are_shown_beside_each_other(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    for name, answers in (("left", {"say red": "red", "say blue": "blue"}), ("right", {"say red": "rot"})):
        samples = make_run(root, name, steps=20, extras=False) / "samples"
        samples.mkdir(exist_ok=True)
        rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
        (samples / "step_20.json").write_text(json.dumps(rows))
    page = viewer.enter(serve_page(root), "/run/local/left/samples")
    viewer.wait_text("main .card", "a model that had finished")
    page.get_by_label("Step of left").select_option("20")
    viewer.wait_text("main .card", "say blue")
    page.wait_for_function("document.querySelectorAll('[aria-label=\"Compare with\"] option').length > 1")
    page.get_by_label("Compare with").select_option("local/right")
    page.get_by_label("Step of right").select_option("20")
    viewer.wait_text("main .card", "say red\\s+red\\s+rot")
    first = page.locator(".sample", has_text="say red").locator("pre")
    assert first.nth(0).bounding_box()["y"] == first.nth(1).bounding_box()["y"]
    viewer.wait_text("main .card", "Not asked at this step")
    page.get_by_title("Remove right").click()
    page.wait_for_function("!document.querySelector('main .card').innerText.includes('rot')")
    assert viewer.errors == []


APPEND_TWICE = """async () => {
  const { CurvesPanel } = await import("/static/curves.js");
  const key = "local/live", panel = new CurvesPanel(document.createElement("div"), [key], ["live"]);
  await panel.load();
  const total = () => panel.data.get(key).curves["train/loss"].total, begin = panel.data.get(key).end, seen = [total()];
  const train = { step: [51], time: [0], tokens: [0], "train/loss": [3] };
  for (const name of Object.keys(panel.data.get(key).curves)) train[name] ??= [null];
  const rows = { key, begin, end: begin + 9, train, eval: { step: [] }, sources: {} };
  for (const _ of [1, 2]) {
    panel.append(key, rows);
    seen.push(total());
  }
  panel.close();
  return seen;
}"""
"""Rows that were loaded meanwhile arrive again."""


def test_new_rows_appear_in_list_and_curve(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    run = make_run(root, "live", steps=40, max_steps=1000, state="running")
    page = viewer.enter(serve_page(root))
    viewer.wait_text(".runs tbody", "40 / 1,000")
    write_rows(run, 41, 45, time.time(), 0.5, 6e-4, 1000)
    viewer.wait_text(".runs tbody", "45 / 1,000")
    page.click(".runs tbody a")
    viewer.wait_text(LOSS, "45 of 45 points")
    write_rows(run, 46, 50, time.time(), 0.5, 6e-4, 1000)
    viewer.wait_text(LOSS, "50 of 50 points")
    viewer.wait_text(".facts", "50 / 1,000")
    assert page.evaluate(APPEND_TWICE) == [50, 51, 51]
    assert viewer.errors == []


@pytest.mark.parametrize(
    "place", ["run/local/one", pytest.param("compare/local/one,local/two", marks=pytest.mark.slow)]
)
def test_notice_disappears_when_the_run_returns(root: Path, serve_page: Serve, viewer: Viewer, place: str) -> None:
    run = make_run(root, "one", steps=30)
    make_run(root, "two", steps=30)
    viewer.enter(serve_page(root), place)
    viewer.wait_text("body", "30 / 30")
    run.rename(root.with_name("away"))
    viewer.wait_text("#notices", "not here any more")
    root.with_name("away").rename(run)
    viewer.wait_text("#notices", "^$")


@pytest.mark.parametrize(
    ("place", "path", "shown"),
    [
        ("run/local/one", "curves", "30 of 30 points"),
        pytest.param("compare/local/one,local/two", "curves", "60 of 60 points", marks=pytest.mark.slow),
        pytest.param(*("compare/local/one,local/two", "config", "What differs in the configs"), marks=pytest.mark.slow),
    ],
)
def test_request_that_failed_once_is_repeated(
    root: Path, serve_page: Serve, viewer: Viewer, place: str, path: str, shown: str
) -> None:
    """A run may be away for less than a second, so that the stream does not notice it."""
    for number, name in enumerate(("one", "two")):
        make_run(root, name, steps=30, lr=1e-3 * (number + 1))
    failed: list[str] = []

    def fail_once(route: Any) -> None:
        if failed:
            route.continue_()
            return
        failed.append(route.request.url)
        route.fulfill(status=404, json={"what": "Run 'one' is not here any more.", "remedy": None})

    viewer.page.route(f"**/api/{path}?*", fail_once)
    viewer.enter(serve_page(root), place)
    viewer.wait_text("main", shown)
    viewer.wait_text("#notices", "^$")
    assert len(failed) == 1


def test_zoom_loads_detail_and_compare_shows_both(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    for number, lr in enumerate((3e-4, 1e-3)):
        make_run(root, f"run-{number}", steps=6000, lr=lr, seed=number, extras=False)
    page = viewer.enter(serve_page(root))
    viewer.wait_text(".toolbar", "2 runs")
    for box in page.query_selector_all(".runs tbody input"):
        box.check()
    page.click("text=Compare 2 runs")
    viewer.wait_text(LOSS, "of 12,000 points")
    viewer.wait_text("main", "trainer.lr")
    shown = int(viewer.text(LOSS).split()[0].replace(",", ""))
    assert shown < 6000
    area = page.query_selector("[data-chart=loss] .u-over").bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + 50)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.55, area["y"] + 60, steps=4)
    page.mouse.up()
    viewer.wait_text(LOSS, r"^[56]\d\d of [56]\d\d points")  # every row of the part
    page.click("[data-zoom=reset]")
    viewer.wait_text(LOSS, "of 12,000 points")
    page.click("[data-axis=time]")
    viewer.wait_text("[data-chart=loss] .legend", "run-0")
    assert viewer.errors == []


def test_scores_on_tasks_are_curves_beside_the_losses(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    chart = '[data-chart="tasks/hellaswag/acc"]'
    runs = [RunDirectory(make_run(root, name, steps=40)) for name in ("one", "two")]
    write_task_scores(runs[0], 20, {"hellaswag": {"metrics": {"acc": 0.25}}})
    page = viewer.enter(serve_page(root), "run/local/one")
    viewer.wait_text(f"{chart} .shown", "1 of 1 points")
    charts = page.evaluate("[...document.querySelectorAll('[data-chart]')].map((each) => each.dataset.chart)")
    assert charts.index("loss") < charts.index("tasks/hellaswag/acc") < charts.index("lr")
    assert page.is_visible(f"{chart} canvas")
    write_task_scores(runs[0], 40, {"hellaswag": {"metrics": {"acc": 0.5}}})
    viewer.wait_text(f"{chart} .shown", "2 of 2 points")
    viewer.wait_text(".facts", "0.5000")
    page.click("[data-axis=time]")
    viewer.wait_text(f"{chart} .shown", "2 of 2 points")
    write_task_scores(runs[1], 40, {"hellaswag": {"metrics": {"acc": 0.4}}})
    page.goto(page.url.split("#")[0] + "#/compare/local/one,local/two")
    viewer.wait_text(f"{chart} .shown", "3 of 3 points")
    viewer.wait_text(f"{chart} .legend", "two")
    assert viewer.errors == []


def write_source_loss(run: Path, step: int, source: str, loss: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        row = {"step": step, "val/loss": loss, f"val/loss/{source}": loss, "time": time.time()}
        file.write(json.dumps(row) + "\n")


def test_losses_of_sources_are_curves_beside_the_losses(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    chart = '[data-chart="val/loss/web"]'
    runs = [make_run(root, name, steps=39, max_steps=80, state="running") for name in ("one", "two")]
    page = viewer.enter(serve_page(root), "run/local/one")
    viewer.wait_text(LOSS, "39 of 39 points")
    write_source_loss(runs[0], 40, "web", 2.5)
    viewer.wait_text(f"{chart} .shown", "1 of 1 points")
    viewer.wait_text(f"{chart} h3", "Validation loss: web")
    charts = page.evaluate("[...document.querySelectorAll('[data-chart]')].map((each) => each.dataset.chart)")
    assert charts.index("loss") < charts.index("val/loss/web") < charts.index("lr")
    write_rows(runs[0], 41, 41, 0.0, 0.5, 6e-4, 80)
    write_source_loss(runs[0], 42, "web", 2.25)
    viewer.wait_text(f"{chart} .shown", "2 of 2 points")
    page.click("[data-axis=tokens]")
    viewer.wait_text(f"{chart} .shown", "2 of 2 points")
    write_source_loss(runs[1], 40, "web", 2.0)
    page.goto(page.url.split("#")[0] + "#/compare/local/one,local/two")
    viewer.wait_text(f"{chart} .shown", "3 of 3 points")
    viewer.wait_text(f"{chart} .legend", "two")
    assert viewer.errors == []


def test_dark_mode_follows_system_and_phone_has_no_sideways_scroll(root: Path, serve_page: Serve, browser: Any) -> None:
    make_run(root, "first", steps=50, state="failed")
    served = serve_page(root)
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    viewer = Viewer(context)
    for place, selector in (("", ".runs tbody tr"), ("/run/local/first", LOSS), ("/run/local/first/ranks", ".cell")):
        page = viewer.enter(served, place)
        page.wait_for_selector(selector)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", color)[:3])) < 150
    page.emulate_media(color_scheme="light")
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", color)[:3])) > 600
    context.close()


def test_hostile_text_is_shown_and_not_run(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    run = make_run(root, "evil", steps=30, state="failed", message=HOSTILE)
    (run / "config.yaml").write_text(f"run:\n  name: >-\n    {HOSTILE}\n")
    (run / "logs" / "train.log").write_text(f"{HOSTILE}\n")
    generations = (run / "generations.json").read_text()
    (run / "generations.json").write_text(generations.replace("node-a", HOSTILE.replace('"', '\\"')))
    page = viewer.enter(serve_page(root))
    viewer.wait_text(".runs tbody", "<script>")
    for tab, selector in (
        ("curves", ".whycard"),
        ("logs", ".log"),
        ("samples", ".sample"),
        ("config", "main .fields"),
        ("ranks", "main table"),
    ):
        page.goto(f"{page.url.split('#')[0]}#/run/local/evil/{tab}")
        viewer.wait_text(selector, "<script>")
        assert page.title() != "ran"
        assert page.evaluate("document.querySelectorAll('main script, main img, #notices img').length") == 0
    assert viewer.errors == []


def test_open_page_survives_restart_of_server(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    run = make_run(root, "live", steps=20, max_steps=1000, state="running")
    served = serve_page(root)
    viewer.enter(served, "/run/local/live")
    viewer.wait_text(LOSS, "20 of 20 points")
    served.stop()
    viewer.wait_text("#connection", "not connected")
    write_rows(run, 21, 25, time.time(), 0.5, 6e-4, 1000)
    serve_page(root, port=served.access.port, key=served.access.key)
    viewer.wait_text(LOSS, "25 of 25 points")
    viewer.wait_text("#connection", "live")


def test_run_that_disappears_shows_notice_and_list_stays(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    run = make_run(root, "going", steps=20)
    make_run(root, "staying", steps=20)
    page = viewer.enter(serve_page(root), "/run/local/going")
    viewer.wait_text(LOSS, "20 of 20 points")
    shutil.rmtree(run)
    viewer.wait_text("#notices", "not here any more")
    page.click(".brand")
    viewer.wait_text(".runs tbody", "staying")
    assert "going" not in viewer.text(".runs tbody")
    assert viewer.text("#notices") == ""


def test_actions_are_shown_with_permission_only_and_need_name(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    make_run(root, "old", steps=10, extras=False)
    page = viewer.enter(serve_page(root), "/run/local/old")
    viewer.wait_text(LOSS, "10 of 10 points")
    assert page.query_selector("[data-action]") is None
    viewer.enter(serve_page(root, allow_actions=True), "/run/local/old")
    page.click("[data-action=delete]")
    assert page.is_disabled("[data-confirm=delete]")
    page.fill("dialog input", "ol")
    assert page.is_disabled("[data-confirm=delete]")
    page.fill("dialog input", "old")
    page.click("[data-confirm=delete]")
    viewer.wait_text("dialog pre", "runs prune old")
    assert not (root / "old").exists()


def test_log_follows_searches_and_loads_earlier_parts(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    run = make_run(root, "live", steps=3000, state="running")
    page = viewer.enter(serve_page(root), "/run/local/live/logs")
    viewer.wait_text(".log", "step 2999/3000")
    assert "step 100/" not in viewer.text(".log")  # not loaded
    with (run / "logs" / "train.log").open("a") as file:
        file.write("a line that is new\n")
    viewer.wait_text(".log", "a line that is new")
    page.fill("input[aria-label='Search the log']", "step 123/")
    page.click(".matches button")
    viewer.wait_text(".log .found", "step 123/3000")
    page.evaluate("document.querySelector('.log').scrollTop = 0")
    viewer.wait_text(".log", "step 100/")
    assert viewer.errors == []


def test_ranks_mark_slow_and_silent(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    run = make_run(root, "big", steps=20, max_steps=90, state="running", world_size=512)
    later = 3600  # a slow machine must not make all of them silent
    write_heartbeats(run, 512, 20, time.time() + later, silent=(5,), slow=(7, 8), silent_sec=later + 95)
    page = viewer.enter(serve_page(root), "/run/local/big/ranks")
    page.wait_for_selector(".cell.silent")
    assert len(page.query_selector_all(".cell")) == 512
    assert [cell.inner_text() for cell in page.query_selector_all(".cell.silent")] == ["5"]
    assert [cell.inner_text() for cell in page.query_selector_all(".cell.slow")] == ["7", "8"]
    page.click(".cell.slow")
    viewer.wait_text("main", "Rank 7: step 16")


BARS = """() => {
  const edges = (element) => (({ left, right }) => ({ left, right }))(element.getBoundingClientRect());
  const bars = [...document.querySelectorAll(".track .bar")];
  const found = bars.map((bar) => ({ text: bar.innerText, kind: bar.classList[1], ...edges(bar) }));
  return [found, edges(document.querySelector(".track"))];
}"""


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
def test_time_line_shows_starts_in_order(root: Path, serve_page: Serve, browser: Any, width: int) -> None:
    now = time.time()
    run = make_run(root, "spot", steps=40, max_steps=90, state="running", started=now - 600)
    add_starts(run, [(now - 7000, now - 5000, "stopped"), (now - 4000, now - 900, "failed")])
    context = browser.new_context(viewport={"width": width, "height": 800})
    viewer = Viewer(context)
    page = viewer.enter(serve_page(root), "/run/local/spot/ranks")
    page.wait_for_selector(".track .bar.run")
    bars, track = page.evaluate(BARS)  # at once: news of the run draw them again
    assert [bar["text"] for bar in bars] == ["1", "2", "3"]
    assert [bar["kind"] for bar in bars] == ["warn", "bad", "run"]
    edges = [edge for bar in bars for edge in (bar["left"], bar["right"])]
    assert edges == sorted(edges)
    assert edges[0] == pytest.approx(track["left"], abs=1)
    assert edges[-1] == pytest.approx(track["right"], abs=1)
    assert len(page.query_selector_all(".track .mark")) >= 1  # checkpoints, close ones together
    page.click(".track .bar.bad")
    viewer.wait_text(".chosen", r"Start 2 on node-a.*failed")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("text=Last hour")
    page.wait_for_function("document.querySelectorAll('.track .bar').length === 2")
    assert viewer.errors == []
    context.close()


@pytest.mark.slow
def test_thousand_runs_and_hundred_thousand_rows(root: Path, serve_page: Serve, viewer: Viewer) -> None:
    for number in range(1000):
        make_run(root, f"run-{number:04}", steps=20, extras=False)
    make_run(root, "long", steps=100_000, extras=False, started=time.time())
    page = viewer.enter(serve_page(root))
    viewer.wait_text(".toolbar", "1,001 runs")
    page.fill("input[type=search]", "run-0999")
    viewer.wait_text(".toolbar", "1 of 1,001 runs")
    page.fill("input[type=search]", "")
    page.click(".runs tbody a:text('long')")
    viewer.wait_text(LOSS, r"2,\d\d\d of 100,000 points")
    assert viewer.errors == []
