"""The handle on a run on a cluster: what commands and the Python API do with one run."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from llmtrain.errors import Interrupted, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, Object
from llmtrain.launch import lifecycle
from llmtrain.launch.job import config_map_name
from llmtrain.launch.lifecycle import OnWait
from llmtrain.launch.record import Record, find_record
from llmtrain.operate.fetch.choice import Only
from llmtrain.operate.fetch.fetch_run import FetchResult, fetch_run
from llmtrain.operate.fetch.transfer import FetchProgress
from llmtrain.operate.logs.merged_logs import merged_logs
from llmtrain.operate.logs.pod_log import LogLine
from llmtrain.operate.observed_run import ObservedRun, current_record
from llmtrain.operate.start import OnWarning, ignore_warning, plan_resume, take_back
from llmtrain.operate.status import watch
from llmtrain.operate.status.run_status import RunStatus
from llmtrain.operate.why.explain import explain
from llmtrain.runs.explain import Why
from llmtrain.runs.state import RunState

OnLine = Callable[[str], None]


def ignore_pods(pods: list[Object]) -> None:
    pass


@dataclass(frozen=True)
class StoppedRun:
    """The result of `stop`."""

    state: RunState
    """STOPPED, or how the run had ended before."""
    lost_pods: list[str]
    """Pods that did not exit in time."""

    @property
    def had_ended(self) -> bool:
        return self.state != RunState.STOPPED


@dataclass(frozen=True)
class DeletedRun:
    """The result of `delete`."""

    kept_claim: str | None
    """The volume that still has its files."""
    lost_pods: list[str]
    """Pods that did not exit in time."""


class ClusterRun:
    """A run on a cluster. Each method looks at the cluster again.

    The fields of RunStatus (`run.run_id`, `run.state`, `run.step`, ...) are attributes too, as of the last `status()`.
    """

    def __init__(self, cluster: Cluster, record: Record) -> None:
        self.cluster = cluster
        self.record = record
        self._seen: ObservedRun | None = None
        self._has_looked = False

    @classmethod
    def find(cls, cluster: Cluster, run_id: str, namespace: str | None = None) -> "ClusterRun":
        """The run of this id, in the namespace of the context unless another is given."""
        return cls(cluster, find_record(cluster, run_id, namespace or cluster.namespace))

    def __getattr__(self, name: str) -> Any:
        """The fields of RunStatus. Called only for names that the handle itself does not have."""
        is_of_status = name in RunStatus.__dataclass_fields__ or hasattr(RunStatus, name)
        if name.startswith("_") or not is_of_status:
            raise AttributeError(f"'ClusterRun' object has no attribute '{name}'")
        if self._seen is None:
            self.status()
        return getattr(self._seen.status, name)  # type: ignore[union-attr]

    def __repr__(self) -> str:
        text = f"ClusterRun {self.record.run_id} in namespace {self.record.namespace}"
        if self._seen is not None:
            text += f", {self._seen.status.state}"
        return f"<{text}>"

    @property
    def in_commands(self) -> str:
        """The run as a command of a message names it: `demo --namespace team`."""
        return f"{self.record.run_id}{self.cluster.place(self.record.namespace)}"

    def look(self, *, with_log: bool = True, with_usage: bool = True) -> ObservedRun:
        """The run as it is now."""
        if self._has_looked and self.record.uid:  # without uid: made from the volume of a deleted run
            self.record = current_record(self.cluster, self.record)
        self._has_looked = True
        return ObservedRun(self.cluster, self.record, with_log=with_log, with_usage=with_usage)

    def status(self, *, with_log: bool = True, with_usage: bool = True) -> RunStatus:
        """Its state, step, loss and pods."""
        seen = self.look(with_log=with_log, with_usage=with_usage)
        status = seen.status
        self._seen = seen
        return status

    def why(self) -> Why:
        """Diagnose it: cause (`unknown` if none was found), evidence and remedy."""
        return explain(self.look())

    def logs(self, *, rank: int | None = None, follow: bool = False, tail: int | None = None) -> Iterator[LogLine]:
        """The log lines of all pods, merged by time.

        rank: only the pod that runs this rank. follow: until the run ends. tail: only the last lines of each pod.
        """
        return merged_logs(self.look(), rank=rank, follow=follow, tail=tail)

    def fetch(
        self,
        to: str | Path = "runs",
        *,
        only: Only = "all",
        on_progress: Callable[[FetchProgress], None] = lambda _: None,
    ) -> FetchResult:
        """Download it, or what is new since the last download, to `to/<run id>`."""
        return fetch_run(self.look(), Path(to).expanduser(), only, on_progress)

    def stop(self, *, on_wait: OnWait = ignore_pods, on_line: OnLine | None = None) -> StoppedRun:
        """Save a checkpoint and stop it. Its objects are removed; its data and its record are kept.

        on_wait: called with the pods that still exist. on_line: called with each line that rank 0 logs meanwhile.
        """
        seen = self.look(with_usage=False)
        ended_as = None
        with suppress(UsageError):  # malformed objects can still be removed
            if seen.status.state in (RunState.FINISHED, RunState.FAILED):
                ended_as = seen.status.state
        _copy_log(seen, on_line)
        lost = lifecycle.stop(self.cluster, self.record, on_wait, ended_as)
        return StoppedRun(ended_as or RunState.STOPPED, lost)

    def resume(
        self,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        *,
        with_code: str | None = None,
        on_warning: OnWarning = ignore_warning,
        on_wait: OnWait = ignore_pods,
    ) -> list[str]:
        """Launch it again with its recorded config; it resumes from its newest checkpoint. Returns old pods that
        remain.

        overrides: changes of the config. with_code: a directory of your own code; None: that of the last launch.
        """
        plan = plan_resume(self.look(with_usage=False), overrides, with_code, on_warning)
        lost = lifecycle.resume(self.cluster, self.record, plan, on_wait)
        self._seen = None  # its status is that of the next launch
        return lost

    def delete(self, *, data: bool = False, on_wait: OnWait = ignore_pods, on_line: OnLine | None = None) -> DeletedRun:
        """Remove it from the cluster; if it runs, it saves a checkpoint first.

        data: also delete the volumes created for it; those that existed before the run are always kept.
        """
        _copy_log(self.look(with_log=False, with_usage=False), on_line)
        lost = lifecycle.delete(self.cluster, self.record, data, on_wait)
        volume = self.record.config.launch.runs_volume
        existed_before = volume is not None and bool(volume.claim)
        kept_claim = None
        if existed_before or not data:
            kept_claim = self.record.runs_claim
        return DeletedRun(kept_claim, lost)

    def follow(
        self, out: TextIO, *, is_terminal: bool, tail: int | None = None, recover_after: float | None = None
    ) -> RunStatus:
        """Show it until it ends."""
        return watch.follow(self.look(), is_terminal=is_terminal, out=out, tail=tail, recover_after=recover_after)

    def follow_launch(self, out: TextIO, *, is_terminal: bool, recover_after: float | None = None) -> RunStatus:
        """Show a run that was just launched, until it ends or, for `launch --hold`, until its pods are ready. If it
        cannot start, the first launch of a run is rolled back."""

        def roll_back(error: UsageError) -> None:
            if self.record.number == 1:
                error.remedy = f"{error.remedy} {take_back(self.look())}"
            raise error

        return watch.follow(
            self.look(),
            is_terminal=is_terminal,
            out=out,
            on_never_started=roll_back,
            recover_after=recover_after,
            until_running=self.record.task.mode == "hold",
        )

    def end_error(self, status: RunStatus) -> LlmtrainError:
        """The error whose exit code is that of a run that has ended without finishing."""
        run = self.in_commands
        reason = f": {status.why_short}" if status.why_short else ""
        if status.state == RunState.FAILED:
            error = LlmtrainError(
                f"Run {status.run_id} failed{reason}.",
                remedy=f"Diagnose it: llmtrain why {run}. Logs: llmtrain logs {run}.",
            )
            error.exit_code = status.exit_code or LlmtrainError.exit_code
        elif self._is_deleted():
            error = Interrupted(f"Run {status.run_id} was deleted while it was being watched.")
        else:
            error = Interrupted(
                f"Run {status.run_id} is {status.state}{reason}.", remedy=f"Resume it: llmtrain resume {run}."
            )
        error.details["status"] = status.as_dict()
        return error

    def _is_deleted(self) -> bool:
        config_map = config_map_name(self.record.run_id)
        return self.cluster.get("v1", "ConfigMap", config_map, self.record.namespace) is None


def _copy_log(run: ObservedRun, on_line: OnLine | None) -> None:
    """Pass on new log lines of rank 0 in the background: whether and where it saves."""
    if on_line is None:
        return
    try:
        with run.checked_objects():
            first = run.first_pod
    except UsageError:  # stopping does not depend on the log
        return
    if first is None or first.phase != "Running":
        return

    def copy(pod: str) -> None:
        container = run.record.kind.container
        try:
            for line in run.cluster.log(pod, run.namespace, container, tail=0, follow=True):
                on_line(line)
        except LlmtrainError:  # stopping does not depend on the log
            return

    threading.Thread(target=copy, args=(first.name,), daemon=True).start()
