import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llmtrain.config.trainer import TrainerSection
from llmtrain.training.optimizer import build_adamw
from llmtrain.training.schedule import Group, group_lr_at, lr_at, set_schedule

LR, MIN = 1.0, 0.1


def shape(schedule: str, *steps: int, **fields: object) -> list[float]:
    base = {"lr": LR, "min_lr": MIN, "max_steps": 110, "warmup_steps": 10, "schedule": schedule}
    config = TrainerSection(**{**base, **fields})  # type: ignore[arg-type]
    return [lr_at(step, config) for step in steps]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_warmup_rises_linearly_to_the_peak(schedule: str) -> None:
    assert shape(schedule, *range(11)) == pytest.approx([0.1 * (i + 1) for i in range(10)] + [LR])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_no_warmup_starts_at_the_peak(schedule: str) -> None:
    assert shape(schedule, 0, warmup_steps=0) == [LR]


def test_cosine_schedule() -> None:
    start, quarter, half, three_quarters, end = shape("cosine", 10, 35, 60, 85, 110)
    assert (start, half, end) == pytest.approx((LR, (LR + MIN) / 2, MIN))
    # flat at both ends, steep in the middle
    assert start - quarter < quarter - half
    assert three_quarters - end < half - three_quarters


def test_linear_schedule() -> None:
    assert shape("linear", 10, 35, 60, 85, 110) == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])


def test_constant_schedule() -> None:
    assert set(shape("constant", *range(10, 200))) == {LR}


def test_wsd_stays_then_decays() -> None:
    # the last fifth of 110 steps: 22
    assert set(shape("wsd", *range(10, 89))) == {LR}
    assert shape("wsd", 99, 110) == pytest.approx([(LR + MIN) / 2, MIN])
    assert shape("wsd", 54, 55, 110, decay_fraction=0.5) == pytest.approx([LR, LR, MIN])


def test_wsd_does_not_decay_during_warmup() -> None:
    assert shape("wsd", 9, 10, 60, 110, decay_fraction=1.0) == pytest.approx([LR, LR, (LR + MIN) / 2, MIN])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_lr_stays_at_its_minimum_after_the_end(schedule: str) -> None:
    assert shape(schedule, 50, 80, 109, schedule_steps=50) == pytest.approx([MIN] * 3)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_schedule_steps_make_lr_independent_of_max_steps(schedule: str) -> None:
    steps = range(100)
    assert shape(schedule, *steps, schedule_steps=100) == shape(schedule, *steps, schedule_steps=100, max_steps=500)


@given(
    step=st.integers(0, 2000),
    max_steps=st.integers(2, 1000),
    warmup=st.integers(0, 1000),
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    decay=st.floats(0.001, 1),
)
def test_lr_is_between_zero_and_the_peak(step: int, max_steps: int, warmup: int, schedule: str, decay: float) -> None:
    warmup = min(warmup, max_steps - 1)
    (lr,) = shape(schedule, step, max_steps=max_steps, warmup_steps=warmup, decay_fraction=decay, min_lr=0.0)
    assert 0 <= lr <= LR
    if step < max_steps:
        assert lr > 0


def test_weight_decay_applies_to_matrices_only() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(5, 3))
    optimizer = build_adamw(module, TrainerSection(weight_decay=0.3, lr=0.5, betas=(0.8, 0.7)))
    decayed = {tuple(p.shape) for g in optimizer.param_groups if g["weight_decay"] == 0.3 for p in g["params"]}
    spared = {tuple(p.shape) for g in optimizer.param_groups if g["weight_decay"] == 0.0 for p in g["params"]}
    assert decayed == {(3, 3), (5, 3)}
    assert spared == {(3,)}
    assert optimizer.defaults["betas"] == (0.8, 0.7)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(module.parameters()))


def test_frozen_parameters_are_not_optimized() -> None:
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    assert [len(g["params"]) for g in build_adamw(module, TrainerSection()).param_groups] == [1]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_set_schedule_changes_the_step_size(name: str) -> None:
    module = nn.Linear(4, 1, bias=False)
    optimizer = build_adamw(module, TrainerSection(optimizer=name, lr=0.1))  # type: ignore[arg-type]
    before = module.weight.detach().clone()
    for lr, moves in ((0.0, False), (0.1, True)):
        set_schedule(optimizer, 0, TrainerSection(schedule="constant").model_copy(update={"lr": lr}))
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert torch.equal(before, module.weight.detach()) is not moves


def test_rate_of_each_group() -> None:
    config = TrainerSection(optimizer="muon", lr=0.5, warmup_steps=10, schedule="constant")
    warm, after = 4, 300
    assert lr_at(warm, config) == pytest.approx(0.25)
    assert group_lr_at(warm, Group.ALL, config) == lr_at(warm, config)
    assert group_lr_at(warm, Group.MATRICES, config) == 0.5  # no warmup
    assert group_lr_at(warm, Group.EMBEDDINGS, config) == pytest.approx(0.25 * 0.6)
    assert [group_lr_at(after, group, config) for group in Group] == pytest.approx([0.5, 0.5, 0.3, 0.15])
