"""RunView: the one reader of a run directory, for `runs`, `why`, the page, the report, trackers and the Python API.

Everything in a run directory may be damaged, written by another user, or disappear meanwhile: each attribute has what
can be read. No torch, no server, no cluster.
"""

import os
import shlex
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.document import read_dumped
from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import SECTIONS
from llmtrain.core.files import is_there, open_text, read_json
from llmtrain.errors import LlmtrainError
from llmtrain.runs.checksums import CHECKSUMS, step_of
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.exit_report import ExitReport, parse_report, report_times
from llmtrain.runs.generations import MAX_GENERATIONS, read_generations
from llmtrain.runs.heartbeats import read_heartbeats
from llmtrain.runs.json_values import MAX_INTEGER, dictionary, epoch, finite, integer, short_text
from llmtrain.runs.lock import is_held
from llmtrain.runs.metrics import Row, best_val_loss, last_rows, read_metrics
from llmtrain.runs.state import RunState, state_after

Values = dict[str, Any]
_SUMMARIZED = ("run", "model", "data", "trainer", "plan")
_MAX_SAMPLES = 50
_MAX_HOST = 80


@dataclass(frozen=True)
class CheckpointView:
    name: str
    step: int
    bytes: int | None
    time: float | None
    is_latest: bool
    is_best: bool


@dataclass(frozen=True)
class RankView:
    """The last heartbeat of a rank."""

    rank: int
    step: int
    time: int
    age: float
    """Seconds, by this machine's clock."""
    host: str


class RunView:
    """A run as its files show it. Each attribute is read on first use and kept: for what is new, make another view."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._damaged: set[str] = set()

    # How it is, and how far.

    @cached_property
    def state(self) -> RunState:
        if self._object(self.run.lock) and is_held(self.run.lock):
            return RunState.RUNNING
        if self.is_finished:
            return RunState.FINISHED
        if self.generations:
            return state_after(self.last_start.get("ended"))
        # A run of a version that recorded no starts, or whose record is damaged, has at least its metrics.
        return RunState.KILLED if is_there(self.run.metrics) else RunState.NOT_STARTED

    @property
    def is_finished(self) -> bool:
        """Whether it has a result. Its process may still be running, to send the last metrics."""
        return is_there(self.run.finished)

    @cached_property
    def generations(self) -> list[Values]:
        """The last starts of the run, without damaged rows."""
        return [row for row in read_generations(self.run)[-MAX_GENERATIONS:] if _has_valid_integers(row)]

    @property
    def last_start(self) -> Values:
        return self.generations[-1] if self.generations else {}

    @property
    def step(self) -> int:
        train, val = self.last_rows
        return max(integer(row.get("step")) for row in (train, val, self.last_start))

    @property
    def max_steps(self) -> int | None:
        """The last step of the newest start. The config, which has none for a run by epochs, is read only for a run
        without a start."""
        for row in reversed(self.generations):
            if isinstance(row.get("to_step"), int):
                return integer(row["to_step"])
        return integer(self.setting("trainer").get("max_steps")) or None

    # Metrics.

    @cached_property
    def last_rows(self) -> tuple[Row, Row]:
        """The last training row and the last evaluation, from the end of the file: fast in a list of many runs."""
        return last_rows(self.run.metrics)

    def read_rows(self) -> Iterator[Row]:
        """The rows of metrics.jsonl, one after the other. OSError: the file cannot be read, which must not be taken for
        a run without metrics."""
        return read_metrics(self.run.metrics)

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of metrics.jsonl that can be read."""
        try:
            return list(self.read_rows())
        except OSError:
            self._damaged.add(self.run.metrics.name)
            return []

    @cached_property
    def best_val_loss(self) -> float | None:
        """The lowest validation loss, read as fast as the last rows."""
        return finite(self.result.get("best_val_loss")) or best_val_loss(self.run.metrics, self.last_rows[1])

    @property
    def updated(self) -> float | None:
        """When the last row of metrics was written."""
        train, val = self.last_rows
        return finite(train.get("time") or val.get("time"))

    @property
    def last_written(self) -> float | None:
        """When the run last wrote metrics, by the time of the file; without metrics, that of the directory."""
        return _mtime(self.run.metrics) or _mtime(self.run.path)

    def losses(self, name: str) -> list[float]:
        """The values of `train/loss` or `val/loss` that are numbers."""
        values = [row[name] for row in self.rows if row.get(name) is not None]
        numbers = [value for value in values if _is_drawable(value)]
        if len(numbers) < len(values):
            self._damaged.add(self.run.metrics.name)
        return numbers

    # What it was started with, and its result.

    @cached_property
    def meta(self) -> Values:
        return self._object(self.run.meta)

    @cached_property
    def result(self) -> Values:
        """finished.json; empty if the run has not finished."""
        return self._object(self.run.finished)

    @cached_property
    def config(self) -> Values:
        """config.yaml as it was recorded; empty if it is missing or damaged."""
        return self._read_config()

    @cached_property
    def current_config(self) -> Values:
        """config.yaml with the names of the current schema."""
        return upgraded_values(self.config)

    @cached_property
    def _settings(self) -> Values:
        """The sections of which a summary shows something. Reading all of a config is most of the work of a list."""
        values = self._read_config(skipped=SECTIONS.keys() - set(_SUMMARIZED))
        is_damaged = not values and is_there(self.run.config)
        if is_damaged or not isinstance(values.get("trainer", {}), dict):
            self._damaged.add(self.run.config.name)
        return upgraded_values(values)

    def setting(self, section: str) -> Values:
        """`run`, `model`, `data`, `trainer` or `plan` of the config, with the names of the current schema."""
        return dictionary(self._settings.get(section))

    @property
    def dataset(self) -> str | None:
        """What the run is trained on: its dataset or first file, else the kind of data."""
        data = self.setting("data")
        sources = data.get("sources")
        if isinstance(sources, list) and sources:
            return f"{len(sources)} sources"
        files = data.get("files")
        first_file = files[0] if isinstance(files, list) and files else None
        named = data.get("dataset_name") or data.get("train_file") or first_file or data.get("name")
        return str(named) if data else None

    # Checkpoints and samples.

    @cached_property
    def checkpoint_names(self) -> list[str]:
        """Oldest first."""
        steps = (step_of(path.name) for path in self.run.checkpoints.glob("step_*"))
        return [f"step_{step}" for step in sorted(step for step in steps if step is not None)]

    def pointed(self, pointer: str) -> str | None:
        """The checkpoint that `latest` or `best` names; None if there is none."""
        try:
            with open_text(self.run.checkpoints / pointer) as file:
                return file.read().strip()
        except (OSError, ValueError):
            return None

    def checkpoints(self) -> list[CheckpointView]:
        latest = self.pointed("latest")
        best = self.pointed("best")
        found = []
        for name in self.checkpoint_names:
            checksums = self.run.checkpoints / name / CHECKSUMS
            files = dictionary(dictionary(read_json(checksums)).get("files"))
            sizes = [integer(dictionary(entry).get("bytes")) for entry in files.values()]
            found.append(
                CheckpointView(
                    name=name,
                    step=step_of(name) or 0,
                    bytes=sum(sizes) if sizes else None,
                    time=_mtime(checksums),
                    is_latest=name == latest,
                    is_best=name == best,
                )
            )
        return found

    def sample_steps(self) -> list[int]:
        """The last steps with answers to trainer.eval_prompts."""
        if not self.is_inside(self.run.samples):
            return []
        steps = (step_of(path.stem) for path in self.run.samples.glob("step_*.json"))
        return sorted(step for step in steps if step is not None)[-_MAX_SAMPLES:]

    def samples(self, step: int) -> list[Values]:
        path = self.run.samples / f"step_{step}.json"
        rows = read_json(path) if self.is_inside(path) else None
        if not isinstance(rows, list):
            return []
        found = [row for row in rows if isinstance(row, dict)]
        return [{name: short_text(row.get(name)) for name in ("prompt", "answer")} for row in found]

    # Processes: ranks, logs, and how starts ended.

    def ranks(self) -> list[RankView]:
        now = time.time()
        found = []
        for rank, beat in sorted(read_heartbeats(self.run.heartbeats).items()):
            at = finite(beat.get("time")) or now
            age = round(max(0.0, now - at), 1)
            host = short_text(beat.get("host"))[:_MAX_HOST]
            found.append(RankView(rank, integer(beat.get("step")), round(at), age, host))
        return found

    def log_path(self, rank: int) -> Path | None:
        """The log file of a rank; None if it has none. Rank 0 writes the file that the config names."""
        paths = [self.run.logs / f"rank-{rank}.log"]
        if not rank:
            paths = [path for path in self._log_files() if not path.name.startswith("rank-")] or paths
        return next((path for path in paths if self.is_inside(path) and _is_file(path)), None)

    def log_ranks(self) -> list[int]:
        """Ranks that have a log file."""
        numbers = (path.stem.removeprefix("rank-") for path in self._log_files() if path.name.startswith("rank-"))
        ranks = {int(number) for number in numbers if number.isdecimal()}
        if self.log_path(0):
            ranks.add(0)
        return sorted(ranks)

    def _log_files(self) -> list[Path]:
        """Its default name first: logging.file_name may be any."""
        try:
            paths = [path for path in self.run.logs.iterdir() if not path.name.startswith(".")]
        except OSError:
            return []
        return sorted(paths, key=lambda path: (path.name != LoggingSection().file_name, path.name))

    @cached_property
    def newest_report(self) -> ExitReport | None:
        """The exit report that was written last."""
        try:
            names = sorted(name for name in os.listdir(self.run.exits) if name.endswith(".json"))  # noqa: PTH208 (fast)
        except OSError:
            return None
        return parse_report(read_json(self.run.exits / names[-1])) if names else None

    @cached_property
    def ends(self) -> list[float | None]:
        """When each start ended. One without an exit report ended at the next start or with the last row of metrics;
        None for the start that is running."""
        times = report_times(self.run.exits, _mtime(self.run.exits))
        following = [*(epoch(row.get("started_at")) for row in self.generations[1:]), self._last_end]
        return [times.get(row["generation"]) or end for row, end in zip(self.generations, following, strict=False)]

    @property
    def _last_end(self) -> float | None:
        return None if self.state == RunState.RUNNING else self.updated

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all processes of all starts; None on a CPU."""
        device = dictionary(self.meta.get("machine")).get("device")
        if not str(device).startswith("cuda") or not self.generations:
            return None
        return round(sum(hours for _, hours in self.process_hours()), 2)

    def process_hours(self) -> list[tuple[Values, float]]:
        """Each start, and the hours of all its processes together."""
        found: list[tuple[Values, float]] = []
        if not self.generations:
            return found
        for row, seconds in zip(self.generations, self._seconds_of_starts(time.time()), strict=True):
            found.append((row, seconds / 3600 * (integer(row.get("world_size")) or 1)))
        return found

    @property
    def seconds(self) -> float | None:
        """Of all starts, without the time between them, until the last row of metrics; None if none is recorded."""
        return round(sum(self._seconds_of_starts(self.updated))) if self.generations else None

    def _seconds_of_starts(self, now: float | None) -> list[float]:
        """`now`: the end of one that is running. Exit reports are not read for one start: a list has many runs."""
        ends = self.ends if len(self.generations) > 1 else [self._last_end]
        found = []
        for row, end in zip(self.generations, ends, strict=True):
            begin = epoch(row.get("started_at"))
            if end is None and self.state == RunState.RUNNING:
                end = now
            found.append(0.0 if begin is None or end is None else max(0.0, end - begin))
        return found

    # The run as a whole.

    @property
    def damaged(self) -> list[str]:
        """Files that exist and could not be read, of those that were needed so far."""
        return sorted(self._damaged)

    @property
    def argument(self) -> str:
        """How a command names the run: the run id where that is enough, else the path."""
        shown = self.run.shown()
        return self.run.run_id if str(shown.parent) == "runs" else shlex.quote(str(shown))

    @property
    def resume_command(self) -> str:
        return f"llmtrain train --resume {self.argument}"

    def is_inside(self, path: Path) -> bool:
        """Whether a path is in the run directory: a run from another machine may have links to other files."""
        try:
            return path.resolve().is_relative_to(self.run.path.resolve())
        except (OSError, RuntimeError):  # RuntimeError: a loop of links
            return False

    def _object(self, path: Path) -> Values:
        """A JSON object; empty if there is none."""
        value = read_json(path)
        if not isinstance(value, dict) and is_there(path):
            self._damaged.add(path.name)
        return dictionary(value)

    def _read_config(self, skipped: Collection[str] = ()) -> Values:
        """`skipped`: sections that are not needed, None in the result."""
        try:
            return read_dumped(self.run.config, skipped) if self.run.config.is_file() else {}
        except (LlmtrainError, OSError):
            return {}


def _has_valid_integers(row: Values) -> bool:
    return all(abs(value) < MAX_INTEGER for value in row.values() if isinstance(value, int))


def _is_drawable(value: Any) -> bool:
    """Whether a loss is a number that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)


def _is_file(path: Path) -> bool:
    """Like Path.is_file, but False in a directory that may not be read, where Path.is_file raises."""
    try:
        return path.is_file()
    except OSError:
        return False


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
