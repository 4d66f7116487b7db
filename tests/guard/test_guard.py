"""The guard: how it derives the end of a run from its pods, notifies a webhook and recovers pods."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kube_runs import INDEX_LABELS, FakeRun, ended, launch, running

from fork_server import IN_BACKGROUND
from kube_server import KubeServer
from limits import limit, wait_until
from llmtrain.config.logging import LoggingSection
from llmtrain.core.logs import setup_logging
from llmtrain.distributed.platform_codes import IDLE_MARK
from llmtrain.guard import watch as guard_module
from llmtrain.guard.watch import NO_RETRY_AFTER_SEC, Guard, RunOutcome, find_outcome, watch
from llmtrain.kubernetes.labels import NOTIFIED

Object = dict[str, Any]
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
INDEX = INDEX_LABELS["indexed_job"]


def stamp(ago_sec: float, now: float | None = None) -> str:
    at = datetime.fromtimestamp(now or time.time(), UTC) - timedelta(seconds=ago_sec)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(
    index: int,
    code: int | None = None,
    *,
    ago_sec: float = 10.0,
    made: int = 0,
    is_terminating: bool = False,
    role: str = "",
    phase: str = "",
) -> Object:
    """A pod of a run that runs, or that ended `ago_sec` seconds ago. A pod with a larger `made` is newer."""
    labels = {INDEX if not role else INDEX_LABELS["pytorch_job"]: str(index)}
    labels |= {"training.kubeflow.org/replica-type": role} if role else {}
    meta = {"name": f"demo-{role}{index}-{made}", "labels": labels, "creationTimestamp": f"2026-06-01T00:00:{made:02}Z"}
    meta |= {"deletionTimestamp": stamp(1, NOW)} if is_terminating else {}
    state: Object = {"running": {}}
    if code is not None:
        state = {"terminated": {"exitCode": code, "finishedAt": stamp(ago_sec, NOW)}}
    expected_phase = "Running" if code is None else "Failed" if code else "Succeeded"
    rows = [{"name": "trainer", "state": state}]
    return {"metadata": meta, "spec": {}, "status": {"phase": phase or expected_phase, "containerStatuses": rows}}


LONG = NO_RETRY_AFTER_SEC + 1
CASES: dict[str, tuple[list[Object], RunOutcome | None]] = {
    "no pods": ([], None),
    "running": ([pod(0), pod(1)], None),
    "pending": ([pod(0, phase="Pending"), pod(1)], None),
    "finished": ([pod(0, 0), pod(1, 0)], RunOutcome("finished", 0)),
    "one finished, one running": ([pod(0, 0), pod(1)], None),
    "recent crash, will be retried": ([pod(0, 1), pod(1, 75)], None),
    "one crashed, one running": ([pod(0, 1, ago_sec=LONG), pod(1)], None),
    "old crash": ([pod(0, 1, ago_sec=LONG), pod(1, 75, ago_sec=LONG)], RunOutcome("failed", 1)),
    "old crash, other pod ended recently": (
        [pod(0, 1, ago_sec=LONG), pod(1, 75, ago_sec=NO_RETRY_AFTER_SEC - 1)],
        None,
    ),
    "killed": ([pod(0, 137, ago_sec=LONG)], RunOutcome("failed", 137)),
    "config error": ([pod(0, 64), pod(1)], RunOutcome("failed", 64)),
    "bad data": ([pod(0, 1), pod(1, 65)], RunOutcome("failed", 65)),
    "one finished, one crashed long ago": ([pod(0, 0, ago_sec=LONG), pod(1, 1, ago_sec=LONG)], RunOutcome("failed", 1)),
    "replacement running": ([pod(0, 1, ago_sec=LONG), pod(0, made=1), pod(1)], None),
    "replacement finished": ([pod(0, 1, ago_sec=LONG), pod(0, 0, made=1), pod(1, 0)], RunOutcome("finished", 0)),
    "newest pod decides in any order": (
        [pod(0, 0, made=2), pod(0, 1, ago_sec=LONG, made=1)],
        RunOutcome("finished", 0),
    ),
    "being stopped": ([pod(0, is_terminating=True), pod(1, is_terminating=True)], None),
    "stopped": ([pod(0, 75, is_terminating=True), pod(1, 75, is_terminating=True)], None),
    "config error of a terminating pod": ([pod(0, 64, is_terminating=True), pod(1)], None),
    "PyTorchJob running": ([pod(0, role="master"), pod(0, role="worker")], None),
    "PyTorchJob master finished": ([pod(0, 0, role="master"), pod(0, role="worker")], None),
    "PyTorchJob finished": ([pod(0, 0, role="master"), pod(0, 0, role="worker")], RunOutcome("finished", 0)),
    "PyTorchJob worker config error": ([pod(0, role="master"), pod(0, 64, role="worker")], RunOutcome("failed", 64)),
}


@pytest.mark.parametrize("case", CASES)
def test_find_outcome(case: str) -> None:
    pods, end = CASES[case]
    assert find_outcome(pods, NOW) == end


def test_find_outcome_tells_pods_without_index_label_apart_by_name() -> None:
    """StatefulSets before Kubernetes 1.28 set no index label."""
    pods = [pod(0, 0), pod(1, 1, ago_sec=1)]
    for each in pods:
        each["metadata"]["labels"] = {}
    assert find_outcome(pods, NOW) is None
    assert find_outcome(pods[:1], NOW) == RunOutcome("finished", 0)


NODE = ["python", "-m", "llmtrain", "node"]


def pods_with_command(command: list[str], code: int) -> list[Object]:
    """Pod 0 has finished, pod 1 has ended with `code`."""
    pods = [pod(0, 0, ago_sec=LONG), pod(1, code, ago_sec=LONG)]
    for each in pods:
        each["spec"]["containers"] = [{"name": "trainer", "command": command}]
    return pods


@pytest.mark.parametrize("code", [75, 1])
@pytest.mark.parametrize("command", [[*NODE, "--nodes", "1:2"], ["torchrun", "--nnodes=1:2", "--no-python", "./run"]])
def test_find_outcome_of_elastic_run_depends_on_pod_0(command: list[str], code: int) -> None:
    """The job is complete once pod 0 has succeeded (successPolicy); a lost pod is not replaced then."""
    assert find_outcome(pods_with_command(command, code), NOW) == RunOutcome("finished", 0)


def test_find_outcome_does_not_take_arguments_of_a_script_for_a_range_of_nodes() -> None:
    for command in ([*NODE, "--nodes", "2", "--", "run", "--nodes", "1:2"], ["torchrun", "--no-python", "run", "1:2"]):
        assert find_outcome(pods_with_command(command, 1), NOW) == RunOutcome("failed", 1)


def test_find_outcome_translates_pytorchjob_exit_codes() -> None:
    """Interrupted (75) and crashed (1): `llmtrain node` adds 128 to codes that should be retried."""
    pods = [pod(0, 203, ago_sec=LONG, role="master"), pod(0, 129, ago_sec=LONG, role="worker")]
    for each in pods:
        each["spec"]["containers"] = [
            {"name": "pytorch", "env": [{"name": "LLMTRAIN_EXIT_CODES", "value": "pytorchjob"}]}
        ]
    assert find_outcome(pods, NOW) == RunOutcome("failed", 1)


@pytest.mark.parametrize(("code", "ago_sec"), [(65, 10.0), (1, LONG)])
def test_find_outcome_reads_init_containers(code: int, ago_sec: float) -> None:
    """If prefetching fails, the training container never starts."""
    pods = [pod(0, code, ago_sec=ago_sec, phase="Failed")]
    status = pods[0]["status"]
    status["initContainerStatuses"] = status["containerStatuses"]
    status["containerStatuses"] = [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}]
    assert find_outcome(pods, NOW) == RunOutcome("failed", code)


@pytest.mark.parametrize(
    ("changed_sec", "end"), [(LONG, RunOutcome("failed", 137)), (10.0, None), (None, RunOutcome("failed", 137))]
)
def test_find_outcome_without_finish_time(changed_sec: float | None, end: RunOutcome | None) -> None:
    """ContainerStatusUnknown (lost node): the time of the last condition change counts, else of creation."""
    pods = [pod(0, 137)]
    status = pods[0]["status"]
    status["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = None
    if changed_sec is None:
        pods[0]["metadata"]["creationTimestamp"] = stamp(LONG, NOW)
    else:
        status["conditions"] = [{"type": "Ready", "lastTransitionTime": stamp(changed_sec, NOW)}]
    assert find_outcome(pods, NOW) == end


class Hook:
    """A local webhook server."""

    def __init__(self) -> None:
        self.events: list[Object] = []
        self.status = 200
        self.garbage = b""
        self.is_up = True
        self.url = ""

    @property
    def received(self) -> list[tuple[str, str, int | None]]:
        return [(event["event"], event["run"], event["exit_code"]) for event in self.events]


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not made.is_up:
                return
            if made.garbage:
                self.wfile.write(made.garbage)
                return
            if made.status == 200:
                assert body.endswith(b"}\n")
                assert body.count(b"\n") == 1
                assert self.headers["Content-Type"] == "application/json"
                made.events.append(json.loads(body))
            self.send_response(made.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}/services/secret-word"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _lines() -> None:
    setup_logging(LoggingSection())


def make_guard(kube: KubeServer, hook: Hook | None, after_sec: float = 60.0) -> Guard:
    return Guard(kube.cluster(), "team", after_sec, hook.url if hook else None)


def end(run: FakeRun, index: int, code: int, ago_sec: float = 0.0) -> None:
    state = ended(code)
    state["terminated"]["finishedAt"] = stamp(ago_sec)
    run.set(index, state)


def two(kube: KubeServer, name: str = "demo", kind: str = "indexed_job") -> FakeRun:
    run = launch(kube, kind, name=name)
    run.pod(0)
    run.pod(1)
    return run


def not_ready(since_sec: float) -> list[Object]:
    row = {"status": "False", "reason": "NodeNotReady", "lastTransitionTime": stamp(since_sec)}
    return [{"type": "Ready", **row}]


class TestNotifications:
    def test_ends_are_sent_once(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        good, bad, active = two(kube, "good"), two(kube, "bad"), two(kube, "active")
        guard = make_guard(kube, hook)
        guard.check()
        assert hook.events == []
        end(good, 0, 0)
        end(good, 1, 0)
        end(bad, 1, 65)
        for _ in range(3):
            guard.check()
        assert sorted(hook.received) == [("failed", "bad", 65), ("finished", "good", 0)]
        row = next(event for event in hook.events if event["run"] == "bad")
        assert row["text"] == "llmtrain: run bad has failed with exit code 65 (namespace team)"
        assert row["namespace"] == "team"
        assert abs(datetime.fromisoformat(row["at"]).timestamp() - time.time()) < 30
        for run in (good, bad):
            for name in run.pods.values():
                notes = kube.objects["pods", "team", name]["metadata"]["annotations"]
                assert notes == {NOTIFIED: "finished" if run is good else "failed"}
        assert "annotations" not in kube.objects["pods", "team", active.pods[0]]["metadata"]
        err = capfd.readouterr().err
        assert err.count("[GUARD] run bad has failed with exit code 65") == 1
        assert "secret-word" not in err

    def test_restarted_guard_does_not_notify_again(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        end(run, 0, 0)
        end(run, 1, 0)
        make_guard(kube, hook).check()
        make_guard(kube, hook).check()
        assert hook.received == [("finished", "demo", 0)]

    def test_resumed_run_is_notified_again(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        end(run, 0, 65)
        guard.check()
        for name in list(run.pods.values()):
            kube.remove("Pod", name)
        run.pod(0)
        run.pod(1)
        guard.check()
        end(run, 0, 0)
        end(run, 1, 0)
        guard.check()
        assert hook.received == [("failed", "demo", 65), ("finished", "demo", 0)]

    def test_without_webhook_ends_are_logged_once(self, kube: KubeServer, capfd: Any) -> None:
        run, guard = two(kube), make_guard(kube, None)
        end(run, 0, 64)
        guard.check()
        guard.check()
        assert capfd.readouterr().err.count("[GUARD] run demo has failed with exit code 64") == 1

    @pytest.mark.parametrize("trouble", ["no response", "500", "404"])
    def test_unsent_notifications_are_kept_in_order(
        self, kube: KubeServer, hook: Hook, trouble: str, capfd: Any
    ) -> None:
        runs = [two(kube, f"run-{letter}") for letter in "abc"]
        guard = make_guard(kube, hook)
        hook.is_up, hook.status = trouble != "no response", 200 if trouble == "no response" else int(trouble)
        for run in runs:
            end(run, 0, 64)
            guard.check()
            guard.check()
        assert hook.events == []
        assert all("annotations" not in found["metadata"] for key, found in kube.objects.items() if key[0] == "pods")
        hook.is_up, hook.status = True, 200
        guard.check()
        guard.check()
        assert hook.received == [("failed", f"run-{letter}", 64) for letter in "abc"]
        err = capfd.readouterr().err
        assert err.count("warning: ") == 1
        assert trouble == "no response" or f"(HTTP {trouble})" in err
        assert "secret-word" not in err
        assert "127.0.0.1" not in err

    def test_unreachable_webhook_url_is_not_logged(self, kube: KubeServer, capfd: Any) -> None:
        run = two(kube)
        end(run, 0, 64)
        guard = Guard(kube.cluster(), "team", 60.0, "http://127.0.0.1:9/secret-word")
        guard.check()
        err = capfd.readouterr().err
        assert "Connection refused" in err
        assert "secret-word" not in err

    def test_webhook_that_is_not_an_http_server_is_retried(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        hook.garbage = b"220 mail.example.com ESMTP\r\n"
        end(run, 0, 64)
        guard.check()
        hook.garbage = b""
        guard.check()
        assert hook.received == [("failed", "demo", 64)]
        assert "warning: the webhook" in capfd.readouterr().err

    @pytest.mark.parametrize("url", ["http://127.0.0.1:9/secret word", "http://127.0.0.1:port/secret-word"])
    def test_invalid_webhook_url_is_not_logged(self, kube: KubeServer, url: str, capfd: Any) -> None:
        run = two(kube)
        end(run, 0, 64)
        Guard(kube.cluster(), "team", 60.0, url).check()
        err = capfd.readouterr().err
        assert "warning: the webhook" in err
        assert "secret" not in err

    def test_ends_are_sent_once_if_pods_cannot_be_annotated(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        end(run, 0, 64)
        kube.gate = lambda method, path, headers: (500, "{}") if method == "PATCH" else None  # noqa: ARG005
        check_twice(guard)
        other = two(kube, "other")
        end(other, 0, 65)
        check_twice(guard)
        assert hook.received == [("failed", "demo", 64), ("failed", "other", 65)]

    def test_end_is_sent_although_the_pod_is_gone(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        hook.status = 500
        end(run, 0, 64)
        guard.check()
        kube.remove("Pod", run.pods[0])
        hook.status = 200
        guard.check()
        assert hook.received == [("failed", "demo", 64)]

    def test_oldest_pending_notifications_are_dropped(
        self, kube: KubeServer, hook: Hook, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guard_module, "MAX_PENDING", 2)
        guard = make_guard(kube, hook)
        hook.is_up = False
        for letter in "abc":
            end(two(kube, f"run-{letter}"), 0, 64)
        guard.check()
        assert [each.event["run"] for each in guard._pending] == ["run-b", "run-c"]

    def test_pods_of_other_applications_are_ignored(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        end(run, 0, 64)
        for change in ({"app": "other"}, {"llmtrain.dev/run": None}):
            kube.change("Pod", run.pods[0], {"metadata": {"labels": {"app": "llmtrain", "llmtrain.dev/run": "demo"}}})
            kube.change("Pod", run.pods[0], {"metadata": {"labels": change}})
            make_guard(kube, hook).check()
        assert hook.events == []


class TestRecovery:
    def test_pods_on_lost_nodes_are_removed_and_notified_once(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        patches: list[str] = []

        def gate(method: str, path: str, headers: object) -> None:  # noqa: ARG001
            if method in ("PATCH", "DELETE"):
                patches.append(f"{method} {path.partition('/pods/')[2].partition('?')[0]}")

        kube.gate = gate
        run.set(1, running(), conditions=not_ready(61))
        lost = run.pods[1]
        guard.check()
        assert patches == [f"PATCH {lost}/status", f"DELETE {lost}"], "marked Failed first, or its finalizer stays"
        assert ("pods", "team", lost) not in kube.objects
        assert ("pods", "team", run.pods[0]) in kube.objects
        run.pod(1)
        guard.check()
        make_guard(kube, hook).check()
        assert hook.received == [("recovered", "demo", None)]
        assert lost in hook.events[0]["text"]

    def test_pods_are_not_removed_before_the_threshold(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        run.set(1, running(), conditions=not_ready(50))
        make_guard(kube, hook).check()
        assert ("pods", "team", run.pods[1]) in kube.objects
        make_guard(kube, hook, after_sec=40).check()
        assert ("pods", "team", run.pods[1]) not in kube.objects
        assert hook.received == [("recovered", "demo", None)]

    def test_lost_pods_of_one_run_share_a_notification(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        for index in (0, 1):
            run.set(index, running(), conditions=not_ready(100))
        make_guard(kube, hook).check()
        assert [run.pods[index] in hook.events[0]["text"] for index in (0, 1)] == [True, True]
        assert len(hook.events) == 1

    def test_recovery_and_end_are_sent_in_order_after_an_outage(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        hook.status = 503
        run.set(1, running(), conditions=not_ready(100))
        guard.check()
        run.pod(1)
        end(run, 0, 0)
        end(run, 1, 0)
        guard.check()
        hook.status = 200
        guard.check()
        assert hook.received == [("recovered", "demo", None), ("finished", "demo", 0)]


class TestStatefulSet:
    @pytest.fixture
    def run(self, kube: KubeServer) -> FakeRun:
        run = two(kube, kind="stateful_set")
        for name in run.pods.values():
            kube.change("Pod", name, {"metadata": {"ownerReferences": [{"kind": "StatefulSet", "name": "demo"}]}})
        return run

    @pytest.mark.parametrize(("code", "event"), [(0, "finished"), (65, "failed")])
    def test_end_is_read_from_the_container_before_the_one_that_waits(
        self, run: FakeRun, kube: KubeServer, hook: Hook, code: int, event: str
    ) -> None:
        guard = make_guard(kube, hook)
        run.set(0, running(), restarts=1, last=ended(code))
        guard.check()
        assert hook.received == ([("failed", "demo", 65)] if code else [])
        run.set(1, running(), restarts=1, last=ended(code))
        guard.check()
        guard.check()
        assert hook.received == [(event, "demo", code)]

    def test_restart_after_a_crash_is_not_the_end(self, run: FakeRun, kube: KubeServer, hook: Hook) -> None:
        for index in (0, 1):
            run.set(index, running(), restarts=1, last=ended(1))
        make_guard(kube, hook).check()
        assert hook.events == []

    def test_end_of_a_first_version_image_is_not_reported(self, run: FakeRun, kube: KubeServer, hook: Hook) -> None:
        """Its pods log the exit code and do not exit. The guard is not allowed to read logs."""
        for index in (0, 1):
            run.say(index, "[TRAIN] step 30/30", f"[DDP] {IDLE_MARK} 0; a StatefulSet would start this again")
        make_guard(kube, hook).check()
        assert hook.events == []
        assert kube.asked()["GET log"] == 0


def check_twice(guard: Guard) -> None:
    turns = iter([False, True])
    watch(guard, 0.0, lambda: None, lambda _: next(turns))


class TestWatch:
    def test_unreachable_cluster_is_retried(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        alive: list[int] = []
        turn = 0

        def wait_for_stop(poll_sec: float) -> bool:
            nonlocal turn
            assert poll_sec == 5.0
            turn += 1
            if turn == 1:
                kube.gate = lambda method, path, headers: (0, "")  # noqa: ARG005
            elif turn == 3:
                kube.gate = None
                end(run, 0, 64)
            return turn == 5

        watch(guard, 5.0, lambda: alive.append(turn), wait_for_stop)
        assert alive == [0, 1, 2, 3, 4], "also while the cluster is unreachable"
        assert hook.received == [("failed", "demo", 64)]
        err = capfd.readouterr().err
        assert err.count("warning: ") == 1
        assert err.count("reachable again") == 1

    def test_missing_rights_are_logged(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        kube.forbidden.add("pods")
        check_twice(make_guard(kube, hook))
        assert capfd.readouterr().err.count("pods") >= 1
        assert hook.events == []

    def test_failed_recovery_does_not_block_other_runs(self, kube: KubeServer, hook: Hook) -> None:
        """For example if deleting is not allowed, or an admission webhook denies it."""
        broken, fine = two(kube, "a-broken"), two(kube, "b-fine")
        broken.set(1, running(), conditions=not_ready(100))
        end(fine, 0, 64)
        refusal = json.dumps({"message": "admission webhook denied the request"})
        kube.gate = lambda method, path, headers: (403, refusal) if path.endswith("/status") else None  # noqa: ARG005
        check_twice(make_guard(kube, hook))
        assert ("failed", "b-fine", 64) in hook.received


def test_watch_command_runs_until_sigterm(kube: KubeServer, hook: Hook, tmp_path: Any) -> None:
    """In its own process, as in the pod of a guard, which the first version may have installed with --with-logs."""
    import os
    import signal
    import subprocess
    import sys

    run = two(kube)
    end(run, 0, 64)
    command = [sys.executable, "-m", "llmtrain", "guard", "watch", "--after", "5", "--with-logs", "--kubeconfig"]
    process = subprocess.Popen(
        [*IN_BACKGROUND, *command, str(kube.kubeconfig(tmp_path))],
        env={**os.environ, "LLMTRAIN_WEBHOOK": hook.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: hook.events, 30)
    process.send_signal(signal.SIGINT)
    time.sleep(limit(0.3))  # for a guard that would end now
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=limit(20))
    assert hook.received == [("failed", "demo", 64)]
    assert process.returncode == 0, err
    assert "[GUARD] watching namespace team" in err
    assert "for 5 s" in err
    assert "secret-word" not in err
