"""llmtrain runs: list, show and compare runs by reading their directories."""

from typing import Annotated, Any

import typer

from llmtrain.commands.options import DEFAULT_ROOT, JsonOption, RootOption, show
from llmtrain.terminal import format_columns

app = typer.Typer(help="List, show and compare runs.", no_args_is_help=True)


@app.command("list")
def list_command(root: RootOption = DEFAULT_ROOT, json_: JsonOption = False) -> None:
    """List all runs, oldest first."""
    from llmtrain.runs.directory import list_runs
    from llmtrain.runs.summary import summarize_all

    rows = summarize_all(list_runs(root))
    columns = ("run_id", "status", "step", "max_steps", "train_loss", "val_loss", "best_val_loss")
    more = ("damaged",) if any(row["damaged"] for row in rows) else ()
    show(json_, {"root": root, "runs": rows}, _table(rows, (*columns, *more)) if rows else f"No runs in {root}.")


@app.command("show")
def show_command(
    run: Annotated[str, typer.Argument(help="Run id or path.")],
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Show summary, checkpoints, starts, result, metadata and config of a run."""
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.summary import describe

    value = describe(find_run(root, run))
    show(json_, value, "\n".join(_lines(value)))


@app.command("compare")
def compare_command(
    first: Annotated[str, typer.Argument(help="Run id or path.")],
    second: Annotated[str, typer.Argument(help="Run id or path.")],
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Compare config, losses and final state of two runs."""
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.summary import compare

    value = compare(find_run(root, first), find_run(root, second))
    lines = [
        _table(
            value["runs"],
            ("run_id", "status", "step", "train_loss", "val_loss", "best_val_loss", "state_sha256"),
        )
    ]
    lines += ["", *(f"{d['field']}: {d['first']!r} -> {d['second']!r}" for d in value["config_differences"])]
    if not value["config_differences"]:
        lines.append("The configs are equal.")
    if value["first_different_step"] is not None:
        lines.append(f"The training losses differ from step {value['first_different_step']} on.")
    elif value["compared_steps"]:
        lines.append(f"The training losses are equal at all {value['compared_steps']} steps that both logged.")
    if value["same_state"] is not None:
        lines.append(f"The final states are {'identical' if value['same_state'] else 'different'}.")
    if not value["same_state"]:
        lines += _causes(value)
    show(json_, value, "\n".join(lines))


def _causes(value: dict[str, Any]) -> list[str]:
    """Differences between the machines that change results in the last bits."""
    labels = {"architectures": "CPU architecture", "threads": "number of CPU threads"}
    lines = []
    for name, label in labels.items():
        first, second = value[name]
        if first and second and (first != second or len(first) > 1):
            lines.append(f"The {label} differs: {_then(first)} in the first run, {_then(second)} in the second.")
    note = "Results are bit-identical only on the same architecture with the same number of threads."
    return [*lines, note] if lines else []


def _then(values: list[Any]) -> str:
    return ", then ".join(map(str, values))


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    return format_columns([columns, *([_cell(row.get(column)) for column in columns] for row in rows)])


def _cell(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)[:40]


def _lines(value: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [f"{indent}{key}:", *_lines(item, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {item}")
    return lines
