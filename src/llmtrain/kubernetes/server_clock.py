"""The time as the API server has it. Ages of what a cluster says are taken by its clock: the caller's may be wrong."""

import time
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

AGREE_SEC = 2.0  # the header has whole seconds, and the answer was on its way
_ahead = timedelta()


def note_date(header: str | None) -> None:
    """The `Date` header of an answer that has just come."""
    global _ahead  # a process talks to one cluster
    try:
        ahead = parsedate_to_datetime(header or "") - datetime.fromtimestamp(time.time(), UTC)
    except (ValueError, TypeError):  # a proxy may leave it out
        return
    _ahead = ahead if abs(ahead.total_seconds()) > AGREE_SEC else timedelta()


def server_now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC) + _ahead


def seconds_since(stamp: str) -> float:
    """Of a time as Kubernetes writes it; never negative."""
    return max(0.0, (server_now() - datetime.fromisoformat(stamp)).total_seconds())
