"""Reports: complete, small, readable without a network or the extra `page`, and safe to open."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from demo_runs import HOSTILE, make_run
from llmtrain.config.document import dump_document
from llmtrain.config.load import load_config
from llmtrain.page.report import MAX_BYTES, report_html, run_data
from llmtrain.page.report_markdown import report_markdown
from llmtrain.page.values import plain
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.task_scores import write_task_scores
from llmtrain.runs.view import RunView

Cli = Callable[..., Any]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    value: dict[str, Any] = json.loads(found[1])
    return value


def dom_after_scripts(page: Path, home: Path, width: int = 1440) -> str:
    """The page as Chromium has it once its scripts have run, opened from disk without any network."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--user-data-dir={home}",
        f"--window-size={width},900",
    ]
    cut = ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
    done = subprocess.run([str(CHROMIUM), *options, *cut, "--dump-dom", page.as_uri()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_report_of_long_run_is_small_and_keeps_peaks(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path, "long", steps=20_000, extras=False))
    rows = run.metrics.read_text().splitlines()
    row = json.loads(rows[12_345])
    rows[12_345] = json.dumps({**row, "train/loss": 77.5})
    run.metrics.write_text("\n".join(rows) + "\n")
    text = report_html([run])
    assert len(text) < 500_000
    curve = data_of(text)["runs"][0]["curves"]["train/loss"]
    assert max(curve["y"]) == 77.5
    assert curve["total"] == 20_000
    assert len(curve["x"]) < 2000


@pytest.mark.parametrize("steps", [12, 400])
def test_only_curves_with_many_points_are_smoothed(steps: int, tmp_path: Path) -> None:
    """Of few points, an average would show a loss far from that of the run."""
    run = RunDirectory(make_run(tmp_path, "first", steps=steps, extras=False))
    curve = data_of(report_html([run]))["runs"][0]["curves"]["train/loss"]
    assert ("smooth" in curve) == (steps > 12)
    assert curve.get("smooth", curve)["y"][-1] == pytest.approx(curve["y"][-1], rel=0.1)


def test_report_of_many_runs_has_fewer_points_each(tmp_path: Path) -> None:
    runs = [RunDirectory(make_run(tmp_path, f"run-{n}", steps=1500, seed=n, extras=False)) for n in range(12)]
    text = report_html(runs)
    assert len(text.encode()) < MAX_BYTES
    assert len(data_of(text)["runs"]) == 12


def test_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = report_html([RunDirectory(make_run(tmp_path, "first", steps=50))])
    assert not re.search(r"<(?:link|img|iframe|object)\b", text.split('id="data"')[0])
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']*["']""", text.split('id="data"')[0]) == []
    assert "default-src 'none'" in text
    assert "@import" not in text


def test_text_of_runs_cannot_end_its_element(tmp_path: Path) -> None:
    make_run(tmp_path, "first", steps=50, state="failed", message=HOSTILE)
    text = report_html([RunDirectory(tmp_path / "first")])
    assert "<script>document" not in text
    run = data_of(text)["runs"][0]
    assert run["why"]["what"] == HOSTILE, "it is shown as it is"
    assert HOSTILE in run["samples"][0]["answer"]


def test_damaged_and_empty_runs_have_a_report(tmp_path: Path) -> None:
    damaged = make_run(tmp_path, "damaged", steps=30)
    for name in ("meta.json", "generations.json", "config.yaml", "finished.json"):
        (damaged / name).write_bytes(b"\x00{")
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "train/loss": "x"}\n{"step": 32, "tra')
    empty = RunDirectory(tmp_path / "empty")
    empty.path.mkdir()
    runs = data_of(report_html([RunDirectory(damaged), empty]))["runs"]
    assert [len(run["curves"].get("train/loss", {"x": []})["x"]) for run in runs] == [30, 0]


def test_config_of_report_has_no_derived_values(tmp_path: Path) -> None:
    run = make_run(tmp_path, "first", steps=20, extras=False)
    config = load_config("gpt_stdlib", ["run.threads=2", "trainer.lr=0.003"]).with_values("output", run_id="first")
    (run / "config.yaml").write_text(dump_document(config.as_dict()))
    (shown,) = data_of(report_html([RunDirectory(run)]))["runs"]
    assert shown["changed"]["trainer.lr"] == 0.003
    assert shown["changed"]["model.d_model"] == config.as_dict()["model"]["d_model"]
    derived = {"model.d_ff", "model.n_heads", "trainer.momentum", "run.threads", "output.run_id"}
    assert derived & shown["changed"].keys() == set()
    assert derived <= shown["config"].keys(), "they are among all fields"


@needs_chromium
def test_report_of_two_runs_has_common_fields_once_and_no_derived_differences(tmp_path: Path) -> None:
    runs = []
    for number in (1, 2):
        run = make_run(tmp_path, f"run-{number}", steps=20, seed=number, extras=False)
        config = load_config("gpt_stdlib", [f"model.d_model={128 * number}", "trainer.lr=0.003"])
        (run / "config.yaml").write_text(dump_document(config.with_values("output", run_id=run.name).as_dict()))
        runs.append(RunDirectory(run))
    page = tmp_path / "two.html"
    page.write_text(report_html(runs))
    shown = dom_after_scripts(page, tmp_path / "home").split('id="data"')[0]
    shown = re.sub(r"<details>.*?</details>", "", shown, flags=re.S)
    assert shown.count("trainer.lr") == 1
    assert shown.count("model.d_model") == 1
    assert "model.d_ff" not in shown
    assert "output.run_id" not in shown


@needs_chromium
def test_report_folds_details_on_a_phone(tmp_path: Path) -> None:
    runs = [RunDirectory(make_run(tmp_path, run_id, steps=20, extras=False)) for run_id in ("first", "second")]
    page = tmp_path / "two.html"
    page.write_text(report_html(runs))
    for width, is_open in ((390, False), (1440, True)):
        shown = dom_after_scripts(page, tmp_path / f"home-{width}", width).split('id="data"')[0]
        folded = re.findall(r'<details class="folded"[^>]*>', shown)
        assert [" open" in tag for tag in folded] == [is_open] * 3, "the common config, and the files of each run"


@needs_chromium
def test_report_opens_from_disk_without_network(tmp_path: Path) -> None:
    first = RunDirectory(make_run(tmp_path, "first", steps=300, world_size=4))
    second = RunDirectory(make_run(tmp_path, "second", steps=200, state="failed", message=HOSTILE, lr=2e-3))
    for name, runs in (("one", [first]), ("two", [first, second])):
        page = tmp_path / f"{name}.html"
        page.write_text(report_html(runs))
        dom = dom_after_scripts(page, tmp_path / "home")
        shown = dom.split('id="data"')[0]
        assert shown.count("<canvas") == 8, "the charts are drawn"
        assert "300 of 300 points" in shown or name == "two"
        assert "Tokens/s, last" in shown
        assert "<title>ran" not in dom, "a script in the data has run"
        assert shown.count("first") >= 1
        assert ("&lt;script&gt;" in shown) is True, "hostile text is shown as text"


def test_report_shows_scores_on_tasks(tmp_path: Path) -> None:
    """Curves after the losses, the newest ones among the facts, and all in a table."""
    run = RunDirectory(make_run(tmp_path, "first", steps=40))
    for step in (20, 40):
        write_task_scores(run, step, {"hellaswag": {"metrics": {"acc": step / 100, "acc_norm": 0.5}}})
    text = report_html([run])
    curves = data_of(text)["runs"][0]["curves"]
    assert curves["tasks/hellaswag/acc"] == {"x": [20.0, 40.0], "y": [0.2, 0.4], "total": 2}
    files = report_markdown([run_data(run, 100)], "card")
    assert "| hellaswag/acc | 0.4000 |" in files["card.md"]
    seconds = RunView(run).seconds
    assert seconds is not None
    assert run_data(run, 100)["seconds"] == seconds, "as in runs show"
    if CHROMIUM:
        page = tmp_path / "report.html"
        page.write_text(text)
        shown = dom_after_scripts(page, tmp_path / "home").split('id="data"')[0]
        charts = re.findall(r'data-chart="([^"]+)"', shown)
        assert charts.index("loss") < charts.index("tasks/hellaswag/acc") < charts.index("lr")
        assert "Scores on tasks" in shown
        assert "0.4000" in shown


def test_report_has_losses_of_sources(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path, "first", steps=39, max_steps=40))
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 40, "val/loss": 3.0, "val/loss/web": 2.5, "val/loss/books": 3.5}) + "\n")
    text = report_html([run])
    assert data_of(text)["runs"][0]["curves"]["val/loss/web"]["y"] == [2.5]
    if CHROMIUM:
        page = tmp_path / "report.html"
        page.write_text(text)
        shown = dom_after_scripts(page, tmp_path / "home").split('id="data"')[0]
        charts = re.findall(r'data-chart="([^"]+)"', shown)
        assert charts.index("loss") < charts.index("val/loss/web") < charts.index("val/loss/books") < charts.index("lr")
        assert "Validation loss: books" in shown


def test_report_needs_no_extra(tmp_path: Path) -> None:
    """Nor torch, nor the packages of the page."""
    make_run(tmp_path / "runs", "first", steps=20)
    hidden = ["starlette", "uvicorn", "torch", "kubernetes", "anyio", "plotext"]
    script = f"""
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from llmtrain.cli import main
main(["report", "first"])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert data_of((tmp_path / "report.html").read_text())["runs"][0]["row"]["run_id"] == "first"


class TestCommand:
    def test_html(self, cli: Cli, workdir: Path) -> None:
        make_run(workdir / "runs", "first", steps=40)
        done = cli("report", "first", "--to", "a.html", "--json")
        assert done.code == 0, done.err
        assert (done.json["runs"], done.json["files"]) == (["first"], ["a.html"])
        assert done.json["bytes"] == (workdir / "a.html").stat().st_size

    def test_markdown_has_images_beside_it(self, cli: Cli, workdir: Path) -> None:
        for n in range(2):
            make_run(workdir / "runs", f"run-{n}", steps=40, seed=n)
        done = cli("report", "run-0", "run-1", "--format", "md", "--to", "card.md", "--json")
        assert done.code == 0, done.err
        text = (workdir / "card.md").read_text()
        images = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
        assert [f"{name}" for name in images] == [Path(name).name for name in done.json["files"][1:]]
        for name in images:
            root = ElementTree.fromstring((workdir / name).read_text())
            assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) >= 2
        assert "| Best validation loss |" in text
        assert "| Tokens per second, last |" in text

    def test_hostile_text_in_markdown_is_escaped(self, cli: Cli, workdir: Path) -> None:
        make_run(workdir / "runs", "first", steps=40, state="failed", message=f"{HOSTILE} | x")
        assert cli("report", "first", "--to", "report.md").code == 0
        text = (workdir / "report.md").read_text()
        assert "<script" not in text
        assert "\\| x" in text

    def test_hostile_names_in_markdown(self, cli: Cli, workdir: Path) -> None:
        run = make_run(workdir / "runs", "first", steps=40)
        (run / "config.yaml").write_text('schema_version: 3\nrun: {"` | <img src=x> | `": 1}\n')
        assert cli("report", "first", "--to", "a (b).md").code == 0
        text = (workdir / "a (b).md").read_text()
        assert "(a%20%28b%29-loss.svg)" in text
        assert (workdir / "a (b)-loss.svg").is_file()
        (row,) = [line for line in text.splitlines() if "<img" in line]
        assert row.count("`") == 2
        assert len(re.findall(r"(?<!\\)\|", row)) == 3

    def test_values_in_markdown_are_written_as_in_a_config(self, cli: Cli, workdir: Path) -> None:
        run = make_run(workdir / "runs", "first", steps=40)
        (run / "config.yaml").write_text("schema_version: 3\ntrainer: {compile: true, lr: null}\n")
        assert cli("report", "first", "--to", "report.md").code == 0
        text = (workdir / "report.md").read_text()
        assert "| `trainer.compile` | true |" in text
        assert "| `trainer.lr` | null |" in text

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["report", "nosuch"], 64),
            (["report", "first", "--to", "no/such/directory.html"], 64),
            (["report", "first", "--to", "runs"], 64),
            (["report", "first", "--to", "."], 64),
            (["report", "first", "--to", "", "--format", "md"], 64),
            (["report", "first", "--format", "pdf"], 64),
            (["report"], 64),
        ],
    )
    def test_bad_input(self, cli: Cli, workdir: Path, words: list[str], code: int) -> None:
        make_run(workdir / "runs", "first", steps=10)
        done = cli(*words)
        assert done.code == code, done.err
        assert "Traceback" not in done.err
        assert list(workdir.glob("**/.*.tmp")) == []


def test_config_values_are_written_as_in_a_config_file() -> None:
    assert [plain(value) for value in (["a.txt"], [], True, None, 0.5)] == ['["a.txt"]', "[]", True, None, 0.5]
