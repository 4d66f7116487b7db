"""A machine that does not answer: how a run with a pod on it is shown, and how it goes on while it is watched."""

import io
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kube_runs import STEP, FakeRun, launch, running
from watcher import Watcher, wait_for

from kube_server import KubeServer
from llmtrain.errors import ClusterError
from llmtrain.operate.status.display import LiveView, PlainLines
from llmtrain.operate.status.run_status import run_status
from llmtrain.operate.status.tables import run_text

pytestmark = pytest.mark.usefixtures("hurry")
Cli = Callable[..., Any]
Object = dict[str, Any]


def silent(since_sec: float, reason: str = "NodeNotReady") -> list[Object]:
    at = (datetime.now(UTC) - timedelta(seconds=since_sec)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [{"type": "Ready", "status": "False", "reason": reason, "lastTransitionTime": at}]


def two(kube: KubeServer, kind: str = "indexed_job") -> FakeRun:
    run = launch(kube, kind)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    return run


def finish(run: FakeRun) -> None:
    run.end(0)
    run.end(1)
    run.finish()


class TestStatus:
    def test_it_is_named_with_the_way_out(self, kube: KubeServer) -> None:
        run = two(kube)
        run.set(1, running(), conditions=silent(42))
        status = run_status(run.cluster, run.record)
        assert status.state == "running"
        assert [pod.silent_sec is None for pod in status.pods] == [True, False]
        assert 42 <= (status.pods[1].silent_sec or 0) < 60
        assert status.why_short is not None
        start, _, rest = status.why_short.partition(" for ")
        assert start == "machine-1 does not answer"
        assert rest.endswith(" s, and nothing takes the place of node 1: llmtrain recover demo gives it up")
        page = run_text(status)
        assert "Running (machine silent)" in page
        assert page.count("machine silent") == 1
        assert status.as_dict()["pods"][1]["silent_sec"] == status.pods[1].silent_sec
        run.set(1, running())
        status = run_status(run.cluster, run.record)
        assert (status.why_short, status.pods[1].silent_sec) == (None, None)

    @pytest.mark.parametrize("ahead_sec", [3600.0, -3600.0])
    def test_by_the_clock_of_the_api_server(self, kube: KubeServer, ahead_sec: float) -> None:
        """The caller's may be wrong by any amount."""
        kube.ahead_sec = ahead_sec
        run = two(kube)
        run.set(1, running(), conditions=silent(90 - ahead_sec))
        leaves_at = (datetime.now(UTC) - timedelta(seconds=15 - ahead_sec)).strftime("%Y-%m-%dT%H:%M:%SZ")
        kube.change("Pod", run.pods[0], {"metadata": {"deletionTimestamp": leaves_at}})
        status = run_status(run.cluster, run.record)
        assert 85 <= (status.pods[1].silent_sec or 0) < 120
        assert not status.pods[0].is_overdue
        kube.ahead_sec = 0.0
        run_status(run.cluster, run.record)

    def test_one_that_should_be_gone(self, kube: KubeServer) -> None:
        """Kubernetes has told it to go, and nobody there answers."""
        run = two(kube)
        at = (datetime.now(UTC) - timedelta(seconds=900)).strftime("%Y-%m-%dT%H:%M:%SZ")
        kube.change("Pod", run.pods[1], {"metadata": {"deletionTimestamp": at}})
        status = run_status(run.cluster, run.record)
        assert status.pods[1].silent_sec == pytest.approx(900, abs=30)
        assert "Terminating (machine silent)" in run_text(status)
        assert "llmtrain recover demo" in str(status.why_short)

    def test_several(self, kube: KubeServer) -> None:
        run = two(kube)
        run.set(0, running(), conditions=silent(10))
        run.set(1, running(), conditions=silent(70))
        why = str(run_status(run.cluster, run.record).why_short)
        assert why.startswith("machine-0, machine-1 do not answer for 7")
        assert "the place of node 0, 1" in why

    def test_two_pods_of_one_machine(self, kube: KubeServer) -> None:
        run = two(kube)
        for index in (0, 1):
            kube.change("Pod", run.pods[index], {"spec": {"nodeName": "machine-0"}})
            run.set(index, running(), conditions=silent(10))
        assert str(run_status(run.cluster, run.record).why_short).startswith("machine-0 does not answer")

    def test_a_probe_of_somebody_else_is_no_silence(self, kube: KubeServer) -> None:
        run = two(kube)
        run.set(1, running(), conditions=silent(42, "ContainersNotReady"))
        assert run_status(run.cluster, run.record).pods[1].silent_sec is None


class TestWatching:
    def test_the_pod_is_given_up_and_the_run_goes_on(self, kube: KubeServer) -> None:
        run = two(kube)
        watcher = Watcher(run, recover_after=60.0)
        watcher.until("is running")
        lost = run.pods[1]
        run.set(1, running(), conditions=silent(61))
        watcher.until("is given up")
        wait_for(lambda: ("pods", "team", lost) not in kube.objects)
        run.pod(1)
        watcher.until(f"node 1, pod {run.pods[1]}: Running on machine-1")
        finish(run)
        status = watcher.end()
        assert (status.state, status.restarts) == ("finished", 1)
        lines = watcher.out.getvalue().splitlines()
        assert sum("is given up" in line for line in lines) == 1
        (told,) = [line for line in lines if "is given up" in line]
        assert told.startswith(f"[K8S] {lost} is given up: machine-1 has not answered for 6")
        asked = [line for line in kube.requests if line.startswith(("PATCH", "DELETE"))]
        assert asked == ["PATCH status", f"DELETE pods/{lost}"]

    @pytest.mark.parametrize(("recover_after", "since_sec"), [(None, 900), (60.0, 30)])
    def test_it_is_left_without_the_option_or_before_its_time(
        self, kube: KubeServer, recover_after: float | None, since_sec: float
    ) -> None:
        run = two(kube)
        watcher = Watcher(run, recover_after=recover_after)
        watcher.until("is running")
        run.set(1, running(), conditions=silent(since_sec))
        watcher.until(f"[K8S] node 1, pod {run.pods[1]}: Running on machine-1, which does not answer")
        count = kube.asked()["GET pods"]
        wait_for(lambda: kube.asked()["GET pods"] > count + 3)
        assert ("pods", "team", run.pods[1]) in kube.objects
        run.set(1, running())
        watcher.until(f"[K8S] node 1, pod {run.pods[1]}: Running on machine-1\n", 2)
        finish(run)
        watcher.end()
        assert "given up" not in watcher.out.getvalue()
        assert watcher.out.getvalue().count("does not answer") == 1, "once, though its seconds grow"

    def test_one_that_is_being_stopped_needs_nobody_new(self, kube: KubeServer) -> None:
        run = two(kube)
        watcher = Watcher(run, recover_after=0.0)
        watcher.until("is running")
        kube.change("Job", "demo", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        watcher.until("is stopping")
        run.set(1, running(), conditions=silent(900))
        count = kube.asked()["GET pods"]
        wait_for(lambda: kube.asked()["GET pods"] > count + 3)
        assert ("pods", "team", run.pods[1]) in kube.objects
        for index in (0, 1):
            kube.remove("Pod", run.pods[index])
        kube.remove("Job", "demo")
        watcher.end()

    def test_the_server_is_away_in_the_middle_of_it(self, kube: KubeServer) -> None:
        """It is given up when it is back, and told once it is."""
        run = two(kube)
        watcher = Watcher(run, recover_after=60.0)
        watcher.until("is running")
        lost = run.pods[1]
        kube.gate = lambda method, path, headers: (0, "") if method == "PATCH" else None  # noqa: ARG005
        run.set(1, running(), conditions=silent(61))
        watcher.until("does not answer: ")
        assert ("pods", "team", lost) in kube.objects
        kube.gate = None
        watcher.until("is given up")
        assert ("pods", "team", lost) not in kube.objects
        run.pod(1)
        finish(run)
        assert watcher.end().state == "finished"

    def test_many_machines_at_once_are_one_line(self, kube: KubeServer) -> None:
        run = launch(kube, "indexed_job", "launch.nodes=8", "trainer.grad_accum_steps=8")
        for index in range(8):
            run.pod(index)
        watcher = Watcher(run)
        watcher.until("8 pods (node 0 to 7): Running")
        with kube.lock:
            for index in range(8):
                run.set(index, running(), conditions=silent(30))
        watcher.until("8 pods (node 0 to 7): Running, machine silent")
        run.finish("Failed")
        watcher.end()

    def test_the_view_of_a_terminal(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setenv("LINES", "30")
        run = two(kube)
        watcher = Watcher(run, is_terminal=True, recover_after=60.0)
        watcher.until("step 5/30")
        run.set(1, running(), conditions=silent(50))
        watcher.until("Running (machine silent)")
        watcher.until("machine-1 does not answer for 5")
        run.set(1, running(), conditions=silent(61))
        watcher.until("is given up: machine-1 has not answered for 6")
        run.pod(1)
        finish(run)
        watcher.end()


def test_notes_stand_among_the_lines() -> None:
    plain = io.StringIO()
    with PlainLines(plain) as display:
        display.line("a")
        display.note("done")
    assert plain.getvalue() == "a\n[K8S] done\n"
    with LiveView(io.StringIO()) as view:
        view.note("before anything is known")
        view.away(ClusterError("gone"))


class TestCommand:
    def test_status_gives_up_and_goes_on(self, kube: KubeServer, call: Cli) -> None:
        run = two(kube)
        run.set(1, running(), conditions=silent(20))
        lost = run.pods[1]

        def play() -> None:
            wait_for(lambda: ("pods", "team", lost) not in kube.objects)
            run.pod(1)
            finish(run)

        player = threading.Thread(target=play, daemon=True)
        player.start()
        done = call("status", "demo", "--watch", "--recover-lost-nodes", "15", "--json")
        player.join(10)
        assert (done.code, done.json["state"]) == (0, "finished")
        assert f"[K8S] {lost} is given up" in done.err

    @pytest.mark.parametrize(
        ("words", "what"),
        [
            (("status", "--recover-lost-nodes", "5"), "acts while one run is watched"),
            (("status", "demo", "--recover-lost-nodes", "5"), "acts while one run is watched"),
            (("status", "--watch", "--recover-lost-nodes", "5"), "acts while one run is watched"),
            (("status", "demo", "--watch", "--recover-lost-nodes", "-1"), "recover-lost-nodes"),
            (("launch", "--config", "ddp_smoke", "--name", "demo", "-d", "--recover-lost-nodes", "5"), "--detach"),
            (("resume", "demo", "-d", "--recover-lost-nodes", "5"), "--detach"),
        ],
    )
    def test_where_nobody_watches_it_is_refused(
        self, kube: KubeServer, call: Cli, words: tuple[str, ...], what: str
    ) -> None:
        done = call(*words)
        assert done.code == 64
        assert what in done.err
        assert kube.requests == [], "before anything is asked or made"

    def test_recover_as_it_is_typed(self, kube: KubeServer, call: Cli) -> None:
        run = two(kube)
        assert call("recover", "demo").out == "No pod of run demo is on a lost machine or hangs.\n"
        run.set(1, running(), conditions=silent(20))
        early = call("recover", "demo")
        assert f"{run.pods[1]} on machine-1 is silent for 2" in early.out
        assert "--after 60" in early.out
        assert ("pods", "team", run.pods[1]) in kube.objects
        done = call("recover", "demo", "--after", "10", "--json")
        assert [row["name"] for row in done.json["recovered"]] == [run.pods[1]]
        assert ("pods", "team", run.pods[1]) not in kube.objects
        assert json.loads(done.out)["too_early"] == []
