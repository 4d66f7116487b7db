"""Runs and pods as plain text: a table of all runs, details of one run."""

from collections.abc import Sequence

from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.view import age_text, pod_rows, progress_texts, shape_text
from llmtrain.terminal import format_columns, printable_line

WHY_LENGTH = 70


def runs_table(statuses: Sequence[RunStatus], *, with_namespace: bool) -> str:
    rows = [["run", "state", "kind", "pods", "step", "loss", "tok/s", "left", "restarts", "age", "why"]]
    rows += [
        [
            status.run_id,
            status.state,
            status.kind,
            f"{sum(pod.is_running for pod in status.pods)}/{status.nodes}" if status.nodes else "-",
            _step(status),
            f"{status.loss:.4f}" if status.loss is not None else "-",
            f"{status.tokens_per_second:,.0f}" if status.tokens_per_second is not None else "-",
            status.time_left or "-",
            str(status.restarts),
            age_text(status.age_sec),
            _short(printable_line(status.why_short or status.unseen or "")),
        ]
        for status in statuses
    ]
    if with_namespace:
        names = ["namespace", *(status.namespace for status in statuses)]
        rows = [[name, *row] for name, row in zip(names, rows, strict=True)]
    return format_columns(rows)


def run_text(status: RunStatus) -> str:
    """One run with its pods."""
    mode = "" if status.mode == "train" else f" ({status.mode})"
    lines = [
        f"run        {status.run_id}{mode}",
        f"state      {status.state}{f': {printable_line(status.why_short)}' if status.why_short else ''}",
        f"job        {status.kind} in namespace {status.namespace}, {shape_text(status)}, world size "
        f"{status.world_size}",
        f"launched   {status.launched_at}, {age_text(status.age_sec)} ago",
    ]
    if _step(status) != "-":
        lines.append(f"step       {', '.join([_step(status), *progress_texts(status)])}")
    if status.exit_code is not None:
        lines.append(f"exit code  {status.exit_code}")
    if status.restarts:
        lines.append(f"restarts   {status.restarts}")
    if status.unseen:
        lines.append(f"warning    {status.unseen}")
    if status.pods:
        lines += ["", format_columns(pod_rows(status.pods))]
    return "\n".join(lines)


def _step(status: RunStatus) -> str:
    if status.step is None and (status.max_steps is None or status.has_ended):  # the logs of ended runs are not read
        return "-"
    return f"{status.step if status.step is not None else '-'}/{status.max_steps or '-'}"


def _short(text: str) -> str:
    return text if len(text) <= WHY_LENGTH else f"{text[: WHY_LENGTH - 1]}…"
