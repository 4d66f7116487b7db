"""A run on a cluster as it is at one moment. Everything about runs on a cluster starts here."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from llmtrain.core.redact import redacted_line
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import KindNotFound
from llmtrain.kubernetes.client import Cluster, Object, plural_of
from llmtrain.kubernetes.labels import belongs_to_run
from llmtrain.launch.job import config_map_name
from llmtrain.launch.record import Record, read_record
from llmtrain.operate.status.events import find_events
from llmtrain.operate.status.pods import PodStatus, Usage, by_index, pod_statuses, unindexed_pods_warning, worst_code
from llmtrain.operate.status.progress import RunProgress, read_progress
from llmtrain.operate.status.queue import NOT_QUEUED, QueueState, find_queue_state
from llmtrain.operate.status.run_status import RunStatus, make_status
from llmtrain.operate.status.state import Observation, is_queued

TAIL_LINES = 400  # of the log of rank 0: enough to contain a step line
IDLE_LINES = 5  # the exit code of a waiting pod is in its last line
MAX_PARALLEL_LOGS = 16


def current_record(cluster: Cluster, record: Record) -> Record:
    """The record as it is now: another command may have stopped or resumed the run. The old one if it was deleted."""
    found = cluster.get("v1", "ConfigMap", config_map_name(record.run_id), record.namespace)
    if found is None or not belongs_to_run(found, record.run_id):
        return record
    return read_record(found, cluster.place(record.namespace))


class ObservedRun:
    """Each part is read when it is first used, and kept. To look again, make another one.

    A part that the caller knows already is assigned before it is used, such as the pods when those of all runs were
    read with one request.
    """

    def __init__(self, cluster: Cluster, record: Record, *, with_log: bool = True, with_usage: bool = True) -> None:
        """Without its log, neither its step nor the end of a run whose pods idle is known."""
        self.cluster = cluster
        self.record = record
        self._with_log = with_log
        self._with_usage = with_usage
        self._log_problem: str | None = None

    def again(self) -> "ObservedRun":
        """The same run as it is now."""
        return ObservedRun(self.cluster, self.record, with_log=self._with_log, with_usage=self._with_usage)

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def namespace(self) -> str:
        return self.record.namespace

    @cached_property
    def place(self) -> str:
        """Command-line options that select namespace and cluster, for commands in messages."""
        return self.cluster.place(self.record.namespace)

    @property
    def in_commands(self) -> str:
        """The run as a command of a message names it: `demo --namespace team`."""
        return f"{self.record.run_id}{self.place}"

    @cached_property
    def job(self) -> Object | None:
        kind = self.record.kind
        try:
            job = self.cluster.get(kind.api_version, kind.object_kind, kind.job_name(self.run_id), self.namespace)
        except KindNotFound:  # the CRD was removed, and its jobs with it
            return None
        if job is None or not belongs_to_run(job, self.run_id):  # another user's job of that name
            return None
        return job

    @cached_property
    def pods(self) -> list[Object]:
        return self.cluster.find("v1", "Pod", self.record.namespace, self.record.selector)

    @cached_property
    def pods_by_index(self) -> dict[int, list[Object]]:
        """Node rank -> its pods, oldest first."""
        return by_index(self.record, self.pods)

    @cached_property
    def usage(self) -> Usage | None:
        if not self._with_usage or not self.pods:
            return None
        return self.cluster.usage(self.record.namespace, self.record.selector)

    @cached_property
    def pod_statuses(self) -> list[PodStatus]:
        return pod_statuses(self.record, self.pods, self.usage)

    @property
    def first_pod(self) -> PodStatus | None:
        """The pod with rank 0, which logs for all."""
        for pod in self.pod_statuses:
            if pod.index == 0:
                return pod
        return None

    @property
    def unindexed_warning(self) -> str | None:
        return unindexed_pods_warning(self.record, self.pods)

    @cached_property
    def progress(self) -> RunProgress | None:
        """What rank 0 has logged; None if its log cannot be read."""
        if not self._with_log:
            return None
        first = self.first_pod
        if first is None or not first.has_run:
            return RunProgress()
        if first.silent_sec is not None:
            self._log_problem = f"The log of {first.name} cannot be read: {first.node or 'its node'} is NotReady."
            return None
        lines = self._log_tail(first, TAIL_LINES)
        if lines is None:
            return None
        progress = read_progress(lines)
        if progress.step is None and first.last_exit_code is not None:  # it has just restarted
            earlier = read_progress(self._log_tail(first, TAIL_LINES, previous=True) or [])
            return RunProgress(step=earlier.step, max_steps=earlier.max_steps, val_loss=earlier.val_loss)
        return progress

    @cached_property
    def idle_code(self) -> int | None:
        """Exit code of a run whose pods have all ended and wait to be deleted; None otherwise."""
        pods = self.pod_statuses
        if not self.record.kind.pods_idle_at_end or len(pods) < self.record.config.launch.node_range[0]:
            return None
        codes = [pod.final_code for pod in pods]
        if None not in codes:
            return worst_code(codes)
        # Pods of the first version never exit: they log their exit code and wait. Rank 0 is asked first, because
        # reading all logs takes time.
        if self.progress is None or self.progress.idle_code is None or not all(pod.is_running for pod in pods):
            return None
        with ThreadPoolExecutor(MAX_PARALLEL_LOGS) as threads:
            codes = list(threads.map(self._logged_code, pods))
        if None in codes:
            return None
        return worst_code(codes)

    def _logged_code(self, pod: PodStatus) -> int | None:
        return read_progress(self._log_tail(pod, IDLE_LINES) or []).idle_code

    def _log_tail(self, pod: PodStatus, count: int, previous: bool = False) -> list[str] | None:
        """None if the log cannot be read: not allowed, or its node is NotReady."""
        container = self.record.kind.container
        try:
            return list(self.cluster.log(pod.name, self.namespace, container, tail=count, previous=previous))
        except LlmtrainError as problem:
            self._log_problem = self._log_problem or problem.what
            return None

    @property
    def needs_events(self) -> bool:
        """Whether events are needed to explain the state: the job is gone, pods are missing, or one does not start."""
        if self.job is None:  # with events of it, it was deleted; without, it was never created
            return all(pod.is_overdue for pod in self.pod_statuses) and not self.record.stopped_at
        has_too_few = len(self.pod_statuses) < self.record.config.launch.node_range[1]
        return has_too_few or any(pod.is_mounting for pod in self.pod_statuses)

    @cached_property
    def events(self) -> list[Object]:
        """Events of the namespace, if they are needed."""
        if not self.needs_events:
            return []
        return find_events(self.cluster, self.namespace)

    @cached_property
    def queue(self) -> QueueState:
        """The queue state from Kueue, if the run is queued."""
        if self.job is None or not is_queued(self.record, self.job, self.pod_statuses):
            return NOT_QUEUED
        return find_queue_state(self.cluster, self.record, self.job)

    @cached_property
    def observation(self) -> Observation:
        return Observation(
            job=self.job,
            pods=self.pod_statuses,
            progress=self.progress,
            idle_code=self.idle_code,
            events=self.events,
            queue=self.queue,
            place=self.place,
        )

    @cached_property
    def status(self) -> RunStatus:
        with self.checked_objects():
            status = make_status(self.record, self.observation)
            return replace(status, unseen=self.unindexed_warning or self._log_problem)

    @contextmanager
    def checked_objects(self) -> Iterator[None]:
        """Turn exceptions caused by malformed objects (anyone with write access to the namespace can create some) into
        an error of the run they belong to."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as problem:
            cause = redacted_line(f"{type(problem).__name__}: {problem}")
            selector = f"{self.record.run_label}={self.record.run_id}"
            raise UsageError(
                f"The objects of run '{self.record.run_id}' in namespace {self.record.namespace} are malformed "
                f"({cause}).",
                remedy=f"Inspect them: kubectl get all,{plural_of(self.record.kind.object_kind)} -o yaml -l {selector}"
                f"{self.place}",
            ) from problem
