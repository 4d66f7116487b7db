"""What the guard does with the pods it sees, and what it tells a real webhook."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kube_runs import INDEX_LABELS, FakeRun, ended, launch, running

from kube_server import KubeServer
from llmtrain.config.logging import LoggingSection
from llmtrain.distributed.exit_codes import IDLE_MARK
from llmtrain.kubernetes.labels import NOTIFIED
from llmtrain.logs import setup_logging
from llmtrain.operate.guard import watch as guard_module
from llmtrain.operate.guard.watch import GIVEN_UP_SEC, End, Guard, find_end, watch

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
    is_leaving: bool = False,
    role: str = "",
    phase: str = "",
) -> Object:
    """A pod of a run: it runs, or has ended so long ago. `made`: of two, the later one is the newer."""
    labels = {INDEX if not role else INDEX_LABELS["pytorch_job"]: str(index)}
    labels |= {"training.kubeflow.org/replica-type": role} if role else {}
    meta = {"name": f"demo-{role}{index}-{made}", "labels": labels, "creationTimestamp": f"2026-06-01T00:00:{made:02}Z"}
    meta |= {"deletionTimestamp": stamp(1, NOW)} if is_leaving else {}
    state: Object = {"running": {}}
    if code is not None:
        state = {"terminated": {"exitCode": code, "finishedAt": stamp(ago_sec, NOW)}}
    found = "Running" if code is None else "Failed" if code else "Succeeded"
    rows = [{"name": "trainer", "state": state}]
    return {"metadata": meta, "spec": {}, "status": {"phase": phase or found, "containerStatuses": rows}}


LONG = GIVEN_UP_SEC + 1
CASES: dict[str, tuple[list[Object], End | None]] = {
    "nothing there": ([], None),
    "it runs": ([pod(0), pod(1)], None),
    "it waits": ([pod(0, phase="Pending"), pod(1)], None),
    "finished": ([pod(0, 0), pod(1, 0)], End("finished", 0)),
    "one still ends": ([pod(0, 0), pod(1)], None),
    "a crash that is tried again": ([pod(0, 1), pod(1, 75)], None),
    "one crashed, the other goes on": ([pod(0, 1, ago_sec=LONG), pod(1)], None),
    "a crash, and nothing since": ([pod(0, 1, ago_sec=LONG), pod(1, 75, ago_sec=LONG)], End("failed", 1)),
    "a crash, and the other ended just now": ([pod(0, 1, ago_sec=LONG), pod(1, 75, ago_sec=GIVEN_UP_SEC - 1)], None),
    "killed": ([pod(0, 137, ago_sec=LONG)], End("failed", 137)),
    "a mistake in the config": ([pod(0, 64), pod(1)], End("failed", 64)),
    "bad data": ([pod(0, 1), pod(1, 65)], End("failed", 65)),
    "one finished, the other never came back": ([pod(0, 0, ago_sec=LONG), pod(1, 1, ago_sec=LONG)], End("failed", 1)),
    "replaced, and running": ([pod(0, 1, ago_sec=LONG), pod(0, made=1), pod(1)], None),
    "replaced, and finished": ([pod(0, 1, ago_sec=LONG), pod(0, 0, made=1), pod(1, 0)], End("finished", 0)),
    "the newest counts, whatever the order": ([pod(0, 0, made=2), pod(0, 1, ago_sec=LONG, made=1)], End("finished", 0)),
    "being stopped": ([pod(0, is_leaving=True), pod(1, is_leaving=True)], None),
    "stopped, and told to": ([pod(0, 75, is_leaving=True), pod(1, 75, is_leaving=True)], None),
    "a mistake of one that is being removed": ([pod(0, 64, is_leaving=True), pod(1)], None),
    "a PyTorchJob runs": ([pod(0, role="master"), pod(0, role="worker")], None),
    "its master finished": ([pod(0, 0, role="master"), pod(0, role="worker")], None),
    "all of it finished": ([pod(0, 0, role="master"), pod(0, 0, role="worker")], End("finished", 0)),
    "its worker's mistake": ([pod(0, role="master"), pod(0, 64, role="worker")], End("failed", 64)),
}


@pytest.mark.parametrize("case", CASES)
def test_how_a_run_has_ended(case: str) -> None:
    pods, end = CASES[case]
    assert find_end(pods, NOW) == end


def test_a_pod_without_labels_of_its_number_is_one_of_its_own() -> None:
    """A StatefulSet before Kubernetes 1.28."""
    pods = [pod(0, 0), pod(1, 1, ago_sec=1)]
    for each in pods:
        each["metadata"]["labels"] = {}
    assert find_end(pods, NOW) is None
    assert find_end(pods[:1], NOW) == End("finished", 0)


@pytest.mark.parametrize("code", [75, 1])
def test_what_an_elastic_run_leaves_behind(code: int) -> None:
    """Its job is complete once node 0 has succeeded (successPolicy); a node that was lost is not replaced then."""
    pods = [pod(0, 0, ago_sec=LONG), pod(1, code, ago_sec=LONG)]
    for each in pods:
        each["spec"]["containers"] = [
            {"name": "trainer", "command": ["python", "-m", "llmtrain", "node", "--nodes", "1:2"]}
        ]
    assert find_end(pods, NOW) == End("finished", 0)


def test_codes_that_were_translated_for_a_platform() -> None:
    """One was told to stop (75), the other crashed (1): `llmtrain node` adds 128 to what is worth another try."""
    pods = [pod(0, 203, ago_sec=LONG, role="master"), pod(0, 129, ago_sec=LONG, role="worker")]
    for each in pods:
        each["spec"]["containers"] = [
            {"name": "pytorch", "env": [{"name": "LLMTRAIN_EXIT_CODES", "value": "pytorchjob"}]}
        ]
    assert find_end(pods, NOW) == End("failed", 1)


@pytest.mark.parametrize(("code", "ago_sec"), [(65, 10.0), (1, LONG)])
def test_what_fails_before_training(code: int, ago_sec: float) -> None:
    """Its data could not be fetched: the container itself never started."""
    pods = [pod(0, code, ago_sec=ago_sec, phase="Failed")]
    status = pods[0]["status"]
    status["initContainerStatuses"] = status["containerStatuses"]
    status["containerStatuses"] = [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}]
    assert find_end(pods, NOW) == End("failed", code)


@pytest.mark.parametrize(("changed_sec", "end"), [(LONG, End("failed", 137)), (10.0, None), (None, End("failed", 137))])
def test_ends_without_a_time(changed_sec: float | None, end: End | None) -> None:
    """ContainerStatusUnknown: the machine was lost. Then the time of the pod's last change counts, or of its start."""
    pods = [pod(0, 137)]
    status = pods[0]["status"]
    status["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = None
    if changed_sec is None:
        pods[0]["metadata"]["creationTimestamp"] = stamp(LONG, NOW)
    else:
        status["conditions"] = [{"type": "Ready", "lastTransitionTime": stamp(changed_sec, NOW)}]
    assert find_end(pods, NOW) == end


class Hook:
    """A webhook on this machine."""

    def __init__(self) -> None:
        self.rows: list[Object] = []
        self.status = 200
        self.garbage = b""
        self.is_up = True
        self.url = ""

    @property
    def told(self) -> list[tuple[str, str, int | None]]:
        return [(row["event"], row["run"], row["exit_code"]) for row in self.rows]


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
                made.rows.append(json.loads(body))
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


def make_guard(kube: KubeServer, hook: Hook | None, after_sec: float = 60.0, with_logs: bool = False) -> Guard:
    return Guard(kube.cluster(), "team", after_sec, hook.url if hook else None, with_logs)


def end(run: FakeRun, index: int, code: int, ago_sec: float = 0.0) -> None:
    state = ended(code)
    state["terminated"]["finishedAt"] = stamp(ago_sec)
    run.set(index, state)


def two(kube: KubeServer, name: str = "demo", kind: str = "indexed_job") -> FakeRun:
    run = launch(kube, kind, name=name)
    run.pod(0)
    run.pod(1)
    return run


def silent(since_sec: float) -> list[Object]:
    row = {"status": "False", "reason": "NodeNotReady", "lastTransitionTime": stamp(since_sec)}
    return [{"type": "Ready", **row}]


class TestTelling:
    def test_finished_and_failed_once_each(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        good, bad, going = two(kube, "good"), two(kube, "bad"), two(kube, "going")
        guard = make_guard(kube, hook)
        guard.look()
        assert hook.rows == []
        end(good, 0, 0)
        end(good, 1, 0)
        end(bad, 1, 65)
        for _ in range(3):
            guard.look()
        assert sorted(hook.told) == [("failed", "bad", 65), ("finished", "good", 0)]
        row = next(row for row in hook.rows if row["run"] == "bad")
        assert row["text"] == "llmtrain: run bad has failed with exit code 65 (namespace team)"
        assert row["namespace"] == "team"
        assert abs(datetime.fromisoformat(row["at"]).timestamp() - time.time()) < 30
        for run in (good, bad):
            for name in run.pods.values():
                notes = kube.objects["pods", "team", name]["metadata"]["annotations"]
                assert notes == {NOTIFIED: "finished" if run is good else "failed"}
        assert "annotations" not in kube.objects["pods", "team", going.pods[0]]["metadata"]
        err = capfd.readouterr().err
        assert err.count("[GUARD] run bad has failed with exit code 65") == 1
        assert "secret-word" not in err

    def test_a_guard_that_was_started_again_tells_nothing_twice(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        end(run, 0, 0)
        end(run, 1, 0)
        make_guard(kube, hook).look()
        make_guard(kube, hook).look()
        assert hook.told == [("finished", "demo", 0)]

    def test_a_run_that_is_resumed_is_told_again(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        end(run, 0, 65)
        guard.look()
        for name in list(run.pods.values()):
            kube.remove("Pod", name)
        run.pod(0)
        run.pod(1)
        guard.look()
        end(run, 0, 0)
        end(run, 1, 0)
        guard.look()
        assert hook.told == [("failed", "demo", 65), ("finished", "demo", 0)]

    def test_without_a_webhook_it_is_only_said(self, kube: KubeServer, capfd: Any) -> None:
        run, guard = two(kube), make_guard(kube, None)
        end(run, 0, 64)
        guard.look()
        guard.look()
        assert capfd.readouterr().err.count("[GUARD] run demo has failed with exit code 64") == 1

    @pytest.mark.parametrize("trouble", ["away", "500", "404"])
    def test_what_the_webhook_does_not_take_is_kept_in_order(
        self, kube: KubeServer, hook: Hook, trouble: str, capfd: Any
    ) -> None:
        runs = [two(kube, f"run-{letter}") for letter in "abc"]
        guard = make_guard(kube, hook)
        hook.is_up, hook.status = trouble != "away", 200 if trouble == "away" else int(trouble)
        for run in runs:
            end(run, 0, 64)
            guard.look()
            guard.look()
        assert hook.rows == []
        assert all("annotations" not in found["metadata"] for key, found in kube.objects.items() if key[0] == "pods")
        hook.is_up, hook.status = True, 200
        guard.look()
        guard.look()
        assert hook.told == [("failed", f"run-{letter}", 64) for letter in "abc"]
        err = capfd.readouterr().err
        assert err.count("warning: the webhook does not take what it is told") == 1
        assert trouble == "away" or f"(HTTP {trouble})" in err
        assert "secret-word" not in err
        assert "127.0.0.1" not in err

    def test_a_webhook_that_is_not_there(self, kube: KubeServer, capfd: Any) -> None:
        run = two(kube)
        end(run, 0, 64)
        guard = Guard(kube.cluster(), "team", 60.0, "http://127.0.0.1:9/secret-word")
        guard.look()
        err = capfd.readouterr().err
        assert "Connection refused" in err
        assert "secret-word" not in err

    def test_one_that_answers_what_no_server_would(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        hook.garbage = b"220 mail.example.com ESMTP\r\n"
        end(run, 0, 64)
        guard.look()
        hook.garbage = b""
        guard.look()
        assert hook.told == [("failed", "demo", 64)]
        assert "the webhook does not take what it is told" in capfd.readouterr().err

    @pytest.mark.parametrize("url", ["http://127.0.0.1:9/secret word", "http://127.0.0.1:port/secret-word"])
    def test_an_address_that_is_none_is_not_shown(self, kube: KubeServer, url: str, capfd: Any) -> None:
        run = two(kube)
        end(run, 0, 64)
        Guard(kube.cluster(), "team", 60.0, url).look()
        err = capfd.readouterr().err
        assert "the webhook does not take what it is told" in err
        assert "secret" not in err

    def test_what_was_told_is_kept_in_mind_where_it_cannot_be_written_down(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        end(run, 0, 64)
        kube.gate = lambda method, path, headers: (500, "{}") if method == "PATCH" else None  # noqa: ARG005
        look_twice(guard)
        other = two(kube, "other")
        end(other, 0, 65)
        look_twice(guard)
        assert hook.told == [("failed", "demo", 64), ("failed", "other", 65)], "it holds up nobody else"

    def test_a_pod_that_has_gone_meanwhile(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        hook.status = 500
        end(run, 0, 64)
        guard.look()
        kube.remove("Pod", run.pods[0])
        hook.status = 200
        guard.look()
        assert hook.told == [("failed", "demo", 64)]

    def test_of_too_many_the_oldest_are_forgotten(
        self, kube: KubeServer, hook: Hook, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guard_module, "OUTBOX", 2)
        guard = make_guard(kube, hook)
        hook.is_up = False
        for letter in "abc":
            end(two(kube, f"run-{letter}"), 0, 64)
        guard.look()
        assert len(guard._outbox) == 2

    def test_pods_of_others_are_not_looked_at(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        end(run, 0, 64)
        for change in ({"app": "other"}, {"llmtrain.dev/run": None}):
            kube.change("Pod", run.pods[0], {"metadata": {"labels": {"app": "llmtrain", "llmtrain.dev/run": "demo"}}})
            kube.change("Pod", run.pods[0], {"metadata": {"labels": change}})
            make_guard(kube, hook).look()
        assert hook.rows == []


class TestRecovering:
    def test_pods_of_a_lost_machine_are_given_up_and_told_once(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        patches: list[str] = []

        def gate(method: str, path: str, headers: object) -> None:  # noqa: ARG001
            if method in ("PATCH", "DELETE"):
                patches.append(f"{method} {path.partition('/pods/')[2].partition('?')[0]}")

        kube.gate = gate
        run.set(1, running(), conditions=silent(61))
        lost = run.pods[1]
        guard.look()
        assert patches == [f"PATCH {lost}/status", f"DELETE {lost}"], "failed first, else its finalizer stays"
        assert ("pods", "team", lost) not in kube.objects
        assert ("pods", "team", run.pods[0]) in kube.objects
        run.pod(1)
        guard.look()
        make_guard(kube, hook).look()
        assert hook.told == [("recovered", "demo", None)]
        assert f"run demo goes on without {lost} (machine-1 has not answered for 6" in hook.rows[0]["text"]

    def test_one_that_is_silent_for_a_short_time_is_left(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        run.set(1, running(), conditions=silent(50))
        make_guard(kube, hook).look()
        assert ("pods", "team", run.pods[1]) in kube.objects
        make_guard(kube, hook, after_sec=40).look()
        assert ("pods", "team", run.pods[1]) not in kube.objects
        assert hook.told == [("recovered", "demo", None)]

    def test_several_of_one_run_in_one_line(self, kube: KubeServer, hook: Hook) -> None:
        run = two(kube)
        for index in (0, 1):
            run.set(index, running(), conditions=silent(100))
        make_guard(kube, hook).look()
        assert [run.pods[index] in hook.rows[0]["text"] for index in (0, 1)] == [True, True]
        assert len(hook.rows) == 1

    def test_recovered_while_the_webhook_is_away_and_finished_later(self, kube: KubeServer, hook: Hook) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        hook.status = 503
        run.set(1, running(), conditions=silent(100))
        guard.look()
        run.pod(1)
        end(run, 0, 0)
        end(run, 1, 0)
        guard.look()
        hook.status = 200
        guard.look()
        assert hook.told == [("recovered", "demo", None), ("finished", "demo", 0)]


class TestStatefulSet:
    def idle(self, kube: KubeServer, code: int) -> FakeRun:
        run = two(kube, kind="stateful_set")
        for index in (0, 1):
            owner = [{"kind": "StatefulSet", "name": "demo"}]
            kube.change("Pod", run.pods[index], {"metadata": {"ownerReferences": owner}})
            kube.change("Pod", run.pods[index], {"spec": {"containers": [{"name": "trainer"}]}})
            run.say(index, "[TRAIN] step 30/30", f"[DDP] {IDLE_MARK} {code}; a StatefulSet would start this again")
        return run

    @pytest.mark.parametrize(("code", "event"), [(0, "finished"), (65, "failed")])
    def test_only_its_log_says_that_it_has_ended(self, kube: KubeServer, hook: Hook, code: int, event: str) -> None:
        self.idle(kube, code)
        make_guard(kube, hook).look()
        assert hook.rows == [], "it may not read logs"
        guard = make_guard(kube, hook, with_logs=True)
        guard.look()
        guard.look()
        assert hook.told == [(event, "demo", code)]

    def test_logs_of_other_kinds_are_not_read(self, kube: KubeServer, hook: Hook) -> None:
        two(kube)
        make_guard(kube, hook, with_logs=True).look()
        assert kube.asked()["GET log"] == 0

    def test_one_that_goes_on(self, kube: KubeServer, hook: Hook) -> None:
        run = self.idle(kube, 0)
        kube.restart_log(run.pods[0])
        run.say(0, "[TRAIN] step 5/30")
        make_guard(kube, hook, with_logs=True).look()
        assert hook.rows == []


def look_twice(guard: Guard) -> None:
    turns = iter([False, True])
    watch(guard, 0.0, lambda: None, lambda _: next(turns))


class TestWatching:
    def test_a_cluster_that_is_away_is_asked_again(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        run, guard = two(kube), make_guard(kube, hook)
        seen: list[int] = []
        turn = 0

        def is_told(every_sec: float) -> bool:
            nonlocal turn
            assert every_sec == 5.0
            turn += 1
            if turn == 1:
                kube.gate = lambda method, path, headers: (0, "")  # noqa: ARG005
            elif turn == 3:
                kube.gate = None
                end(run, 0, 64)
            return turn == 5

        watch(guard, 5.0, lambda: seen.append(turn), is_told)
        assert seen == [0, 1, 2, 3, 4], "it lives, also while the cluster is away"
        assert hook.told == [("failed", "demo", 64)]
        err = capfd.readouterr().err
        assert err.count("does not answer") == 1
        assert err.count("the cluster answers again") == 1

    def test_rights_that_are_missing(self, kube: KubeServer, hook: Hook, capfd: Any) -> None:
        kube.forbidden.add("pods")
        look_twice(make_guard(kube, hook))
        assert capfd.readouterr().err.count("pods") >= 1
        assert hook.rows == []

    def test_one_run_that_cannot_be_recovered_does_not_hide_the_ends_of_others(
        self, kube: KubeServer, hook: Hook
    ) -> None:
        """A right to delete that is missing, or a webhook of the cluster that says no."""
        broken, fine = two(kube, "a-broken"), two(kube, "b-fine")
        broken.set(1, running(), conditions=silent(100))
        end(fine, 0, 64)
        refusal = json.dumps({"message": "admission webhook denied the request"})
        kube.gate = lambda method, path, headers: (403, refusal) if path.endswith("/status") else None  # noqa: ARG005
        look_twice(make_guard(kube, hook))
        assert ("failed", "b-fine", 64) in hook.told


def test_the_command_watches_until_it_is_told_to_stop(kube: KubeServer, hook: Hook, tmp_path: Any) -> None:
    """As its pod runs it, in a process of its own."""
    import os
    import signal
    import subprocess
    import sys

    run = two(kube)
    end(run, 0, 64)
    command = [sys.executable, "-m", "llmtrain", "guard", "watch", "--after", "5", "--kubeconfig"]
    process = subprocess.Popen(
        [*command, str(kube.kubeconfig(tmp_path))],
        env={**os.environ, "LLMTRAIN_WEBHOOK": hook.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not hook.rows and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert hook.told == [("failed", "demo", 64)]
    assert process.returncode == 0, err
    assert "[GUARD] watches namespace team: pods are given up 5 s after their machine went silent" in err
    assert "secret-word" not in err
