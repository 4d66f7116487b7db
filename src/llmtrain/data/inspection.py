"""What a config trains on, found out before training: sources with their sizes, and samples as the model gets them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtrain.config.data import DataSection
from llmtrain.config.mixture import MixtureSection
from llmtrain.config.model import ModelSection
from llmtrain.config.run import RunSection
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.base import PreparedData, PreparedMixture
from llmtrain.data.batches import Batch, TrainBatches
from llmtrain.data.cache_dir import token_cache_dir
from llmtrain.data.make_batches import make_batches
from llmtrain.data.mixture.mixed_batches import MixedBatches
from llmtrain.data.open_data import open_data
from llmtrain.data.preferences.pair_store import PairStore
from llmtrain.data.statistics import StatisticsFile, statistics
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.tokenizers.base import Tokenizer

Values = dict[str, Any]
END_OF_TEXT = "<end of text>\n"
"""What is shown for the byte tokenizer's end of text, which cannot be printed."""
SEARCHED_BATCHES = 256
"""Micro-batches in which samples of every source are looked for."""


@dataclass(frozen=True)
class OpenSource:
    """A source with its token stores. Data that is no mixture is one source."""

    label: str
    kind: str
    weight: float
    prepared: PreparedData


@dataclass(frozen=True)
class OpenedData:
    trainer: TrainerSection
    tokenizer: Tokenizer
    sources: list[OpenSource]
    batches: TrainBatches
    statistics_file: StatisticsFile

    @property
    def is_text(self) -> bool:
        return self.sources[0].prepared.is_text


def open_sources(data: DataSection, model: ModelSection, trainer: TrainerSection, run: RunSection) -> OpenedData:
    """The data of a config, tokenized if it is not yet."""
    prepared = open_data(data, model, run.seed).prepare(run.threads or 1)
    batches, _ = make_batches(
        prepared,
        data,
        block_size=model.block_size,
        micro_batch_size=trainer.micro_batch_size,
        micro_batches=trainer.grad_accum_steps,
        seed=run.seed,
        vocab_size=prepared.tokenizer.vocab_size,
        eval_limit=trainer.eval_batches,
        can_pack=True,
    )
    tokenizer = prepared.tokenizer
    file = StatisticsFile.of(token_cache_dir(data), prepared.fingerprint, tokenizer.sha256(), model.block_size)
    return OpenedData(trainer, tokenizer, _sources(data, prepared), batches, file)


def _sources(data: DataSection, prepared: PreparedData | PreparedMixture) -> list[OpenSource]:
    if isinstance(prepared, PreparedData):
        return [OpenSource(data.name, data.name, 1.0, prepared)]
    assert isinstance(data, MixtureSection)
    found = []
    for label, source, section, each in zip(
        data.labels(), data.sources, data.sections(), prepared.sources, strict=True
    ):
        found.append(OpenSource(label, section.name, source.weight, each))
    return found


def source_facts(opened: OpenedData) -> list[Values]:
    """One row per source."""
    steps = None if opened.trainer.max_epochs else opened.trainer.steps
    used = opened.batches.source_progress(opened.batches.available_steps(steps)) if steps else {}
    total = sum(source.weight for source in opened.sources)
    rows = []
    for source in opened.sources:
        train = source.prepared.train
        row: Values = {
            "source": source.label,
            "kind": source.kind,
            "documents": None,
            "examples": None,
            "pairs": None,
            "tokens": len(train),
            "validation_tokens": len(source.prepared.val),
            "bytes": train.tokens.nbytes,
            "share": source.weight / total,
            "epochs": used[source.label].epochs if source.label in used else None,
        }
        if isinstance(train, ExampleStore):
            row["examples"] = train.example_count
        elif isinstance(train, PairStore):
            row["pairs"] = train.pair_count
        elif opened.tokenizer.end_of_text is not None:
            row["documents"] = int(np.count_nonzero(train.tokens == opened.tokenizer.end_of_text))
        rows.append(row)
    if len(rows) == 1 and steps:
        rows[0]["epochs"] = steps / max(1, opened.batches.steps_in(1))
    return rows


def statistics_of(opened: OpenedData, block_size: int) -> list[Values]:
    """One row per source; counted once."""
    known = opened.statistics_file.read([source.label for source in opened.sources])
    if known is not None:
        return known
    sources = [(source.label, source.prepared) for source in opened.sources]
    rows = statistics(sources, opened.tokenizer.end_of_text, block_size)
    opened.statistics_file.write(rows)
    return rows


def samples(opened: OpenedData, count: int) -> list[Values]:
    """The first training samples of each source, as parts that are trained on or not."""
    left = {source.label: count for source in opened.sources}
    found = []
    for number in range(SEARCHED_BATCHES):
        if not any(left.values()):
            break
        labels = _labels(opened, number)
        if not any(left[label] for label in labels):
            continue
        batch = opened.batches[number]
        rows_per_sample = len(batch.inputs) // len(labels)  # two for a pair that is not packed
        for index, label in enumerate(labels):
            if left[label]:
                left[label] -= 1
                parts = []
                for row in range(index * rows_per_sample, (index + 1) * rows_per_sample):
                    parts += _parts(batch, row, opened.tokenizer, opened.is_text)
                found.append({"source": label, "parts": parts})
    found.sort(key=lambda sample: list(left).index(str(sample["source"])))
    return found


def _labels(opened: OpenedData, number: int) -> list[str]:
    """The source of each sample of a micro-batch."""
    if isinstance(opened.batches, MixedBatches):
        return opened.batches.labels_of(number)
    return [opened.sources[0].label] * opened.batches.size


def _parts(batch: Batch, row: int, tokenizer: Tokenizer, is_text: bool) -> list[Values]:
    """The text of a sequence in parts: each is trained on as a whole, or not at all. Padding is left out."""
    ids = batch.inputs[row].numpy()
    targets = batch.targets[row].numpy()
    starts = [0]
    if batch.positions is not None and not is_text:  # packed: each example has a last target of its own
        starts = np.flatnonzero(batch.positions[row].numpy() == 0).tolist()
    parts: list[Values] = []
    for start, end in pairwise([*starts, len(ids)]):
        found = _marked(ids[start:end], targets[start:end], tokenizer)
        if batch.pairs is not None:
            is_rejected = int(batch.pairs.answers[row, start]) % 2
            found = [{**part, "answer": "rejected" if is_rejected else "chosen"} for part in found]
        parts += found
    return parts


def _marked(ids: npt.NDArray[Any], targets: npt.NDArray[Any], tokenizer: Tokenizer) -> list[Values]:
    """The parts of an example, or of a window of text."""
    last = np.flatnonzero(targets != IGNORE_INDEX)
    if not len(last):
        return []  # padding
    length = int(last[-1]) + 1
    is_trained = np.concatenate([[False], targets[:length] != IGNORE_INDEX])
    tokens = np.concatenate([ids[:length], targets[length - 1 : length]])  # the last target is no input
    is_trained[:1] = is_trained[1:2].any()  # the first token is never a target: it belongs to what follows
    borders = [0, *(np.flatnonzero(is_trained[1:] != is_trained[:-1]) + 1).tolist(), len(tokens)]
    parts = []
    for first, end in pairwise(borders):
        text = tokenizer.decode(tokens[first:end].tolist()).replace("\0", END_OF_TEXT)
        parts.append({"text": text, "is_trained": bool(is_trained[first])})
    return parts
