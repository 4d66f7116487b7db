"""llmtrain runs: list, show, compare, price and prune runs by reading their directories."""

from typing import Annotated

import typer

from llmtrain.commands.options import DEFAULT_ROOT, JsonOption, RootOption, complete_run, show
from llmtrain.errors import UsageError

app = typer.Typer(help="List, show, compare, price and prune runs.", no_args_is_help=True)

RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN", help="Run ids or paths.", autocompletion=complete_run)
]


@app.command("list")
def list_command(
    sort: Annotated[
        str | None,
        typer.Option(
            help="Order: val_loss, best_val_loss, train_loss, step, lr, run_id or age (newest first). Default: oldest "
            "first.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of runs; without --sort: the newest.")] = None,
    filter_: Annotated[
        str | None,
        typer.Option("--filter", metavar="TEXT", help="Only runs with this text in id, name, status, data or model."),
    ] = None,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """List runs with their losses, age, dataset, learning rate and number of parameters."""
    from llmtrain.commands.run_tables import best_colors, run_table
    from llmtrain.runs.directory import list_runs
    from llmtrain.runs.listing import select_rows, summarize_all

    everything = summarize_all(list_runs(root))
    rows = select_rows(everything, sort, limit, filter_)
    empty = f"No runs in {root}." if not everything else f"None of the {len(everything)} runs in {root} matches."
    show(json_, {"root": root, "runs": rows}, run_table(rows) if rows else empty, best_colors(rows))


@app.command("show")
def show_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or path.", autocompletion=complete_run)],
    plot: Annotated[bool, typer.Option("--plot", help="Show the loss curves instead.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Show everything that is recorded: starts, ranks, result, metadata, config.")
    ] = False,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Show a summary of a run, everything that is recorded of it, or its loss curves. --json has everything."""
    from llmtrain.commands.run_summary import summary_lines
    from llmtrain.commands.run_tables import description_lines, run_table
    from llmtrain.plan.cost import cost_of_run
    from llmtrain.plan.prediction import recorded_prediction, usage_of
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.listing import describe, summarize
    from llmtrain.runs.view import RunView

    for name, is_given in {"--json": json_, "--all": all_}.items():
        if plot and is_given:
            raise UsageError(f"--plot cannot be combined with {name}.", remedy="Omit one of them.")
    found = find_run(root, run)
    if plot:
        from llmtrain.commands.loss_plot import print_plot, run_curves

        show(False, {}, run_table([summarize(RunView(found))]))
        print_plot(run_curves(found), found.run_id)
        return
    view = RunView(found)
    value = describe(view)
    cost = cost_of_run(view)
    config = value.pop("config")  # long: it stays at the end
    predicted = recorded_prediction(view)
    usage = usage_of(view)
    value |= {"gpu_hours": view.gpu_hours, "cost": cost.as_dict() if cost else None}
    value |= {"predicted": predicted.as_dict() if predicted else None, "usage": usage.as_dict(), "config": config}
    lines = description_lines(value) if all_ else summary_lines(value, cost, predicted, usage)
    show(json_, value, "\n".join(lines))


@app.command("compare")
def compare_command(
    runs: RunsArgument,
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            "--group-by",
            metavar="FIELD",
            help="Mean, standard deviation and number of the runs with the same value of a config field, such as "
            "trainer.lr. Repeatable.",
        ),
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Show the loss curves of the runs below the comparison.")
    ] = False,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Compare two runs or more: what differs in their configs, their losses, and which are best. Runs that differ only
    in run.seed are samples of one setting."""
    from llmtrain.commands.run_tables import comparison_lines, group_lines
    from llmtrain.runs.compare import compare
    from llmtrain.runs.directory import find_run

    if len(runs) < 2:
        raise UsageError("Pass at least two runs to compare.", remedy="`llmtrain runs list` lists them.")
    if plot and json_:
        raise UsageError("--plot cannot be combined with --json.", remedy="Omit one of them.")
    found = [find_run(root, run) for run in runs]
    value = compare(found, group_by or [])
    show(json_, value, "\n".join(group_lines(value) if group_by else comparison_lines(value)), {"Best:": "green"})
    if plot:
        from llmtrain.commands.loss_plot import compared_curves, print_plot

        for name, curves in compared_curves(found).items():
            print_plot(curves, f"{name} loss")


@app.command("cost")
def cost_command(
    prices: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Config or file with a `plan` section, whose prices replace those in the configs of the runs.",
            show_default=False,
        ),
    ] = None,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Sum GPU-hours and cost of all runs by name and by month. Running runs count with what they have used so far."""
    from llmtrain.commands.cost_tables import spending_text
    from llmtrain.plan.cost import read_prices
    from llmtrain.plan.spending import sum_spending
    from llmtrain.runs.directory import list_runs

    given = None if prices is None else read_prices(prices)
    spending = sum_spending(list_runs(root), given)
    show(json_, {"root": root, "prices": prices, **spending.as_dict()}, spending_text(spending, root))


@app.command("prune")
def prune_command(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Run ids.", autocompletion=complete_run)
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Runs that wrote nothing for this long, such as 12h or 30d.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="All but the newest N runs that match.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Runs whose last start crashed or failed.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Delete only checkpoints, except the newest and the best of each run.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would be deleted.")] = False,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Delete runs, or their older checkpoints. Several criteria must all be met. A running run is never touched."""
    from llmtrain.commands.run_tables import prune_lines
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.prune import Criteria, delete, parse_age, plan_prune, remove_leftovers, select_runs

    age = parse_age(older_than) if older_than is not None else None
    criteria = Criteria(tuple(runs or ()), age, keep, failed)
    if criteria.is_empty() and not checkpoints:
        raise UsageError(
            "Pass which runs to delete.", remedy="Name them, or use --older-than, --keep, --failed or --checkpoints."
        )
    for name in criteria.names:
        find_run(root, name)  # raises for a run that does not exist
    result = plan_prune(root, select_runs(root, criteria), checkpoints)
    if yes:
        result = delete(result)
        remove_leftovers(root)
    value = {
        "root": root,
        "is_deleted": yes,
        "bytes": result.bytes,
        "runs": [candidate.as_dict() for candidate in result.deleted],
        "kept": [candidate.as_dict() for candidate in result.kept],
    }
    show(json_, value, "\n".join(prune_lines(result, is_deleted=yes)))
