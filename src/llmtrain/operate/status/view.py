"""The live view of a run in a terminal: rich renderables built from a status."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmtrain.core.terminal import printable_line
from llmtrain.core.text import plural, sparkline
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.state import reason_text
from llmtrain.runs.state import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

LOG_LINES = 8
COURSE_WIDTH = 12
_OTHER_LINES = 9  # lines of the view that are neither pods nor log
_COLORS = {
    RunState.RUNNING: "green",
    RunState.FINISHED: "green",
    RunState.FAILED: "red",
    RunState.REMOVED: "red",
    RunState.RESTARTING: "yellow",
    RunState.PENDING: "yellow",
    RunState.SUSPENDED: "yellow",
}
_PHASES = {"Running": "green", "Succeeded": "green", "Failed": "red", "Pending": "yellow", "Terminating": "yellow"}


def run_view(
    status: RunStatus,
    log: Sequence[str],
    *,
    height: int,
    width: int,
    connection_problem: str | None = None,
    losses: Sequence[float] = (),
) -> "RenderableType":
    """`losses`: those logged so far, for a small curve."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_header(status)]
    if connection_problem:
        parts.append(Text(printable_line(connection_problem), style="red", overflow="ellipsis", no_wrap=True))
    if status.why_short:
        parts.append(Text(printable_line(status.why_short), style=_COLORS.get(status.state, ""), overflow="fold"))
    if status.step is not None or status.max_steps is not None:
        parts.append(_progress(status, width, losses))
    if status.pods:
        max_pods = max(2, height - _OTHER_LINES - min(len(log), LOG_LINES))
        parts += [Text(), _pods(status.pods, max_pods, width)]
    if log:
        parts.append(Text(f"log of rank 0 {'─' * max(0, width - 14)}", style="dim", no_wrap=True))
        parts += [Text(printable_line(line), overflow="ellipsis", no_wrap=True) for line in log[-LOG_LINES:]]
    return Group(*parts)


def _header(status: RunStatus) -> "RenderableType":
    from rich.text import Text

    header = Text(no_wrap=True, overflow="ellipsis")
    header.append(status.run_id, style="bold")
    header.append(f"  {status.state}", style=f"bold {_COLORS.get(status.state, 'cyan')}")
    header.append(f"  {status.kind}", style="dim")
    header.append(f" in {status.namespace}, {shape_text(status)}, {age_text(status.age_sec)} old", style="dim")
    if status.restarts:
        header.append(f", {plural(status.restarts, 'restart')}", style="yellow")
    return header


def shape_text(status: RunStatus) -> str:
    """`2 pods x 4 processes`"""
    text = plural(status.nodes, "pod")
    if status.processes_per_node > 1:
        text += f" x {status.processes_per_node} processes"
    return text


def _progress(status: RunStatus, width: int, losses: Sequence[float]) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    cells: list[Any] = [f"step {step_text(status)}"]
    if status.max_steps:
        width = max(10, min(40, width - 82))  # 82: the other cells at their longest
        cells.append(ProgressBar(total=status.max_steps, completed=status.step or 0, width=width))
    cells += [Text(printable_line(text)) for text in progress_texts(status)]
    if len(losses) > 1:
        cells.append(Text(sparkline(losses, COURSE_WIDTH), style="cyan"))
    line.add_row(*cells)
    return line


def step_text(status: RunStatus) -> str:
    """`10/30`, with a dash for what is unknown."""
    step = "-" if status.step is None else status.step
    return f"{step}/{status.max_steps or '-'}"


def progress_texts(status: RunStatus) -> list[str]:
    texts = []
    if status.loss is not None:
        texts.append(f"loss {status.loss:.4f}")
    if status.val_loss is not None:
        texts.append(f"val {status.val_loss:.4f}")
    if status.tokens_per_second is not None:
        texts.append(f"{status.tokens_per_second:,.0f} tok/s")
    if status.time_left:
        texts.append(f"{status.time_left} left")
    return texts


def _pods(pods: list[PodStatus], max_pods: int, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = _most_relevant(pods, max_pods)
    header, *rows = pod_rows(shown)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in header:
        table.add_column(name, no_wrap=True, justify="right" if name in ("restarts", "cpu", "memory") else "left")
    longest = _name_width(header, rows, width)
    for pod, (rank, name, phase, *rest) in zip(shown, rows, strict=True):
        if len(name) > longest:
            name = f"…{name[1 - longest :]}"  # shortened from the left: pod names differ at the end
        table.add_row(rank, Text(name), Text(phase, style=_PHASES.get(pod.phase, "")), *map(Text, rest))
    others = [pod for pod in pods if pod not in shown]
    if not others:
        return table
    return Group(table, Text(printable_line(f"others: {phase_counts(others)}"), style="dim"))


def _name_width(header: list[str], rows: list[list[str]], width: int) -> int:
    """What the other columns leave for pod names, which are the second column."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    total = sum(widths) + 2 * len(widths)  # two spaces after each column
    too_wide = max(0, total - width)
    return widths[1] - too_wide


def pod_rows(pods: Sequence[PodStatus]) -> list[list[str]]:
    """The table of pods: the header, then one row per pod."""
    rows = [["rank", "pod", "phase", "node", "restarts"]]
    for pod in pods:
        cells = [pod.ranks, pod.name, phase_text(pod), pod.node or "-", str(pod.restarts)]
        rows.append([printable_line(cell) for cell in cells])
    if any(pod.cpu or pod.memory for pod in pods):
        rows[0] += ["cpu", "memory"]
        for pod, row in zip(pods, rows[1:], strict=True):
            row += [cpu_text(pod.cpu), memory_text(pod.memory)]
    return rows


def _most_relevant(pods: list[PodStatus], max_pods: int) -> list[PodStatus]:
    """At most `max_pods` pods, preferring those with a problem, in order of their ranks."""
    if len(pods) <= max_pods:
        return pods

    def key(pod: PodStatus) -> tuple[bool, int]:
        is_healthy = pod.is_running or pod.phase == "Succeeded"
        return is_healthy, pod.index

    selected = sorted(pods, key=key)[: max_pods - 1]  # one line is for the others
    return [pod for pod in pods if pod in selected]


def phase_counts(pods: Sequence[PodStatus]) -> str:
    """`60 Running, 2 Pending`"""
    phases = Counter(phase_text(pod) for pod in pods)
    return ", ".join(f"{number} {phase}" for phase, number in phases.items())


def phase_text(pod: PodStatus) -> str:
    """The phase and, if there is one, the reason."""
    if pod.silent_sec is not None:
        return f"{pod.phase} (node NotReady)"
    if pod.reason == "Error":
        return f"{pod.phase} (exit {pod.exit_code})"
    if pod.reason:
        return f"{pod.phase} ({pod.reason})"
    return pod.phase


def pod_text(pod: PodStatus) -> str:
    """A pod in one line: phase, node and reason."""
    text = pod.phase
    if pod.node:
        text += f" on {pod.node}"
    if pod.silent_sec is not None:
        return f"{text}, which is NotReady"
    if pod.reason:
        text += f", {reason_text(pod)}"
    return text


def cpu_text(quantity: str | None) -> str:
    """Cores, from a quantity such as 12345678n or 250m."""
    if not quantity:
        return "-"
    units = {"n": 1e-9, "u": 1e-6, "m": 1e-3}
    number = quantity.rstrip("num")
    return f"{float(number) * units.get(quantity[-1], 1):.2f}"


def memory_text(quantity: str | None) -> str:
    """MiB or GiB, from a quantity such as 123456Ki."""
    if not quantity:
        return "-"
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9}
    number = quantity.rstrip("KMGTik")
    amount = float(number) * units.get(quantity.removeprefix(number), 1)
    if amount >= 2**30:
        return f"{amount / 2**30:.1f} GiB"
    return f"{amount / 2**20:.0f} MiB"


def age_text(seconds: float) -> str:
    """`42s`, `7m10s`, `42m`, `3h12m`, `5d`"""
    minutes = int(seconds // 60)
    hours = minutes // 60
    if minutes < 1:
        return f"{int(seconds)}s"
    if minutes < 10:
        return f"{minutes}m{int(seconds) % 60}s"
    if hours < 1:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60}m"
    return f"{hours // 24}d"
