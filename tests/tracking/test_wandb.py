"""W&B without a server: the record is complete, a resumed run keeps its id, and a missing API key stops nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limits import wait_until
from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import Config
from llmtrain.core.logs import close_logging, setup_logging
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.metrics import MetricsLog
from llmtrain.tracking.base import TrackedRun
from llmtrain.tracking.wandb import WandbTracker, wandb_id


@pytest.fixture(scope="module", autouse=True)
def _wandb() -> Iterator[None]:
    wandb = pytest.importorskip("wandb", reason="needs the wandb extra")
    yield
    wandb.teardown()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    run = RunDirectory(tmp_path / "first")
    run.path.mkdir()
    return run


def tracked(run: RunDirectory, resumed_from: int = 0, **options: Any) -> TrackedRun:
    config = Config().with_values("tracking.wandb", enabled=True, **options)
    return TrackedRun(run, config, resumed_from, 0, {"parameters": 5})


def stored_values(run: RunDirectory, name: str = "train/loss") -> list[dict[int, float]]:
    """Step -> value of a metric, of each offline record, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb")):
        store, values = DataStore(), {}
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if name in items:
                values[json.loads(items["_step"])] = json.loads(items[name])
        found.append(values)
    return found


def test_offline_records_are_complete(directory: RunDirectory) -> None:
    """Also that of a resumed run, which begins with the rows of metrics.jsonl."""
    log = MetricsLog(directory.metrics, 0, 0)
    tracker = WandbTracker(tracked(directory, offline=True))
    for step in range(1, 5):
        tracker.log(step, {"train/loss": 4.0 / step})
        log.append({"step": step, "train/loss": 4.0 / step, "time": 1.0})
    tracker.log(4, {"val/loss": 2.0, "tasks/items/acc": 0.5})
    tracker.finish("stopped", None)
    log.close()
    name = wandb_id(directory)
    resumed = WandbTracker(tracked(directory, resumed_from=4, offline=True))
    for step in range(5, 9):
        resumed.log(step, {"train/loss": 4.0 / step})
    directory.report.write_text("<p>report")
    resumed.finish("finished", None)
    expected = [{step: 4.0 / step for step in range(1, last)} for last in (5, 9)]
    # wandb's own process writes the file, and may end after finish().
    wait_until(lambda: stored_values(directory) == expected, 20, lambda: stored_values(directory))
    assert stored_values(directory, "tasks/items/acc")[0] == {4: 0.5}
    assert wandb_id(directory) == name, "a resumed run continues in its W&B run"
    assert list((directory.path / "wandb").glob("offline-run-*/files/report.html"))


def test_missing_api_key_disables_tracker(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Without asking for one."""
    setup_logging(LoggingSection())
    tracker = WandbTracker(tracked(directory))
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish("finished", None)
    close_logging()
    assert tracker._has_failed
    assert "W&B failed" in capsys.readouterr().err


def test_names_of_deleted_runs_are_not_continued(tmp_path: Path) -> None:
    names = set()
    for parent in ("a", "b"):
        run = RunDirectory(tmp_path / parent / "first")
        run.path.mkdir(parents=True)
        names.add(wandb_id(run))
    assert len(names) == 2
