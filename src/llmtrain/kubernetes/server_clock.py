"""The time of the API server, which ages of objects are computed with: the local clock may be wrong."""

import time
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

TOLERANCE_SEC = 2.0  # the header has whole seconds, and the response takes time
_ahead = timedelta()


def note_date(header: str | None) -> None:
    """Compare the local clock with the `Date` header of a response that has just arrived."""
    global _ahead  # a process uses one cluster
    try:
        ahead = parsedate_to_datetime(header or "") - datetime.fromtimestamp(time.time(), UTC)
    except (ValueError, TypeError):  # a proxy may drop it
        return
    _ahead = ahead if abs(ahead.total_seconds()) > TOLERANCE_SEC else timedelta()


def server_now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC) + _ahead


def seconds_since(stamp: str) -> float:
    """Age of an RFC 3339 time stamp; never negative."""
    return max(0.0, (server_now() - datetime.fromisoformat(stamp)).total_seconds())
