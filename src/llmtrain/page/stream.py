"""Server-sent events: only what has changed travels.

An event carries the position of the client (its `id`): the version of the list, or the byte offset in the metrics of
each run and in the log. A browser that reconnects sends it back, also after a restart of the server, and receives what
it has missed; if that is too much, or a run has replaced its metrics, it receives `reset` and reads the curves again.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from starlette.concurrency import run_in_threadpool

from llmtrain.errors import LlmtrainError
from llmtrain.page.log_file import read_chunk
from llmtrain.page.run_catalog import RunCatalog
from llmtrain.page.run_values import compact_ranks
from llmtrain.page.series import end_position, parse_position, position_text, read_rows, table_of_rows
from llmtrain.page.values import json_text, message

TICK_SEC = 1.0
LIST_TICK_SEC = 2.0
END_SEC = 0.25
"""How long a stream takes to notice that the server ends."""
KEEP_ALIVE_TICKS = 15
MAX_NEW_BYTES = 1 << 19
"""Maximum bytes of metrics that are sent as rows; beyond that curves are read again, with fewer points."""
Event = tuple[str, Any, str]
"""Name, value, and the position of the client once it has the event."""


class ListEvents:
    """Rows of the list that changed since a version."""

    def __init__(self, catalog: RunCatalog, version: str) -> None:
        self._catalog = catalog
        self._version = version
        self._problems: Any = None

    def stream(self) -> AsyncIterator[str]:
        return _stream(self._catalog, self._next, LIST_TICK_SEC)

    def _next(self) -> list[Event]:
        changes = self._catalog.list_since(self._version)
        has_news = changes["rows"] or changes["removed"] or changes["is_all"] or changes["problems"] != self._problems
        self._version = changes["version"]
        self._problems = changes["problems"]
        return [("runs", changes, self._version)] if has_news else []


class RunEvents:
    """The events of one viewer of one run or several."""

    def __init__(
        self, catalog: RunCatalog, keys: list[str], position: str, with_ranks: bool, log_rank: int | None
    ) -> None:
        self._catalog = catalog
        self._keys = keys
        self._with_ranks = with_ranks
        self._log_rank = log_rank
        metrics, _, log = position.partition(";")
        found = metrics.split(",") if metrics else []
        self._metrics: list[str | None] = [None] * len(keys)  # None: the end
        if len(found) == len(keys):
            self._metrics = [position_text(*parse_position(each)) for each in found]  # it is sent back: nothing else
        self._log_end = int(log) if log.isdecimal() and len(log) < 16 else None
        self._sent: dict[str, Any] = {}
        self._tick = 0

    @property
    def position(self) -> str:
        """`OFFSET-CHECKSUM` of the metrics of each run, joined by commas; and `;OFFSET` of the log."""
        metrics = ",".join(each or "0-0" for each in self._metrics)
        return metrics if self._log_end is None else f"{metrics};{self._log_end}"

    def stream(self) -> AsyncIterator[str]:
        return _stream(self._catalog, self._next, TICK_SEC)

    def _next(self) -> list[Event]:
        events: list[Event] = []
        for index, key in enumerate(self._keys):
            try:
                events += self._run_events(index, key)
                if self._sent.pop(f"problem {key}", None):  # a row, also an unchanged one, shows that the run is back
                    events.append(("row", self._sent[f"row {key}"], self.position))
            except LlmtrainError as problem:
                events += self._changed(f"problem {key}", "problem", {"key": key, **message(problem)})
            except OSError as problem:
                value = {"key": key, "what": f"Cannot read the run: {problem.strerror or problem}.", "remedy": None}
                events += self._changed(f"problem {key}", "problem", value)
        self._tick += 1
        return events

    def _run_events(self, index: int, key: str) -> list[Event]:
        events = self._changed(f"row {key}", "row", self._catalog.row(key))
        events += self._new_rows(index, key)
        if index:
            return events  # a comparison shows only rows and curves
        if self._tick % 2 == 0:  # every second time: several files are read
            events += self._changed("details", "details", {"key": key, **self._catalog.details(key)})
            if self._with_ranks:
                events += self._changed("ranks", "ranks", compact_ranks(self._catalog.ranks(key)))
        if self._log_rank is not None:
            events += self._new_log(key, self._log_rank)
        return events

    def _new_rows(self, index: int, key: str) -> list[Event]:
        path = self._catalog.metrics_path(key)
        position = self._metrics[index] or end_position(path)
        try:
            found = read_rows(path, position, MAX_NEW_BYTES)
        except FileNotFoundError:
            return []
        if found is None:
            self._metrics[index] = self._catalog.metrics(key).position
            return [("reset", {"key": key}, self.position)]
        rows, following = found
        self._metrics[index] = following
        if not rows:
            return []
        begin, _ = parse_position(position)
        end, _ = parse_position(following)
        value = {"key": key, "begin": begin, "end": end, **table_of_rows(rows)}
        return [("rows", value, self.position)]

    def _new_log(self, key: str, rank: int) -> list[Event]:
        try:
            path = self._catalog.log_path(key, rank)
            size = path.stat().st_size
            if self._log_end is None:  # followed from now on
                self._log_end = int(read_chunk(path)["end"])
            elif self._log_end > size:  # a new file
                self._log_end = 0
            if size <= self._log_end:
                return []
            chunk = read_chunk(path, after=self._log_end)
        except LlmtrainError as problem:
            return self._changed("log problem", "log-problem", {"what": problem.what})
        except OSError as problem:
            return self._changed("log problem", "log-problem", {"what": str(problem.strerror)})
        if not chunk["text"]:
            return []
        self._log_end = chunk["end"]
        return [("log", chunk, self.position)]

    def _changed(self, name: str, event: str, value: Any) -> list[Event]:
        """The event, unless the same was sent before."""
        if self._sent.get(name) == value:
            return []
        self._sent[name] = value
        return [(event, value, self.position)]


async def _stream(catalog: RunCatalog, read: Callable[[], list[Event]], tick_sec: float) -> AsyncIterator[str]:
    """The events that `read` finds at each tick, until the server ends."""
    idle = 0
    while not catalog.is_closing:
        events = await run_in_threadpool(read)
        for event in events:
            yield encode(*event)
        idle = 0 if events else idle + 1
        if idle >= KEEP_ALIVE_TICKS:
            idle = 0
            yield ": still here\n\n"
        await _pause(catalog, tick_sec)


async def _pause(catalog: RunCatalog, seconds: float) -> None:
    """Shorter if the server ends."""
    for _ in range(round(seconds / END_SEC)):
        if not catalog.is_closing:
            await anyio.sleep(END_SEC)


def encode(event: str, value: Any, position: str) -> str:
    return f"id: {position}\nevent: {event}\ndata: {json_text(value)}\n\n"
