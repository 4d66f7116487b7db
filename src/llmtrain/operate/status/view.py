"""A run as a person sees it in a terminal: rich's renderables, made anew from each status."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.state import reason_text
from llmtrain.terminal import printable_line

if TYPE_CHECKING:
    from rich.console import RenderableType

LOG_LINES = 8
_AROUND = 9  # lines of the view that are neither pods nor log
_COLOURS = {
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
    status: RunStatus, log: Sequence[str], *, height: int, width: int, away: str | None = None
) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    room = max(2, height - _AROUND - min(len(log), LOG_LINES))
    parts: list[RenderableType] = [_header(status)]
    if away:
        parts.append(Text(printable_line(away), style="red", overflow="ellipsis", no_wrap=True))
    if status.why_short:
        parts.append(Text(printable_line(status.why_short), style=_COLOURS.get(status.state, ""), overflow="fold"))
    if status.step is not None or status.max_steps is not None:
        parts.append(_progress(status, width))
    if status.pods:
        parts += [Text(), _pods(status.pods, room, width)]
    if log:
        parts.append(Text(f"log of rank 0 {'─' * max(0, width - 14)}", style="dim", no_wrap=True))
        parts += [Text(printable_line(line), overflow="ellipsis", no_wrap=True) for line in log[-LOG_LINES:]]
    return Group(*parts)


def _header(status: RunStatus) -> "RenderableType":
    from rich.text import Text

    words = Text(no_wrap=True, overflow="ellipsis")
    words.append(status.run_id, style="bold")
    words.append(f"  {status.state}", style=f"bold {_COLOURS.get(status.state, 'cyan')}")
    words.append(f"  {status.kind}", style="dim")
    words.append(f" in {status.namespace}, {shape_text(status)}, {age_text(status.age_sec)} old", style="dim")
    if status.restarts:
        words.append(f", {count(status.restarts, 'restart')}", style="yellow")
    return words


def shape_text(status: RunStatus) -> str:
    """`2 nodes x 4 processes`."""
    nodes = count(status.nodes, "node")
    return f"{nodes} x {status.processes_per_node} processes" if status.processes_per_node > 1 else nodes


def _progress(status: RunStatus, width: int) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    total, step = status.max_steps, status.step
    cells: list[Any] = [f"step {step if step is not None else '-'}/{total if total is not None else '-'}"]
    if total:
        cells.append(ProgressBar(total=total, completed=step or 0, width=max(10, min(40, width - 72))))
    cells += [Text(printable_line(word)) for word in progress_words(status)]
    line.add_row(*cells)
    return line


def progress_words(status: RunStatus) -> list[str]:
    words = [f"loss {status.loss:.4f}"] if status.loss is not None else []
    words += [f"val {status.val_loss:.4f}"] if status.val_loss is not None else []
    words += [f"{status.tokens_per_second:,.0f} tok/s"] if status.tokens_per_second is not None else []
    return words + ([f"{status.time_left} left"] if status.time_left else [])


def _pods(pods: list[PodStatus], room: int, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = _worth_showing(pods, room)
    rows = pod_rows(shown)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for name in rows[0]:
        table.add_column(name, no_wrap=True, justify="right" if name in ("restarts", "cpu", "memory") else "left")
    over = max(0, sum(widths) + 2 * len(widths) - width)  # the pods' names give way; they differ at their end
    for pod, (rank, name, phase, *rest) in zip(shown, rows[1:], strict=True):
        short = name if len(name) <= widths[1] - over else f"…{name[over - widths[1] + 1 :]}"
        table.add_row(rank, Text(short), Text(phase, style=_PHASES.get(pod.phase, "")), *map(Text, rest))
    left = [pod for pod in pods if pod not in shown]
    return Group(table, Text(printable_line(f"others: {phase_counts(left)}"), style="dim")) if left else table


def pod_rows(pods: Sequence[PodStatus]) -> list[list[str]]:
    """The table of pods: its head, then a row for each."""
    has_usage = any(pod.cpu or pod.memory for pod in pods)
    rows = [["rank", "pod", "phase", "node", "restarts", *(("cpu", "memory") if has_usage else ())]]
    for pod in pods:
        used = [cpu_text(pod.cpu), memory_text(pod.memory)] if has_usage else []
        cells = [pod.ranks, pod.name, phase_text(pod), pod.node or "-", str(pod.restarts), *used]
        rows.append([printable_line(cell) for cell in cells])
    return rows


def _worth_showing(pods: list[PodStatus], room: int) -> list[PodStatus]:
    """As many as there is room for, those with a problem first, in order of their ranks."""
    if len(pods) <= room:
        return pods
    first = sorted(pods, key=lambda pod: (pod.is_running or pod.phase == "Succeeded", pod.index))[: room - 1]
    return [pod for pod in pods if pod in first]


def phase_counts(pods: Sequence[PodStatus]) -> str:
    """`60 Running, 2 Pending`."""
    phases: dict[str, int] = {}
    for pod in pods:
        phases[phase_text(pod)] = phases.get(phase_text(pod), 0) + 1
    return ", ".join(f"{number} {phase}" for phase, number in phases.items())


def phase_text(pod: PodStatus) -> str:
    """The phase, with the reason in a word where there is one."""
    if pod.silent_sec is not None:
        return f"{pod.phase} (machine silent)"
    if pod.reason == "Error":
        return f"{pod.phase} (exit {pod.exit_code})"
    return f"{pod.phase} ({pod.reason})" if pod.reason else pod.phase


def pod_text(pod: PodStatus) -> str:
    """A pod in a line of plain text."""
    where = f" on {pod.node}" if pod.node else ""
    if pod.silent_sec is not None:
        return f"{pod.phase}{where}, which does not answer"
    why = f", {reason_text(pod)}" if pod.reason else ""
    return f"{pod.phase}{where}{why}"


def cpu_text(quantity: str | None) -> str:
    """Cores, from 12345678n or 250m."""
    if not quantity:
        return "-"
    units = {"n": 1e-9, "u": 1e-6, "m": 1e-3}
    scale = units.get(quantity[-1])
    cores = float(quantity[:-1]) * scale if scale else float(quantity)
    return f"{cores:.2f}"


def memory_text(quantity: str | None) -> str:
    """From 123456Ki."""
    if not quantity:
        return "-"
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9}
    unit = next((unit for unit in units if quantity.endswith(unit)), "")
    amount = float(quantity.removesuffix(unit)) * units.get(unit, 1)
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"


def age_text(seconds: float) -> str:
    """`42s`, `7m10s`, `42m`, `3h12m`, `5d`."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}m" if minutes >= 10 else f"{minutes}m{int(seconds) % 60}s"
    return f"{hours}h{minutes % 60}m" if hours < 48 else f"{hours // 24}d"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"
