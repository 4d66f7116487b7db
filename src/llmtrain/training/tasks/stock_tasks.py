"""The tasks of lm_eval: it has their prompts, few-shot examples, filters and metrics; the model and the data are ours.

Nothing of it is downloaded: each task is a small YAML file that includes the stock one and names a local directory of
data. lm_eval's own start, which seeds all random state and reads 14,000 files, is left out.
"""

import logging
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from llmtrain.config.task_specs import TaskSpec
from llmtrain.core.text import one_line
from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.hub.task_index import StockTask, find_stock_tasks
from llmtrain.hub.tasks import find_task_data
from llmtrain.training.random_state import preserved
from llmtrain.training.tasks.lm_eval_model import LmEvalModel
from llmtrain.training.tasks.score import TaskScore, items_sha256, mean, standard_error
from llmtrain.training.tasks.task_model import TaskModel

NO_FILTER = "none"
"""lm_eval's name for the filter of an answer that is used as it is."""


@dataclass(frozen=True)
class StockTasks:
    loaded: Any
    """What lm_eval's TaskManager has loaded: tasks and groups."""
    limit: int | None

    @property
    def metrics(self) -> dict[str, tuple[str, ...]]:
        """Task -> names of its metrics, as far as they are known before it is scored."""
        return {name: tuple(task.higher_is_better()) for name, task in self.loaded["tasks"].items()}

    def score(self, model: TaskModel) -> list[TaskScore]:
        lm = LmEvalModel(model)
        with _seeded(), _quiet():
            for task in self.loaded["tasks"].values():
                task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # the same examples at every evaluation
            try:
                results = evaluate(
                    lm=lm,
                    task_dict=self.loaded,
                    limit=self.limit,
                    bootstrap_iters=0,  # it starts processes, and standard errors of means need none
                    apply_chat_template=model.template is not None,
                    fewshot_as_multiturn=True,
                )
            except (LlmtrainError, MemoryError, torch.OutOfMemoryError):
                raise
            except (AssertionError, ImportError, LookupError, OSError, TypeError, ValueError) as problem:
                names = ", ".join(self.loaded["tasks"])
                if _is_offline(problem):  # a metric that the hub has the code of
                    raise _needs_network(names, _text(problem)) from None
                raise DataError(f"lm_eval cannot score {names}: {_text(problem)}.") from None
        scores = [_task_score(name, results, lm) for name in self.loaded["tasks"]]
        return [*(_group_score(name, results, scores) for name in results.get("groups", {})), *scores]


def load_stock_tasks(specs: Sequence[TaskSpec], directory: Path, limit: int | None) -> StockTasks:
    tasks: dict[str, StockTask] = {}
    groups: dict[str, Path] = {}
    few_shot: dict[str, int] = {}
    for spec in specs:
        found, found_groups = find_stock_tasks([spec.name])
        groups |= found_groups
        for task in found:
            tasks[task.name] = task
            if spec.few_shot is not None:
                few_shot[task.name] = spec.few_shot
    data = {name: find_task_data(task, directory) for name, task in tasks.items()}
    with tempfile.TemporaryDirectory(prefix="llmtrain-tasks-") as folder, _seeded(), _quiet():
        for name, task in tasks.items():
            _write(Path(folder), name, {"include": str(task.file), "task": name, "dataset_path": str(data[name])})
        for name, file in groups.items():
            _write(Path(folder), name, {"include": str(file), "group": name})
        manager = TaskManager(include_path=folder, include_defaults=False)
        loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in [*groups, *tasks]:
            if name not in loaded["tasks"]:
                for kind, values in _load(manager, name, tasks.get(name)).items():
                    loaded[kind] |= values
    for name, task in loaded["tasks"].items():
        _prepare(name, task, few_shot.get(name))
    return StockTasks(loaded, limit)


def _write(folder: Path, name: str, values: Mapping[str, str]) -> None:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(values)), encoding="utf-8")


def _load(manager: Any, name: str, task: StockTask | None) -> Any:
    try:
        return manager.load([name])
    except LlmtrainError:
        raise
    except ImportError as problem:
        raise UsageError(
            f"Task '{name}' requires a package that is not installed: {_text(problem)}.",
            remedy="Install it with pip, or leave this task out.",
        ) from None
    except Exception as problem:  # tasks are code, and so are the data sets that they read
        if _is_offline(problem):
            raise _needs_network(name, _text(problem)) from None
        place = "" if task is None else f" in {task.dataset}"
        raise DataError(
            f"The data of task '{name}'{place} cannot be used: {_text(problem)}.",
            remedy=f"It is empty, damaged, or of another task. Download it again: llmtrain fetch-tasks {name} --to DIR",
        ) from None


def _is_offline(problem: BaseException) -> bool:
    text = str(problem).lower()
    return isinstance(problem, ConnectionError) or "offline" in text or "couldn't find a module script" in text


def _needs_network(name: str, why: str) -> UsageError:
    return UsageError(f"Task '{name}' needs the network: {why}.", remedy="Leave this task out.")


def _prepare(name: str, task: Any, few_shot: int | None) -> None:
    """Refuse what cannot be scored, and set the number of examples, as lm_eval does for its own command line."""
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"Task '{name}' has images or sound, which llmtrain's models do not read.")
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"Task '{name}' runs code that the model writes, which llmtrain does not do.")
    if task.OUTPUT_TYPE == "generate_until" and task.get_config("process_results") is None:
        for metric, function in task._metric_fn_list.items():
            if function is None:  # lm_eval only logs that
                raise _needs_network(name, f"the code of its metric '{metric}' is on the hub, which cannot be reached")
    own = task.get_config("num_fewshot")
    if few_shot is not None and own != 0:  # 0 means that its prompts have no place for examples
        task.set_config(key="num_fewshot", value=few_shot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)


# Results


def _task_score(name: str, results: Any, lm: LmEvalModel) -> TaskScore:
    samples = results["samples"][name]
    metrics = {}
    values = {}
    for key, value in results["results"][name].items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        label = metric if filter_name == NO_FILTER else f"{metric}.{filter_name}"
        metrics[label] = float(value)
        found = [sample.get(metric) for sample in samples if sample["filter"] == filter_name]
        if all(isinstance(each, bool | int | float) for each in found):
            numbers = [float(each) for each in found]
            if np.isclose(mean(numbers), metrics[label], rtol=1e-9, atol=1e-12):  # else it is no mean of them
                values[label] = numbers
    first = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    return TaskScore(
        task=name,
        version=str(results["versions"].get(name)),
        few_shot=int(results["n-shot"].get(name) or 0),
        items=len(first),
        truncated=sum(task == name for task, _ in lm.truncated),
        chat_template=lm.model.template is not None,
        sha256=items_sha256([sample["doc_hash"] + sample["target_hash"] for sample in first]),
        metrics=metrics,
        stderr={label: standard_error(values[label]) if label in values else None for label in metrics},
        values=values,
    )


def _group_score(name: str, results: Any, scores: Sequence[TaskScore]) -> TaskScore:
    """The mean that a group defines over its tasks."""
    members = [score for score in scores if _is_member(score.task, name, results)]
    metrics = {}
    for key, value in results["groups"][name].items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            metrics[metric if filter_name == NO_FILTER else f"{metric}.{filter_name}"] = float(value)
    return TaskScore(
        task=name,
        version=str(results["versions"].get(name)),
        few_shot=max((score.few_shot for score in members), default=0),
        items=sum(score.items for score in members),
        truncated=sum(score.truncated for score in members),
        chat_template=any(score.chat_template for score in members),
        sha256=items_sha256([score.sha256 for score in members]),
        metrics=metrics,
        stderr=dict.fromkeys(metrics),
    )


def _is_member(task: str, group: str, results: Any) -> bool:
    children = results["group_subtasks"].get(group, [])
    return task in children or any(_is_member(task, child, results) for child in children)


def _text(problem: BaseException) -> str:
    if isinstance(problem, KeyError):
        return f"it has no {problem}"
    return (one_line(problem, 300) or type(problem).__name__).rstrip(".")


@contextmanager
def _seeded() -> Iterator[None]:
    """Some tasks draw from the global random state: it starts as in lm_eval, and is restored for a run that trains."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with preserved():
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no log lines of the libraries."""
    import datasets

    datasets.disable_progress_bars()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with patch("lm_eval.api.task.tqdm", lambda rows, **_: rows):
            yield
    finally:
        logger.setLevel(level)
