from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.store.token_store import TokenStore, _open_tokens
from llmtrain.data.text.window_batches import WindowBatches, WindowEvalBatches
from llmtrain.errors import DataError

VOCAB = 1000


def store(count: int, path: Path = Path("tokens.bin")) -> TokenStore:
    """Every token is its own position."""
    return TokenStore(path, np.arange(count, dtype=np.uint16))


def train_batches(count: int = 500, block: int = 8, size: int = 4, seed: int = 1, micro: int = 2) -> WindowBatches:
    return WindowBatches(store(count), block, size, micro, seed, VOCAB)


class TestTraining:
    def test_shapes_and_shifted_targets(self) -> None:
        batch = train_batches()[3]
        assert batch.inputs.shape == batch.targets.shape == (4, 8)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets, batch.inputs + 1)
        assert torch.equal(batch.inputs[:, 1:], batch.inputs[:, :-1] + 1)
        assert (batch.target_count, batch.first_sample, batch.token_count) == (32, 12, 32)
        assert batch.positions is None

    def test_batch_depends_on_its_number_only(self) -> None:
        forward = [train_batches()[n].inputs for n in range(40)]
        batches = train_batches()
        for n in reversed(range(40)):
            assert torch.equal(batches[n].inputs, forward[n])

    def test_micro_batch_size_only_changes_the_grouping(self) -> None:
        small = torch.cat([train_batches(size=2)[n].inputs for n in range(60)])
        large = torch.cat([train_batches(size=6)[n].inputs for n in range(20)])
        assert torch.equal(small, large)

    def test_batches_cross_epoch_boundaries(self) -> None:
        batches = train_batches(count=81, block=8, size=4)  # 9 windows per epoch, so batch 2 has 3 windows of the next
        assert batches.sampler.windows == 9
        starts = torch.cat([batches[n].inputs[:, 0] for n in range(9)])  # four epochs
        for epoch in starts.split(9):
            assert len(set(epoch.tolist())) == 9

    def test_order_never_changes(self) -> None:
        """Runs of earlier versions must resume with the same samples. Recorded with the first version."""
        starts = [train_batches(count=81, size=3)[n].inputs[:, 0].tolist() for n in range(4)]
        assert starts == [[60, 28, 36], [12, 44, 68], [20, 4, 52], [23, 31, 63]]

    @pytest.mark.parametrize(("micro", "epochs", "steps"), [(2, 1, 2), (2, 8, 9), (1, 4, 9), (3, 1, 1)])
    def test_steps_per_epoch(self, micro: int, epochs: int, steps: int) -> None:
        batches = train_batches(count=81, block=8, size=4, micro=micro)  # 9 windows per epoch
        assert batches.steps_in(epochs) == steps
        assert batches.epochs_after(steps) >= epochs > batches.epochs_after(steps - 1)

    def test_samples_and_tokens_of_a_step(self) -> None:
        batches = train_batches()  # 2 micro-batches of 4
        assert batches.describe_samples(1) == "samples 0 to 7"
        assert batches.describe_samples(3) == "samples 16 to 23"
        assert batches.tokens_per_step == 64

    def test_text_with_a_single_window(self) -> None:
        batch = WindowBatches(store(9), 8, 3, 1, 0, VOCAB)[5]
        assert batch.inputs.tolist() == [list(range(8))] * 3

    @pytest.mark.parametrize("workers", [0, 2])
    def test_stream_yields_the_requested_numbers(self, workers: int, tmp_path: Path) -> None:
        path = tmp_path / "train.bin"
        np.arange(500, dtype=np.uint16).tofile(path)
        batches = WindowBatches(_open_tokens(path, "<u2"), 8, 4, 2, 1, VOCAB)
        numbers = range(7, 20)
        streamed = list(batches.stream(numbers, workers, pin_memory=False))
        assert [batch.first_sample for batch in streamed] == [4 * n for n in numbers]
        assert all(torch.equal(batch.inputs, batches[n].inputs) for batch, n in zip(streamed, numbers, strict=True))

    def test_stream_does_not_change_the_global_generator(self) -> None:
        torch.manual_seed(0)
        state = torch.get_rng_state()
        list(train_batches().stream(range(3), 0, pin_memory=False))
        assert torch.equal(torch.get_rng_state(), state)

    def test_text_shorter_than_block_size_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"training.* 8 tokens.*model\.block_size 8") as caught:
            WindowBatches(store(8), 8, 1, 1, 0, VOCAB)
        assert "at most 7" in (caught.value.remedy or "")

    def test_id_outside_the_vocabulary_is_refused(self) -> None:
        batches = WindowBatches(store(500), 8, 4, 1, 0, vocab_size=100)
        with pytest.raises(DataError, match=r"tokens\.bin.* 100"):
            [batches[n] for n in range(10)]


class TestEvaluation:
    @pytest.mark.parametrize(("count", "size"), [(81, 4), (85, 4), (9, 4), (65, 1), (65, 8)])
    def test_every_whole_window_once_in_order(self, count: int, size: int) -> None:
        batches = list(WindowEvalBatches(store(count), 8, size, VOCAB))
        windows = (count - 1) // 8
        targets = torch.cat([batch.targets for batch in batches])
        real = targets[targets != IGNORE_INDEX]
        assert real.tolist() == list(range(1, windows * 8 + 1))
        assert sum(batch.target_count for batch in batches) == windows * 8

    def test_short_last_batch_is_padded_without_loss(self) -> None:
        last = list(WindowEvalBatches(store(49), 8, 4, VOCAB))[-1]  # six windows: four, then two
        assert last.inputs.shape == last.targets.shape == (4, 8)
        assert (last.targets[2:] == IGNORE_INDEX).all()
        assert (last.target_count, last.token_count) == (16, 16)

    @pytest.mark.parametrize("limit", [1, 2, 3, 10, 11])
    def test_limit_takes_the_same_evenly_spaced_batches(self, limit: int) -> None:
        def chosen() -> list[int]:
            return [batch.first_sample for batch in WindowEvalBatches(store(161), 8, 2, VOCAB, limit)]

        assert chosen() == chosen()
        assert len(chosen()) == len(set(chosen())) == min(limit, 10)
        if limit > 1:
            assert (chosen()[0], chosen()[-1]) == (0, 18)

    def test_length_is_the_number_of_batches(self) -> None:
        for limit in (None, 3):
            batches = WindowEvalBatches(store(161), 8, 3, VOCAB, limit)
            assert len(batches) == len(list(batches))

    def test_text_shorter_than_block_size_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"validation.* 8 tokens"):
            WindowEvalBatches(store(8), 8, 1, VOCAB)

    def test_id_outside_the_vocabulary_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"tokens\.bin.* 50"):
            list(WindowEvalBatches(store(100), 8, 1, vocab_size=50))
