"""Nodes that are NotReady: how status shows them, and how their pods are replaced while a run is watched."""

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
from limits import limit
from llmtrain.errors import ClusterError
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.display import LiveView, PlainLines
from llmtrain.operate.status.tables import run_text

pytestmark = pytest.mark.usefixtures("hurry")
Cli = Callable[..., Any]
Object = dict[str, Any]


def not_ready(since_sec: float, reason: str = "NodeNotReady") -> list[Object]:
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
    def test_status_names_node_pod_and_remedy(self, kube: KubeServer) -> None:
        run = two(kube)
        run.set(1, running(), conditions=not_ready(42))
        status = ObservedRun(run.cluster, run.record).status
        assert status.state == "running"
        assert [pod.silent_sec is None for pod in status.pods] == [True, False]
        assert 42 <= (status.pods[1].silent_sec or 0) < 60
        assert status.why_short is not None
        for fact in ("k8s-node1", "NotReady", "pod 1", "llmtrain recover demo"):
            assert fact in status.why_short
        page = run_text(status)
        assert page.count("Running (node NotReady)") == 1
        assert status.as_dict()["pods"][1]["silent_sec"] == status.pods[1].silent_sec
        run.set(1, running())
        status = ObservedRun(run.cluster, run.record).status
        assert (status.why_short, status.pods[1].silent_sec) == (None, None)

    @pytest.mark.parametrize("ahead_sec", [3600.0, -3600.0])
    def test_durations_use_the_clock_of_the_api_server(self, kube: KubeServer, ahead_sec: float) -> None:
        """The local clock may be wrong."""
        kube.ahead_sec = ahead_sec
        run = two(kube)
        run.set(1, running(), conditions=not_ready(90 - ahead_sec))
        deleted_at = (datetime.now(UTC) - timedelta(seconds=15 - ahead_sec)).strftime("%Y-%m-%dT%H:%M:%SZ")
        kube.change("Pod", run.pods[0], {"metadata": {"deletionTimestamp": deleted_at}})
        status = ObservedRun(run.cluster, run.record).status
        assert 85 <= (status.pods[1].silent_sec or 0) < 120
        assert not status.pods[0].is_overdue
        kube.ahead_sec = 0.0
        _ = ObservedRun(run.cluster, run.record).status

    def test_overdue_deletion_counts_as_lost(self, kube: KubeServer) -> None:
        run = two(kube)
        at = (datetime.now(UTC) - timedelta(seconds=900)).strftime("%Y-%m-%dT%H:%M:%SZ")
        kube.change("Pod", run.pods[1], {"metadata": {"deletionTimestamp": at}})
        status = ObservedRun(run.cluster, run.record).status
        assert status.pods[1].silent_sec == pytest.approx(900, abs=30)
        assert "Terminating (node NotReady)" in run_text(status)
        assert "llmtrain recover demo" in str(status.why_short)

    def test_several_lost_nodes(self, kube: KubeServer) -> None:
        run = two(kube)
        run.set(0, running(), conditions=not_ready(10))
        run.set(1, running(), conditions=not_ready(70))
        why = str(ObservedRun(run.cluster, run.record).status.why_short)
        assert why.startswith("k8s-node0, k8s-node1 have been NotReady for 7")
        assert "pod 0, 1" in why

    def test_two_pods_on_one_node_name_it_once(self, kube: KubeServer) -> None:
        run = two(kube)
        for index in (0, 1):
            kube.change("Pod", run.pods[index], {"spec": {"nodeName": "k8s-node0"}})
            run.set(index, running(), conditions=not_ready(10))
        assert str(ObservedRun(run.cluster, run.record).status.why_short).count("k8s-node0") == 1

    def test_failing_readiness_probe_is_not_a_lost_node(self, kube: KubeServer) -> None:
        run = two(kube)
        run.set(1, running(), conditions=not_ready(42, "ContainersNotReady"))
        assert ObservedRun(run.cluster, run.record).status.pods[1].silent_sec is None


class TestWatch:
    def test_pod_on_lost_node_is_replaced(self, kube: KubeServer) -> None:
        run = two(kube)
        watcher = Watcher(run, recover_after=60.0)
        watcher.until("is running")
        lost = run.pods[1]
        run.set(1, running(), conditions=not_ready(61))
        watcher.until(f"removed {lost}")
        wait_for(lambda: ("pods", "team", lost) not in kube.objects)
        run.pod(1)
        watcher.until(f"pod 1 ({run.pods[1]}): Running on k8s-node1")
        finish(run)
        status = watcher.end()
        assert (status.state, status.restarts) == ("finished", 1)
        lines = watcher.out.getvalue().splitlines()
        (removal,) = [line for line in lines if "removed" in line]
        assert removal.startswith(f"[K8S] removed {lost}: k8s-node1 ")
        asked = [line for line in kube.requests if line.startswith(("PATCH", "DELETE"))]
        assert asked == ["PATCH status", f"DELETE pods/{lost}"]

    @pytest.mark.parametrize(("recover_after", "since_sec"), [(None, 900), (60.0, 30)])
    def test_pod_is_kept_without_the_option_or_before_the_threshold(
        self, kube: KubeServer, recover_after: float | None, since_sec: float
    ) -> None:
        run = two(kube)
        watcher = Watcher(run, recover_after=recover_after)
        watcher.until("is running")
        run.set(1, running(), conditions=not_ready(since_sec))
        watcher.until(f"[K8S] pod 1 ({run.pods[1]}): Running on k8s-node1, which is NotReady")
        count = kube.asked()["GET pods"]
        wait_for(lambda: kube.asked()["GET pods"] > count + 3)
        assert ("pods", "team", run.pods[1]) in kube.objects
        run.set(1, running())
        watcher.until(f"[K8S] pod 1 ({run.pods[1]}): Running on k8s-node1\n", 2)
        finish(run)
        watcher.end()
        assert "removed" not in watcher.out.getvalue()
        assert watcher.out.getvalue().count("NotReady") == 1, "once, although the duration grows"

    def test_pods_of_a_stopping_run_are_not_replaced(self, kube: KubeServer) -> None:
        run = two(kube)
        watcher = Watcher(run, recover_after=0.0)
        watcher.until("is running")
        kube.change("Job", "demo", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        watcher.until("is stopping")
        run.set(1, running(), conditions=not_ready(900))
        count = kube.asked()["GET pods"]
        wait_for(lambda: kube.asked()["GET pods"] > count + 3)
        assert ("pods", "team", run.pods[1]) in kube.objects
        for index in (0, 1):
            kube.remove("Pod", run.pods[index])
        kube.remove("Job", "demo")
        watcher.end()

    def test_replacement_is_retried_after_an_api_server_outage(self, kube: KubeServer) -> None:
        run = two(kube)
        watcher = Watcher(run, recover_after=60.0)
        watcher.until("is running")
        lost = run.pods[1]
        kube.gate = lambda method, path, headers: (0, "") if method == "PATCH" else None  # noqa: ARG005
        run.set(1, running(), conditions=not_ready(61))
        watcher.until("Unable to connect")
        assert ("pods", "team", lost) in kube.objects
        kube.gate = None
        watcher.until(f"removed {lost}")
        assert ("pods", "team", lost) not in kube.objects
        run.pod(1)
        finish(run)
        assert watcher.end().state == "finished"

    def test_many_lost_nodes_share_one_line(self, kube: KubeServer) -> None:
        run = launch(kube, "indexed_job", "launch.nodes=8", "trainer.grad_accum_steps=8")
        for index in range(8):
            run.pod(index)
        watcher = Watcher(run)
        watcher.until("8 pods (0 to 7): Running")
        with kube.lock:
            for index in range(8):
                run.set(index, running(), conditions=not_ready(30))
        watcher.until("8 pods (0 to 7): Running, node NotReady")
        run.finish("Failed")
        watcher.end()

    def test_live_view(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setenv("LINES", "30")
        run = two(kube)
        watcher = Watcher(run, is_terminal=True, recover_after=60.0)
        watcher.until("step 5/30")
        run.set(1, running(), conditions=not_ready(50))
        watcher.until("Running (node NotReady)")
        watcher.until("k8s-node1 has been NotReady for 5")
        run.set(1, running(), conditions=not_ready(61))
        watcher.until(f"removed {run.pods[1]}")
        run.pod(1)
        finish(run)
        watcher.end()


def test_notes_are_printed_between_log_lines() -> None:
    plain = io.StringIO()
    with PlainLines(plain) as display:
        display.line("a")
        display.note("done")
    assert plain.getvalue() == "a\n[K8S] done\n"
    with LiveView(io.StringIO()) as view:
        view.note("before the first status")
        view.connection(ClusterError("unreachable"))


class TestCommand:
    def test_status_watch_replaces_pods_and_keeps_watching(self, kube: KubeServer, call: Cli) -> None:
        run = two(kube)
        run.set(1, running(), conditions=not_ready(20))
        lost = run.pods[1]

        def play() -> None:
            wait_for(lambda: ("pods", "team", lost) not in kube.objects)
            run.pod(1)
            finish(run)

        player = threading.Thread(target=play, daemon=True)
        player.start()
        done = call("status", "demo", "--watch", "--recover-lost-nodes", "15", "--json")
        player.join(limit(10))
        assert (done.code, done.json["state"]) == (0, "finished")
        assert f"[K8S] removed {lost}" in done.err

    @pytest.mark.parametrize(
        ("words", "what"),
        [
            (("status", "--recover-lost-nodes", "5"), "--watch"),
            (("status", "demo", "--recover-lost-nodes", "5"), "--watch"),
            (("status", "--watch", "--recover-lost-nodes", "5"), "--watch"),
            (("status", "demo", "--watch", "--recover-lost-nodes", "-1"), "recover-lost-nodes"),
            (("launch", "--config", "ddp_smoke", "--name", "demo", "-d", "--recover-lost-nodes", "5"), "--detach"),
            (("resume", "demo", "-d", "--recover-lost-nodes", "5"), "--detach"),
        ],
    )
    def test_recover_option_without_watching_is_refused(
        self, kube: KubeServer, call: Cli, words: tuple[str, ...], what: str
    ) -> None:
        done = call(*words)
        assert done.code == 64
        assert what in done.err
        assert kube.requests == [], "refused before the first request"

    def test_recover_command(self, kube: KubeServer, call: Cli) -> None:
        run = two(kube)
        assert call("recover", "demo").out.startswith("No pod of run demo ")
        run.set(1, running(), conditions=not_ready(20))
        early = call("recover", "demo")
        assert early.out.startswith(f"{run.pods[1]} was not removed: k8s-node1 ")
        assert "--after 60" in early.out
        assert ("pods", "team", run.pods[1]) in kube.objects
        done = call("recover", "demo", "--after", "10", "--json")
        assert [row["name"] for row in done.json["recovered"]] == [run.pods[1]]
        assert ("pods", "team", run.pods[1]) not in kube.objects
        assert json.loads(done.out)["too_early"] == []
