"""Checks across all processes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from llmtrain.distributed.control_group import ControlGroup
from llmtrain.distributed.world import World
from llmtrain.doctor.collective import (
    Timing,
    all_reduce,
    clock_skew,
    collective_findings,
    time_all_reduce,
    version_skew,
)


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(is_joined=True, control=ControlGroup(0, 1, dist.new_group(backend="gloo")))
    finally:
        dist.destroy_process_group()


def test_correct_all_reduce(world: World) -> None:
    found, timings = collective_findings(world)
    assert {finding.name: finding.status for finding in found} == {
        "same versions": "pass",
        "same time": "pass",
        "all-reduce": "pass",
    }
    assert [timing.bytes for timing in timings] == [4, 4_000, 1_000_000, 16_000_000]
    assert all(timing.latency_sec > 0 for timing in timings)


def test_all_reduce_wrong_once_is_detected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    really = dist.all_reduce

    def wrong_at_last(value: torch.Tensor, *args: object, **kwargs: object) -> None:
        really(value, *args, **kwargs)  # type: ignore[arg-type]
        calls.append(None)
        if len(calls) == 3:
            value[-1] += 1

    monkeypatch.setattr(dist, "all_reduce", wrong_at_last)
    timing = time_all_reduce(world, 4_000, 2)
    assert timing.wrong_ranks == [0]


def test_wrong_sum_names_the_ranks() -> None:
    right, wrong = Timing(4, 1e-3, 1.0, []), Timing(4_000, 1e-3, 1.0, [1, 3])
    found = all_reduce("gloo on cpu, 4 ranks", [right, wrong])
    assert found.status == "fail"
    assert "4 kB on rank 1, 3" in found.evidence
    assert all_reduce("gloo on cpu, 4 ranks", [right, right]).status == "pass"


@pytest.mark.parametrize(("skew", "status"), [(0.5, "pass"), (5.0, "warn"), (61.0, "fail")])
def test_clock_skew(skew: float, status: str) -> None:
    found = clock_skew([[1000.0, 1000.0 + skew, 1000.2]])
    assert found.status == status
    if status != "pass":
        assert "rank 1" in found.evidence


def test_one_slow_round_is_not_skew() -> None:
    assert clock_skew([[1000.0, 1009.0], [1010.0, 1010.1]]).status == "pass"


def test_version_skew() -> None:
    row = {"llmtrain": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "nccl": None}
    assert version_skew([row, row]).status == "pass"
    assert version_skew([row, row | {"python": "3.11.9"}]).status == "warn"
    found = version_skew([row, row, row | {"torch": "2.11.0"}])
    assert found.status == "fail"
    assert "torch is 2.13.0 on rank 0, 1 and 2.11.0 on rank 2" in found.evidence
