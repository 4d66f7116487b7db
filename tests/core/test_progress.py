"""Phases of the start-up, and the ways to show progress."""

import sys
from collections.abc import Iterator

import pytest

from llmtrain.config.logging import LoggingSection
from llmtrain.core.logs import close_logging, log, setup_logging, warn
from llmtrain.core.progress import detail, is_live, phase, phases, progress_mode


@pytest.fixture(autouse=True)
def logging_to_stderr() -> Iterator[None]:
    setup_logging(LoggingSection())
    yield
    close_logging()


def test_log_has_one_line_per_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with phases("loading torch"):
        assert not detail("on a live line only")
        phase("reading data")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["[SETUP]", "[SETUP]"]
    assert lines[0] == "[SETUP] loading torch"


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with phases("loading torch"):
        pass
    assert capsys.readouterr().err == ""


def test_none_shows_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_mode("none"):
        phase("reading data")
        log("TRAIN", "step 1/2")
        warn("TRAIN", "watch out")
    log("TRAIN", "step 2/2")
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["warning:", "step"]


def test_live_line_needs_a_terminal_that_shows_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_live()
    with progress_mode("bar"):
        assert is_live()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert is_live()
    with progress_mode("log"):
        assert not is_live()
    setup_logging(LoggingSection(json_output=True))
    assert not is_live()
    setup_logging(LoggingSection(level="WARNING"))
    assert not is_live()
