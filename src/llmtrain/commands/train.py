"""llmtrain train: start or resume a training run."""

import os
import shlex
import sys
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
from llmtrain.commands.processes import (
    diagnosed_join_errors,
    forwarded_options,
    local_node,
    run_processes,
    worker_command,
)
from llmtrain.errors import TrainingFailed, UsageError
from llmtrain.files import is_full
from llmtrain.logs import is_debugging, log, setup_logging
from llmtrain.progress import phases
from llmtrain.runs.directory import RunDirectory, new_run
from llmtrain.runs.exit_report import report_to_run
from llmtrain.terminal import discard, printable
from llmtrain.text import plural

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
    _check_options(from_, resume, dry_run, processes, {"model": model_local_dir, "tokenizer": tokenizer_local_dir})
    overrides = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    config, overrides, loaded = _load(config, overrides, resume, from_, processes or 1)
    setup_logging(loaded.logging)
    if processes:
        options = ["--from", from_] if from_ else []
        options += ["--allow-config-change"] if allow_config_change else []
        _train_in_processes(loaded, processes, max_restarts, config, overrides, resume, options, json_)
        return
    _train_here(loaded, resume, from_, dry_run, allow_config_change, json_)


def _train_here(
    loaded: "Config", resume: str | None, from_: str | None, dry_run: bool, allow_config_change: bool, json_: bool
) -> None:
    """Train in this process."""
    from llmtrain.distributed.env import NAMES

    is_launched = any(name in os.environ for names in NAMES.values() for name in names)
    if not (is_launched or resume or dry_run):  # of several processes, rank 0 may have created it already
        new_run(loaded.output.root_dir, loaded.output.run_id, loaded.run.name)  # before torch is loaded

    from llmtrain.training.shutdown import StopFlag

    # Importing torch takes seconds, in which a pod may receive SIGTERM.
    with phases("loading torch"), StopFlag() as stop:
        if dry_run:
            from llmtrain.training.dry_run import dry_run as report_sizes

            report = report_sizes(loaded)
            show(json_, report, _dry_run_text(report))
        else:
            from llmtrain.distributed.world import current_process_info
            from llmtrain.training.run import run_training

            if is_debugging():
                _diagnose(loaded)
            with diagnosed_join_errors(loaded):
                result = run_training(loaded, resume, allow_config_change, stop, start_from=from_)
            if current_process_info(loaded.distributed).rank == 0:
                _show(json_, result)


def _check_options(
    from_: str | None, resume: str | None, dry_run: bool, processes: int | None, directories: dict[str, str | None]
) -> None:
    if "" in (from_, resume):
        raise UsageError("--from and --resume must not be empty.", remedy="Pass a run, or leave the option out.")
    if dry_run and (resume or processes or from_):
        raise UsageError("--dry-run cannot be combined with --resume, --processes or --from.")
    if from_ and resume not in (None, "auto"):
        raise UsageError(
            "--from starts a new run and --resume continues one.", remedy="Pass one of them, or --resume auto."
        )
    for what, directory in directories.items():
        if directory is not None and not Path(directory).expanduser().is_dir():
            raise UsageError(
                f"--{what}-local-dir: the directory '{directory}' does not exist (looked in {Path.cwd()})."
            )


def _train_in_processes(
    loaded: "Config",
    processes: int,
    max_restarts: int,
    config: str | None,
    overrides: list[str],
    resume: str | None,
    options: list[str],
    json_: bool,
) -> None:
    """Train in several processes. The run id is chosen here, so that restarted processes find their run."""
    from llmtrain.distributed.batch_split import micro_batches_in_step
    from llmtrain.training.resume import find_resumed_run

    micro_batches_in_step(loaded, processes)
    arguments = ["train", *forwarded_options(config, overrides, json_), *options]
    run: RunDirectory | None
    if resume is None:
        run = new_run(loaded.output.root_dir, loaded.output.run_id, loaded.run.name)
        arguments += ["--set", f"output.run_id={run.run_id}", "--resume", "auto"]
    else:
        run = find_resumed_run(loaded, resume)
        arguments += ["--resume", resume]
    if run:
        report_to_run(run.absolute().exits)
    log("SETUP", f"starting {plural(processes, 'process')}")
    run_processes(local_node(processes), worker_command(*arguments), loaded.distributed, max_restarts)


def _diagnose(config: "Config") -> None:
    """LLMTRAIN_DEBUG=1: print the report of `llmtrain doctor` first."""
    from llmtrain.diagnose import diagnose
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
        trainer = loaded.trainer
        batch = {"micro_batch_size": trainer.micro_batch_size, "grad_accum_steps": trainer.grad_accum_steps}
        overrides = [*overrides, *(f"trainer.{name}={value}" for name, value in batch.items())]
    if resume not in (None, "auto") and not is_checkpoint_path(str(resume)):
        find_run(loaded.output.root_dir, str(resume))  # a missing run is refused before torch is loaded
    return config, overrides, loaded


def _show(as_json: bool, result: dict[str, Any]) -> None:
    try:
        show(as_json, result, _result_text(result))
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
    first_val, bits = result.get("first_val_loss"), result.get("final_bits_per_byte")
    since = f" since step {result['resumed_from']}" if result.get("resumed_from") else ""
    val_loss = f"{result['final_val_loss']:.4f}" if first_val is None else _from_to(first_val, result["final_val_loss"])
    lines += [
        f"train loss  {_from_to(result['first_train_loss'], result['final_train_loss'])}",
        f"val loss    {val_loss}, best {result['best_val_loss']:.4f} at step {result['best_step']}",
        *([f"bits/byte   {bits:.4f} on the validation text"] if bits is not None else []),
        f"speed       {result['tokens_per_second']:,.0f} tokens/s{since}, {plural(result['steps'], 'step')}",
        f"state       sha256 {result['state_sha256'][:16]}...",
        f"run         {result['run_dir']}",
    ]
    return "\n".join([*lines, *_next_steps(result)])


def _from_to(first: float, last: float) -> str:
    return f"{first:.4f} -> {last:.4f}"


def _sample_lines(result: dict[str, Any]) -> list[str]:
    prompt, sample = (printable(result.get(name) or "").strip() for name in ("sample_prompt", "sample"))
    if not sample:
        return []
    title = ["The model's answer to:", "", *(f"  > {line}" for line in prompt.splitlines())]
    lines = title if prompt else ["A sample the model wrote:"]
    return ["", *lines, "", *(f"  | {line}" for line in sample.splitlines()), ""]


def _next_steps(result: dict[str, Any]) -> list[str]:
    """What to do with a finished run: use it, train it longer, see its curve."""
    is_default_root = Path(result["run_dir"]).parent == Path(DEFAULT_ROOT)
    run = shlex.quote(result["run_id"] if is_default_root else result["run_dir"])
    epochs = result.get("wanted", {}).get("max_epochs")
    length = f"trainer.max_epochs={2 * epochs}" if epochs else f"trainer.max_steps={2 * result['steps']}"
    uri = result.get("tracking_uri")
    if uri:
        curve = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    elif (Path(result["run_dir"]) / "tensorboard").is_dir():
        curve = f"tensorboard --logdir {shlex.quote(result['run_dir'])}"
    else:
        names = [name for name in ("report.html", "metrics.jsonl") if (Path(result["run_dir"]) / name).is_file()]
        curve = str(Path(result["run_dir"]) / (names or ["metrics.jsonl"])[0])
    return [
        "",
        f"use it      llmtrain generate --run {run}",
        f"train more  llmtrain train --resume {run} --set {length}",
        f"curves      {curve}",
    ]


def _dry_run_text(report: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"model       {report['model']}, {report['parameters']:,} parameters"
            f"{_trained(report)}, on {report['device']}",
            f"data        {report['train_tokens']:,} training tokens, {report['val_tokens']:,} for validation",
            f"step        {report['tokens_per_step']:,} tokens; {report['steps']:,} steps are "
            f"{report['epochs']} epochs",
            f"first loss  {report['loss']:.4f}",
            f"memory      {report['state_bytes'] / 1e6:,.0f} MB for weights, gradients and optimizer; "
            f"{report['peak_memory_bytes'] / 1e6:,.0f} MB at the peak of this forward pass",
        ]
    )


def _trained(report: dict[str, Any]) -> str:
    trained = report["trainable_parameters"]
    return f" ({trained:,} trained)" if trained < report["parameters"] else ""
