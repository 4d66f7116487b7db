"""The report of the doctor, as a table and as JSON."""

import io
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmtrain.core.findings import Finding, Status, is_ok
from llmtrain.core.terminal import printable
from llmtrain.core.text import format_bytes

if TYPE_CHECKING:
    from llmtrain.doctor.collective import Timing

COLORS: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}
MAX_VARIANTS = 4  # rows of one check that pass: thousands of ranks may differ in the name of their interface
LOG_WIDTH = 10_000
"""Without a terminal lines are not wrapped, so that they can be searched."""


@dataclass(frozen=True)
class Report:
    findings: list[Finding]
    allreduce: list["Timing"] = field(default_factory=list)
    world_size: int = 1
    rank: int = 0
    """Rank of the process that reports."""

    @property
    def is_ok(self) -> bool:
        return is_ok(self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.is_ok,
            "findings": [finding.as_dict() for finding in self.findings],
            "allreduce": [timing.as_dict() for timing in self.allreduce],
        }

    def text(self, *, is_terminal: bool) -> str:
        """For a rank other than 0, which prints only if it could not join: without findings that pass."""
        head = f"rank {self.rank} could not join the other processes:\n" if self.rank else ""
        shown = [finding for finding in self.findings if finding.status != "pass" or not self.rank]
        parts = [head + findings_table(shown, self.world_size, is_terminal=is_terminal)]
        if self.allreduce:
            parts.append(allreduce_table(self.allreduce, is_terminal=is_terminal))
        return "\n\n".join([*parts, self.verdict()])

    def verdict(self) -> str:
        counts = Counter(row.status for row, _ in grouped(self.findings))
        totals = ", ".join(f"{counts[status]} {status}" for status in COLORS if counts[status])
        verdict = "Ready to train" if self.is_ok else "Not ready to train"
        return f"{verdict}: {totals}."


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[int]]]:
    """Equal findings of several ranks as one, with their ranks; findings with one name stay together."""
    order: dict[str, int] = {}
    rows: dict[tuple[Any, ...], tuple[Finding, list[int]]] = {}
    for finding in findings:
        order.setdefault(finding.name, len(order))
        key = (finding.name, finding.status, finding.evidence, finding.remedy)
        ranks = rows.setdefault(key, (finding, []))[1]
        if finding.rank is not None:
            ranks.append(finding.rank)
    return sorted(rows.values(), key=lambda row: order[row[0].name])


def findings_table(findings: Iterable[Finding], world_size: int, *, is_terminal: bool) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    has_ranks = world_size > 1
    for column in ("status", "check", "rank"):
        if column != "rank" or has_ranks:
            table.add_column(column, no_wrap=True, overflow="ignore")
    table.add_column("evidence and remedy", overflow="fold")
    variants: Counter[str] = Counter()
    for finding, ranks in grouped(findings):
        if finding.status == "pass":
            variants[finding.name] += 1
            if variants[finding.name] > MAX_VARIANTS:
                continue
        evidence = Text(printable(finding.evidence))
        if finding.remedy:
            evidence.append(printable(f"\n-> {finding.remedy}"), style="bold")
        where = [Text(_span(ranks, world_size))] if has_ranks else []
        status = finding.status.upper() if finding.status == "fail" else finding.status
        table.add_row(Text(status, style=COLORS[finding.status]), Text(finding.name), *where, evidence)
    for name, count in variants.items():
        if count > MAX_VARIANTS:
            more = Text(f"and {count - MAX_VARIANTS} more that pass; --json lists all")
            table.add_row(Text("pass", style=COLORS["pass"]), Text(name), Text("..."), more)
    return _render(table, is_terminal=is_terminal)


def allreduce_table(timings: Iterable["Timing"], *, is_terminal: bool) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("all-reduce of", "latency", "bus bandwidth", "sum"):
        table.add_column(column, no_wrap=True, justify="left" if column == "sum" else "right")
    for timing in timings:
        verdict = Text("correct", style=COLORS["pass"])
        if timing.wrong_ranks:
            verdict = Text("wrong", style=COLORS["fail"])
        bandwidth = f"{format_bytes(timing.bus_bytes_per_sec)}/s"
        table.add_row(format_bytes(timing.bytes), f"{1e6 * timing.latency_sec:,.0f} us", bandwidth, verdict)
    return _render(table, is_terminal=is_terminal)


def _render(table: Any, *, is_terminal: bool) -> str:
    from rich.console import Console

    width = max(60, shutil.get_terminal_size().columns) if is_terminal else LOG_WIDTH
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _span(ranks: list[int], world_size: int) -> str:
    """[0, 1, 2, 5] -> `0-2,5`; `all` for all ranks."""
    if not ranks or len(set(ranks)) == world_size:
        return "all"
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
