"""The status of all runs, read with few requests to the API server."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import KindNotFound
from llmtrain.kubernetes.client import Cluster, Labels, Object
from llmtrain.kubernetes.labels import APP_LABEL, run_id_of
from llmtrain.launch.record import Record, UnreadableRecord, all_records
from llmtrain.operate.observed_run import MAX_PARALLEL_LOGS, ObservedRun
from llmtrain.operate.status.events import find_events
from llmtrain.operate.status.run_status import RunStatus, malformed_status, unreadable_status
from llmtrain.operate.status.state import Observation, find_state
from llmtrain.runs.state import RunState

_ALL_RUNS: Labels = {**APP_LABEL}
Key = tuple[str, str]
"""(namespace, run id)"""


def all_status(cluster: Cluster, namespace: str | None) -> list[RunStatus]:
    """All runs of one namespace or of all, oldest first. Only logs of active runs are read. A problem with one run
    shows in its own status and does not hide the others."""
    entries = all_records(cluster, namespace)
    records = [record for record in entries if isinstance(record, Record)]
    if not records:
        return [unreadable_status(each) for each in entries if isinstance(each, UnreadableRecord)]
    pods = _all_pods(cluster, namespace)
    unseen: dict[str, str] = {}
    jobs = _all_jobs(cluster, namespace, records, unseen)
    runs: dict[Key, ObservedRun] = {}
    malformed: dict[Key, RunStatus] = {}
    needs_events = False
    for record in records:
        run = ObservedRun(cluster, record, with_usage=False)
        run.job = jobs.get(_key(record))
        run.pods = pods[_key(record)]
        try:
            with run.checked_objects():
                needs_events |= run.needs_events
        except UsageError as problem:
            malformed[_key(record)] = malformed_status(record, problem)
        else:
            runs[_key(record)] = run
    events = find_events(cluster, namespace) if needs_events else []

    def finish(record: Record | UnreadableRecord) -> RunStatus:
        if isinstance(record, UnreadableRecord):
            return unreadable_status(record)
        if _key(record) in malformed:
            return malformed[_key(record)]
        run = runs[_key(record)]
        run.events = events
        try:
            return _status(run, unseen.get(record.kind.object_kind))
        except UsageError as problem:
            return malformed_status(record, problem)

    with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
        return list(threads.map(finish, entries))


def _status(run: ObservedRun, job_problem: str | None) -> RunStatus:
    """`job_problem`: why jobs of its kind may not be read."""
    with run.checked_objects():
        if not _is_active(run):
            run.progress = None
        status = replace(run.status, unseen=run.unindexed_warning)
    if job_problem:
        return replace(status, state=RunState.UNKNOWN, why_short=job_problem)
    return status


def _is_active(run: ObservedRun) -> bool:
    """Whether its log may have new lines, judged by its job and pods."""
    if run.job is None or not run.pod_statuses:
        return False
    return not find_state(run.record, Observation(run.job, run.pod_statuses)).has_ended


def _all_pods(cluster: Cluster, namespace: str | None) -> dict[Key, list[Object]]:
    pods: dict[Key, list[Object]] = defaultdict(list)
    for pod in cluster.find("v1", "Pod", namespace, _ALL_RUNS):
        run_id = run_id_of(pod)
        if run_id is not None:
            pods[pod["metadata"]["namespace"], run_id].append(pod)
    return pods


def _all_jobs(
    cluster: Cluster, namespace: str | None, records: list[Record], unseen: dict[str, str]
) -> dict[Key, Object]:
    """Jobs by run. `unseen` gets the kinds that may not be read, with the reason."""
    kinds = {(record.kind.api_version, record.kind.object_kind) for record in records}
    found = {}
    for api_version, kind in sorted(kinds):
        try:
            jobs = cluster.find(api_version, kind, namespace, _ALL_RUNS)
        except KindNotFound:  # the CRD was removed, and its jobs with it
            continue
        except UsageError as refused:  # runs of other kinds are still shown
            unseen[kind] = refused.what
            continue
        for job in jobs:
            meta = job["metadata"]
            found[kind, meta["namespace"], meta["name"]] = job
    by_run = {}
    for record in records:
        own = found.get((record.kind.object_kind, record.namespace, record.kind.job_name(record.run_id)))
        if own is not None and run_id_of(own) == record.run_id:
            by_run[_key(record)] = own
    return by_run


def _key(record: Record) -> Key:
    return record.namespace, record.run_id
