"""Batches of examples: each exactly once per epoch, for any sizes, and as a function of the position only."""

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.config.data import InstructJsonlSection, PythonStdlibSection
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.base import PreparedData
from llmtrain.data.batches import Batch, EvalBatches
from llmtrain.data.examples.example_batches import ExampleBatches
from llmtrain.data.make_batches import make_batches, make_eval_batches
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.store.token_store import TokenStore
from llmtrain.data.text.window_batches import WindowBatches, WindowEvalBatches
from llmtrain.data.text_and_examples import Example, Segment
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.errors import DataError, UsageError

BLOCK = 24
VOCAB = 256
SIZES = [(1, 1), (2, 3), (4, 1), (3, 2), (8, 4)]
shapes = pytest.mark.parametrize(("size", "micro"), SIZES)
both = pytest.mark.parametrize("packing", [True, False])


def store_of(*pairs: tuple[str, str]) -> ExampleStore:
    """A store of (prompt, answer) pairs, as bytes; line numbers from 1."""
    examples = [Example([Segment(p, False), Segment(a, True)], "train.jsonl", n) for n, (p, a) in enumerate(pairs, 1)]
    return ExampleStore.from_examples(examples, ByteTokenizer(), 1)


def some_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """(prompt, answer), each with its number in it, of various lengths (at most BLOCK + 1 tokens)."""
    rng = np.random.default_rng(seed)
    return [
        (f"{n:03}?" + "p" * int(rng.integers(0, 8)), f"{n:03}" + "a" * int(rng.integers(0, 10))) for n in range(count)
    ]


def batches(
    store: ExampleStore, size: int = 4, micro: int = 2, seed: int = 1, block: int = BLOCK, limit: int | None = None,
    vocab: int = VOCAB, can_pack: bool = True, **fields: Any
) -> tuple[ExampleBatches, EvalBatches]:  # fmt: skip
    config = InstructJsonlSection(train_file="x", **fields)
    prepared = PreparedData(ByteTokenizer(), store, store, "")
    train, val = make_batches(
        prepared,
        config,
        block_size=block,
        micro_batch_size=size,
        micro_batches=micro,
        seed=seed,
        vocab_size=vocab,
        eval_limit=limit,
        can_pack=can_pack,
    )
    assert isinstance(train, ExampleBatches)
    return train, val


def train_batches(store: ExampleStore, **options: Any) -> ExampleBatches:
    return batches(store, **options)[0]


def epoch(train: ExampleBatches, number: int = 0) -> list[Batch]:
    count = train.steps_in(1) * train.micro_batches
    return [train[n] for n in range(number * count, (number + 1) * count)]


def pairs_in(batch: Batch) -> list[tuple[str, str]]:
    """(inputs, targets with loss) of each example of a batch; packed examples begin at position 0."""
    pairs = []
    for index in range(len(batch.inputs)):
        inputs, targets = batch.inputs[index], batch.targets[index]
        starts = [0] if batch.positions is None else (batch.positions[index] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], len(inputs)], strict=True):
            text = bytes(inputs[start:end].tolist()).rstrip(b"\0").decode()
            loss = targets[start:end]
            if text:
                pairs.append((text, bytes(loss[loss != IGNORE_INDEX].tolist()).decode()))
    return pairs


def same(one: Batch, other: Batch) -> bool:
    positions = (one.positions is None and other.positions is None) or torch.equal(one.positions, other.positions)  # type: ignore[arg-type]
    return (
        positions
        and torch.equal(one.inputs, other.inputs)
        and torch.equal(one.targets, other.targets)
        and one[2:5] == other[2:5]
    )


def expected(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(((prompt + answer)[:-1], answer) for prompt, answer in pairs)


class TestEpoch:
    @both
    @shapes
    @pytest.mark.parametrize("count", [1, 7, 24, 100])
    def test_every_example_once(self, packing: bool, size: int, micro: int, count: int) -> None:
        pairs = some_pairs(count)
        train = train_batches(store_of(*pairs), size=size, micro=micro, packing=packing)
        orders = []
        for number in range(3):
            some = epoch(train, number)
            found = [pair for batch in some for pair in pairs_in(batch)]
            assert sorted(found) == expected(pairs)
            assert sum(batch.target_count for batch in some) == sum(len(answer) for _, answer in pairs)
            assert sum(batch.token_count for batch in some) == sum(len(p + a) - 1 for p, a in pairs)
            assert all(batch.inputs.shape[0] == size for batch in some)
            orders.append(found)
        if count == 100:
            assert orders[0] != orders[1] != orders[2]
        assert train.steps_in(5) == 5 * train.steps_in(1)
        assert train.steps_in(1) == -(-len(train.samples) // (size * micro))

    @both
    @given(count=st.integers(1, 90), size=st.integers(1, 9), micro=st.integers(1, 5), seed=st.integers(0, 99))
    def test_every_example_once_for_any_sizes(
        self, packing: bool, count: int, size: int, micro: int, seed: int
    ) -> None:
        pairs = some_pairs(count, seed)
        train = train_batches(store_of(*pairs), size=size, micro=micro, seed=seed, packing=packing)
        assert sorted(pair for batch in epoch(train, seed % 3) for pair in pairs_in(batch)) == expected(pairs)

    @both
    def test_order_depends_on_the_seed(self, packing: bool) -> None:
        store = store_of(*some_pairs(60))
        one, same_seed, other = (epoch(train_batches(store, seed=seed, packing=packing)) for seed in (1, 1, 2))
        assert all(map(same, one, same_seed))
        assert not all(map(same, one, other))

    @both
    def test_last_step_is_filled_without_loss(self, packing: bool) -> None:
        train = train_batches(store_of(*some_pairs(3)), size=2, micro=4, packing=packing)
        *_, last = epoch(train)
        assert last.inputs.shape == (2, BLOCK if packing else 16)
        assert (last.target_count, last.token_count) == (0, 0)
        assert (last.targets == IGNORE_INDEX).all()
        assert (last.inputs == 0).all()
        assert last.first_sample == 6

    @both
    def test_mean_tokens_per_step(self, packing: bool) -> None:
        train = train_batches(store_of(*some_pairs(50)), packing=packing)
        tokens = sum(batch.token_count for batch in epoch(train))
        assert train.tokens_per_step == pytest.approx(tokens / train.steps_in(1))


class TestPosition:
    @both
    def test_batch_depends_on_its_number_only(self, packing: bool) -> None:
        store = store_of(*some_pairs(60))
        train = train_batches(store, size=3, packing=packing)
        numbers = list(range(3 * train.steps_in(1) * train.micro_batches))
        forward = [train[n] for n in numbers]
        shuffled = train_batches(store, size=3, packing=packing)
        for n in np.random.default_rng(0).permutation(numbers).tolist():
            assert same(shuffled[n], forward[n])
        again = pickle.loads(pickle.dumps(train))
        assert all(same(again[n], forward[n]) for n in numbers)

    @pytest.mark.parametrize(
        ("packing", "workers"), [(True, 0), (False, 0), (True, 2), pytest.param(False, 2, marks=pytest.mark.slow)]
    )
    def test_stream(self, packing: bool, workers: int) -> None:
        train = train_batches(store_of(*some_pairs(60)), packing=packing)
        numbers = range(5, 25)
        streamed = list(train.stream(numbers, workers, pin_memory=False))
        assert all(same(batch, train[n]) for batch, n in zip(streamed, numbers, strict=True))

    @both
    def test_order_never_changes(self, packing: bool) -> None:
        """Runs of earlier versions must resume with the same samples."""
        train = train_batches(store_of(*some_pairs(12)), size=2, micro=2, packing=packing)
        assert [[text[:3] for text, _ in pairs_in(batch)] for batch in epoch(train, 1)] == RECORDED[packing]

    @both
    def test_describe_samples_names_lines(self, packing: bool) -> None:
        train = train_batches(store_of(*some_pairs(40)), size=2, micro=2, packing=packing)
        second = [pair for n in (2, 3) for pair in pairs_in(train[n])]
        lines = ", ".join(str(int(text[:3]) + 1) for text, _ in second[:3])
        assert len(second) > 3
        assert train.describe_samples(2) == f"samples 4 to 7 (train.jsonl lines {lines}, ...)"

    def test_describe_samples_of_a_single_example(self) -> None:
        train = train_batches(store_of(("p", "a")), size=2, micro=2)
        assert train.describe_samples(1) == "samples 0 to 3 (train.jsonl line 1)"


RECORDED = {
    True: [["008", "005"], ["001", "011", "010", "002"], ["000", "003", "007"], ["006", "009"], ["004"], []],
    False: [["003", "002"], ["011", "001"], ["004", "008"], ["005", "007"], ["000", "009"], ["006", "010"]],
}


class TestPacked:
    def test_positions_restart_with_each_example(self) -> None:
        train = train_batches(store_of(*some_pairs(40)))
        for batch in epoch(train):
            assert batch.positions is not None
            assert batch.inputs.shape == batch.targets.shape == batch.positions.shape == (4, BLOCK)
            assert batch.positions.dtype == torch.int64
            steps = batch.positions.diff(dim=1)
            assert ((steps == 1) | (batch.positions[:, 1:] == 0)).all()
            assert (batch.positions[:, 0] == 0).all()

    def test_positions_restart_with_the_padding(self) -> None:
        [batch, *_] = epoch(train_batches(store_of(("pp", "aaa"), ("q", "bb")), size=1, block=10))
        assert batch.positions is not None
        assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]
        assert bytes(batch.inputs[0].tolist()) == b"ppaaqb\0\0\0\0"
        a, b = ord("a"), ord("b")
        assert batch.targets.tolist() == [[IGNORE_INDEX, a, a, a, b, b] + [IGNORE_INDEX] * 4]
        assert (batch.token_count, batch.target_count) == (6, 5)

    def test_model_that_cannot_pack_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"data\.packing") as caught:
            batches(store_of(("p", "a")), can_pack=False)
        assert "data.packing" in (caught.value.remedy or "")
        batches(store_of(("p", "a")), can_pack=False, packing=False)

    def test_positions_are_moved_to_the_device(self) -> None:
        batch = train_batches(store_of(("p", "a")))[0].to(torch.device("meta"))
        assert batch.positions is not None
        assert {batch.inputs.device.type, batch.targets.device.type, batch.positions.device.type} == {"meta"}
        unpacked = train_batches(store_of(("p", "a")), packing=False)[0].to(torch.device("meta"))
        assert unpacked.positions is None


class TestUnpacked:
    @pytest.mark.parametrize(("longest", "block", "width"), [(5, 64, 16), (17, 64, 16), (18, 64, 32), (60, 50, 50)])
    def test_sequences_are_padded_to_a_multiple(self, longest: int, block: int, width: int) -> None:
        train = train_batches(store_of(("p", "a" * (longest - 1)), ("p", "a")), packing=False, block=block, size=2)
        assert train[0].inputs.shape == (2, width)
        assert train[0].positions is None

    def test_examples_of_similar_length_share_a_batch(self) -> None:
        rng = np.random.default_rng(0)
        pairs = [("p", "a" * int(rng.integers(1, 400))) for _ in range(600)]
        some = epoch(train_batches(store_of(*pairs), packing=False, block=512, size=4, micro=1))
        share = sum(b.token_count for b in some) / sum(b.inputs.numel() for b in some)
        assert share > 0.9  # 0.6 in random order
        widths = [b.inputs.shape[1] for b in some]
        assert widths != sorted(widths)
        assert len(set(widths[:20])) > 10  # short and long batches alternate


class TestTargets:
    @both
    def test_loss_on_answers_or_on_everything(self, packing: bool) -> None:
        store = store_of(("pp", "aa"))
        [(_, answer)] = pairs_in(train_batches(store, packing=packing)[0])
        assert answer == "aa"
        [(_, everything)] = pairs_in(train_batches(store, packing=packing, train_on_prompt=True)[0])
        assert everything == "paa"

    @both
    def test_example_with_several_answers(self, packing: bool) -> None:
        parts = [Segment("p", False), Segment("aa", True), Segment("qq", False), Segment("b", True)]
        store = ExampleStore.from_examples([Example(parts, "f", 1)], ByteTokenizer(), 1)
        assert pairs_in(train_batches(store, packing=packing)[0]) == [("paaqq", "aab")]

    @both
    def test_id_outside_the_vocabulary_is_refused(self, packing: bool) -> None:
        store = store_of(("p", "ab"))  # b is only ever a target
        with pytest.raises(DataError, match=r"112 .*train\.jsonl.* 112"):
            train_batches(store, packing=packing, vocab=112)[0]
        store = store_of((" ", "!z"))
        with pytest.raises(DataError, match=r"122 .*train\.jsonl"):
            train_batches(store, packing=packing, vocab=122)[0]


class TestLongExamples:
    pairs = (("p", "a"), ("pp", "a" * 30), ("p" * 10, "a" * 15), ("p" * 10, "a" * 14))  # 2, 32, 25, 24 tokens

    @both
    def test_truncated_and_counted(self, packing: bool, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "llmtrain"):
            train = train_batches(store_of(*self.pairs, ("p", "a" * 99)), packing=packing)
        found = sorted(pair for batch in epoch(train) for pair in pairs_in(batch))
        assert sorted(len(text) for text, _ in found) == [1, 23, 24, 24, 24]
        assert ("pp" + "a" * 22, "a" * 23) in found
        train_warning, val_warning = (record.getMessage() for record in caplog.records)
        assert "2 of 5 training examples were truncated" in train_warning
        assert "2 of 5 validation examples were truncated" in val_warning

    @both
    def test_skipped_and_counted(self, packing: bool, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "llmtrain"):
            train = train_batches(store_of(*self.pairs), packing=packing, truncation="skip")
        found = [pair for batch in epoch(train) for pair in pairs_in(batch)]
        assert sorted(len(text) for text, _ in found) == [1, 23, 24]
        assert "1 of 4 training examples was dropped" in caplog.text

    def test_refused_with_the_longest(self) -> None:
        with pytest.raises(DataError, match=r"train\.jsonl, line 2: .* 31 tokens") as caught:
            train_batches(store_of(*self.pairs), truncation="error")
        remedy = caught.value.remedy or ""
        assert "model.block_size" in remedy
        assert "31" in remedy
        assert "data.truncation" in remedy
        assert train_batches(store_of(*self.pairs), truncation="error", block=31).steps_in(1)

    def test_all_skipped_is_refused(self) -> None:
        with pytest.raises(DataError, match="None of the 1 training"):
            train_batches(store_of(("p", "a" * 99)), truncation="skip")

    def test_example_without_answer_tokens_is_dropped(self, caplog: pytest.LogCaptureFixture) -> None:
        store = store_of(("p", "a"), ("p" * 25, "a"), ("p" * 24, "a"), ("p" * 99, "a"))
        with caplog.at_level(logging.WARNING, "llmtrain"):
            train = train_batches(store)
        assert sorted(len(text) for batch in epoch(train) for text, _ in pairs_in(batch)) == [1, 24]
        assert "2 of 4 training examples were dropped" in caplog.text
        assert "truncated" not in caplog.text
        whole = train_batches(store, train_on_prompt=True)
        assert len(whole.samples.selection) == 4
        assert len(train_batches(store, truncation="skip").samples.selection) == 2

    def test_example_of_one_token_has_no_target(self) -> None:
        for pairs in ([("", "a"), ("p", "a")], [("p", "a"), ("", "a")], [("p", "a"), ("", "")]):
            train = train_batches(store_of(*pairs), on_bad_example="skip")
            assert len(train.samples.selection) == 1
            assert (
                len(train_batches(store_of(*pairs), on_bad_example="skip", train_on_prompt=True).samples.selection) == 1
            )

    def test_answers_are_counted_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmtrain.data.examples.selection.EXAMPLES_AT_ONCE", 3)
        pairs = [("p" * n, "a") for n in range(1, 35)]
        train = train_batches(store_of(*pairs), on_bad_example="skip")
        assert train.samples.selection.examples.tolist() == list(range(24))


class TestEvaluation:
    @both
    @pytest.mark.parametrize("size", [1, 4, 7])
    def test_every_example_once(self, packing: bool, size: int) -> None:
        pairs = some_pairs(41)
        _, val = batches(store_of(*pairs), size=size, packing=packing)
        some = list(val)
        assert sorted(pair for batch in some for pair in pairs_in(batch)) == expected(pairs)
        assert all(batch.inputs.shape[0] == size for batch in some)
        assert len(some) == len(val)
        assert [batch.first_sample for batch in some] == [n * size for n in range(len(val))]

    @both
    def test_order_does_not_depend_on_the_seed(self, packing: bool) -> None:
        store = store_of(*some_pairs(41))
        assert all(map(same, batches(store, seed=1, packing=packing)[1], batches(store, seed=2, packing=packing)[1]))

    @both
    @pytest.mark.parametrize("limit", [1, 2, 5, 100])
    def test_limit_takes_evenly_spaced_batches(self, packing: bool, limit: int) -> None:
        store = store_of(*some_pairs(80))
        whole = list(batches(store, size=2, packing=packing)[1])
        some = list(batches(store, size=2, packing=packing, limit=limit)[1])
        assert len(some) == min(limit, len(whole))
        firsts = [batch.first_sample for batch in some]
        assert firsts[0] == 0
        assert all(same(batch, whole[batch.first_sample // 2]) for batch in some)
        if limit > 1:
            assert firsts[-1] == whole[-1].first_sample

    def test_index_past_the_end(self) -> None:
        _, val = batches(store_of(("p", "a")))
        with pytest.raises(IndexError):
            val[1]

    def test_make_eval_batches(self) -> None:
        config = InstructJsonlSection(train_file="x")
        options: Any = {"block_size": BLOCK, "micro_batch_size": 2, "vocab_size": VOCAB, "limit": None}
        val = make_eval_batches(store_of(("p", "a")), config, **options, can_pack=True)
        assert [pair for batch in val for pair in pairs_in(batch)] == [("p", "a")]
        with pytest.raises(UsageError, match="packing"):
            make_eval_batches(store_of(("p", "a")), config, **options, can_pack=False)


def test_text_is_batched_as_windows() -> None:
    text = TokenStore(Path("t.bin"), np.arange(200, dtype=np.uint8))
    options: Any = {"block_size": 8, "micro_batch_size": 2, "micro_batches": 3, "seed": 1, "vocab_size": 256}
    train, val = make_batches(
        PreparedData(ByteTokenizer(), text, text, ""), PythonStdlibSection(), **options, eval_limit=2, can_pack=False
    )
    assert isinstance(train, WindowBatches)
    assert isinstance(val, WindowEvalBatches)
    assert len(val) == 2
    assert train.tokens_per_step == 48


@both
def test_step_with_more_micro_batches_than_examples(packing: bool) -> None:
    """trainer.grad_accum_steps may be large: the order of the samples takes memory for the examples only."""
    train = train_batches(store_of(*some_pairs(5)), size=2, micro=10**12, packing=packing)
    assert train.steps_in(1) == 1
    assert train[0].target_count > 0
    last = train[10**12 - 1]
    assert (last.target_count, len(last.inputs)) == (0, 2)
    assert train[10**12].target_count > 0, "the next epoch"


@both
def test_shapes_are_known_without_building_a_batch(packing: bool) -> None:
    train, val = batches(store_of(*some_pairs(20)), packing=packing)
    assert train.first_shape() == tuple(train[0].inputs.shape)
    assert val.largest_shape() == max(tuple(batch.inputs.shape) for batch in val)
