"""`llmtrain eval`: models on files and tasks, on one process or on several that a launcher has started.

What is wrong with a command is found before a model is loaded. Items and batches are divided over the processes; the
results have the same bits on any number of them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.run import RunSection
from llmtrain.core.arguments import Source
from llmtrain.core.logs import log_errors_only, scoped_logging
from llmtrain.data.text.reader import expand_files
from llmtrain.distributed.control_group import peer_errors
from llmtrain.distributed.process_info import is_worker
from llmtrain.distributed.world import World, join_world, pick_device
from llmtrain.errors import PeerLost
from llmtrain.inference.load import check_device, check_source, choose_checkpoint
from llmtrain.inference.loaded_model import Evaluation, Model, OnProgress
from llmtrain.inference.tasks import Baseline, TaskEvaluation, TaskOptions, evaluate_tasks, find_baseline, read_tasks
from llmtrain.runs.directory import find_run
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.tasks.task_model import check_has_template


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate, and on what: files, tasks, or both."""

    sources: Sequence[Source]
    files: Sequence[str] = ()
    tasks: Sequence[str] = ()
    limit: int | None = None
    tasks_dir: str | None = None
    baseline: str | None = None
    chat_template: bool | None = None
    batch_size: int = 8
    block_size: int | None = None


@dataclass(frozen=True)
class Evaluated:
    """One entry per source; empty without files, or without tasks."""

    losses: list[Evaluation]
    scores: list[TaskEvaluation]


@contextmanager
def evaluation_world(device: str, stop: StopFlag) -> Iterator[World]:
    """This process, or with a launcher all processes that it has started."""
    check_device(device)
    if not is_worker(os.environ):
        stop.joined()
        yield World(device=pick_device(device))
        return
    # Only small messages are exchanged, none from a GPU.
    with (
        scoped_logging(),
        join_world(DistributedSection(backend="gloo"), RunSection.model_validate({"device": device})) as world,
    ):
        stop.joined()
        if not world.is_first:
            log_errors_only()  # all processes have the same warnings
        try:
            with peer_errors():
                yield world
        except PeerLost as lost:
            lost.remedy = "See the message of the process that ended first, then run the same command again."
            raise


def evaluate_sources(request: EvalRequest, world: World, stop: StopFlag, on_progress: OnProgress) -> Evaluated:
    """Every process gets the results."""
    sources, baseline = world.control.on_rank0(lambda: _checked(request))
    tasks = None
    if request.tasks:
        tasks = world.control.all_or_none(lambda: read_tasks(request.tasks, request.tasks_dir, request.limit))

    shared = _SharedStop(world, stop)
    options = TaskOptions(request.batch_size, request.chat_template, shared.is_set, on_progress)
    evaluated = Evaluated([], [])
    for source in sources:
        model = world.control.all_or_none(partial(Model, source, world=world))
        stop.enter_loop(saves=False)
        if request.files:
            loss = model.evaluate(
                request.files,
                batch_size=request.batch_size,
                block_size=request.block_size,
                on_progress=on_progress,
                stop=shared,
            )
            evaluated.losses.append(loss)
        if tasks is not None:
            evaluated.scores.append(evaluate_tasks(model.loaded, tasks, options, baseline, source))
    return evaluated


@dataclass(frozen=True)
class _SharedStop:
    """Set on all processes if it is on one; they ask together."""

    world: World
    stop: StopFlag

    def is_set(self) -> bool:
        return self.world.control.any(self.stop.is_set())


def _checked(request: EvalRequest) -> tuple[list[Source], Baseline | None]:
    """The sources, each with the checkpoint that is evaluated, and the baseline. Raises for what does not exist."""
    sources = []
    baseline = None
    for source in request.sources:
        check_source(source)
        tokenizer: Path | None = None
        if source.run:
            run = find_run(source.root, source.run)
            tokenizer = run.tokenizer
            # A run may be training: every process must read the same checkpoint of it.
            source = replace(source, checkpoint=choose_checkpoint(run, source.checkpoint).path.name)
        elif source.model and not source.adapter and Path(source.model).expanduser().is_dir():
            tokenizer = Path(source.model).expanduser()
        if request.chat_template and tokenizer is not None:
            check_has_template(tokenizer)
        if request.baseline is not None:
            baseline = find_baseline(request.baseline, source)
        sources.append(source)
    if request.files:
        expand_files(request.files, "--file")
    return sources, baseline
