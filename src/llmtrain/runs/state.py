"""The state of a run, on this machine or on a cluster: one word per state, everywhere it is shown. And how one start of
a run ended, as generations.json records it."""

from enum import StrEnum


class RunState(StrEnum):
    # Before and while it trains.
    NOT_STARTED = "not started"
    """Local: the directory exists, and no process has trained in it."""
    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    # After it ended.
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Local: it received a signal and saved a checkpoint."""
    FAILED = "failed"
    """It ended with an error."""
    KILLED = "killed"
    """Local: it ended without recording how: SIGKILL, out of memory, or the machine went down."""
    STOPPED = "stopped"
    """Cluster: it was stopped by `llmtrain stop`."""
    REMOVED = "removed"
    """Cluster: its job no longer exists and was not stopped by `llmtrain stop`."""
    INCOMPLETE = "incomplete"
    """Cluster: submitting it was cut off before its job was created."""
    # It cannot be read.
    UNKNOWN = "unknown"
    """Cluster: its job may not be read, or its objects are malformed."""
    UNREADABLE = "unreadable"
    """Its record is damaged or from another version."""

    @property
    def has_ended(self) -> bool:
        return self in _AFTER_THE_END


_AFTER_THE_END = frozenset(
    {
        RunState.FINISHED,
        RunState.INTERRUPTED,
        RunState.FAILED,
        RunState.KILLED,
        RunState.STOPPED,
        RunState.REMOVED,
        RunState.INCOMPLETE,
    }
)


class EndStatus(StrEnum):
    """How a start of a run ended: `ended` in generations.json, and passed to trackers. A start without one was killed.

    A run may be started many times, so these are not states of the run; `state_after` says which state follows.
    """

    FINISHED = "finished"
    STOPPED = "stopped"
    """It received a signal and saved a checkpoint."""
    FAILED = "failed"
    REFUSED = "refused"
    """A usage error: nothing was trained."""
    SUPERSEDED = "superseded"
    """Another process has taken over the run and reports on it."""


_STATE_AFTER: dict[str, RunState] = {
    EndStatus.FINISHED: RunState.FINISHED,
    EndStatus.STOPPED: RunState.INTERRUPTED,
    EndStatus.FAILED: RunState.FAILED,
    EndStatus.REFUSED: RunState.FAILED,
}


def state_after(ended: object) -> RunState:
    """The state of a run whose last start ended like this: an EndStatus, or whatever generations.json has instead. A
    start that recorded nothing was killed."""
    return _STATE_AFTER.get(str(ended), RunState.KILLED)
