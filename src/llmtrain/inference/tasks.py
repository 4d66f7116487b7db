"""Scores of a trained model on tasks, and of the baseline that it is compared with, on the same items.

How items are scored: training/tasks/, where own_tasks.py reads files of the user's questions, and stock_tasks.py those
of lm_eval.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from llmtrain.config.data import DataSection
from llmtrain.config.task_specs import parse_tasks
from llmtrain.core.arguments import Source
from llmtrain.core.logs import warn
from llmtrain.errors import UsageError
from llmtrain.hub.find import find_model_config, looks_like_path
from llmtrain.inference.evaluate import base_model
from llmtrain.inference.load import LoadedModel, choose_checkpoint, load_model
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
    baseline_truncated: dict[str, int] = field(default_factory=dict)
    """Task -> items of which the baseline could not read the beginning."""

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
            "baseline_truncated": self.baseline_truncated,
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


@dataclass
class Baseline:
    """What models are compared with, on the same items."""

    source: Source | None
    """None: what each model was fine-tuned from."""
    _scored: tuple[str, list[TaskScore]] | None = field(default=None, init=False)

    def score(self, loaded: LoadedModel, tasks: TaskSet, options: TaskOptions) -> tuple[str, list[TaskScore]]:
        """Its label, and its scores; those of a model that several others are compared with are computed once."""
        if self.source is None:
            return _score_own_base(loaded, tasks, options)
        if self._scored is None:
            other = load_model(self.source, world=loaded.world)
            model = task_model(other, other.computing, options, "Scoring the baseline")
            self._scored = other.label, tasks.score(model)
        return self._scored


def find_baseline(name: str, source: Source) -> Baseline:
    """The baseline of that name: `base`, a run or a model, for a model from `source`. It is not loaded yet."""
    if name in {run.run_id for run in list_runs(source.root)} or (Path(name) / "checkpoints").is_dir():
        choose_checkpoint(find_run(source.root, name), "best")
        return Baseline(Source(run=name, root=source.root))
    if name == OWN_BASE:
        _check_has_base(source)
        return Baseline(None)
    if "/" not in name and not looks_like_path(name) and not Path(name).is_dir():
        raise UsageError(
            f"--baseline '{name}' is neither a run nor a model.",
            remedy=f"Pass a run, a model directory, owner/name on the hub, or {OWN_BASE}: what the run started from.",
        )
    find_model_config(name, None, local_files_only=False, field="--baseline")
    return Baseline(Source(model=name))


def _check_has_base(source: Source) -> None:
    if source.run:
        checkpoint = choose_checkpoint(find_run(source.root, source.run), source.checkpoint)
        if checkpoint.state().get("base_sha256") is None:
            raise _no_base(source.run)
    elif not source.adapter:
        raise _no_base(str(source.model))


def _no_base(label: str) -> UsageError:
    return UsageError(
        f"--baseline {OWN_BASE}: {label} was not fine-tuned from a model, or that model is gone.",
        remedy="Pass a run, a model directory or the name of a model on the hub.",
    )


@default_settings()
def evaluate_tasks(
    loaded: LoadedModel,
    tasks: TaskSet,
    options: TaskOptions,
    baseline: Baseline | None = None,
    source: Source | None = None,
) -> TaskEvaluation:
    """`source`: what `loaded` was loaded from. The baseline comes first: it may turn out to be unusable."""
    compared = None if baseline is None else baseline.score(loaded, tasks, options)
    scores = tasks.score(task_model(loaded, loaded.computing, options))
    by_name = {score.task: score for score in scores}
    if source and source.run and loaded.step is not None and loaded.world.is_first:
        _record(find_run(source.root, source.run), loaded.step, scores)
    if compared is None:
        return TaskEvaluation(loaded.label, loaded.step, by_name)
    label, others = compared
    cut = {score.task: score.truncated for score in others if score.truncated}
    return TaskEvaluation(loaded.label, loaded.step, by_name, label, compare_scores(scores, others), cut)


def _record(run: RunDirectory, step: int, scores: Sequence[TaskScore]) -> None:
    """Beside the run's other files, for `runs compare`, the page and the model card."""
    try:
        write_task_scores(run, step, {score.task: score.as_dict() for score in scores})
    except OSError as problem:  # runs of others may be read-only
        warn("EVAL", f"the scores are not recorded in {run.shown(run.task_scores)}: {problem.strerror or problem}")


def _score_own_base(loaded: LoadedModel, tasks: TaskSet, options: TaskOptions) -> tuple[str, list[TaskScore]]:
    with base_model(loaded) as module:
        if module is None:
            raise _no_base(loaded.label)
        computing = loaded.in_compute_dtype(module)
        return "its base model", tasks.score(task_model(loaded, computing, options, "Scoring the baseline"))


def task_model(loaded: LoadedModel, module: nn.Module, options: TaskOptions, activity: str = "Scoring") -> TaskModel:
    """`module`: that of `loaded`, or its base model."""
    template = chat_template(loaded.config.data, loaded.tokenizer_dir, loaded.is_run, options.chat_template)
    return TaskModel(
        adapter=loaded.adapter,
        module=module,
        autocast=loaded.autocast,
        tokenizer=loaded.tokenizer,
        world=loaded.world,
        template=template,
        batch_size=options.batch_size,
        seed=loaded.config.run.seed,
        stop=options.stop,
        on_progress=lambda _, done, total: options.on_progress(activity, done, total),
    )
