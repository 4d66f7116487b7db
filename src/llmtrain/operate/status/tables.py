"""Runs and pods as plain text: a table of all runs, details of one run."""

from collections.abc import Sequence

from llmtrain.core.terminal import format_table, printable_line
from llmtrain.core.text import format_bytes
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.status.view import age_text, pod_rows, progress_texts, shape_text, step_text
from llmtrain.plan.cost import cost_text
from llmtrain.plan.prediction import beside
from llmtrain.runs.progress_lines import duration_text

WHY_LENGTH = 70


def runs_table(statuses: Sequence[RunStatus], *, with_namespace: bool) -> str:
    head = ["run", "state", "kind", "pods", "step", "loss", "tok/s", "left", "restarts", "age", "why"]
    if with_namespace:
        head.insert(0, "namespace")
    rows = [head]
    for status in statuses:
        row = _row(status)
        if with_namespace:
            row.insert(0, status.namespace)
        rows.append(row)
    return format_table(rows, dropped_first=["tok/s", "kind", "age", "restarts", "left", "namespace"])


def _row(status: RunStatus) -> list[str]:
    running = sum(pod.is_running for pod in status.pods)
    pods = loss = speed = "-"
    if status.nodes:  # 0: its record cannot be read
        pods = f"{running}/{status.nodes}"
    if status.loss is not None:
        loss = f"{status.loss:.4f}"
    if status.tokens_per_second is not None:
        speed = f"{status.tokens_per_second:,.0f}"
    return [
        status.run_id,
        status.state,
        status.kind,
        pods,
        _step(status) or "-",
        loss,
        speed,
        status.time_left or "-",
        str(status.restarts),
        age_text(status.age_sec),
        _short(printable_line(status.why_short or status.unseen or "")),
    ]


def run_text(status: RunStatus) -> str:
    """One run with its pods."""
    run = status.run_id
    if status.mode != "train":
        run += f" ({status.mode})"
    state: str = status.state
    if status.why_short:
        state += f": {printable_line(status.why_short)}"
    lines = [
        f"run        {run}",
        f"state      {state}",
        f"job        {status.kind} in namespace {status.namespace}, {shape_text(status)}, world size "
        f"{status.world_size}",
        f"launched   {status.launched_at}, {age_text(status.age_sec)} ago",
    ]
    step = _step(status)
    if step:
        lines.append(f"step       {', '.join([step, *progress_texts(status)])}")
    lines += _cost_lines(status)
    if status.exit_code is not None:
        lines.append(f"exit code  {status.exit_code}")
    if status.restarts:
        lines.append(f"restarts   {status.restarts}")
    if not status.has_files:
        lines.append("files      none")
    if status.unseen:
        lines.append(f"warning    {status.unseen}")
    if status.pods:
        lines += ["", format_table(pod_rows(status.pods), dropped_first=["memory", "cpu"])]
    return "\n".join(lines)


def _cost_lines(status: RunStatus) -> list[str]:
    cost = status.costs
    lines = []
    spent = cost_text(cost.gpu_hours, cost.cost)
    if spent:
        lines.append(f"cost       {spent}")
    predicted = cost.predicted
    if predicted is None:
        return lines
    memory = beside(cost.peak_memory_bytes, predicted.peak_memory_bytes, format_bytes)
    if memory:
        lines.append(f"memory     {memory} {predicted.memory_source}")
    time = beside(cost.seconds, predicted.seconds, duration_text)
    if time:
        lines.append(f"time       {time} {predicted.time_source}")
    return lines


def _step(status: RunStatus) -> str | None:
    if status.step is None and (status.max_steps is None or status.has_ended):  # the logs of ended runs are not read
        return None
    return step_text(status)


def _short(text: str) -> str:
    if len(text) <= WHY_LENGTH:
        return text
    return f"{text[: WHY_LENGTH - 1]}…"
