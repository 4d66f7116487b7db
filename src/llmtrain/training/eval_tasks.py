"""trainer.eval_tasks: the model is scored on tasks while it trains, on all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.config.schema import Config
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.logs import warn
from llmtrain.data.base import PreparedData, PreparedMixture
from llmtrain.distributed.world import World
from llmtrain.errors import Interrupted, PeerLost, Superseded
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.task_scores import write_task_scores
from llmtrain.training.model_handle import ModelHandle
from llmtrain.training.tasks.score import TaskScore
from llmtrain.training.tasks.task_model import TaskModel, chat_template
from llmtrain.training.tasks.task_set import TaskSet


def tasks_are_due(trainer: TrainerSection, step: int, epoch: int | None, is_last: bool) -> bool:
    """Whether the evaluation after this step includes tasks: every n-th one does, and the last. It depends on the
    position only. `epoch`: the number of the epoch that ends with the step."""
    section = trainer.eval_tasks
    if section is None:
        return False
    if trainer.eval_every_steps is None:
        return is_last or (epoch is not None and epoch % section.every == 0)
    return is_last or step % (trainer.eval_every_steps * section.every) == 0


@dataclass(frozen=True)
class EvalTasks:
    config: Config
    run: RunDirectory
    model: ModelHandle
    prepared: PreparedData | PreparedMixture
    world: World
    tasks: TaskSet | None

    def score(self, is_interrupted: Callable[[], bool]) -> list[TaskScore] | None:
        """Every rank calls this and gets the same scores; None if a rank was interrupted. Neither the random state nor
        the model is changed."""
        if self.tasks is None:
            return []
        model = TaskModel(
            adapter=self.model.adapter,
            module=self.model.module,
            autocast=self.model.autocast,
            tokenizer=self.prepared.tokenizer,
            world=self.world,
            is_sharded=self.model.parallel.is_sharded,
            template=chat_template(self.config.data, self.run.tokenizer, is_run=True, requested=None),
            batch_size=self.config.trainer.micro_batch_size,
            seed=self.config.run.seed,
            stop=is_interrupted,
        )
        try:
            return self.tasks.score(model)
        except (PeerLost, Superseded):
            raise
        except Interrupted:
            return None

    def save(self, step: int, scores: Sequence[TaskScore]) -> None:
        """Record the scores beside the run's other files."""
        if not scores:
            return
        try:
            write_task_scores(self.run, step, {score.task: score.as_dict() for score in scores})
        except OSError as problem:
            warn("EVAL", f"the scores on trainer.eval_tasks could not be saved; training continues: {problem}")
