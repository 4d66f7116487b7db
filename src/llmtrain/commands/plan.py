"""llmtrain plan: memory, time and cost of a run, before it is started."""

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from llmtrain.commands.options import CURRENT, ConfigOption, JsonOption, SetOption, show, with_option_groups
from llmtrain.commands.spinner import progress
from llmtrain.core.arguments import ClusterPlace
from llmtrain.errors import UsageError


@with_option_groups
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
    in_pod: Annotated[
        bool, typer.Option("--in-pod", help="With --probe: train them in one pod, as `launch` would.")
    ] = False,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Estimate whether a run fits, how long it takes and what it costs, without a GPU and without weights. Exits with 0
    if it fits, 1 if it does not, and 2 if that is not known."""
    from llmtrain.commands.plan_text import plan_text, plan_values
    from llmtrain.config.load import load_config
    from llmtrain.plan.choose_target import choose_target
    from llmtrain.plan.cost import read_prices
    from llmtrain.plan.history import past_runs
    from llmtrain.plan.plan import Verdict, make_plan
    from llmtrain.plan.probe import run_probe

    has_torch = find_spec("torch") is not None
    _check_options(find, probe, in_pod, bool(gpu or memory or nodes), place, has_torch)
    loaded = load_config(config, set_ or [], for_launch=True)
    if prices is not None:
        loaded = loaded.with_values("plan", prices=read_prices(prices))
    if in_pod:
        from llmtrain.commands.cluster_options import connect
        from llmtrain.commands.launch import read_plugin_code
        from llmtrain.operate.probe import on_one_pod, probe_in_pod

        cluster = connect(place.kubeconfig, place.context)
        launch = on_one_pod(loaded.launch, processes_per_node, place.namespace or cluster.namespace)
        loaded = loaded.model_copy(update={"launch": launch})
        target = probe_in_pod(cluster, loaded, read_plugin_code(loaded, config, None), sys.stderr)
    else:
        target = choose_target(loaded, nodes, processes_per_node, gpu, memory)
        if probe:
            run_probe(loaded, target.processes_per_node)
    history = past_runs(loaded.output.root_dir)
    with progress("planning"):
        plan = make_plan(loaded, target, history)
    if plan.problem is not None:
        raise plan.problem
    change = options = None
    if find or (plan.verdict is Verdict.DOES_NOT_FIT and has_torch):
        from llmtrain.plan.find import cheapest_change, find_options

        with progress("looking for settings that fit"):
            options = find_options(loaded, target, history) if find else None
            change = None if find else cheapest_change(loaded, target)
    show(json_, plan_values(plan, change, options), plan_text(plan, change, options))
    raise typer.Exit(plan.verdict.exit_code)


def _check_options(
    find: bool, probe: bool, in_pod: bool, is_elsewhere: bool, place: ClusterPlace, has_torch: bool
) -> None:
    """`is_elsewhere`: options name another target than this machine."""
    if (find or (probe and not in_pod)) and not has_torch:
        raise UsageError(
            "--find, and --probe on this machine, need torch, which is not installed.",
            remedy="Install llmtrain instead of llmtrain-client, or leave them out for an estimate from a formula.",
        )
    if (in_pod and not probe) or (place != CURRENT and not in_pod):
        raise UsageError(
            "--in-pod, --namespace, --context and --kubeconfig say where --probe trains.",
            remedy="Pass --probe --in-pod, or none of them.",
        )
    if probe and is_elsewhere:
        raise UsageError(
            "--probe trains on this machine or in one pod, so it cannot be combined with --gpu, --memory and --nodes.",
            remedy="Run it on a machine of the kind that you plan for.",
        )
