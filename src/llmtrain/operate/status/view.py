"""The live view of a run in a terminal: rich renderables built from a status."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.state import reason_text
from llmtrain.terminal import printable_line
from llmtrain.text import plural, sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType

LOG_LINES = 8
COURSE_WIDTH = 12
_OTHER_LINES = 9  # lines of the view that are neither pods nor log
_COLORS = {
    "running": "green",
    "finished": "green",
    "failed": "red",
    "removed": "red",
    "restarting": "yellow",
    "pending": "yellow",
    "suspended": "yellow",
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

    max_pods = max(2, height - _OTHER_LINES - min(len(log), LOG_LINES))
    parts: list[RenderableType] = [_header(status)]
    if connection_problem:
        parts.append(Text(printable_line(connection_problem), style="red", overflow="ellipsis", no_wrap=True))
    if status.why_short:
        parts.append(Text(printable_line(status.why_short), style=_COLORS.get(status.state, ""), overflow="fold"))
    if status.step is not None or status.max_steps is not None:
        parts.append(_progress(status, width, losses))
    if status.pods:
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
    pods = plural(status.nodes, "pod")
    return f"{pods} x {status.processes_per_node} processes" if status.processes_per_node > 1 else pods


def _progress(status: RunStatus, width: int, losses: Sequence[float]) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    total, step = status.max_steps, status.step
    cells: list[Any] = [f"step {step if step is not None else '-'}/{total if total is not None else '-'}"]
    if total:
        cells.append(ProgressBar(total=total, completed=step or 0, width=max(10, min(40, width - 82))))
    cells += [Text(printable_line(text)) for text in progress_texts(status)]
    cells += [Text(sparkline(losses, COURSE_WIDTH), style="cyan")] if len(losses) > 1 else []
    line.add_row(*cells)
    return line


def progress_texts(status: RunStatus) -> list[str]:
    texts = [f"loss {status.loss:.4f}"] if status.loss is not None else []
    texts += [f"val {status.val_loss:.4f}"] if status.val_loss is not None else []
    texts += [f"{status.tokens_per_second:,.0f} tok/s"] if status.tokens_per_second is not None else []
    return texts + ([f"{status.time_left} left"] if status.time_left else [])


def _pods(pods: list[PodStatus], max_pods: int, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = _most_relevant(pods, max_pods)
    rows = pod_rows(shown)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name in rows[0]:
        table.add_column(name, no_wrap=True, justify="right" if name in ("restarts", "cpu", "memory") else "left")
    # Pod names are shortened from the left: they differ at the end.
    over = max(0, sum(widths) + 2 * len(widths) - width)
    for pod, (rank, name, phase, *rest) in zip(shown, rows[1:], strict=True):
        short = name if len(name) <= widths[1] - over else f"…{name[over - widths[1] + 1 :]}"
        table.add_row(rank, Text(short), Text(phase, style=_PHASES.get(pod.phase, "")), *map(Text, rest))
    others = [pod for pod in pods if pod not in shown]
    return Group(table, Text(printable_line(f"others: {phase_counts(others)}"), style="dim")) if others else table


def pod_rows(pods: Sequence[PodStatus]) -> list[list[str]]:
    """The table of pods: the header, then one row per pod."""
    has_usage = any(pod.cpu or pod.memory for pod in pods)
    rows = [["rank", "pod", "phase", "node", "restarts", *(("cpu", "memory") if has_usage else ())]]
    for pod in pods:
        usage = [cpu_text(pod.cpu), memory_text(pod.memory)] if has_usage else []
        cells = [pod.ranks, pod.name, phase_text(pod), pod.node or "-", str(pod.restarts), *usage]
        rows.append([printable_line(cell) for cell in cells])
    return rows


def _most_relevant(pods: list[PodStatus], max_pods: int) -> list[PodStatus]:
    """At most `max_pods` pods, preferring those with a problem, in order of their ranks."""
    if len(pods) <= max_pods:
        return pods
    selected = sorted(pods, key=lambda pod: (pod.is_running or pod.phase == "Succeeded", pod.index))[: max_pods - 1]
    return [pod for pod in pods if pod in selected]


def phase_counts(pods: Sequence[PodStatus]) -> str:
    """`60 Running, 2 Pending`"""
    phases: dict[str, int] = {}
    for pod in pods:
        phases[phase_text(pod)] = phases.get(phase_text(pod), 0) + 1
    return ", ".join(f"{number} {phase}" for phase, number in phases.items())


def phase_text(pod: PodStatus) -> str:
    """The phase and, if there is one, the reason."""
    if pod.silent_sec is not None:
        return f"{pod.phase} (node NotReady)"
    if pod.reason == "Error":
        return f"{pod.phase} (exit {pod.exit_code})"
    return f"{pod.phase} ({pod.reason})" if pod.reason else pod.phase


def pod_text(pod: PodStatus) -> str:
    """A pod in one line: phase, node and reason."""
    on_node = f" on {pod.node}" if pod.node else ""
    if pod.silent_sec is not None:
        return f"{pod.phase}{on_node}, which is NotReady"
    reason = f", {reason_text(pod)}" if pod.reason else ""
    return f"{pod.phase}{on_node}{reason}"


def cpu_text(quantity: str | None) -> str:
    """Cores, from a quantity such as 12345678n or 250m."""
    if not quantity:
        return "-"
    units = {"n": 1e-9, "u": 1e-6, "m": 1e-3}
    scale = units.get(quantity[-1])
    cores = float(quantity[:-1]) * scale if scale else float(quantity)
    return f"{cores:.2f}"


def memory_text(quantity: str | None) -> str:
    """MiB or GiB, from a quantity such as 123456Ki."""
    if not quantity:
        return "-"
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9}
    unit = next((unit for unit in units if quantity.endswith(unit)), "")
    amount = float(quantity.removesuffix(unit)) * units.get(unit, 1)
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"


def age_text(seconds: float) -> str:
    """`42s`, `7m10s`, `42m`, `3h12m`, `5d`"""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}m" if minutes >= 10 else f"{minutes}m{int(seconds) % 60}s"
    return f"{hours}h{minutes % 60}m" if hours < 48 else f"{hours // 24}d"
