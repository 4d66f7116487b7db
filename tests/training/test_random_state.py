"""Threads that load models do not disturb the random numbers of a training."""

import threading

import torch

from llmtrain.training.random_state import preserved, seeded


def test_seeded_block_is_not_disturbed_by_another_thread() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    has_seeded = threading.Event()

    def load() -> None:
        with preserved():
            torch.manual_seed(1)
            has_seeded.set()

    thread = threading.Thread(target=load)
    with seeded(7):
        thread.start()
        assert not has_seeded.wait(0.2)
        assert torch.equal(torch.rand(3), expected)
    thread.join()
    assert has_seeded.is_set()


def test_preserved_restores_the_state() -> None:
    before = torch.get_rng_state()
    with preserved():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
