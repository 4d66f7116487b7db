"""What `follow` shows: a live view in a terminal, plain lines anywhere else."""

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from llmtrain.errors import ClusterError
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.view import LOG_LINES, count, pod_text, run_view
from llmtrain.terminal import say

if TYPE_CHECKING:
    from rich.live import Live

DRAW_SEC = 0.1
MANY = 4  # more pods that changed in the same way are told in one line


class Display(Protocol):
    def __enter__(self) -> "Display": ...
    def __exit__(self, *problem: object) -> None: ...
    def line(self, text: str) -> None:
        """A line of rank 0's log."""

    def note(self, text: str) -> None:
        """Something that we did ourselves."""

    def status(self, status: RunStatus) -> None: ...
    def away(self, problem: ClusterError | None) -> None:
        """The cluster does not answer, or (None) answers again."""


class PlainLines:
    """Each change once, as `[K8S] ...`, between the lines of rank 0."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._pods: dict[str, str] = {}
        self._state: tuple[str, str | None] | None = None

    def __enter__(self) -> "PlainLines":
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def line(self, text: str) -> None:
        say(text, self._out)

    def status(self, status: RunStatus) -> None:
        self._tell_pods(status.pods)
        if self._state is None or self._state[0] != status.state:
            why = f": {status.why_short}" if status.why_short and status.state != "running" else ""
            where = f" ({status.kind} in namespace {status.namespace})" if self._state is None else ""
            self._say(f"run {status.run_id}{where} is {status.state}{why}")
        elif status.why_short and self._state[1] != status.why_short and not status.pods:
            self._say(status.why_short)  # of pods there are lines already
        self._state = status.state, status.why_short

    def away(self, problem: ClusterError | None) -> None:
        if problem is None:
            self._say("the cluster answers again")
        else:
            self._say(_away_text(problem))

    def note(self, text: str) -> None:
        self._say(text)

    def _tell_pods(self, pods: Iterable[PodStatus]) -> None:
        changed: dict[str, list[PodStatus]] = {}
        for pod in pods:
            if pod.phase == "Running" and pod.exit_code is not None:
                continue  # in a moment it has failed, or runs again: that is told
            key = _pod_key(pod)
            if self._pods.get(pod.name) != key:
                changed.setdefault(key.partition("|")[0], []).append(pod)
            self._pods[pod.name] = key
        for text, same in changed.items():
            if len(same) > MANY:
                self._say(f"{count(len(same), 'pod')} (node {same[0].index} to {same[-1].index}): {text}")
                continue
            for pod in same:
                again = f", started again after exit code {pod.last_exit_code}" if _was_restarted(pod) else ""
                self._say(f"node {pod.index}, pod {pod.name}: {pod_text(pod)}{again}")

    def _say(self, text: str) -> None:
        say(f"[K8S] {text}", self._out)


def _away_text(problem: ClusterError) -> str:
    return f"{problem.what.rstrip('.')}. The run goes on without us; trying again."


def _pod_key(pod: PodStatus) -> str:
    """What of a pod is worth a line when it changes: the kubelet's back-off and its error are the same story."""
    reason = "ImagePull" if pod.reason in ("ErrImagePull", "ImagePullBackOff") else pod.reason
    told = f" ({reason})" if reason and pod.phase != "Terminating" else ""
    silent = ", machine silent" if pod.silent_sec is not None else ""
    return f"{pod.phase}{told}{silent}|{pod.node}|{pod.restarts}"


def _was_restarted(pod: PodStatus) -> bool:
    return pod.is_running and pod.last_exit_code is not None


class LiveView:
    """A view that is drawn over and over in place, and stays when it is left."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=out, force_terminal=True)
        self._live: Live | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._status: RunStatus | None = None
        self._away: str | None = None
        self._drawn_at = 0.0

    def __enter__(self) -> "LiveView":
        from rich.live import Live

        self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._live.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def line(self, text: str) -> None:
        self._log.append(text)
        if time.monotonic() - self._drawn_at > DRAW_SEC:  # lines may come by the thousand
            self._draw()

    def note(self, text: str) -> None:
        self.line(f"[K8S] {text}")

    def status(self, status: RunStatus) -> None:
        self._status = status
        self._draw()

    def away(self, problem: ClusterError | None) -> None:
        self._away = None if problem is None else _away_text(problem)
        self._draw()

    def _draw(self) -> None:
        if self._live is None or self._status is None:
            return
        self._drawn_at, size = time.monotonic(), self._console.size
        view = run_view(self._status, list(self._log), height=size.height, width=size.width, away=self._away)
        self._live.update(view, refresh=True)
