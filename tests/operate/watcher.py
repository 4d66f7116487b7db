"""Runs `follow` in a thread while the test changes the cluster."""

import io
import threading
from collections.abc import Callable

from kube_runs import FakeRun

from limits import limit, wait_until
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status import watch as follow
from llmtrain.operate.status.run_status import RunStatus


class Watcher(threading.Thread):
    """A thread that watches a run."""

    def __init__(self, run: FakeRun, *, is_terminal: bool = False, tail: int | None = None, **more: object) -> None:
        super().__init__(daemon=True)
        self.out = io.StringIO()
        self.status: RunStatus | None = None
        self.error: Exception | None = None
        self._call: Callable[[], RunStatus] = lambda: follow.follow(
            ObservedRun(run.cluster, run.record), is_terminal=is_terminal, out=self.out, tail=tail, **more
        )
        self.start()

    def run(self) -> None:
        try:
            self.status = self._call()
        except Exception as error:
            self.error = error

    def until(self, text: str, count: int = 1) -> None:
        wait_for(lambda: self.out.getvalue().count(text) >= count, lambda: self.out.getvalue())

    def end(self) -> RunStatus:
        self.join(limit(10))
        assert not self.is_alive(), self.out.getvalue()
        if self.error is not None:
            raise self.error
        assert self.status is not None
        return self.status

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()

    @property
    def log(self) -> list[str]:
        return [line for line in self.lines if not line.startswith("[K8S]")]


def wait_for(is_true: Callable[[], object], what: Callable[[], str] = str) -> None:
    wait_until(is_true, 10, what)
