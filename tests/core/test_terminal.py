"""Standard output in any encoding."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.commands.options import print_warning
from llmtrain.config.logging import LoggingSection
from llmtrain.core.logs import close_logging, setup_logging, warn
from llmtrain.core.terminal import format_columns, say
from llmtrain.runs.progress_lines import log_evaluation


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_characters_outside_the_encoding_are_escaped(env: dict[str, str], tmp_path: Path) -> None:
    """U+2603 is in the config, and print-config --json would escape it: so it comes as an error, and as text."""
    (tmp_path / "snow.yaml").write_text("run: {name: \N{SNOWMAN}, unknown\N{SNOWMAN}: 1}\n", encoding="utf-8")
    command = [sys.executable, "-m", "llmtrain", "runs", "list", "--root", "no-\N{SNOWMAN}"]
    rest = {"cwd": tmp_path, "capture_output": True, "check": False, "env": {**os.environ, **env}}
    listed = subprocess.run(command, **rest)
    assert (listed.returncode, listed.stderr) == (0, b"")
    refused = subprocess.run([sys.executable, "-m", "llmtrain", "validate", "-c", "snow.yaml"], **rest)
    assert refused.returncode == 64
    assert b"\\u2603" in refused.stderr
    assert b"Traceback" not in refused.stderr


def test_log_lines_contain_no_escape_sequences(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning may quote a file, such as the state.json of a checkpoint."""
    monkeypatch.setattr(logging.getLogger("llmtrain"), "propagate", True)
    warn("TRAIN", "the run moves from \x1b[31mX\x1b]0;title\x07 to cpu")
    # An earlier test of this process may have added a handler, so that the line is captured twice.
    assert set(caplog.messages) == {"warning: the run moves from X\ufffd]0;title\ufffd to cpu"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_words_have_colors_in_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    say("error: \x1b[35mx error:", terminal, {"error:": "red"})
    print_warning("it is slow")
    assert terminal.getvalue() == "\x1b[31merror:\x1b[0m x error:\n\x1b[33mwarning:\x1b[0m it is slow\n"


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colors_where_they_are_not_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    say("error: x", terminal, {"error:": "red"})
    file = io.StringIO()
    say("error: x", file, {"error:": "red"})
    assert terminal.getvalue() == file.getvalue() == "error: x\n"


def test_best_evaluation_is_green(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    setup_logging(LoggingSection())
    try:
        for is_best in (0.0, 1.0):
            log_evaluation(3, 9, None, {"val/loss": 2.0, "val/perplexity": 7.4, "val/is_best": is_best})
    finally:
        close_logging()
    other, best = terminal.getvalue().splitlines()
    assert "\x1b[32m" not in other
    assert best.endswith("| \x1b[32mbest\x1b[0m")


def test_numbers_are_right_aligned() -> None:
    rows = [["run", "loss", "step", "age"], ["a", "3.02", "5/60", "15 s"], ["longer", "-", "60/60", "9 min"]]
    assert format_columns(rows).splitlines() == [
        "run     loss   step    age",
        "a       3.02   5/60   15 s",
        "longer     -  60/60  9 min",
    ]


def test_columns_that_do_not_fit_are_left_out() -> None:
    rows = [["run", "loss", "data", "why"], ["a", "3.02", "dummy_text", "the node of pod 0 is NotReady"]]
    assert len(format_columns(rows).splitlines()[0].split()) == 4
    fitted = format_columns(rows, 30, ["data"]).splitlines()
    assert fitted[0].split() == ["run", "loss", "why"]
    assert max(map(len, fitted)) == 30
    assert fitted[1].endswith("…")
    assert format_columns(rows, 5, ["data"]), "too narrow for anything"
