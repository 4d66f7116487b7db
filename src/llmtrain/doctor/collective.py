"""Checks across all processes: same versions, synchronized clocks, correct and fast all-reduce.

torch is imported inside the functions, so that the module imports without it.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from llmtrain.core.findings import Finding, failed, passed, warned
from llmtrain.core.text import first_names, format_bytes, plural
from llmtrain.doctor.machine import nccl_version

if TYPE_CHECKING:
    from llmtrain.distributed.world import World

SIZES = ((4, 20), (4_000, 20), (1_000_000, 10), (16_000_000, 5))
"""(bytes, repetitions): the smallest shows the latency, the largest the bandwidth."""
CLOCK_ROUNDS = 5
CLOCK_WARN_SEC = 1.0  # logs of several nodes can no longer be read as one
CLOCK_FAIL_SEC = 60.0  # certificates and tokens may be refused


@dataclass(frozen=True)
class Timing:
    """One size of all-reduce: the median of its repetitions, on the slowest rank."""

    bytes: int
    latency_sec: float
    bus_bytes_per_sec: float
    """As in nccl-tests, 2 (n-1)/n of the bytes per second: the load of the slowest link, for any number of ranks."""
    wrong_ranks: list[int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def collective_findings(world: "World") -> tuple[list[Finding], list[Timing]]:
    """The same on every rank. A collective: every rank must call it."""
    import torch.distributed as dist

    how = f"{dist.get_backend()} on {world.device.type}, {plural(world.world_size, 'rank')}"
    timings = [time_all_reduce(world, count, repetitions) for count, repetitions in SIZES]
    findings = [version_skew(gather_versions(world)), clock_skew(gather_clocks(world)), all_reduce(how, timings)]
    return findings, timings


def gather_versions(world: "World") -> list[dict[str, Any]]:
    import torch

    from llmtrain.distributed.world import relevant_versions

    nccl = nccl_version() if world.device.type == "cuda" else None
    return world.control.gather({**relevant_versions(), "cuda": torch.version.cuda, "nccl": nccl})


def version_skew(rows: list[dict[str, Any]]) -> Finding:
    differing = []
    for name in dict.fromkeys(chain.from_iterable(rows)):
        ranks: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks.setdefault(str(row.get(name, "missing")), []).append(rank)
        if len(ranks) > 1:
            places = [f"{version} on rank {_some(own)}" for version, own in ranks.items()]
            differing.append(f"{name} is {' and '.join(places)}")
    if not differing:
        versions = ", ".join(f"{name} {value}" for name, value in rows[0].items() if value is not None)
        return passed("same versions", f"{versions} on {plural(len(rows), 'rank')}")
    remedy = "Use one image, by its digest, for all nodes."
    if all(text.startswith("python ") for text in differing):
        return warned("same versions", "; ".join(differing), remedy)
    return failed("same versions", "; ".join(differing), remedy)


def gather_clocks(world: "World") -> list[list[float]]:
    """The time on every rank right after a barrier, for several rounds."""
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        world.control.barrier()
        rounds.append(world.control.gather(time.time()))
    return rounds


def clock_skew(rounds: list[list[float]]) -> Finding:
    """The smallest spread of all rounds, so that a rank that left one barrier late does not count."""
    best = min(rounds, key=lambda times: max(times) - min(times))
    earliest = min(best)
    latest = max(best)
    skew_sec = latest - earliest
    if skew_sec <= CLOCK_WARN_SEC:
        return passed("same time", f"clocks within {1000 * skew_sec:.1f} ms")
    evidence = f"the clock of rank {best.index(latest)} is {skew_sec:.1f} s ahead of rank {best.index(earliest)}'s"
    make = failed if skew_sec > CLOCK_FAIL_SEC else warned
    return make("same time", evidence, "Synchronize the clocks of the nodes with NTP (chronyc tracking, timedatectl).")


def time_all_reduce(world: "World", count: int, repetitions: int) -> Timing:
    import torch
    import torch.distributed as dist

    size = world.world_size
    # Small integers that differ by position: their sums are exact, and a shifted result is wrong.
    pattern = torch.arange(count // 4, device=world.device, dtype=torch.float32) % 7 + 1
    expected = pattern * (size * (size + 1) // 2)
    seconds = []
    is_right = True
    for repetition in range(repetitions + 1):
        value = pattern * (world.rank + 1)
        dist.barrier()
        _synchronize(world)
        started = time.perf_counter()
        dist.all_reduce(value)
        _synchronize(world)
        if repetition:  # the first opens connections and allocates buffers
            seconds.append(time.perf_counter() - started)
        is_right = is_right and torch.equal(value, expected)
    rows = world.control.gather((statistics.median(seconds), is_right))
    latency_sec = max(median for median, _ in rows)
    return Timing(
        bytes=count,
        latency_sec=latency_sec,
        bus_bytes_per_sec=2 * (size - 1) / size * count / latency_sec,
        wrong_ranks=[rank for rank, (_, right) in enumerate(rows) if not right],
    )


def all_reduce(how: str, timings: list[Timing]) -> Finding:
    wrong = [f"{format_bytes(t.bytes)} on rank {_some(t.wrong_ranks)}" for t in timings if t.wrong_ranks]
    if wrong:
        return failed(
            "all-reduce",
            f"{how}: the sum is wrong for {'; '.join(wrong)}",
            "Do not train on these nodes. Test them one by one, and check their memory, GPUs and network cards.",
        )
    small = timings[0]
    large = timings[-1]
    evidence = f"{how}: sums are correct; {format_bytes(small.bytes)} take {1e6 * small.latency_sec:,.0f} us"
    if large.bus_bytes_per_sec:  # 0 for a single rank
        evidence += f", {format_bytes(large.bytes)} run at {format_bytes(large.bus_bytes_per_sec)}/s"
    return passed("all-reduce", evidence)


def _synchronize(world: "World") -> None:
    if world.device.type == "cuda":
        import torch

        torch.cuda.synchronize(world.device)


def _some(ranks: list[int]) -> str:
    return first_names([str(rank) for rank in ranks], 8)
