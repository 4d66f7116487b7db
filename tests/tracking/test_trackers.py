"""Several trackers as one, and TensorBoard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID
from task_models import choice_items, write_items

from llmtrain.config.schema import Config
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Metrics, Tracker, Trackers

MakeConfig = Callable[..., Config]


class Broken(Tracker):
    """Fails in one of its hooks."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.calls = 0

    def log(self, step: int, metrics: Metrics) -> None:  # noqa: ARG002
        self._maybe("log")

    def saved(self, step: int) -> None:  # noqa: ARG002
        self._maybe("saved")

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        self._maybe("finish")

    def _maybe(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            raise RuntimeError("the tracker is broken")


class Recorder(Tracker):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ended: str | None = None

    def log(self, step: int, metrics: Metrics) -> None:  # noqa: ARG002
        self.steps.append(step)

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        self.ended = status


def test_failing_tracker_is_removed() -> None:
    broken, recorder = Broken("log"), Recorder()
    both = Trackers([broken, recorder])
    for step in range(3):
        both.log(step, {"train/loss": 1.0})
    both.finish(EndStatus.FINISHED, None)
    assert broken.calls == 1
    assert recorder.steps == [0, 1, 2]
    assert recorder.ended == "finished"


@pytest.mark.parametrize("method", ["log", "saved", "finish", "__init__"])
def test_failing_tracker_never_stops_training(make_config: MakeConfig, method: str) -> None:
    """Also if it fails in its constructor, such as TensorBoard on a read-only directory."""

    def break_tensorboard() -> None:
        from llmtrain.tracking import tensorboard

        def make(_run: object) -> Broken:
            if method == "__init__":
                raise RuntimeError("the tracker is broken")
            return Broken(method)

        tensorboard.TensorboardTracker = make

    config = make_config(tracking__tensorboard__enabled=True)
    ended = harness.run(config, before=break_tensorboard)
    assert ended.code == 0, ended.output
    assert ended.output.count("the tracker is broken") == 1
    plain = make_config()
    assert harness.run(plain).result["state_sha256"] == ended.result["state_sha256"]
    assert len(harness.train_rows(Path(config.output.root_dir) / RUN_ID)) == 8


def test_tensorboard_files(make_config: MakeConfig, tmp_path: Path) -> None:
    """Losses, and the scores on tasks beside them."""
    pytest.importorskip("tensorboard", reason="needs the tensorboard extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    items = write_items(tmp_path / "items.jsonl", choice_items(4))
    config = make_config(
        tracking__tensorboard__enabled=True, model__block_size=64, trainer__eval_tasks={"tasks": [str(items)]}
    )
    assert harness.run(config, fault="after_optimizer:6:0:kill").code == -9
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    directory = Path(config.output.root_dir) / RUN_ID
    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    losses = {event.step: event.value for event in found.Scalars("train/loss")}
    assert sorted(losses) == list(range(1, 9))
    expected = {step: float.fromhex(values[0]) for step, values in harness.train_rows(directory)}
    assert losses == pytest.approx(expected)
    assert [event.step for event in found.Scalars("val/loss")] == [4, 8]
    assert [event.step for event in found.Scalars("tasks/items/acc")] == [4, 8]
