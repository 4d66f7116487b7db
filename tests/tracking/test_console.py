"""The progress bar: what it shows, how it fits, and that it says the same as the log."""

import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import Config
from llmtrain.core.logs import close_logging, console_handler, setup_logging
from llmtrain.runs.progress_lines import read_progress_line
from llmtrain.tracking.console import Bar, ConsoleTracker

METRICS = {
    "train/loss": 2.4542,
    "train/lr": 3e-3,
    "train/tokens_per_second": 8475.3,
    "train/seconds_left": 3725.0,
    "train/peak_memory_bytes": 12.3e9,
    "val/loss": 2.5113,
}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A run as the console sees it, without torch: a few steps, two log lines, one evaluation, one long warning.
RUN = """
from types import SimpleNamespace
from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import Config
from llmtrain.core.logs import setup_logging, warn
from llmtrain.core.progress import phase
from llmtrain.tracking.console import ConsoleTracker

setup_logging(LoggingSection())
phase("loading torch")
config = Config().with_values("trainer", max_steps=20000)
tracker = ConsoleTracker(SimpleNamespace(config=config, resumed_from=0))
for step in range(1, 20001):
    tracker.step(step, 20000.0 - step)
    if step % 5000 == 0:
        metrics = {"train/loss": 2.5, "train/lr": 1e-3, "train/tokens_per_second": 8475.0, "train/seconds_left": 5.0}
        tracker.log(step, metrics)
    if step == 10000:
        tracker.activity("evaluating")
        tracker.log(step, {"val/loss": 2.4, "val/perplexity": 11.0, "val/bits_per_byte": 3.4, "val/is_best": 1.0})
        warn("DATA", "78 of 4,000 training examples were truncated to model.block_size 512, " + "and so on " * 9)
tracker.finish("finished", None)
"""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still, so that the time left does not shrink while a test runs."""
    monkeypatch.setattr("llmtrain.tracking.console.time", SimpleNamespace(monotonic=lambda: 1000.0))


def bar(step: int = 60, **metrics: float) -> Bar:
    one = Bar(200, step)
    one.metrics.update(metrics)
    one.set_time_left(metrics.get("train/seconds_left"))
    return one


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140, 200])
def test_bar_fits(width: int) -> None:
    for one in (bar(), bar(**METRICS), bar(200, **METRICS)):
        assert one.render(width).cell_len <= width


def test_bar_shows_more_in_a_wider_terminal() -> None:
    narrow, wide = (bar(**METRICS).render(width).plain for width in (80, 140))
    for part in ("step  60/200", "loss 2.4542", "8,475 tok/s", "1:02:05 left"):
        assert part in narrow
        assert part in wide
    for part in ("val 2.5113", "lr 3.0e-03", "12.3 GB"):
        assert part in wide
    assert bar(**METRICS).render(200).cell_len > bar(**METRICS).render(80).cell_len


def test_every_step_moves_the_bar_and_time_left_agrees_with_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingSection())
    run: Any = SimpleNamespace(config=Config().with_values("trainer", max_steps=200), resumed_from=0)
    tracker = ConsoleTracker(run)
    tracker.activity("first step")
    assert "first step" in tracker._bar.render(80).plain
    tracker.step(1, None)
    assert "step   1/200" in tracker._bar.render(80).plain
    tracker.step(2, 100.0)
    assert "step   2/200" in tracker._bar.render(80).plain
    assert "0:01:40 left" in tracker._bar.render(80).plain
    tracker.log(3, {name: value for name, value in METRICS.items() if name.startswith("train/")})
    close_logging()
    logged = capsys.readouterr().err.splitlines()[0].rpartition(" | ")[2]
    assert logged in tracker._bar.render(80).plain


def in_terminal(columns: int, **env: str) -> str:
    """Output of the run in a real terminal of this width."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    kept |= {"TERM": "xterm-256color", "PYTHONUTF8": "1", **env}
    child = subprocess.Popen([sys.executable, "-c", RUN], stdin=theirs, stdout=theirs, stderr=theirs, env=kept)
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        output += part
        if not part:
            break
    os.close(ours)
    assert child.wait() == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("columns", [80, 140])
def test_lines_fit_the_terminal(columns: int) -> None:
    output = in_terminal(columns)
    lines = [line for line in re.split(r"[\r\n]+", ESCAPES.sub("", output)) if line.strip()]
    assert max(map(len, lines)) <= columns, "the terminal would break it inside a word"
    assert any(line.startswith("step ") and "left" in line for line in lines)
    steps = [int(step) for step in re.findall(r"^\[TRAIN\]  step (\d+)/20000", "\n".join(lines), re.M)]
    assert steps == [5000, 10000, 15000, 20000], "the course of the loss stays in the scrollback"
    assert any(line.startswith("[EVAL]   step ") for line in lines), "the texts of all tags begin in one column"
    assert " ".join(" ".join(lines).split()).count("and so on") == 9, "no word is broken"
    assert ("\x1b[33m" in output, "\x1b[?25l" in output) == (True, False), "a yellow warning, a visible cursor"


def test_no_color() -> None:
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", in_terminal(80, NO_COLOR="1"))


def test_with_a_bar_log_lines_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging(LoggingSection())
    run: Any = SimpleNamespace(config=Config().with_values("trainer", max_steps=1000), resumed_from=500)
    monkeypatch.setattr("llmtrain.tracking.console.is_live", lambda: True)
    monkeypatch.setattr("llmtrain.tracking.console.LiveLine", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    tracker = ConsoleTracker(run)
    handler = console_handler()
    assert handler is not None
    shown = []
    for step in range(510, 1001, 10):
        record = logging.makeLogRecord({"tag": "TRAIN", "levelno": logging.INFO, "fields": {"step": step}})
        shown += [step] if handler.filter(record) else []
    assert shown == [600, 700, 800, 900, 1000]
    assert handler.filter(logging.makeLogRecord({"tag": "TRAIN", "levelno": logging.WARNING, "fields": {"step": 1}}))
    tracker.finish("finished", None)
    assert not handler.filters
    close_logging()


@pytest.mark.parametrize("json_output", [False, True])
def test_long_step_logs_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json_output: bool
) -> None:
    """One line per minute, none for short steps, and none that `status` takes for progress."""
    seconds = iter([0.0, 0.0, 30.0, 61.0, 100.0, 130.0, *(200.0 + number for number in range(4))])
    monkeypatch.setattr("llmtrain.tracking.console.time", SimpleNamespace(monotonic=lambda: next(seconds, 300.0)))
    monkeypatch.setattr("llmtrain.tracking.console.Bar", lambda *_: SimpleNamespace())
    setup_logging(LoggingSection(json_output=json_output))
    tracker = ConsoleTracker(SimpleNamespace(config=Config(), resumed_from=0))  # type: ignore[arg-type]
    for number in range(1, 6):
        tracker.micro_batch(3, number, 5)
    for number in range(1, 4):
        tracker.micro_batch(4, number, 3)
    close_logging()
    lines = capsys.readouterr().err.splitlines()
    assert ["step 3: micro-batch 3 of 5" in lines[0], "step 3: micro-batch 5 of 5" in lines[1]] == [True, True]
    assert len(lines) == 2
    assert [read_progress_line(line) for line in lines] == [None, None]


def test_bar_shows_the_micro_batch_of_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging(LoggingSection())
    seconds = 1000.0
    monkeypatch.setattr("llmtrain.tracking.console.time", SimpleNamespace(monotonic=lambda: seconds))
    monkeypatch.setattr("llmtrain.tracking.console.is_live", lambda: True)
    monkeypatch.setattr("llmtrain.tracking.console.LiveLine", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    tracker = ConsoleTracker(SimpleNamespace(config=Config(), resumed_from=0))  # type: ignore[arg-type]
    tracker.micro_batch(3, 1, 16)
    tracker.micro_batch(3, 2, 16)
    assert "micro-batch" not in tracker._bar.render(80).plain
    seconds = 1012.0
    tracker.micro_batch(3, 3, 16)
    assert "step 3: micro-batch 3 of 16 0:00:12" in tracker._bar.render(80).plain
    tracker.step(3, None)
    assert "micro-batch" not in tracker._bar.render(80).plain
    tracker.finish("finished", None)
    close_logging()


def test_bar_shows_the_course_of_the_loss() -> None:
    one = bar(**METRICS)
    one._is_utf = True
    for step in range(5000):
        one.add({"train/loss": 9.0 if step < 2500 else 1.0})
    one.add({"train/loss": float("nan")})
    assert "████▁▁▁▁" in one.render(80).plain
    assert one.render(80).plain.index("loss") < one.render(80).plain.index("████") < one.render(80).plain.index("tok/s")
