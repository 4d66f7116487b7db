"""Scores of a trained model on tasks, and of the baseline that it is compared with, on the same items."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from llmtrain.config.data import DataSection
from llmtrain.config.task_specs import parse_tasks
from llmtrain.core.arguments import Source
from llmtrain.core.logs import warn
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.hub.find import looks_like_path
from llmtrain.inference.evaluate import base_model
from llmtrain.inference.load import LoadedModel, load_model
from llmtrain.runs.directory import RunDirectory, find_run, list_runs
from llmtrain.runs.task_scores import write_task_scores
from llmtrain.training.tasks.compare import Difference, compare_scores
from llmtrain.training.tasks.score import TaskScore
from llmtrain.training.tasks.task_model import OnProgress, TaskModel, chat_template
from llmtrain.training.tasks.task_set import TaskSet, load_tasks
from llmtrain.training.torch_settings import default_settings

OWN_BASE = "base"
"""As a baseline: the model that the run or the adapter was fine-tuned from."""


@dataclass(frozen=True)
class TaskEvaluation:
    """The scores of a model on tasks. The fields are those of `llmtrain eval --tasks --json`."""

    run: str
    """Run id, or the directory of the model."""
    step: int | None
    tasks: dict[str, TaskScore]
    baseline: str | None = None
    """What the model is compared with."""
    comparison: dict[str, dict[str, Difference]] | None = None
    """Task -> metric -> the model minus the baseline; None without a baseline."""

    def as_dict(self) -> dict[str, Any]:
        comparison = None
        if self.comparison is not None:
            comparison = {
                task: {name: asdict(each) for name, each in by_metric.items()}
                for task, by_metric in self.comparison.items()
            }
        return {
            "run": self.run,
            "step": self.step,
            "tasks": {name: score.as_dict() for name, score in self.tasks.items()},
            "baseline": self.baseline,
            "comparison": comparison,
        }


@dataclass(frozen=True)
class TaskOptions:
    """How models are scored: the same for a model and its baseline."""

    batch_size: int = 8
    chat_template: bool | None = None
    """Whether to write items with the chat template. None: for models that answer."""
    stop: Callable[[], bool] = lambda: False
    on_progress: OnProgress = lambda what, done, total: None  # noqa: ARG005


def read_tasks(names: Sequence[str], directory: str | None, limit: int | None) -> TaskSet:
    """`directory`: that of the data of stock tasks; None for the default one."""
    default = Path(str(DataSection.model_fields["cache_dir"].default)).expanduser() / "tasks"
    return load_tasks(parse_tasks(names, "--tasks"), Path(directory) if directory else default, limit)


@default_settings()
def evaluate_tasks(
    loaded: LoadedModel, tasks: TaskSet, options: TaskOptions, baseline: str | None = None, source: Source | None = None
) -> TaskEvaluation:
    """`baseline`: `base`, a run, or a model. `source`: what `loaded` was loaded from."""
    scores = tasks.score(task_model(loaded, loaded.computing, options))
    by_name = {score.task: score for score in scores}
    if source and source.run and loaded.step is not None:
        _record(find_run(source.root, source.run), loaded.step, scores)
    if baseline is None:
        return TaskEvaluation(loaded.label, loaded.step, by_name)
    label, others = _score_baseline(loaded, tasks, options, baseline, (source or Source()).root)
    return TaskEvaluation(loaded.label, loaded.step, by_name, label, compare_scores(scores, others))


def _record(run: RunDirectory, step: int, scores: Sequence[TaskScore]) -> None:
    """Beside the run's other files, for `runs compare`, the page and the model card."""
    try:
        write_task_scores(run, step, {score.task: score.as_dict() for score in scores})
    except OSError as problem:  # runs of others may be read-only
        warn("EVAL", f"the scores are not recorded in {run.shown(run.task_scores)}: {problem.strerror or problem}")


def _score_baseline(
    loaded: LoadedModel, tasks: TaskSet, options: TaskOptions, baseline: str, root: str
) -> tuple[str, list[TaskScore]]:
    is_run = baseline in {run.run_id for run in list_runs(root)} or (Path(baseline) / "checkpoints").is_dir()
    if is_run or baseline != OWN_BASE:
        source = Source(run=baseline, root=root) if is_run else Source(model=_model_name(baseline))
        other = load_model(source, loaded.device.type)
        return other.label, tasks.score(task_model(other, other.computing, options, "Scoring the baseline"))
    with base_model(loaded) as module:
        if module is None:
            raise UsageError(
                f"--baseline {OWN_BASE}: {loaded.label} has no base model.",
                remedy="Pass a run, a model directory or the name of a model on the hub.",
            )
        computing = loaded.in_compute_dtype(module)
        return "its base model", tasks.score(task_model(loaded, computing, options, "Scoring the baseline"))


def _model_name(baseline: str) -> str:
    if "/" not in baseline and not looks_like_path(baseline) and not Path(baseline).is_dir():
        raise UsageError(
            f"--baseline '{baseline}' is neither a run nor a model.",
            remedy=f"Pass a run, a model directory, owner/name on the hub, or {OWN_BASE}: what the run started from.",
        )
    return baseline


def task_model(loaded: LoadedModel, module: nn.Module, options: TaskOptions, activity: str = "Scoring") -> TaskModel:
    """`module`: that of `loaded`, or its base model."""
    template = chat_template(loaded.config.data, loaded.tokenizer_dir, loaded.is_run, options.chat_template)
    return TaskModel(
        adapter=loaded.adapter,
        module=module,
        autocast=loaded.autocast,
        tokenizer=loaded.tokenizer,
        world=World(device=loaded.device),
        template=template,
        batch_size=options.batch_size,
        seed=loaded.config.run.seed,
        stop=options.stop,
        on_progress=lambda _, done, total: options.on_progress(activity, done, total),
    )
