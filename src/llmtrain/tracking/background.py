"""The base class of trackers that send to a server: a thread does the work, in order, so that a slow or unreachable
server does not delay training."""

import queue
import threading
from collections.abc import Callable

from llmtrain.core.logs import warn
from llmtrain.core.redact import redacted_line
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Tracker

FLUSH_SEC = 30.0
FLUSH_WHEN_STOPPED_SEC = 5.0  # a pod has little time after SIGTERM
Job = Callable[[], object]


class BackgroundTracker(Tracker):
    """A job that fails disables the tracker, with a warning."""

    title: str
    """For messages."""

    def __init__(self, first: Job) -> None:
        """`first` opens the connection."""
        self._has_failed = False
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=self.title.lower(), daemon=True)
        self._jobs.put(first)
        self._thread.start()

    def _later(self, job: Job) -> None:
        self._jobs.put(job)

    def _finish(self, status: EndStatus, last: Job) -> None:
        """Do the last job, and wait until everything is sent, but not for long."""
        self._jobs.put(last)
        self._jobs.put(None)
        timeout = FLUSH_SEC if status == EndStatus.FINISHED else FLUSH_WHEN_STOPPED_SEC
        self._thread.join(timeout)
        if self._thread.is_alive() and not self._has_failed:
            warn("TRAIN", f"{self.title} did not accept all metrics within {timeout:.0f} s; metrics.jsonl is complete")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._has_failed:
                continue
            try:
                job()
            except Exception as problem:
                self._has_failed = True
                message = redacted_line(problem, 200)
                warn(
                    "TRAIN",
                    f"{self.title} failed and is disabled; training continues, metrics.jsonl is complete: {message}",
                )
