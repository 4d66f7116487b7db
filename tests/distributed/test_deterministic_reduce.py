"""Gradients summed in one order: the same bits for any number of ranks, and the right sum."""

from typing import Any

import pytest
import rank_harness as ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmtrain.distributed import deterministic_reduce as tree_module
from llmtrain.distributed.deterministic_reduce import GradientTree, odd_part
from llmtrain.distributed.world import World

WIDTH = 7
Leaves = torch.Tensor  # (cases, micro-batches, WIDTH): the gradient of every micro-batch


class Two(nn.Module):
    """Two parameters that get the halves of a leaf, one that never gets a gradient, one that wants none."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 2))
        self.b = nn.Parameter(torch.zeros(WIDTH - 4))
        self.unused = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def add_micro_batch(self, leaf: torch.Tensor) -> None:
        (self.a.reshape(-1) @ leaf[:4] + self.b @ leaf[4:]).backward()

    def gradient(self) -> torch.Tensor:
        assert self.a.grad is not None
        assert self.b.grad is not None
        return torch.cat([self.a.grad.reshape(-1), self.b.grad])


def sums(leaves: Leaves, rank: int, world_size: int) -> torch.Tensor:
    """(cases, WIDTH): what this rank ends with, one tree for all cases, as a run uses it."""
    module = Two()
    count = leaves.shape[1]
    tree = GradientTree(module, rank, world_size, count)
    mine = count // world_size
    found = []
    for case in leaves:
        for leaf in case[rank * mine : (rank + 1) * mine]:
            module.add_micro_batch(leaf)
            tree.add_micro_batch()
        tree.finish()
        found.append(module.gradient().clone())
        module.zero_grad(set_to_none=True)
    return torch.stack(found)


def random_leaves(cases: int, count: int) -> Leaves:
    """Of very different sizes, so that another order shows."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(cases, count, WIDTH, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (cases, count, WIDTH), generator=generator
    )


@pytest.mark.parametrize(("number", "odd"), [(1, 1), (2, 1), (3, 3), (4, 1), (12, 3), (24, 3), (30, 15), (7, 7)])
def test_odd_part(number: int, odd: int) -> None:
    assert odd_part(number) == odd


@given(
    st.integers(1, 24).flatmap(
        lambda count: st.lists(
            st.lists(st.floats(-1e4, 1e4, width=32), min_size=WIDTH, max_size=WIDTH), min_size=count, max_size=count
        )
    )
)
@settings(max_examples=60)
def test_tree_computes_the_sum(rows: list[list[float]]) -> None:
    leaves = torch.tensor(rows).unsqueeze(0)
    exact = leaves.double().sum(1)
    slack = leaves.double().abs().sum(1) * 24 * 2**-24
    assert bool(((sums(leaves, 0, 1).double() - exact).abs() <= slack + 1e-30).all())


COUNTS = (4, 8, 12, 24)


@pytest.fixture(scope="module")
def by_world_size() -> dict[int, list[dict[int, torch.Tensor]]]:
    """{world size: for each rank {micro-batches: sums}}."""

    def add_up(world: World) -> dict[int, torch.Tensor]:
        return {count: sums(random_leaves(40, count), world.rank, world.world_size) for count in COUNTS}

    found = {size: ranks.values(ranks.run_ranks(size, add_up)) for size in (2, 4)}
    return {1: [{count: sums(random_leaves(40, count), 0, 1) for count in COUNTS}], **found}


@pytest.mark.parametrize("count", COUNTS)
def test_bits_do_not_depend_on_world_size(by_world_size: dict[int, Any], count: int) -> None:
    alone = by_world_size[1][0][count]
    for size in (2, 4):
        for rank, found in enumerate(by_world_size[size]):
            assert torch.equal(found[count], alone), f"rank {rank} of {size}"


@pytest.mark.parametrize("count", COUNTS)
def test_values_detect_another_order(by_world_size: dict[int, Any], count: int) -> None:
    """Else the test above proves nothing: from left to right, most sums come out otherwise."""
    leaves = random_leaves(40, count)
    straight = torch.zeros(40, WIDTH)
    for micro in range(count):
        straight = straight + leaves[:, micro]
    differing = (by_world_size[1][0][count] != straight).float().mean()
    assert differing > 0.2
    torch.testing.assert_close(by_world_size[1][0][count], straight, rtol=1e-3, atol=1e-2)


@given(st.integers(0, 2**32 - 1), st.sampled_from(COUNTS), st.sampled_from((2, 4)))
@settings(max_examples=60)
def test_subtrees_combine_to_the_tree(seed: int, count: int, size: int) -> None:
    """What makes it work, without processes: ranks sum their stretch, pairs are added up as partners do."""
    generator = torch.Generator().manual_seed(seed)
    leaves = torch.randn(1, count, WIDTH, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (1, count, WIDTH), generator=generator
    )
    mine = count // size
    branches = []
    for rank in range(size):
        module = Two()
        tree = GradientTree(module, 0, 1, count)
        for leaf in leaves[0, rank * mine : (rank + 1) * mine]:
            module.add_micro_batch(leaf)
            tree.add_micro_batch()
        ((_, total),) = tree._branches
        branches.append(torch.cat([part.reshape(-1) for part in total[:2]]))
    while len(branches) > 1:
        branches = [left + right for left, right in zip(branches[::2], branches[1::2], strict=True)]
    assert torch.equal(branches[0], sums(leaves, 0, 1)[0])


def test_missing_gradient_becomes_zeros_and_frozen_stays_none() -> None:
    module = Two()
    tree = GradientTree(module, 0, 1, 2)
    for _ in range(2):
        module.add_micro_batch(torch.ones(WIDTH))
        tree.add_micro_batch()
    tree.finish()
    assert module.unused.grad is not None
    assert module.unused.grad.tolist() == [0.0, 0.0]
    assert module.frozen.grad is None


def test_buckets_hold_all_gradients_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "BUCKET_ELEMENTS", 10)
    gradients = [torch.zeros(size) for size in (4, 6, 1, 30, 2, 2)]
    buckets = tree_module._buckets(gradients)
    assert [[g.numel() for g in bucket] for bucket in buckets] == [[4, 6], [1], [30], [2, 2]]
    flat = [gradient for bucket in buckets for gradient in bucket]
    assert all(found is given for found, given in zip(flat, gradients, strict=True))


def test_small_buckets_give_the_same_bits() -> None:
    """A model larger than a bucket is exchanged in pieces."""

    def add_up(world: World) -> torch.Tensor:
        tree_module.BUCKET_ELEMENTS = 3
        return sums(random_leaves(5, 4), world.rank, world.world_size)

    found = ranks.values(ranks.run_ranks(2, add_up))
    assert torch.equal(found[0], sums(random_leaves(5, 4), 0, 1))
    assert torch.equal(found[0], found[1])
