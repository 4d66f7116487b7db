"""The functions that `import llmtrain` offers. They share their work with the commands, raise the errors of errors.py
and print nothing, except for the progress of `train`.

Imports are inside the functions: cluster functions run without torch, the others without the Kubernetes client.
"""

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from llmtrain.core.arguments import (
    Source,
    as_integer,
    as_text,
    check_callable,
    check_event,
    check_one_of,
    check_overrides,
    optional_text,
    run_name,
)
from llmtrain.core.env import openmp_variables, scoped_environment
from llmtrain.core.logs import scoped_logging, warn
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.config.load import ConfigSource, Override
    from llmtrain.config.schema import Config
    from llmtrain.core.progress import ProgressMode
    from llmtrain.inference.export import Format
    from llmtrain.inference.loaded_model import Dtype, Evaluation, ExportResult, Model
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.operate.cluster_run import ClusterRun
    from llmtrain.operate.fetch.choice import Only
    from llmtrain.operate.fetch.fetch_run import FetchResult
    from llmtrain.operate.fetch.transfer import FetchProgress
    from llmtrain.operate.status.run_status import RunStatus
    from llmtrain.runs.explain import Why
    from llmtrain.runs.result import TrainResult

PathLike = str | os.PathLike[str]
Overrides = Sequence[str] | Mapping[str, Any]
OnLog = Callable[[int, dict[str, float]], None]

_is_training = threading.Lock()


def load_config(source: "ConfigSource | None" = None, overrides: Overrides = ()) -> "Config":
    """Load a config and check it.

    source: the name of a preset, the path of a YAML file, a dict of sections, or another config. Default: gpt_stdlib.
    overrides: {"trainer.lr": 1e-3}, {"trainer": {"lr": 1e-3}}, or ["trainer.lr=1e-3"] with YAML values as for `--set`.

    Raises ConfigError with all problems at once. The config is frozen; derive another one with
    `load_config(config, {...})`.
    """
    return _load_config(source, overrides)


def _load_config(source: "ConfigSource | None", overrides: Overrides = (), for_launch: bool = False) -> "Config":
    from llmtrain.config.load import load_config

    return load_config(
        source,
        _override_list(overrides),
        for_launch=for_launch,
        overridden_by="override",
        # stacklevel: the line that called load_config, train or submit.
        on_note=lambda note: warnings.warn(note, stacklevel=5),
    )


def _override_list(overrides: Any) -> "list[Override]":
    """Overrides as load_config takes them, which checks the fields and their values."""
    from llmtrain.config.load import flat_overrides

    check_overrides(overrides)
    if isinstance(overrides, Mapping):
        return list(flat_overrides(overrides))
    return list(overrides)


def train(
    config: "ConfigSource | None" = None,
    *,
    resume: PathLike | None = None,
    start_from: PathLike | None = None,
    allow_config_change: bool = False,
    progress: "ProgressMode" = "auto",
    on_log: OnLog | None = None,
    stop: threading.Event | None = None,
) -> "TrainResult":
    """Train a config to its end and return the result; under torchrun, in every process.

    config: as for load_config. None: the recorded config of the run to resume or to start from.
    resume: resume a run (id, checkpoint path or `auto`).
    start_from: start a new run with the weights of another one: RUN or RUN@STEP.
    allow_config_change: resume even though the config changed in a way that affects results.
    progress: how standard error shows it: `bar` or `log` lines; `auto`, a bar in a terminal or notebook and log lines
        elsewhere; `none`, warnings only. The log file of the run always has every line.
    on_log: called as on_log(step, metrics) with each row of metrics.jsonl, on rank 0. What it raises ends the run as
        failed and is raised to the caller.
    stop: setting this event, from another thread or from on_log, saves a checkpoint and raises Interrupted. In the main
        thread SIGTERM and Ctrl-C do the same.

    Raises Interrupted if the run was stopped and can be resumed. One process trains one config at a time.
    """
    from llmtrain.core.progress import ProgressMode

    check_one_of("progress", progress, get_args(ProgressMode))
    check_callable("on_log", on_log)
    check_event("stop", stop)
    resume = run_name("resume", resume)
    start_from = run_name("start_from", start_from)
    if config is None and resume in (None, "auto") and start_from is None:
        raise UsageError("No config was given.", remedy="Pass a config, or the run to resume.")
    if start_from and resume not in (None, "auto"):
        raise UsageError("start_from starts a new run and resume continues one.", remedy="Pass one of them.")
    if not _is_training.acquire(blocking=False):
        raise UsageError(
            "This process is already training.", remedy="Wait until it has finished, or train in another process."
        )
    try:
        from llmtrain.training.shutdown import StopFlag

        loaded = _config_to_train(config, resume, start_from)
        root = Path(loaded.output.root_dir).expanduser().absolute()
        with StopFlag(stop, may_exit=False) as flag, scoped_logging():
            _import_torch()
            from llmtrain.training.run import run_training
            from llmtrain.training.torch_settings import default_settings, restored_settings

            with restored_settings(), default_settings():
                result = run_training(loaded, resume, allow_config_change, flag, progress, start_from, on_log)
        if result.run_dir.is_absolute():
            return result
        # With the root of the beginning: on_log may have changed the current directory since.
        return replace(result, run_dir=root / result.run_dir.name)
    finally:
        _is_training.release()


def _config_to_train(config: "ConfigSource | None", resume: str | None, start_from: str | None) -> "Config":
    from llmtrain.runs.recorded_config import config_to_resume, config_to_start_from

    if config is not None:
        return _load_config(config)
    if start_from:
        return _load_config(*config_to_start_from(start_from))
    return config_to_resume(str(resume))


def load_model(
    run: PathLike | None = None,
    *,
    adapter: PathLike | None = None,
    model: PathLike | None = None,
    checkpoint: str | int = "best",
    device: str = "auto",
    root: PathLike = "runs",
) -> "Model":
    """Load a trained model, to generate with it, evaluate it or export it: `load_model("first").generate("The ")`.

    run: run id, or path of a run directory.
    adapter: directory of a peft adapter.
    model: model directory or name on the hub; with a run or an adapter: its base model.
    checkpoint: best (or latest if there is none), latest, or the number of a step, also as step_<N>.
    device: auto, cpu or cuda.
    root: directory of all runs.
    """
    _import_torch()
    from llmtrain.inference.loaded_model import Model

    if not isinstance(checkpoint, str):
        checkpoint = f"step_{as_integer('checkpoint', checkpoint)}"
    paths = run_name("run", run), optional_text("adapter", adapter), optional_text("model", model)
    return Model(Source(*paths, checkpoint, as_text("root", root)), device)


def generate(
    run: PathLike,
    prompt: str = "",
    *,
    raw: bool = False,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float | None = None,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
    checkpoint: str | int = "best",
    device: str = "auto",
    root: PathLike = "runs",
) -> str:
    """Load the model of a run and continue a prompt, see Model.generate. To do it more than once, use load_model."""
    model = load_model(run, checkpoint=checkpoint, device=device, root=root)
    return model.generate(
        prompt,
        raw=raw,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        on_text=on_text,
    )


def evaluate(
    run: PathLike,
    files: PathLike | Sequence[PathLike],
    *,
    batch_size: int = 8,
    block_size: int | None = None,
    checkpoint: str | int = "best",
    device: str = "auto",
    root: PathLike = "runs",
) -> "Evaluation":
    """Load the model of a run and compute its loss on files, see Model.evaluate."""
    model = load_model(run, checkpoint=checkpoint, device=device, root=root)
    return model.evaluate(files, batch_size=batch_size, block_size=block_size)


def export(
    run: PathLike,
    to: PathLike,
    *,
    merge: bool = False,
    dtype: "Dtype | None" = None,
    base_model: str | None = None,
    format: "Format" = "hf",
    check: bool = True,
    checkpoint: str | int = "best",
    root: PathLike = "runs",
) -> "ExportResult":
    """Write the model of a run to a directory that transformers, peft or llama.cpp loads, see Model.export."""
    from llmtrain.inference.export import ExportOptions
    from llmtrain.inference.loaded_model import export_once

    model = load_model(run, checkpoint=checkpoint, device="cpu", root=root)
    return export_once(model.loaded, model.source, to, base_model, ExportOptions(merge, dtype, format, check))


def metrics(run: PathLike, *, wide: bool = False, root: PathLike = "runs") -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, also while it trains. `pandas.DataFrame(llmtrain.metrics("first"))` works.

    wide: one row per step, with all metrics of that step, evaluations too, and the same keys in every row: None where a
        step has no such metric.
    """
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.metrics import wide_rows
    from llmtrain.runs.view import RunView

    directory = find_run(as_text("root", root), str(run_name("run", run)))
    rows = list(RunView(directory).read_rows())
    return wide_rows(rows) if wide else rows


def list_runs(
    *, sort: str | None = None, limit: int | None = None, text: str | None = None, root: PathLike = "runs"
) -> list[dict[str, Any]]:
    """State, step, losses, data and model of each run: the rows of `llmtrain runs list --json`.

    sort: age (newest first), best_val_loss, lr, run_id, step, train_loss or val_loss. Default: oldest first.
    limit: number of runs; without sort: the newest.
    text: only runs with this text in id, name, status, data or model.
    root: directory of all runs.
    """
    from llmtrain.runs import directory
    from llmtrain.runs.listing import SORT_KEYS, select_rows, summarize_all

    if sort is not None:
        check_one_of("sort", sort, SORT_KEYS)
    if limit is not None:
        limit = as_integer("limit", limit)
    rows = summarize_all(directory.list_runs(as_text("root", root)))
    return select_rows(rows, sort, limit, optional_text("text", text))


def compare_runs(runs: Sequence[PathLike], *, group_by: Sequence[str] = (), root: PathLike = "runs") -> dict[str, Any]:
    """What differs between two runs or more, and which are best: the object of `llmtrain runs compare --json`.

    runs: run ids, or paths of run directories.
    group_by: config fields, such as trainer.lr; runs with the same values are samples of one setting.
    """
    from llmtrain.runs.compare import compare
    from llmtrain.runs.directory import find_run

    if isinstance(runs, str) or len(runs) < 2:
        raise UsageError("runs must be a list of at least two runs.", remedy="llmtrain.list_runs() lists them.")
    names = [str(run_name("runs", run)) for run in runs]
    return compare([find_run(as_text("root", root), name) for name in names], group_by)


# On a Kubernetes cluster.


def submit(
    config: "ConfigSource",
    *,
    resume: bool = False,
    with_code: PathLike | None = None,
    kubeconfig: PathLike | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> "ClusterRun":
    """Launch a run on a Kubernetes cluster, without waiting for it to start. Returns a handle: `run.status()`,
    `run.logs(follow=True)`, `run.why()`, `run.stop()`, `run.resume()`, `run.fetch()`, `run.delete()`.

    config: as for load_config. `output.run_id` names the run, the section `launch` describes its pods.
    resume: resume the run if it exists and has ended.
    with_code: a directory with your own classes, which every pod gets.
    kubeconfig, context, namespace: as for kubectl; `launch.namespace` of the config comes before the context's.
    """
    from llmtrain.launch.plan_job import plan_job
    from llmtrain.launch.plugin_code import plugin_code
    from llmtrain.launch.pod_memory import memory_warnings
    from llmtrain.operate.cluster_run import ClusterRun
    from llmtrain.operate.start import start_run

    loaded = _load_config(config, {"launch.namespace": namespace} if namespace else (), for_launch=True)
    cluster = _connect(kubeconfig, context)
    loaded = loaded.with_values("launch", namespace=loaded.launch.namespace or cluster.namespace)
    code, warnings = plugin_code(loaded, "the config", optional_text("with_code", with_code))
    plan = plan_job(loaded, nonce=os.urandom(3).hex(), code=code)
    for warning in (*warnings, *plan.warnings, *memory_warnings(plan)):
        warn("K8S", warning)
    start_run(cluster, plan, resume)
    run = ClusterRun.find(cluster, plan.run_id, plan.namespace)
    run.status(with_log=False, with_usage=False)  # its fields are attributes of the handle
    return run


def cluster_run(
    run: str, *, kubeconfig: PathLike | None = None, context: str | None = None, namespace: str | None = None
) -> "ClusterRun":
    """The handle on a run that is on the cluster already."""
    from llmtrain.operate.cluster_run import ClusterRun

    return ClusterRun.find(_connect(kubeconfig, context), as_text("run", run), namespace)


def status(
    run: str, *, kubeconfig: PathLike | None = None, context: str | None = None, namespace: str | None = None
) -> "RunStatus":
    """The status of a run on the cluster: its state, step, loss and pods. `has_ended` is true once it has ended."""
    return cluster_run(run, kubeconfig=kubeconfig, context=context, namespace=namespace).status()


def why(
    run: str, *, kubeconfig: PathLike | None = None, context: str | None = None, namespace: str | None = None
) -> "Why":
    """Diagnose a run on the cluster: cause (`unknown` if none was found), evidence and remedy."""
    return cluster_run(run, kubeconfig=kubeconfig, context=context, namespace=namespace).why()


def fetch(
    run: str,
    *,
    to: PathLike = "runs",
    only: "Only" = "all",
    claim: str | None = None,
    image: str | None = None,
    on_progress: "Callable[[FetchProgress], None]" = lambda _: None,
    kubeconfig: PathLike | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> "FetchResult":
    """Download a run from the cluster's volume, while it runs or after all of its pods are gone. Call it again to
    download what is new or to continue an interrupted download.

    to: directory in which the run directory is created.
    only: all, best (the best checkpoint), metrics or logs.
    claim: PersistentVolumeClaim to read if the run has been deleted.
    image: image of the reader pod; it only needs python3.
    on_progress: called with the bytes `received` and `expected`.
    """
    from llmtrain.operate.cluster_run import ClusterRun
    from llmtrain.operate.fetch.find_record import find_run_to_fetch
    from llmtrain.runs.directory import check_run_id

    check_run_id(as_text("run", run))
    cluster = _connect(kubeconfig, context)
    record = find_run_to_fetch(cluster, run, namespace or cluster.namespace, claim, image)
    return ClusterRun(cluster, record).fetch(as_text("to", to), only=only, on_progress=on_progress)


def _connect(kubeconfig: PathLike | None, context: str | None) -> "Cluster":
    from llmtrain.kubernetes.client import Cluster

    return Cluster.connect(optional_text("kubeconfig", kubeconfig), context)


def _import_torch() -> None:
    with scoped_environment(openmp_variables()):
        import torch  # noqa: F401
