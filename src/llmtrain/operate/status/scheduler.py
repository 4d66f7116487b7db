"""The scheduler's sentence, taken apart: `0/3 nodes are available: 2 Insufficient cpu, 1 node(s) had untolerated taint
{key: value}. preemption: ...`."""

import re
from dataclasses import dataclass

_HEAD = re.compile(r"^0/(\d+) nodes are available: (.*)")
_ROW = re.compile(r"(\d+) ([^,]+(?:\{[^}]*\})?[^,]*)")
_SHORT = re.compile(r"Insufficient (\S+)")
# Why a machine does not fit, and the field of the config that has to do with it.
_FIELDS = (
    ("untolerated taint", "launch.tolerations"),
    ("node affinity/selector", "launch.node_selector and launch.affinity"),
    ("node selector", "launch.node_selector"),
    ("pod affinity", "launch.affinity"),
    ("anti-affinity", "launch.affinity"),
)


@dataclass(frozen=True)
class NoRoom:
    machines: int
    rows: tuple[tuple[int, str], ...]
    """(How many machines, why not there)."""

    @property
    def short(self) -> dict[str, int]:
        """Resource -> machines that have too little of it left."""
        found = ((count, _SHORT.match(why)) for count, why in self.rows)
        return {match[1]: count for count, match in found if match}

    @property
    def fields(self) -> list[str]:
        """Of the launch section, that keep machines out."""
        texts = [why for _, why in self.rows]
        return list(dict.fromkeys(field for word, field in _FIELDS if any(word in text for text in texts)))


def read_no_room(message: str) -> NoRoom:
    """A sentence of another form gives nothing but itself."""
    head = _HEAD.match(message)
    if not head:
        return NoRoom(0, ())
    reasons = re.split(r"\.? preemption: |\. no new claims", head[2], maxsplit=1)[0].rstrip(". ")
    return NoRoom(int(head[1]), tuple((int(count), why.strip(". ")) for count, why in _ROW.findall(reasons)))
