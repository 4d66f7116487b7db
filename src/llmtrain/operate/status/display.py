"""Output while a run is watched: a live view in a terminal, plain lines elsewhere."""

import math
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from llmtrain.core.terminal import say
from llmtrain.core.text import plural
from llmtrain.errors import ClusterError
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.progress import RunProgress
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.view import LOG_LINES, pod_text, run_view
from llmtrain.runs.state import RunState

if TYPE_CHECKING:
    from rich.live import Live

MIN_REDRAW_SEC = 0.1
MAX_POD_LINES = 4  # if more pods change in the same way, they share one line


class Display(Protocol):
    def __enter__(self) -> "Display": ...
    def __exit__(self, *problem: object) -> None: ...
    def line(self, text: str) -> None:
        """Show a log line of rank 0."""

    def note(self, text: str) -> None:
        """Show an action of the watcher itself."""

    def status(self, status: RunStatus) -> None: ...
    def connection(self, problem: ClusterError | None) -> None:
        """Show that the cluster is unreachable, or (None) reachable again."""


class PlainLines:
    """Prints each change once, as `[K8S] ...`, between the log lines of rank 0."""

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
        self._print_pods(status.pods)
        if self._state is None or self._state[0] != status.state:
            run = status.run_id
            if self._state is None:
                run += f" ({status.kind} in namespace {status.namespace})"
            state: str = status.state
            if status.why_short and status.state != RunState.RUNNING:
                state += f": {status.why_short}"
            self.note(f"run {run} is {state}")
        elif status.why_short and self._state[1] != status.why_short and not status.pods:
            self.note(status.why_short)  # with pods, their own lines say why
        self._state = status.state, status.why_short

    def connection(self, problem: ClusterError | None) -> None:
        self.note("the cluster is reachable again" if problem is None else _connection_text(problem))

    def note(self, text: str) -> None:
        say(f"[K8S] {text}", self._out)

    def _print_pods(self, pods: Iterable[PodStatus]) -> None:
        changed: dict[str, list[PodStatus]] = {}
        for pod in pods:
            if pod.phase == "Running" and pod.exit_code is not None:
                continue  # about to fail or restart, which gets its own line
            key = _pod_key(pod)
            if self._pods.get(pod.name) != key:
                changed.setdefault(key.partition("|")[0], []).append(pod)
            self._pods[pod.name] = key
        for text, same in changed.items():
            if len(same) > MAX_POD_LINES:
                self.note(f"{plural(len(same), 'pod')} ({same[0].index} to {same[-1].index}): {text}")
                continue
            for pod in same:
                text = f"pod {pod.index} ({pod.name}): {pod_text(pod)}"
                if pod.is_running and pod.last_exit_code is not None:
                    text += f", restarted after exit code {pod.last_exit_code}"
                self.note(text)


def _connection_text(problem: ClusterError) -> str:
    return f"{problem.what.rstrip('.')}. The run is not affected; retrying."


def _pod_key(pod: PodStatus) -> str:
    """A pod gets a new line when this changes. ErrImagePull and its back-off alternate and count as one."""
    text = pod.phase
    reason = "ImagePull" if pod.reason in ("ErrImagePull", "ImagePullBackOff") else pod.reason
    if reason and pod.phase != "Terminating":
        text += f" ({reason})"
    if pod.silent_sec is not None:
        text += ", node NotReady"
    return f"{text}|{pod.node}|{pod.restarts}"


class LiveView:
    """A view that is redrawn in place and stays on the screen when it is closed."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=out, force_terminal=True)
        self._live: Live | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._status: RunStatus | None = None
        self._connection_problem: str | None = None
        self._drawn_at = 0.0
        self._losses: list[float] = []

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
        loss = RunProgress().after(text).loss
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        if time.monotonic() - self._drawn_at > MIN_REDRAW_SEC:  # there may be thousands of lines per second
            self._draw()

    def note(self, text: str) -> None:
        self.line(f"[K8S] {text}")

    def status(self, status: RunStatus) -> None:
        self._status = status
        self._draw()

    def connection(self, problem: ClusterError | None) -> None:
        self._connection_problem = None if problem is None else _connection_text(problem)
        self._draw()

    def _draw(self) -> None:
        if self._live is None or self._status is None:
            return
        self._drawn_at = time.monotonic()
        size = self._console.size
        view = run_view(
            self._status,
            list(self._log),
            height=size.height,
            width=size.width,
            connection_problem=self._connection_problem,
            losses=self._losses,
        )
        self._live.update(view, refresh=True)
