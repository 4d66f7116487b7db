"""llmtrain sweep: many trials of a config, stopped early and promoted exactly."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.launch import WithCodeOption, short_options
from llmtrain.commands.options import (
    CURRENT,
    DEFAULT_ROOT,
    ConfigOption,
    JsonOption,
    RootOption,
    SetOption,
    is_given,
    print_warning,
    show,
    with_option_groups,
)
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.logs import setup_logging
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.sweep.prepare import Sweep

app = typer.Typer(help="Search for the best values of config fields: run a sweep, or show one.")

_SMOKE = "Test the pods before the sweep: llmtrain launch with this option."
_BUILD = "Build and push the image before the sweep, and pass it: --set launch.image=IMAGE."
OPTIONS_OF_LAUNCH = {
    "--build": _BUILD,
    "--build-arg": _BUILD,
    "--detach": "The driver decides what is trained next. It may end at any time; continue with --resume NAME.",
    "--recover": "The driver launches a trial again that ended without a result.",
    "--smoke": _SMOKE,
    "--doctor": _SMOKE,
    "--hold": _SMOKE,
    "--strict": "See whether a trial fits: llmtrain plan.",
    "--launcher": "Trials are trained by llmtrain.",
    "--output": "The manifests of one trial: llmtrain launch --dry-run.",
    "--model-local-dir": "Use --set model.path=DIR.",
    "--tokenizer-local-dir": "Use --set model.tokenizer_path=DIR.",
    "--local-files-only": "Use --set model.local_files_only=true.",
}
"""What people pass to `sweep --launch` as to `launch`, and what to do instead."""


SpaceOption = Annotated[
    str | None,
    typer.Option(
        metavar="FIELDS",
        help="What to vary: FIELD=[a,b], FIELD=uniform(a,b), log(a,b) or int(a,b), separated by spaces.",
        show_default=False,
    ),
]
TrialsOption = Annotated[int | None, typer.Option(min=1, help="Number of trials.", show_default=False)]
ParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Trials at a time. Default: the GPUs, or the cores divided by run.threads.", show_default=False
    ),
]
SearchOption = Annotated[
    str | None, typer.Option(help="halton (the default), random, grid or optuna.", show_default=False)
]
HalvingOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="STEPS",
        help="Stop trials early: compare them from this many steps on, and train a third of them on each time.",
        show_default=False,
    ),
]
SeedsOption = Annotated[
    int | None, typer.Option(min=1, help="Seeds per finalist, or of the config alone.", show_default=False)
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help="What to compare, as trainer.best_metric: val/loss (the default), val/accuracy, tasks/NAME/acc.",
        metavar="NAME",
        show_default=False,
    ),
]
FileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Sweep file: these options as YAML.", show_default=False)
]
NameOption = Annotated[str | None, typer.Option(help="Name of the sweep.", show_default=False)]
ResumeOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Continue a sweep that was interrupted.", show_default=False)
]
LaunchOption = Annotated[
    bool, typer.Option("--launch", help="Train each trial as a run of its own on a Kubernetes cluster.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the trials and what they cost; train nothing.")]


@app.callback(invoke_without_command=True)
@with_option_groups
def command(
    ctx: typer.Context,
    config: ConfigOption = None,
    set_: SetOption = None,
    space: SpaceOption = None,
    trials: TrialsOption = None,
    parallel: ParallelOption = None,
    search: SearchOption = None,
    halving: HalvingOption = None,
    seeds: SeedsOption = None,
    metric: MetricOption = None,
    file: FileOption = None,
    name: NameOption = None,
    resume: ResumeOption = None,
    launch: LaunchOption = False,
    with_code: WithCodeOption = None,
    place: ClusterPlace = CURRENT,
    dry_run: DryRunOption = False,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Search for the best values of config fields. The table does not depend on --parallel, nor on interruptions."""
    if ctx.invoked_subcommand is not None:
        return
    from llmtrain.commands.sweep_text import plan_text, table_text
    from llmtrain.config.logging import LoggingSection
    from llmtrain.sweep.prepare import prepare, reopen
    from llmtrain.sweep.price import price_sweep
    from llmtrain.sweep.record import find_sweep
    from llmtrain.sweep.show import describe

    values: dict[str, Any] = {
        "config": config,
        "space": space,
        "trials": trials,
        "search": search,
        "halving": None if halving is None else {"first_rung": halving},
        "seeds": seeds,
        "metric": metric,
        "name": name,
    }
    given = {key: value for key, value in values.items() if value is not None}
    setup_logging(LoggingSection())
    if resume is not None:
        _check_resume(
            {**given, "with-code": with_code, "namespace": place.namespace, "dry-run": dry_run or None}, set_, file
        )
        sweep = reopen(find_sweep(root, resume), config)
        _check_place(sweep.is_launched, launch, place, with_code)
    else:
        _check_place(launch, launch, place, with_code)
        spec, read = _read(given, file)
        sets = [*(set_ or []), *short_options(None, None, None, None, place.namespace)]
        if not launch and is_given(ctx, "root"):
            sets.append(f"output.root_dir={json.dumps(root)}")
        sweep, known = prepare(spec, read, spec.config, sets, root if launch else None, with_code)
        if launch:
            from llmtrain.sweep.cluster import check_launch, check_names

            for warning in check_launch(known, sweep.configs, sweep.code, with_code):
                print_warning(warning)
        price = price_sweep(sweep, known)
        if dry_run:
            value = {"trials": [trial.as_dict() for trial in known], "price": price.as_dict()}
            show(json_, value, plan_text(sweep, known, price))
            return
        if not json_:
            show(False, {}, plan_text(sweep, [], price))
        if launch:
            check_names(sweep, known, place)
        sweep.create(known)
    _run(sweep, parallel, place)
    value = describe(sweep.directory)
    show(json_, value, table_text(value), {"Best:": "green"})


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a sweep.")],
    best: Annotated[bool, typer.Option("--best", help="Print the config of the best trial as YAML.")] = False,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Show the table of a sweep, also while it runs, or the config of its best trial."""
    from llmtrain.commands.sweep_text import table_text
    from llmtrain.sweep.record import find_sweep
    from llmtrain.sweep.show import describe, read_best

    sweep = find_sweep(root, name)
    if best:
        text = read_best(sweep)
        show(json_, {"name": sweep.name, "config": text}, text.rstrip("\n"))
        return
    value = describe(sweep)
    show(json_, value, table_text(value), {"Best:": "green"})


def _read(given: dict[str, Any], file: Path | None) -> Any:
    """The spec of a sweep file, or of the options; options come before the fields of the file."""
    from llmtrain.sweep.space import parse_space
    from llmtrain.sweep.spec import read_file, read_spec

    values: dict[str, Any] = {}
    source = "the sweep"
    if file is not None:
        document = read_file(file)
        values = document.values
        source = document.source
    if "space" in given:
        given["space"] = parse_space(given["space"])
    return read_spec({**values, **given}, source)


def _check_resume(given: dict[str, Any], set_: list[str] | None, file: Path | None) -> None:
    names = [f"--{name}" for name, value in given.items() if name != "config" and value is not None]
    names += ["--set"] * bool(set_) + ["--file"] * bool(file)
    if names:
        raise UsageError(
            f"--resume continues a sweep as it was started; it cannot be combined with {', '.join(names)}.",
            remedy="Leave them out, or start another sweep.",
        )


def _check_place(is_launched: bool, launch: bool, place: ClusterPlace, with_code: str | None) -> None:
    """Refuse options of a cluster for a sweep of this machine."""
    if is_launched:
        return
    if launch:
        raise UsageError("This sweep was started without --launch.", remedy="Leave it out, or start another sweep.")
    names = [f"--{name}" for name, value in vars(place).items() if value is not None]
    names += ["--with-code"] * (with_code is not None)
    if names:
        raise UsageError(
            f"{', '.join(names)} only applies with --launch.",
            remedy="Add --launch, or leave it out: here, classes are imported from the directory of the config.",
        )


def _run(sweep: "Sweep", parallel: int | None, place: ClusterPlace) -> None:
    from llmtrain.sweep.driver import drive
    from llmtrain.sweep.local import LocalWorkers, default_parallel, warn_of_inexact_gpus

    if sweep.is_launched:
        from llmtrain.sweep.cluster import ClusterWorkers

        drive(sweep, ClusterWorkers(sweep.directory, place, sweep.code), parallel or sweep.budget.trials)
        return
    warn_of_inexact_gpus(sweep.base.run)
    count = parallel or default_parallel(sweep.base.run, sweep.threads or 1)
    drive(sweep, LocalWorkers(sweep.directory, sweep.base.run.device, sweep.search_path), count)
