"""llmtrain why: one cause, its evidence and a remedy."""

from dataclasses import replace

from llmtrain.launch.record import Record
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.why.causes import NO_PROBLEM, find_cause
from llmtrain.operate.why.diagnosis import Diagnosis
from llmtrain.operate.why.snapshot import Snapshot, Stall, take_snapshot
from llmtrain.operate.why.stall import log_age_sec, watch_heartbeats
from llmtrain.runs.explain import Why

STALL_AFTER_SEC = 120.0


def diagnose(run: ObservedRun, stall_after_sec: float) -> tuple[Snapshot, str, Diagnosis]:
    """(Snapshot, id of the cause, diagnosis). Heartbeats are checked if the run shows no other problem, and has logged
    nothing for `stall_after_sec` or its log cannot be read."""
    record = run.record
    with run.checked_objects():
        snapshot = take_snapshot(run)
        cause, diagnosis = find_cause(snapshot)
        log_age = log_age_sec(run, snapshot) if _may_hang(record, cause) else 0.0
        if log_age is not None and log_age <= stall_after_sec:
            return snapshot, cause, diagnosis
        stall = watch_heartbeats(run, snapshot, log_age, stall_after_sec)
        if not stall.advancing_ranks:  # the run may have ended meanwhile, and its heartbeats with it
            snapshot = take_snapshot(run.again())
            cause, diagnosis = find_cause(snapshot)
        if _may_hang(record, cause):
            snapshot = _with_stall(snapshot, stall)
            cause, diagnosis = find_cause(snapshot)
        return snapshot, cause, diagnosis


def _may_hang(record: Record, cause: str) -> bool:
    return cause in NO_PROBLEM and record.task.mode == "train"


def _with_stall(snapshot: Snapshot, stall: Stall) -> Snapshot:
    status = snapshot.status
    if status.step is None and stall.steps:  # no log showed one
        status = replace(status, step=min(stall.steps.values()))
    unreadable = snapshot.unreadable
    if stall.seconds is None and stall.error:
        unreadable = [*unreadable, f"Heartbeats cannot be read: {stall.error}"]
    return replace(snapshot, stall=stall, status=status, unreadable=unreadable)


def explain(run: ObservedRun) -> Why:
    snapshot, cause, diagnosis = diagnose(run, STALL_AFTER_SEC)
    evidence = list(diagnosis.evidence)
    for text in (snapshot.status.unseen, *snapshot.unreadable):
        if text:
            evidence.append(f"Warning: {text}")
    return Why(run.run_id, snapshot.status.state, cause, diagnosis.what, evidence, diagnosis.remedy)
