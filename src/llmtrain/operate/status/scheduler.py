"""Parsing the scheduler's message: `0/3 nodes are available: 2 Insufficient cpu, 1 node(s) had untolerated taint
{key: value}. preemption: ...`."""

import re
from dataclasses import dataclass

_HEAD = re.compile(r"^0/(\d+) nodes are available: (.*)")
_REASON = re.compile(r"(\d+) ([^,]+(?:\{[^}]*\})?[^,]*)")
_INSUFFICIENT = re.compile(r"Insufficient (\S+)")
# Part of the reason why a node does not fit -> the config field behind it.
_FIELDS = (
    ("untolerated taint", "launch.tolerations"),
    ("node affinity/selector", "launch.node_selector and launch.affinity"),
    ("node selector", "launch.node_selector"),
    ("pod affinity", "launch.affinity"),
    ("anti-affinity", "launch.affinity"),
)


@dataclass(frozen=True)
class Unschedulable:
    nodes: int
    reasons: tuple[tuple[int, str], ...]
    """(Number of nodes, why they do not fit)."""

    @property
    def insufficient(self) -> dict[str, int]:
        """Resource -> number of nodes that have too little of it."""
        nodes = {}
        for count, reason in self.reasons:
            match = _INSUFFICIENT.match(reason)
            if match:
                nodes[match[1]] = count
        return nodes

    @property
    def fields(self) -> list[str]:
        """Fields of the launch section that exclude nodes."""
        found: dict[str, None] = {}  # a set that keeps the order
        for part, field in _FIELDS:
            if any(part in reason for _, reason in self.reasons):
                found[field] = None
        return list(found)


def parse_unschedulable(message: str) -> Unschedulable:
    """Empty for a message of another form."""
    head = _HEAD.match(message)
    if not head:
        return Unschedulable(0, ())
    # What follows is whether preempting other pods would help, in the same form.
    text = re.split(r"\.? preemption: |\. no new claims", head[2], maxsplit=1)[0].rstrip(". ")
    reasons = []
    for count, reason in _REASON.findall(text):
        reasons.append((int(count), reason.strip(". ")))
    return Unschedulable(int(head[1]), tuple(reasons))
