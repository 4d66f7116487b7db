"""llmtrain train: start or resume a training run."""

import os
import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.options import (
    DEFAULT_ROOT,
    ConfigOption,
    JsonOption,
    LocalOnlyOption,
    ModelDirOption,
    SetOption,
    TokenizerDirOption,
    complete_run,
    shorthands,
    show,
)
from llmtrain.commands.processes import diagnosed_join_errors, forwarded_options
from llmtrain.core.files import is_full
from llmtrain.core.logs import is_debugging, setup_logging
from llmtrain.core.progress import phases
from llmtrain.core.terminal import discard, format_table, printable, say, stream_width
from llmtrain.core.text import plural
from llmtrain.errors import TrainingFailed, UsageError
from llmtrain.runs.directory import new_run
from llmtrain.runs.generations import start_seconds
from llmtrain.runs.json_values import dictionary

if TYPE_CHECKING:
    from llmtrain.config.schema import Config


FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@STEP]",
        help="Start a new run from the weights of another one: RUN@best (the default), @latest or @STEP. Without "
        "--config it has the same config.",
        show_default=False,
        autocompletion=complete_run,
    ),
]


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Resume a run (id, checkpoint path or `auto`).", show_default=False),
    ] = None,
    from_: FromOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run one forward pass; report sizes and memory.")] = False,
    allow_config_change: Annotated[
        bool,
        typer.Option(
            "--allow-config-change", help="Resume even though the config changed in a way that affects results."
        ),
    ] = False,
    profile_start: Annotated[
        bool, typer.Option("--profile-start", help="Print at the end how long each phase of the start took.")
    ] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes on this machine.")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="With --processes: restarts after a crash, from the newest checkpoint.")
    ] = 10,
    model_local_dir: ModelDirOption = None,
    tokenizer_local_dir: TokenizerDirOption = None,
    local_files_only: LocalOnlyOption = False,
    json_: JsonOption = False,
) -> None:
    """Train a model. The default config is the preset gpt_stdlib."""
    _check_options(
        from_, resume, dry_run, profile_start, processes, {"model": model_local_dir, "tokenizer": tokenizer_local_dir}
    )
    from llmtrain.config.load import DEFAULT_PRESET
    from llmtrain.training.requirements import check_requirements

    overrides = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    config, overrides, loaded = _load(config, overrides, resume, from_, processes or 1)
    setup_logging(loaded.logging)
    if not (resume or _is_launched()):  # a finished run needs no data, and in a pod only rank 0 reads it
        check_requirements(config or DEFAULT_PRESET, loaded.sections())
    if processes:
        from llmtrain.training.local_processes import train_in_processes

        options = forwarded_options(config, overrides, json_)
        if from_:
            options += ["--from", from_]
        if allow_config_change:
            options.append("--allow-config-change")
        if profile_start:
            options.append("--profile-start")
        train_in_processes(loaded, processes, max_restarts, resume, options)
        return
    train_here(loaded, json_, resume, from_, dry_run, allow_config_change, profile_start)


def train_here(
    loaded: "Config",
    json_: bool,
    resume: str | None = None,
    from_: str | None = None,
    dry_run: bool = False,
    allow_config_change: bool = False,
    profile_start: bool = False,
) -> None:
    """Train in this process."""
    if not (_is_launched() or resume or dry_run):  # of several processes, rank 0 may have created it already
        new_run(loaded.output.root_dir, loaded.output.run_id, loaded.run.name)  # before torch is loaded

    from llmtrain.training.shutdown import StopFlag

    # Importing torch takes seconds, in which a pod may receive SIGTERM.
    with phases("loading torch"), StopFlag() as stop:
        if dry_run:
            from llmtrain.training.dry_run import dry_run as report_sizes

            report = report_sizes(loaded)
            if report is not None:
                show(json_, report, _dry_run_text(report))
        else:
            from llmtrain.distributed.world import current_process_info
            from llmtrain.training.run import run_training

            if is_debugging():
                _diagnose(loaded)
            with diagnosed_join_errors(loaded):
                result = run_training(loaded, resume, allow_config_change, stop, start_from=from_)
            if current_process_info(loaded.distributed).rank == 0:
                values = result.as_dict()
                if profile_start:
                    say(_start_table(values), file=sys.stderr)
                _show(json_, values)


def _is_launched() -> bool:
    """Whether a launcher such as torchrun has started this process, perhaps as one of several."""
    from llmtrain.distributed.platform_env import NAMES

    return any(name in os.environ for names in NAMES.values() for name in names)


def _check_options(
    from_: str | None,
    resume: str | None,
    dry_run: bool,
    profile_start: bool,
    processes: int | None,
    directories: dict[str, str | None],
) -> None:
    if "" in (from_, resume):
        raise UsageError("--from and --resume must not be empty.", remedy="Pass a run, or leave the option out.")
    if dry_run and (resume or processes or from_ or profile_start):
        raise UsageError("--dry-run cannot be combined with --resume, --processes, --from or --profile-start.")
    if from_ and resume not in (None, "auto"):
        raise UsageError(
            "--from starts a new run and --resume continues one.", remedy="Pass one of them, or --resume auto."
        )
    for what, directory in directories.items():
        if directory is not None and not Path(directory).expanduser().is_dir():
            raise UsageError(
                f"--{what}-local-dir: the directory '{directory}' does not exist (looked in {Path.cwd()})."
            )


def _diagnose(config: "Config") -> None:
    """LLMTRAIN_DEBUG=1: print the report of `llmtrain doctor` first."""
    from llmtrain.doctor.diagnose import diagnose
    from llmtrain.doctor.report import Report

    print(Report(diagnose(config)).text(is_terminal=sys.stderr.isatty()), file=sys.stderr, flush=True)


def _load(
    config: str | None, overrides: list[str], resume: str | None, from_: str | None, processes: int
) -> tuple[str | None, list[str], "Config"]:
    """The given config with overrides; without one, that of the run to resume or to start from. A default batch is
    split for the processes, and overrides pass the numbers to them."""
    from llmtrain.config.load import load_config
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.recorded_config import config_to_resume, config_to_start_from, is_checkpoint_path

    if config is None and from_:
        config, overrides = config_to_start_from(from_, overrides)
    elif config is None and resume not in (None, "auto"):
        return config, overrides, config_to_resume(str(resume), overrides)
    loaded = load_config(config, overrides, processes=processes)
    if processes > 1:
        overrides = [
            *overrides,
            f"trainer.micro_batch_size={loaded.trainer.micro_batch_size}",
            f"trainer.grad_accum_steps={loaded.trainer.grad_accum_steps}",
        ]
    if resume not in (None, "auto") and not is_checkpoint_path(str(resume)):
        find_run(loaded.output.root_dir, str(resume))  # a missing run is refused before torch is loaded
    return config, overrides, loaded


def _start_table(result: dict[str, Any]) -> str:
    """Seconds of each phase until the first step had ended."""
    seconds = start_seconds(dictionary(result.get("timing")).get("start"))
    total = sum(seconds.values())
    rows = [["phase of the start", "seconds", "share"]]
    for phase, value in seconds.items():
        rows.append([phase, f"{value:.2f}", f"{value / total:.0%}" if total else "-"])
    rows.append(["in all", f"{total:.2f}", ""])
    return format_table(rows)


def _show(as_json: bool, result: dict[str, Any]) -> None:
    try:
        show(as_json, result, _result_text(result), {_best_text(result): "green"})
    except OSError as problem:
        discard(sys.stdout)
        raise TrainingFailed(
            f"Run '{result['run_id']}' is finished, but its result could not be written to standard output: "
            f"{problem.strerror or problem}.",
            remedy=f"Print it again with: llmtrain train --resume {result['run_dir']}",
            reason="disk_full" if is_full(problem) else None,
        ) from None


def _result_text(result: dict[str, Any]) -> str:
    lines = _sample_lines(result)
    first_val = result.get("first_val_loss")
    val_loss = f"{result['final_val_loss']:.4f}"
    if first_val is not None:
        val_loss = _from_to(first_val, result["final_val_loss"])
    lines += [
        f"train loss  {_from_to(result['first_train_loss'], result['final_train_loss'])}",
        f"val loss    {val_loss}, {_best_text(result)}",
    ]
    bits = result.get("final_bits_per_byte")
    if bits is not None:
        lines.append(f"bits/byte   {bits:.4f} on the validation text")
    speed = f"{result['tokens_per_second']:,.0f} tokens/s on average"
    if result.get("resumed_from"):  # it is measured in this process only
        speed += f" since step {result['resumed_from']}"
    lines += [
        f"speed       {speed}, {plural(result['steps'], 'step')}",
        f"state       sha256 {result['state_sha256'][:16]}...",
        f"run         {result['run_dir']}",
    ]
    return "\n".join([*lines, *_next_steps(result)])


def _best_text(result: dict[str, Any]) -> str:
    return f"best {result['best_val_loss']:.4f} at step {result['best_step']}"


def _from_to(first: float, last: float) -> str:
    return f"{first:.4f} -> {last:.4f}"


def _sample_lines(result: dict[str, Any]) -> list[str]:
    prompt = printable(result.get("sample_prompt") or "").strip()
    sample = printable(result.get("sample") or "").strip()
    if not sample:
        return []
    lines = ["", "A sample the model wrote:"]
    if prompt:
        lines = ["", "The model's answer to:", ""]
        lines += [f"  > {line}" for line in prompt.splitlines()]
    lines.append("")
    width = stream_width(sys.stdout)
    for line in sample.splitlines():
        lines += [f"  | {part}" for part in _parts(line, width)]
    lines.append("")
    return lines


def _parts(line: str, width: int | None) -> list[str]:
    """A line of a sample, wrapped so that each part keeps its margin in a terminal of this width."""
    if width is None:
        return [line]
    return textwrap.wrap(line, max(20, width - 4), drop_whitespace=False) or [line]


def _next_steps(result: dict[str, Any]) -> list[str]:
    """What to do with a finished run: use it, train it longer, see its curve."""
    directory = Path(result["run_dir"])
    run = result["run_dir"]
    if directory.parent == Path(DEFAULT_ROOT):  # where the commands look for an id
        run = result["run_id"]
    run = shlex.quote(run)
    return [
        "",
        f"use it      llmtrain generate {run}",
        f"train more  llmtrain train --resume {run} {_longer(result)}",
        f"curves      {_where_curves_are(directory, result.get('tracking_uri'))}",
    ]


def _longer(result: dict[str, Any]) -> str:
    """The options that raise the limit, or both, at which the run has ended."""
    wanted = result.get("wanted", {})
    steps = wanted.get("max_steps")
    epochs = wanted.get("max_epochs")
    options = []
    if not epochs or (steps and result["steps"] >= steps):
        options.append(f"--set trainer.max_steps={2 * result['steps']}")
    if epochs and (not options or result["epochs"] >= epochs):
        options.append(f"--set trainer.max_epochs={2 * epochs}")
    return " ".join(options)


def _where_curves_are(directory: Path, tracking_uri: str | None) -> str:
    """A URL, a command or a file, of the best viewer that the run has data for."""
    if tracking_uri and tracking_uri.startswith("http"):
        return tracking_uri
    if tracking_uri:
        return f"mlflow ui --backend-store-uri {shlex.quote(tracking_uri)}"
    if (directory / "tensorboard").is_dir():
        return f"tensorboard --logdir {shlex.quote(str(directory))}"
    if (directory / "report.html").is_file():
        return str(directory / "report.html")
    return str(directory / "metrics.jsonl")


def _dry_run_text(report: dict[str, Any]) -> str:
    model = f"{report['model']}, {report['parameters']:,} parameters"
    if report["trainable_parameters"] < report["parameters"]:
        model += f" ({report['trainable_parameters']:,} trained)"
    step = f"{report['tokens_per_step']:,} tokens"
    if report["world_size"] > 1:
        step += f" of {report['world_size']} processes"
    return "\n".join(
        [
            f"model       {model}, on {report['device']}",
            f"data        {report['train_tokens']:,} training tokens, {report['val_tokens']:,} for validation",
            f"step        {step}; {report['steps']:,} steps are {report['epochs']} epochs",
            f"first loss  {report['loss']:.4f}",
            f"memory      {report['state_bytes'] / 1e6:,.0f} MB for weights, gradients and optimizer; "
            f"{report['peak_memory_bytes'] / 1e6:,.0f} MB at the peak of this forward pass",
            f"predicted   {_predicted_peak(report['plan'])}",
        ]
    )


def _predicted_peak(plan: dict[str, Any]) -> str:
    """`4,720 MB at the peak of a training step: fits (20 % of the memory)`"""
    peak = (plan["memory"] or {}).get("peak")
    amount = "memory of a training step" if peak is None else f"{peak / 1e6:,.0f} MB at the peak of a training step"
    return f"{amount}: {plan['verdict']} ({plan['reason']})"
