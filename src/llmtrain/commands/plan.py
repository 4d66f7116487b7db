"""llmtrain plan: memory, time and cost of a run, before it is started."""

from importlib.util import find_spec
from typing import Annotated

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show
from llmtrain.commands.spinner import progress
from llmtrain.errors import UsageError


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes. Default: launch.nodes.")] = None,
    processes_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes per node, one per GPU. Default: launch.processes_per_node.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU to plan for, such as h100-80g. Default: that of this machine.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory to fit in, such as 24GB: of a GPU, or with run.device cpu of the machine."),
    ] = None,
    prices: Annotated[
        str | None, typer.Option(metavar="FILE", help="Config or file with a `plan` section, for its prices.")
    ] = None,
    find: Annotated[bool, typer.Option("--find", help="List the settings that fit, the cheapest first.")] = False,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Train a few real steps on this machine first, and plan with what they measured."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Estimate whether a run fits, how long it takes and what it costs, without a GPU and without weights. Exits with 0
    if it fits, 1 if it does not, and 2 if that is not known."""
    from llmtrain.commands.plan_text import options_text, plan_text
    from llmtrain.config.load import load_config
    from llmtrain.plan.choose_target import choose_target
    from llmtrain.plan.cost import read_prices
    from llmtrain.plan.history import past_runs
    from llmtrain.plan.plan import Verdict, make_plan
    from llmtrain.plan.probe import run_probe

    has_torch = find_spec("torch") is not None
    if (find or probe) and not has_torch:
        raise UsageError(
            "--find and --probe need torch, which is not installed.",
            remedy="Install llmtrain instead of llmtrain-client, or leave them out for an estimate from a formula.",
        )
    loaded = load_config(config, set_ or [], for_launch=True)
    if prices is not None:
        loaded = loaded.with_values("plan", prices=read_prices(prices))
    target = choose_target(loaded, nodes, processes_per_node, gpu, memory)
    if probe:
        if gpu or memory or nodes:
            raise UsageError(
                "--probe trains on this machine, so it cannot be combined with --gpu, --memory and --nodes.",
                remedy="Run it on a machine of the kind that you plan for.",
            )
        run_probe(loaded, target.processes_per_node)
    history = past_runs(loaded.output.root_dir)
    with progress("planning"):
        plan = make_plan(loaded, target, history)
    if plan.problem is not None:
        raise plan.problem

    change = None
    options = []
    if find or (plan.verdict is Verdict.DOES_NOT_FIT and has_torch):
        from llmtrain.plan.find import cheapest_change, find_options

        with progress("looking for settings that fit"):
            if find:
                options = find_options(loaded, target, history)
            else:
                change = cheapest_change(loaded, target)
    value = {
        **plan.as_dict(),
        "change": change.as_dict() if change else None,
        "options": [option.as_dict() for option in options] if find else None,
    }
    text = plan_text(plan, change)
    if find:
        text += f"\n\n{options_text(options, plan.verdict is not Verdict.UNKNOWN)}"
    show(json_, value, text)
    raise typer.Exit(plan.verdict.exit_code)
