"""Scores on tasks as text, for `llmtrain eval --tasks`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmtrain.core.terminal import format_table
from llmtrain.core.text import plural

if TYPE_CHECKING:
    from llmtrain.inference.tasks import TaskEvaluation
    from llmtrain.training.tasks.compare import Difference
    from llmtrain.training.tasks.score import TaskScore

SHOWN_ITEMS = 10
FEW_ITEMS = 30
"""With fewer, standard errors and intervals mean little: four right answers of four have an error of 0."""


def scores_text(results: "Sequence[TaskEvaluation]") -> str:
    """One row per metric of a task, one column per model; what has to be known about them is below."""
    first = results[0]
    head = ["task", "metric", "shots", "items", *(_label(result) for result in results)]
    rows = [head]
    for name, score in first.tasks.items():
        for metric in score.metrics:
            values = [_value(result.tasks[name], metric) for result in results]
            rows.append([name, metric, str(score.few_shot), f"{score.items:,}", *values])
    parts = [format_table(rows, dropped_first=["shots", "items"])]
    for result in results:
        if result.comparison is not None:
            parts.append(_comparison_text(result))
    notes = [note for result in results for note in _truncation_notes(result, is_only=len(results) == 1)]
    few = [name for name, score in first.tasks.items() if score.items < FEW_ITEMS]
    if few:
        notes.append(f"Fewer than {FEW_ITEMS} items ({', '.join(few)}): ± and intervals of so few mean little.")
    notes.append(_template_note(results))
    parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _label(result: "TaskEvaluation") -> str:
    return result.run if result.step is None else f"{result.run} at step {result.step}"


def _value(score: "TaskScore", metric: str) -> str:
    error = score.stderr.get(metric)
    value = score.metrics.get(metric)
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _truncation_notes(result: "TaskEvaluation", is_only: bool) -> list[str]:
    notes = []
    for score in result.tasks.values():
        if score.truncated:
            model = "the model" if is_only else _label(result)
            notes.append(_truncation_note(score, score.truncated, model))
    for task, count in result.baseline_truncated.items():
        notes.append(_truncation_note(result.tasks[task], count, str(result.baseline)))
    return notes


def _truncation_note(score: "TaskScore", count: int, model: str) -> str:
    return (
        f"{score.task}: the beginning of {plural(count, 'item')} of {score.items:,} was cut off, because {model} reads "
        "less."
    )


def _template_note(results: "Sequence[TaskEvaluation]") -> str:
    templates = {score.chat_template for result in results for score in result.tasks.values()}
    if len(templates) > 1:
        return "Some models were scored with their chat template and some without."
    template = "with the chat template" if templates == {True} else "as plain text, without a chat template"
    return f"Items were written {template}."


def _comparison_text(result: "TaskEvaluation") -> str:
    rows = [["task", "metric", "baseline", "difference", "95 % interval", "better", "worse"]]
    changed = []
    for task, by_metric in (result.comparison or {}).items():
        for metric, each in by_metric.items():
            interval = "-"
            if each.low is not None and each.high is not None:
                interval = f"{each.low:+.4f} to {each.high:+.4f}"
            counts = [str(len(each.better)), str(len(each.worse))]
            rows.append([task, metric, f"{each.baseline:.4f}", f"{each.difference:+.4f}", interval, *counts])
            changed += _changed(task, metric, each)
    title = f"{_label(result)}, compared with {result.baseline} on the same items"
    return "\n".join([f"{title}:", "", format_table(rows), *([""] if changed else []), *changed])


def _changed(task: str, metric: str, each: "Difference") -> list[str]:
    lines = []
    for word, items in (("better", each.better), ("worse", each.worse)):
        if items:
            shown = ", ".join(map(str, items[:SHOWN_ITEMS]))
            more = f" and {len(items) - SHOWN_ITEMS} more" if len(items) > SHOWN_ITEMS else ""
            lines.append(f"{task} {metric}, {word} on items {shown}{more}.")
    return lines
