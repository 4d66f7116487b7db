"""Batches of a mixture: rows in the order of the schedule, padding, epochs, validation."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.config.mixture import MixtureSection
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.base import PreparedMixture
from llmtrain.data.make_batches import make_batches
from llmtrain.data.mixture.mixed_batches import MixedBatches, MixedEvalBatches
from llmtrain.data.mixture.prepare import Mixture
from llmtrain.errors import DataError, UsageError

LETTERS = "abc"


def prepare(tmp_path: Path, sources: list[dict[str, Any]], **fields: Any) -> tuple[MixtureSection, PreparedMixture]:
    values = {"sources": sources, "tokenizer": "byte", "cache_dir": str(tmp_path / "cache"), **fields}
    section = MixtureSection(**values)
    return section, Mixture(section, 1).prepare(1)


def batches_of(
    section: MixtureSection,
    prepared: PreparedMixture,
    size: int = 4,
    micro_batches: int = 2,
    block_size: int = 16,
    can_pack: bool = True,
) -> Any:
    return make_batches(
        prepared,
        section,
        block_size=block_size,
        micro_batch_size=size,
        micro_batches=micro_batches,
        seed=7,
        vocab_size=256,
        eval_limit=None,
        can_pack=can_pack,
    )


@pytest.fixture
def text(tmp_path: Path) -> list[dict[str, Any]]:
    """Each source has a letter of its own."""
    sources = []
    for index, letter in enumerate(LETTERS):
        (tmp_path / f"{letter}.txt").write_text(letter * (2000 + 500 * index))
        sources.append({"name": "text_files", "files": [str(tmp_path / f"{letter}.txt")], "weight": index + 1})
    return sources


def write_examples(path: Path, count: int, letter: str) -> str:
    rows = ({"instruction": letter, "output": letter * (1 + number % 9)} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def examples(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        {"name": "instruct_jsonl", "train_file": write_examples(tmp_path / f"{letter}.jsonl", 60, letter), "weight": 1}
        for letter in LETTERS[:2]
    ]


def test_rows_have_the_source_that_the_schedule_gives_them(tmp_path: Path, text: list[dict[str, Any]]) -> None:
    section, prepared = prepare(tmp_path, text)
    train, _ = batches_of(section, prepared)
    assert isinstance(train, MixedBatches)
    for number in (0, 3, 500):
        expected = [LETTERS[source] for source in train.schedule.samples(number * 4, 4)[0]]
        assert [chr(int(row[0])) for row in train[number].inputs] == expected
        assert train.labels_of(number) == expected
    assert train[5].inputs.shape == (4, 16)
    assert (train[5].target_count, train[5].token_count) == (64, 64)


def test_an_epoch_of_a_source_has_each_window_once(tmp_path: Path, text: list[dict[str, Any]]) -> None:
    section, prepared = prepare(tmp_path, text)
    train, _ = batches_of(section, prepared)
    for source in train.sources:
        starts = source.samples.sampler.starts(0, len(source.samples))
        assert len(np.unique(starts)) == len(source.samples)
    whole = sum(len(source.samples) for source in train.sources)
    assert train.steps_in(1) == -(-whole // 8)
    assert (train.epochs_after(train.steps_in(1)), train.epochs_after(train.steps_in(1) - 1)) == (1, 0)


def test_worker_processes_read_the_same(tmp_path: Path, text: list[dict[str, Any]]) -> None:
    """Batches are pickled for them."""
    section, prepared = prepare(tmp_path, text, stages=[{"from_step": 5, "weights": [1, 0, 0]}])
    train, _ = batches_of(section, prepared)
    copy = pickle.loads(pickle.dumps(train))
    for number in (0, 7, 8, 20):
        assert torch.equal(copy[number].inputs, train[number].inputs)
    assert set(train.labels_of(8)) == {"a"}  # from_step 5 is the micro-batch 8 on


def test_examples_of_a_step_are_sorted_and_padded(tmp_path: Path, examples: list[dict[str, Any]]) -> None:
    sources = [{**source, "packing": False} for source in examples]
    section, prepared = prepare(tmp_path, sources)
    train, _ = batches_of(section, prepared, micro_batches=3, block_size=128, can_pack=False)
    for step in range(3):
        counts = [train[3 * step + micro].token_count for micro in range(3)]
        assert counts == sorted(counts)
    batch = train[2]
    assert batch.positions is None
    is_target = batch.targets != IGNORE_INDEX
    assert int(is_target.sum()) == batch.target_count
    for row in range(4):  # only the answer, which repeats the letter of the question
        answer = bytes(batch.targets[row][is_target[row]].tolist()).decode()
        assert set(answer) <= {*LETTERS, "\0"}


def test_packed_examples_keep_their_positions(tmp_path: Path, examples: list[dict[str, Any]]) -> None:
    section, prepared = prepare(tmp_path, examples)
    train, _ = make_batches(
        prepared,
        section,
        block_size=128,
        micro_batch_size=4,
        micro_batches=1,
        seed=7,
        vocab_size=256,
        eval_limit=None,
        can_pack=True,
    )
    batch = train[0]
    assert batch.inputs.shape == batch.positions.shape == (4, 128)
    for row, label in enumerate(train.labels_of(0)):
        starts = torch.nonzero(batch.positions[row] == 0).flatten().tolist()
        assert len(starts) > 1
        others = {ord(letter) for letter in LETTERS[:2] if letter != label}
        answers = batch.targets[row][batch.targets[row] != IGNORE_INDEX].tolist()
        assert not others & set(answers), "a sequence has examples of one source"


def test_validation_is_grouped_by_source(tmp_path: Path, text: list[dict[str, Any]]) -> None:
    section, prepared = prepare(tmp_path, text)
    _, val = batches_of(section, prepared)
    assert isinstance(val, MixedEvalBatches)
    groups = val.groups()
    assert [(group.label, round(group.share * 6)) for group in groups] == [("a", 1), ("b", 2), ("c", 3)]
    assert sum(group.batches for group in groups) == len(val) == len(list(val))
    letters = [chr(int(batch.inputs[0, 0])) for batch in val]
    assert letters == sorted(letters)
    with pytest.raises(IndexError):
        val[len(val)]


def test_max_epochs_ends_a_source(tmp_path: Path, text: list[dict[str, Any]]) -> None:
    text[2]["max_epochs"] = 1
    section, prepared = prepare(tmp_path, text)
    train, _ = batches_of(section, prepared)
    step = train.exhausted(10_000)["c"]
    assert train.source_progress(10_000)["c"].epochs == 1
    assert train.source_progress(step - 2)["c"].epochs < 1
    assert "c" not in train.labels_of(2 * step + 2)
    assert train.available_steps(10_000) == 10_000


PLUGIN = """
from llmtrain.data.base import Example, ExampleData, Segment

class Questions(ExampleData):
    def identity(self):
        return {"kind": "questions"}

    def examples(self, split):
        for line in range(20):
            yield Example([Segment("q", False), Segment("a", True)], split, line + 1)
"""


def test_plugin_of_another_kind_is_refused(
    tmp_path: Path, text: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixed_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    sources = [text[0], {"name": "mixed_plugin:Questions", "weight": 1}]
    section, prepared = prepare(tmp_path, sources)
    with pytest.raises(UsageError, match="Questions"):
        batches_of(section, prepared)


def write_pairs(path: Path, count: int, letter: str) -> str:
    """Answers of different lengths, with the letter of the source."""
    rows = (
        {"prompt": "q", "chosen": letter * (2 + number % 7), "rejected": letter * (1 + number % 3) + "!"}
        for number in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_stay_together(tmp_path: Path, packing: bool) -> None:
    """Each row has the source that the schedule gives it, and each answer its own tokens, length and reference."""
    sources = []
    for index, letter in enumerate(LETTERS[:2]):
        file = write_pairs(tmp_path / f"{letter}.jsonl", 60, letter)
        fields = {"name": "preference_jsonl", "train_file": file, "packing": packing, "prompt_format": "plain"}
        sources.append({**fields, "weight": index + 1})
    section, prepared = prepare(tmp_path, sources)
    train, val = batches_of(section, prepared, size=6, block_size=64)
    assert isinstance(train, MixedBatches)
    sets = []
    for number, source in enumerate(train.sources):
        pairs = source.samples.samples.store.pair_count  # type: ignore[attr-defined]
        values = np.arange(2 * pairs, dtype=np.float32).reshape(-1, 2) + 1000 * number
        sets.append(source.samples.with_references(values))  # type: ignore[attr-defined]
    stores = [source.samples.samples.store for source in train.sources]  # type: ignore[attr-defined]
    batches = train.with_samples(sets)
    for number in range(4):
        batch = batches[number]
        assert batch.pairs is not None
        assert batch.pairs.reference is not None
        assert (batch.positions is not None) == packing
        assert batch.target_count == int(batch.pairs.lengths.sum()) == int((batch.targets != IGNORE_INDEX).sum())
        labels = batches.labels_of(number)
        for answer, reference in enumerate(batch.pairs.reference.long().tolist()):
            source, index = divmod(reference, 1000)
            is_answer = (batch.pairs.answers == answer) & (batch.targets != IGNORE_INDEX)
            (rows,) = torch.nonzero(is_answer.any(1), as_tuple=True)
            assert labels[int(rows[0]) // (1 if packing else 2)] == LETTERS[source]
            start, end = stores[source].answers.spans[index, :2]
            mask = stores[source].answers.answers[start:end] == 1
            assert batch.targets[is_answer].tolist() == stores[source].answers.tokens[start:end][mask].tolist()
            assert int(batch.pairs.lengths[answer]) == int(is_answer.sum())
    assert [group.label for group in val.groups()] == ["a", "b"]


def test_source_shorter_than_a_window_is_named(tmp_path: Path, text: list[dict[str, Any]]) -> None:
    (tmp_path / "b.txt").write_text("b" * 10)
    section, prepared = prepare(tmp_path, text)
    with pytest.raises(DataError) as error:
        batches_of(section, prepared)
    assert error.value.what.startswith("Source 'b'")
