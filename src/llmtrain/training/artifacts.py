"""What a run leaves for people besides checkpoints and metrics: answers to fixed prompts, the best adapter, a model
card, and directories named after epochs."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from llmtrain.checkpoint.model_card import model_card
from llmtrain.checkpoint.state import TrainState
from llmtrain.checkpoint.store import Checkpoint, CheckpointStore
from llmtrain.config.schema import Config
from llmtrain.data.base import PreparedData
from llmtrain.data.examples.prompts import prompt_prefix, prompt_text
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.distributed.world import World
from llmtrain.files import is_there, read_json, write_atomic, write_json
from llmtrain.logs import warn
from llmtrain.models.base import ModelAdapter, WriteInto
from llmtrain.models.hf.lora import ADAPTER, BASE_RECORD
from llmtrain.redact import redact_values
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.manifest import MANIFEST
from llmtrain.training.sample import sample_text

CARD = "README.md"
TEMPORARY = ".llmtrain-"
_EPOCH = re.compile(r"epoch-([1-9][0-9]{0,17})")
_OF_RANK = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True)
class Outputs:
    config: Config
    run: RunDirectory
    adapter: ModelAdapter
    module: nn.Module
    prepared: PreparedData
    world: World
    autocast: Callable[[], AbstractContextManager[None]]
    base_sha256: str | None
    _told: set[Path] = field(default_factory=set)

    def answer_prompts(self, stop: Callable[[], bool]) -> list[dict[str, str]] | None:
        """What the model says to each of trainer.eval_prompts, always the likeliest token; None when told to stop.
        All ranks do it in step: a sharded model needs all."""
        trainer = self.config.trainer
        told = False

        def is_told() -> bool:
            nonlocal told
            told = told or stop()
            return told

        answers = []
        for prompt in trainer.eval_prompts:
            with self.autocast():
                text = sample_text(
                    self.adapter,
                    self.module,
                    self.prepared.tokenizer,
                    self.written(prompt),
                    trainer.eval_prompt_tokens,
                    self.config.model.block_size,
                    temperature=0,
                    top_k=None,
                    seed=self.config.run.seed,
                    stop=is_told,
                    prefix=self.prefix(),
                    agree=self.agree,
                )
            if told:
                return None
            answers.append({"prompt": prompt, "answer": text})
        return answers

    def written(self, prompt: str) -> str:
        """A prompt in the form the training rows have; text has none."""
        if not isinstance(self.prepared.train, ExampleStore):
            return prompt
        return prompt_text(self.config.data, self.run.tokenizer, [{"role": "user", "content": prompt}])

    def agree(self, token: int) -> int:
        """Rank 0's choice. Without it ranks whose logits differ in the last bit would write texts of other lengths,
        and wait for each other in different places."""
        return self.world.control.sum(token if self.world.is_first else 0)

    def prefix(self) -> list[int]:
        if not isinstance(self.prepared.train, ExampleStore):
            return []
        return prompt_prefix(self.config.data, self.run.tokenizer, self.prepared.tokenizer)

    def keep_answers(self, step: int, answers: list[dict[str, str]]) -> Path:
        self.run.samples.mkdir(exist_ok=True)
        path = self.run.samples / f"step_{step}.json"
        write_json(path, redact_values(answers))
        return path

    def with_checkpoint(self, progress: TrainState, epoch: int | None) -> tuple[WriteInto | None, Callable[[], None]]:
        """What to write into the checkpoint of this moment, and what to do once it is complete."""
        write_weights = self.adapter.checkpoint_extras(self.module)
        now = asdict(progress)  # a background save writes it later

        def write(folder: Path) -> None:
            assert write_weights is not None
            write_weights(folder)
            card = model_card(self.config, now, self.base_sha256, is_adapter=True)
            (folder / ADAPTER / CARD).write_text(card, encoding="utf-8")
            write_origin(folder / ADAPTER, self.base_sha256)

        step = progress.step  # as it is now: it may be done later
        return write if write_weights else None, lambda: self._lay_out(step, epoch)

    def _lay_out(self, step: int, epoch: int | None) -> None:
        store = CheckpointStore(self.run.checkpoints)
        checkpoint = store.at(step)
        if store.pointed("best") == checkpoint:
            self.publish_best(checkpoint)
        if self.config.output.layout == "epochs" and epoch is not None:
            self._put(self.run.epoch(epoch), lambda folder: _link_by_rank(checkpoint, folder))

    def repair(self, epochs: int, ended_epoch: Callable[[int], int | None]) -> None:
        """Do what a process that was killed after publishing a checkpoint did not come to do, and remove what belongs
        to a course that the run has left."""
        store = CheckpointStore(self.run.checkpoints)
        for word in ("new", "old"):
            for leftover in self.run.path.glob(f"{TEMPORARY}{word}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        for path in self.run.path.glob("epoch-*"):
            number = _EPOCH.fullmatch(path.name)
            if number and int(number[1]) > epochs:
                self._remove(path)
        for step in store.steps():
            epoch = ended_epoch(step)
            if epoch is not None and not self.run.epoch(epoch).exists():
                self._lay_out(step, epoch)
        best = store.pointed("best")
        if best:
            self.publish_best(best)
        else:
            for path in (self.run.adapter, self.run.best):
                self._remove(path)

    def publish_best(self, checkpoint: Checkpoint) -> None:
        """adapter/ (a copy: people edit such files) and best/ of the run directory."""
        if (checkpoint.path / ADAPTER).is_dir():
            self._put(self.run.adapter, lambda folder: _copy(checkpoint.path / ADAPTER, folder))
        if self.config.output.layout == "epochs":
            self._put(self.run.best, lambda folder: _link(checkpoint.path, folder))

    def _put(self, target: Path, fill: WriteInto) -> None:
        """Make a directory of the run, or make it again; one of the user's with its name is left alone."""
        made = self._made()
        if is_there(target) and not self._is_ours(target):
            if target not in self._told:
                self._told.add(target)
                warn("SAVE", f"{target} was not made by this run and is left alone; move it away to have it made")
            return
        if target.name not in made:
            write_json(self.run.artifacts, sorted({*made, target.name}))  # first: unrecorded it would be the user's
        replace_folder(target, fill)

    def _remove(self, target: Path) -> None:
        if self._is_ours(target):
            shutil.rmtree(target, ignore_errors=True)
            write_json(self.run.artifacts, sorted(self._made() - {target.name}))

    def _is_ours(self, target: Path) -> bool:
        """Whether this program made a directory: it is recorded, and has what is always in one of its kind."""
        return target.name in self._made() and self._is_marked(target)

    def _is_marked(self, target: Path) -> bool:
        if target == self.run.adapter:
            mark = target / BASE_RECORD
        else:
            mark = target / MANIFEST if target == self.run.best else target / "rank-0" / MANIFEST
        return not target.is_symlink() and mark.is_file()

    def _made(self) -> set[str]:
        if self.run.artifacts.exists():
            names = read_json(self.run.artifacts)
            return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        # A run of the first version, which kept no record.
        candidates = (self.run.adapter, self.run.best, *self.run.path.glob("epoch-*"))
        return {path.name for path in candidates if self._is_marked(path)}


def write_origin(folder: Path, base_sha256: str | None) -> None:
    (folder / BASE_RECORD).write_text(json.dumps({"base_sha256": base_sha256}) + "\n", encoding="utf-8")


def write_card(
    folder: Path, config: Config, progress: dict[str, Any], base_sha256: str | None, is_adapter: bool
) -> None:
    write_atomic(folder / CARD, model_card(config, progress, base_sha256, is_adapter))


def replace_folder(target: Path, fill: WriteInto) -> None:
    """A directory that is filled under another name first, and takes the place of the one before."""
    fresh, old = (temporary_beside(target, word) for word in ("new", "old"))
    fresh.mkdir()
    try:
        fill(fresh)
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        for path in (fresh, old):
            shutil.rmtree(path, ignore_errors=True)


def temporary_beside(target: Path, word: str) -> Path:
    """A name that nobody else uses, and that says whose it is."""
    return target.with_name(f"{TEMPORARY}{word}-{secrets.token_hex(4)}-{target.name}")


def _copy(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        shutil.copyfile(path, folder / path.name)


def _link(source: Path, folder: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            _link_file(path, folder / path.relative_to(source))


def _link_by_rank(checkpoint: Checkpoint, folder: Path) -> None:
    """rank-K/ holds what rank K wrote; what there is once is in rank-0/."""
    for path in checkpoint.path.rglob("*"):
        if path.is_file():
            match = _OF_RANK.search(path.name)
            rank = int(match[1]) - 1 if match else 0
            _link_file(path, folder / f"rank-{rank}" / path.relative_to(checkpoint.path))


def _link_file(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:  # some network storage knows no hard links
        shutil.copyfile(path, target)
