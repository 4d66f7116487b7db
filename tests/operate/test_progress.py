"""The log line parser, tested with the lines that trackers and logger write."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import Config
from llmtrain.core.logs import close_logging, log, setup_logging, split_line, warn
from llmtrain.distributed import platform_codes
from llmtrain.operate.status.progress import RunProgress, read_progress
from llmtrain.runs.progress_lines import log_done, log_finished_before, log_resumed, log_smoke_step
from llmtrain.tracking.console import ConsoleTracker

TRAIN = {"train/loss": 5.1922, "train/lr": 3e-3, "train/tokens_per_second": 27610.4, "train/seconds_left": 3725.2}
EVAL = {"val/loss": 4.3604, "val/perplexity": 78.29, "val/is_best": True}
EPOCH = {"epoch/number": 1, "epoch/train_loss": 4.9}


class Written:
    """Lines on standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    @property
    def lines(self) -> list[str]:
        self._text += self._capsys.readouterr().err
        return self._text.splitlines()


@pytest.fixture(params=[False, True], ids=["tagged", "json"])
def written(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Written]:
    """As text and as JSON."""
    setup_logging(LoggingSection(json_output=request.param))
    yield Written(capsys)
    close_logging()


def console(max_steps: int = 30) -> ConsoleTracker:
    config = Config().with_values("trainer", max_steps=max_steps)
    run: Any = SimpleNamespace(config=config, resumed_from=0)
    return ConsoleTracker(run)


def test_step_line(written: Written) -> None:
    console().log(5, TRAIN)
    assert read_progress(written.lines) == RunProgress(
        step=5,
        max_steps=30,
        loss=5.1922,
        tokens_per_second=27610,
        time_left="1:02:05",
        seconds_left=3725,
        has_stepped=True,
    )


def test_step_line_of_a_gpu_has_its_peak_memory(written: Written) -> None:
    console().log(5, {**TRAIN, "train/peak_memory_bytes": 23.3e9})
    console().log(6, TRAIN)
    assert read_progress(written.lines).peak_memory_bytes == 23.3e9


def test_step_line_without_speed_and_with_mfu(written: Written) -> None:
    console().log(1, {"train/loss": 5.5, "train/lr": 1e-3})
    first = read_progress(written.lines)
    assert (first.step, first.loss, first.tokens_per_second, first.time_left) == (1, 5.5, None, None)
    console().log(2, {**TRAIN, "train/mfu": 0.31, "train/loss": float("nan")})
    second = read_progress(written.lines)
    assert (second.step, second.time_left) == (2, "1:02:05")
    assert second.loss is not None
    assert math.isnan(second.loss)


def test_evaluation_and_epochs(written: Written) -> None:
    tracker = console()
    tracker.log(10, TRAIN)
    tracker.log(10, {**EVAL, **EPOCH})
    found = read_progress(written.lines)
    assert (found.step, found.loss, found.val_loss, found.tokens_per_second) == (10, 5.1922, 4.3604, 27610)


def test_time_left_of_days(written: Written) -> None:
    console().log(5, {**TRAIN, "train/seconds_left": 200_000})
    found = read_progress(written.lines)
    assert (found.time_left, found.seconds_left) == ("2 days, 7:33:20", 200_000)


def test_other_lines_are_ignored(written: Written) -> None:
    warn("TRAIN", "MLflow is lost; step 3/4 | loss 1.0 in a sentence")
    log("DATA", "tokenised train: 121,446 tokens")
    log("TRAIN", "run demo: 34,688 parameters, 256 tokens a step, from step 0 to 30")
    log("SAVE", "step_10 in 0.22 s", fields={"step": 10})
    log("SAMPLE", "a prompt -> an answer | step 3/4 | loss 1.0")
    logging.getLogger("llmtrain").info("no tag")
    lines = [*written.lines, "", "{", "{}", "[", "[TRAIN]", '{"tag": 3, "message": 4}', "step 1/2 |"]
    assert read_progress(lines) == RunProgress()


def test_resume_line_sets_the_step_without_has_stepped(written: Written) -> None:
    console().log(25, TRAIN)
    log_resumed(Path("/out/demo/checkpoints/step_20"), 20)
    found = read_progress(written.lines)
    assert (found.step, found.max_steps, found.has_stepped, found.tokens_per_second) == (20, 30, False, None)


def test_done_lines(written: Written) -> None:
    console().log(30, TRAIN)
    log_done(30, 3.4104, 3.4275, 3.4275)
    found = read_progress(written.lines)
    assert (found.step, found.time_left) == (30, None)
    log_finished_before("demo", 12)
    assert read_progress(written.lines).step == 12


def test_a_pod_that_waits(written: Written) -> None:
    log("DDP", f"{platform_codes.IDLE_MARK} 65; a StatefulSet would start this again, so the pod waits to be removed")
    assert read_progress(written.lines).idle_code == 65


def test_the_idle_line_of_node_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.sigwait", lambda _: None)
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: None)
    platform_codes._wait_for_deletion(64)
    close_logging()
    assert read_progress(capsys.readouterr().err.splitlines()).idle_code == 64


def test_smoke_run_lines(written: Written) -> None:
    log_smoke_step(1, 2, 3, 10, 1.2345)
    found = read_progress(written.lines)
    assert (found.step, found.max_steps, found.loss) == (3, 10, 1.2345)


# Written before JSON lines had max_steps and event: only the message tells.
EARLIER_JSON = (
    ("TRAIN", "step 5/30 | loss 5.1922 | lr 3.00e-03 | 27,610 tok/s | 0:00:09 left", (5, 30, 5.1922)),
    ("EVAL", "step 5/30 | val loss 4.3604 | perplexity 78.29", (5, 30, None)),
    ("TRAIN", "resumed from /out/demo/checkpoints/step_20", (20, None, None)),
    ("DONE", "1 step, train loss 3.4104, val loss 3.4275, best 3.4275", (1, None, None)),
    ("DONE", "30 steps, train loss 3.4104, val loss 3.4275, best 3.4275", (30, None, None)),
)


@pytest.mark.parametrize(("tag", "message", "expected"), EARLIER_JSON)
def test_json_lines_of_earlier_images(tag: str, message: str, expected: tuple[object, ...]) -> None:
    line = json.dumps({"time": 1.5, "level": "INFO", "tag": tag, "message": message, "step": 5})
    found = read_progress([line])
    assert (found.step, found.max_steps, found.loss) == expected


@pytest.mark.parametrize(
    "fields",
    [{"step": "x"}, {"step": 1, "max_steps": []}, {"event": "done"}, {"step": None}],
)
def test_json_lines_with_wrong_fields_are_ignored(fields: dict[str, object]) -> None:
    line = json.dumps({"tag": "TRAIN", "message": "step 3/4 | loss 1.0", "max_steps": 4, **fields})
    assert read_progress([line]) == RunProgress()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, -1.0, "soon"])
def test_wrong_time_left_is_ignored(seconds: object) -> None:
    values = {"tag": "TRAIN", "message": "", "step": 3, "max_steps": 4, "train/loss": 1.0}
    found = read_progress([json.dumps({**values, "train/seconds_left": seconds})])
    assert (found.step, found.time_left) == (3, None)


def test_lines_of_other_ranks_keep_their_tag() -> None:
    assert split_line("[TRAIN] [rank 1] warning: x") == ("TRAIN", "[rank 1] warning: x")


def test_only_the_last_line_marks_the_run_as_done(written: Written) -> None:
    log_done(30, 3.4012, 3.3911, 3.3911)
    assert read_progress(written.lines).is_done
    assert not read_progress([*STEPS_ONLY, "[DONE] hello", "[TRAIN] 30 steps, train loss 3.4"]).is_done


STEPS_ONLY = ["[TRAIN] step 30/30 | loss 5.1922 | lr 3.00e-03", "[EVAL] step 30/30 | val loss 3.1"]
