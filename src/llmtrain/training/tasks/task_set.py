"""From the names of tasks to tasks, and to the scores of a model on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config.best_metric import metric_name, task_of
from llmtrain.config.data import DataSection
from llmtrain.config.task_specs import BUNDLED, TaskSpec
from llmtrain.config.trainer import TrainerSection
from llmtrain.data.cache_dir import task_data_dir
from llmtrain.errors import UsageError
from llmtrain.hub.task_index import task_folder
from llmtrain.training.tasks.item_kinds import file_of
from llmtrain.training.tasks.own_tasks import OwnTask, read_task
from llmtrain.training.tasks.score import TaskScore, check_readable
from llmtrain.training.tasks.task_model import TaskModel

if TYPE_CHECKING:
    from llmtrain.training.tasks.stock_tasks import StockTasks


@dataclass(frozen=True)
class TaskSet:
    """Tasks with their items, ready to be scored, repeatedly and with several models."""

    own: list[OwnTask]
    stock: "StockTasks | None"

    @property
    def metrics(self) -> dict[str, tuple[str, ...]]:
        """Task -> names of its metrics."""
        found = {task.name: task.metrics for task in self.own}
        if self.stock:
            found |= self.stock.metrics
        return found

    def score(self, model: TaskModel) -> list[TaskScore]:
        scores = [task.score(model) for task in self.own]
        if self.stock:
            scores += self.stock.score(model)
        check_readable({score.task: score.items - score.truncated for score in scores}, model.max_length)
        return scores


def load_tasks(specs: Sequence[TaskSpec], directory: Path, limit: int | None) -> TaskSet:
    """The tasks with their data: that of stock tasks is below `directory`. `limit`: only the first items of each."""
    own = []
    stock = []
    for spec in specs:
        if spec.is_stock:
            stock.append(spec)
            continue
        file = file_of(spec)
        if file.is_dir():
            raise UsageError(f"--tasks: {file} is a directory.", remedy="Name the file of items in it.")
        if not file.is_file():
            raise UsageError(f"--tasks: file {file} does not exist.", remedy=f"Tasks without a file: {_examples()}.")
        own.append(read_task(file, spec.name, spec.few_shot or 0, limit))
    if not stock:
        return TaskSet(own, None)
    task_folder()  # raises if lm_eval is not installed
    from llmtrain.training.tasks.stock_tasks import load_stock_tasks

    return TaskSet(own, load_stock_tasks(stock, directory, limit))


def load_eval_tasks(trainer: TrainerSection, data: DataSection) -> TaskSet | None:
    """The tasks of trainer.eval_tasks, with their data; None if there are none."""
    section = trainer.eval_tasks
    if section is None:
        return None
    tasks = load_tasks(section.specs(), task_data_dir(data, section.dir), section.limit)
    _check_best_metric(trainer, tasks)
    return tasks


def _check_best_metric(trainer: TrainerSection, tasks: TaskSet) -> None:
    task = task_of(trainer.best_metric)
    if task is None:
        return
    metrics = tasks.metrics.get(task)
    if metrics is not None and metric_name(trainer.best_metric) not in metrics:
        raise UsageError(
            f"trainer.best_metric is {trainer.best_metric}, and the task '{task}' has no such metric.",
            known=[f"tasks/{task}/{metric}" for metric in metrics],
        )


def _examples() -> str:
    return ", ".join((*BUNDLED, "and those of lm_eval"))
