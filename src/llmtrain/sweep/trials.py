"""The trials of a sweep: their configs, all checked before the first one starts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.config.best_metric import metric_name, task_of
from llmtrain.config.data import DataSection
from llmtrain.config.document import Document
from llmtrain.config.load import Override, build_config
from llmtrain.config.mixture import has_examples
from llmtrain.config.schema import Config
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.text import first_names, plural
from llmtrain.errors import ConfigError, LlmtrainError
from llmtrain.sweep.halving import rungs_to
from llmtrain.sweep.space import Values
from llmtrain.sweep.spec import HalvingSection, SweepSpec
from llmtrain.training.requirements import missing_requirements
from llmtrain.training.tasks.item_kinds import file_metrics

_OF_THE_SWEEP = {
    "run.name": "the sweep names its trials",
    "run.device": "all trials use the same kind of device",
    "tracking.group": "all trials are in one group",
    "output.run_id": "the sweep names its trials",
    "output.root_dir": "all trials are in one directory",
    "run.threads": "it is the same for all trials, so that their results are exact",
    "run.seed": "use --seeds, which trains the best trials with several seeds",
}
"""Fields that cannot be in a space, and why."""


@dataclass(frozen=True)
class Trial:
    number: int
    run_id: str
    values: Values
    same_as: int | None = None
    """The earlier trial with an equal config, which is trained for both."""

    def as_dict(self) -> dict[str, Any]:
        return {"number": self.number, "run_id": self.run_id, "values": self.values, "same_as": self.same_as}


@dataclass(frozen=True)
class TrialConfigs:
    """Makes the config of a trial: the shared document with the values of the trial."""

    document: Document
    shared: list[Override]
    """Fields that have the same value in all trials."""
    for_launch: bool = False

    def build(self, values: Values, run_id: str, seed: int | None = None) -> Config:
        overrides: list[Override] = [*self.shared, *values.items(), ("output.run_id", run_id)]
        if seed is not None:
            overrides.append(("run.seed", seed))
        return build_config(self.document, overrides, for_launch=self.for_launch, overridden_by="space")

    def key(self, values: Values) -> str:
        """Equal for trials with equal configs."""
        return json.dumps(self.build(values, "trial").as_dict(), sort_keys=True)


def number_trials(
    name: str, drawn: Sequence[Values], configs: TrialConfigs, earlier: Sequence[Trial] = ()
) -> list[Trial]:
    """Trials with their numbers, after the `earlier` ones. Those with equal configs are trained once. Raises
    ConfigError with the problems of all configs."""
    trials: list[Trial] = []
    seen: dict[str, int] = {}
    for trial in earlier:
        seen.setdefault(configs.key(trial.values), trial.number)
    problems: dict[str, list[str]] = {}
    for number, values in enumerate(drawn, len(earlier)):
        run_id = f"{name}-{number}"
        same_as = None
        try:
            key = configs.key(values)
        except ConfigError as error:
            for text in error.problems:
                problems.setdefault(text, []).append(str(number))
        else:
            same_as = seen.setdefault(key, number)
        trials.append(Trial(number, run_id, values, None if same_as in (None, number) else same_as))
    if problems:
        raise ConfigError("the sweep", [f"{_of(numbers)}: {text}" for text, numbers in problems.items()])
    return trials


def check_trials(spec: SweepSpec, trials: Sequence[Trial], configs: TrialConfigs) -> None:
    """Refuse what the configs of the trials do not allow, with all problems at once."""
    problems: dict[str, list[str]] = {}
    for path in spec.space:
        if path in _OF_THE_SWEEP:
            problems[f"space {path}: it cannot be varied: {_OF_THE_SWEEP[path]}."] = []
    if spec.halving and "trainer.max_steps" in spec.space:
        problems["space trainer.max_steps: it cannot be varied with halving, whose rungs are numbers of steps."] = []
    for trial in trials:
        config = configs.build(trial.values, trial.run_id)
        texts = [*_problems(spec, config.data, config.trainer)]
        if not configs.for_launch:  # what the trial needs of this machine
            texts += [_one_line(error) for error in missing_requirements(config.sections())]
        for text in texts:
            problems.setdefault(text, []).append(str(trial.number))
    if problems:
        listed = []
        for text, numbers in problems.items():
            listed.append(text if len(numbers) in (0, len(trials)) else f"{_of(numbers)}: {text}")
        raise ConfigError("the sweep", listed)


def _one_line(error: LlmtrainError) -> str:
    return f"{error.what_and_known} {error.remedy or ''}".rstrip()


def _problems(spec: SweepSpec, data: DataSection, trainer: TrainerSection) -> Iterator[str]:
    for _, text in trainer.missing(spec.metric):
        yield f"metric is {spec.metric}, {text}"
    yield from _task_problems(spec.metric, trainer)
    if spec.metric == "val/bits_per_byte" and has_examples(data):
        yield f"metric val/bits_per_byte is not written with data {data.name}, but for text only. Use val/loss."
    if spec.halving:
        yield from _schedule_problems(trainer, spec.halving)


def _task_problems(metric: str, trainer: TrainerSection) -> Iterator[str]:
    """A score that a task does not have. The metrics of stock tasks are known only when they have been loaded."""
    name = metric_name(metric)
    for task in trainer.eval_tasks.specs() if trainer.eval_tasks else ():
        if task.name != task_of(metric) or task.is_stock:
            continue
        metrics = file_metrics(task)
        if metrics is not None and name not in metrics:
            known = ", ".join(f"tasks/{task.name}/{each}" for each in metrics)
            yield f"metric is {metric}, and the task '{task.name}' has no such metric. Known: {known}."


def _schedule_problems(trainer: TrainerSection, halving: HalvingSection) -> Iterator[str]:
    """Rungs compare trials in the middle of their schedule, which must not depend on where a trial stops."""
    if trainer.max_epochs is not None:
        yield "halving needs trainer.max_steps: rungs are numbers of steps. Set trainer.max_epochs to null."
        return
    if trainer.early_stopping_patience is not None:
        yield (
            "halving needs trainer.early_stopping_patience=null: each rung adds an evaluation that would count, so a "
            "promoted trial would not be the full run. Halving itself ends trials that are worse than others."
        )
    if trainer.schedule != "constant" and trainer.schedule_steps is None:
        yield (
            f"trainer.schedule {trainer.schedule} decays until the end of a run, so a trial that stops at a rung would "
            "have decayed to min_lr there, and one that trains on would not be the same run. Set "
            f"trainer.schedule_steps={trainer.steps}: best with trainer.schedule=wsd, where rungs are compared at the "
            "constant learning rate and only the finalists decay."
        )
    rungs = rungs_to(trainer.steps, halving.first_rung, halving.eta)
    if len(rungs) < 2:
        yield (
            f"halving.first_rung {halving.first_rung} leaves one rung: with eta {halving.eta} it must be at most "
            f"{trainer.steps // halving.eta}, or trainer.max_steps must be larger than {trainer.steps}."
        )
    elif rungs[0] <= trainer.warmup_steps:
        yield (
            f"the first rung, {plural(rungs[0], 'step')}, is within trainer.warmup_steps {trainer.warmup_steps}. Raise "
            "halving.first_rung, or lower the warmup."
        )


def _of(numbers: Sequence[str]) -> str:
    noun = "trial" if len(numbers) == 1 else "trials"
    return f"{noun} {first_names(numbers)}"
