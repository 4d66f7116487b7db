"""Stop, delete and take_back: what they delete, in which order, and how long they wait for pods."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from launched_runs import (
    KINDS,
    Object,
    Response,
    add_bystanders,
    add_pods,
    fresh,
    key_of,
    launch,
    make_plan,
    quiet,
    snapshot,
    status,
)

from kube_server import KubeServer
from limits import limit
from llmtrain.errors import ClusterError
from llmtrain.kubernetes.labels import READER_LABEL
from llmtrain.launch import lifecycle
from llmtrain.launch.manifests import render
from llmtrain.launch.objects import is_overdue
from llmtrain.launch.record import find_record


def test_stopped_at_uses_the_clock_of_the_api_server(kube: KubeServer) -> None:
    kube.ahead_sec = 7200
    record = launch(kube, make_plan())
    before = datetime.fromtimestamp(int(time.time()), UTC)
    lifecycle.stop(kube.cluster(), record, quiet)
    stopped_at = datetime.fromisoformat(fresh(kube).stopped_at or "")
    assert stopped_at >= before + timedelta(hours=1)


@pytest.mark.parametrize("kind", KINDS)
class TestStopAndDelete:
    def test_stop_deletes_the_job_then_waits_then_deletes_the_rest(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        plan = make_plan(kind)
        others = snapshot(kube)
        record = launch(kube, plan)
        add_pods(kube, plan, "demo-0", "demo-1")
        add_pods(kube, make_plan(), "x")
        kube.change("Pod", "x", {"metadata": {"labels": {"llmtrain.dev/run": "demo-2"}}})
        others["pods", "team", "x"] = kube.objects["pods", "team", "x"]
        *around, job = [key_of(m) for m in render(plan) if m["kind"] not in ("ConfigMap", "PersistentVolumeClaim")]
        seen = []

        def waiting(pods: list[Object]) -> None:
            assert job not in kube.objects
            assert all(key in kube.objects for key in around), "pods need them while they save"
            seen.append([pod["metadata"]["name"] for pod in pods])
            kube.remove("Pod", seen[-1][0])

        assert lifecycle.stop(kube.cluster(), record, waiting) == []
        assert seen == [["demo-0", "demo-1"], ["demo-1"]]
        stays = {("configmaps", "team", "demo-config"), ("persistentvolumeclaims", "team", "demo-runs")}
        assert set(kube.objects) == stays | set(others)
        assert {key: kube.objects[key] for key in others} == others
        stopped = find_record(kube.cluster(), "demo", "team")
        assert stopped.stopped_at is not None
        assert stopped.stopped_at.endswith("Z")
        assert (stopped.number, stopped.config, stopped.task) == (record.number, record.config, record.task)
        assert lifecycle.stop(kube.cluster(), stopped, waiting) == [], "stopping twice is fine"

    def test_delete_keeps_claims_unless_data(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        others = snapshot(kube)
        plan = make_plan(kind)
        for data in (False, True):
            record = launch(kube, plan)
            for name, run in (("demo-read", "demo"), ("demo-2-read", "demo-2")):
                labels = {"app": "llmtrain", READER_LABEL: run}
                meta = {"name": name, "namespace": "team", "labels": labels}
                kube.add({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {}})
            others["pods", "team", "demo-2-read"] = kube.objects["pods", "team", "demo-2-read"]
            assert lifecycle.delete(kube.cluster(), record, data, quiet) == []
            claim = ("persistentvolumeclaims", "team", "demo-runs")
            assert set(kube.objects) == set(others) | (set() if data else {claim})
            assert {key: kube.objects[key] for key in others} == others
            kube.objects.pop(claim, None)

    def test_delete_with_data_deletes_claims_of_earlier_launches(self, kube: KubeServer, kind: str) -> None:
        """A resume may have set another claim; the one that was created for the run has its label."""
        record = launch(kube, make_plan(kind))
        own = kube.objects["persistentvolumeclaims", "team", "demo-runs"]
        metadata = {**own["metadata"], "name": "demo-earlier"}
        kube.add({**own, "metadata": metadata})
        lifecycle.delete(kube.cluster(), record, True, quiet)
        assert not [key for key in kube.objects if key[0] == "persistentvolumeclaims"]

    def test_take_back_deletes_all_objects(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        lifecycle.take_back(kube.cluster(), launch(kube, make_plan(kind)))
        assert snapshot(kube) == before


def test_take_back_keeps_a_claim_of_an_earlier_launch(kube: KubeServer) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    lifecycle.delete(kube.cluster(), record, False, quiet)
    before = snapshot(kube)
    assert list(before) == [("persistentvolumeclaims", "team", "demo-runs")]
    lifecycle.submit(kube.cluster(), plan, keep_data=True)
    lifecycle.take_back(kube.cluster(), find_record(kube.cluster(), "demo", "team"))
    assert snapshot(kube) == before


def test_returns_pods_that_remain_after_the_grace_period(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("indexed_job", "launch.grace_period_sec=100")
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += 10 * max(1.0, seconds)
        if clock.now > 50 and ("pods", "team", "demo-1") in kube.objects:
            kube.remove("Pod", "demo-1")

    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    waits: list[float] = []
    assert lifecycle.stop(kube.cluster(), record, lambda pods: waits.append(clock.now)) == ["demo-0"]  # noqa: ARG005
    assert waits[-1] >= 160, "the grace period and the margin after it"
    assert sorted(key[0] for key in kube.objects) == ["configmaps", "persistentvolumeclaims", "pods"]
    assert lifecycle.delete(kube.cluster(), record, True, quiet) == ["demo-0"]
    assert [key[0] for key in kube.objects] == ["pods"]


class TestOperators:
    @pytest.mark.parametrize("act", ["stop", "delete", "resume"])
    def test_uninstalled_operator_does_not_block(self, kube: KubeServer, act: str) -> None:
        record = launch(kube, make_plan("job_set"))
        kube.remove("JobSet", "demo")
        kube.missing_kinds = {"jobsets"}
        if act == "stop":
            lifecycle.stop(kube.cluster(), record, quiet)
        elif act == "delete":
            lifecycle.delete(kube.cluster(), record, True, quiet)
            assert kube.objects == {}
        else:
            lifecycle.resume(kube.cluster(), record, make_plan())
            assert ("jobs", "team", "demo") in kube.objects

    def test_waits_for_objects_owned_by_the_old_job(self, kube: KubeServer) -> None:
        """JobSet creates the headless Service; the garbage collector deletes it some time after the JobSet."""
        record = launch(kube, make_plan("job_set"))
        owner = {"kind": "JobSet", "name": "demo", "uid": kube.objects["jobsets", "team", "demo"]["metadata"]["uid"]}
        meta = {"name": "demo", "namespace": "team", "ownerReferences": [owner]}
        kube.add({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {}})

        def collect() -> None:
            while ("jobsets", "team", "demo") in kube.objects:
                time.sleep(0.005)
            time.sleep(0.3)
            if "ownerReferences" in kube.objects["services", "team", "demo"]["metadata"]:
                kube.remove("Service", "demo")

        collector = threading.Thread(target=collect, daemon=True)
        collector.start()
        try:
            lifecycle.resume(kube.cluster(), record, make_plan())
        finally:
            collector.join(limit(5))
        assert ("jobs", "team", "demo") in kube.objects


# Pods on unreachable nodes


def in_sec(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def set_terminating(kube: KubeServer, name: str, seconds: float) -> None:
    kube.change("Pod", name, {"metadata": {"deletionTimestamp": in_sec(seconds)}})


@pytest.mark.parametrize(("seconds", "expected"), [(None, False), (600, False), (-5, False), (-3600, True)])
def test_pod_is_overdue_after_its_grace_period(seconds: float | None, expected: bool) -> None:
    stamps = {} if seconds is None else {"deletionTimestamp": in_sec(seconds)}
    assert is_overdue({"metadata": {"name": "demo-0", **stamps}}) is expected


@pytest.mark.parametrize("act", ["stop", "delete", "remove_job"])
def test_overdue_pods_are_returned_without_waiting(kube: KubeServer, act: str) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    for name in ("demo-0", "demo-1"):
        set_terminating(kube, name, -3600)
    waits: list[Object] = []
    acts: dict[str, Callable[[], list[str]]] = {
        "stop": lambda: lifecycle.stop(kube.cluster(), record, waits.extend),
        "delete": lambda: lifecycle.delete(kube.cluster(), record, False, waits.extend),
        "remove_job": lambda: lifecycle.remove_job(kube.cluster(), record, waits.extend),
    }
    assert acts[act]() == ["demo-0", "demo-1"]
    assert waits == []
    left = {"configmaps", "persistentvolumeclaims", "pods"} - ({"configmaps"} if act == "delete" else set())
    assert {key[0] for key in kube.objects} == left


@pytest.mark.parametrize("seconds", [None, 600, -5], ids=["not deleted", "in its grace period", "just over"])
def test_waits_for_pods_in_their_grace_period(kube: KubeServer, seconds: float | None) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    set_terminating(kube, "demo-0", -3600)
    if seconds is not None:
        set_terminating(kube, "demo-1", seconds)
    turns = itertools.count()

    def waiting(pods: list[Object]) -> None:
        assert len(pods) == 2
        if next(turns) == 3:
            kube.remove("Pod", "demo-1")

    assert lifecycle.stop(kube.cluster(), record, waiting) == ["demo-0"]
    assert next(turns) == 4


@pytest.mark.parametrize("response", [status(503, "soon"), status(401, "Unauthorized"), (0, "")])
def test_tolerates_a_short_outage_of_the_api_server(kube: KubeServer, response: tuple[int, str]) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0")
    asked = itertools.count()

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
        if method != "GET" or "/pods?" not in path:
            return None
        return response if next(asked) in (1, 2, 3) else None

    kube.gate = gate
    seen: list[int] = []

    def waiting(pods: list[Object]) -> None:
        seen.append(len(pods))
        if len(seen) == 2:
            kube.remove("Pod", "demo-0")

    assert lifecycle.stop(kube.cluster(), record, waiting) == []
    assert seen == [1, 1]
    assert sorted(key[0] for key in kube.objects) == ["configmaps", "persistentvolumeclaims"]


def test_long_outage_of_the_api_server_is_an_error(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    record = launch(kube, make_plan("indexed_job", "launch.grace_period_sec=100"))
    kube.gate = lambda method, path, headers: status(503, "soon") if "/pods?" in path else None  # noqa: ARG005
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:  # noqa: ARG001
        clock.now += 10

    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    with pytest.raises(ClusterError, match="soon"):
        lifecycle.remove_job(kube.cluster(), record, quiet)
    assert clock.now >= 190


HAS_RUN = {
    "running": {"state": {"running": {}}, "restartCount": 0},
    "ended": {"state": {"terminated": {"exitCode": 1, "startedAt": "2026-01-01T00:00:00Z"}}, "restartCount": 0},
    "waiting for a restart": {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 2},
}


@pytest.mark.parametrize("name", [*HAS_RUN, "never"])
def test_take_back_keeps_claims_that_a_container_may_have_written(kube: KubeServer, name: str) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    waits = {"state": {"waiting": {"reason": "ImagePullBackOff"}}, "restartCount": 0}
    for pod, row in (("demo-0", waits), ("demo-1", HAS_RUN.get(name, waits))):
        kube.change("Pod", pod, {"status": {"containerStatuses": [{"name": "trainer", **row}]}})
    lifecycle.take_back(kube.cluster(), record)
    left = sorted(key[0] for key in kube.objects if key[0] != "pods")
    assert left == ([] if name == "never" else ["persistentvolumeclaims"])


def test_take_back_deletes_by_uid(kube: KubeServer) -> None:
    """An object that replaced one of the launch after the record was read is not deleted."""
    record = launch(kube, make_plan())
    replaced: list[Object] = []

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
        if method == "DELETE" and not replaced:  # the job comes first: replace the Service behind it
            kube.remove("Service", "demo")
            replaced.append(kube.add(render(make_plan())[4]))
        return None

    kube.gate = gate
    lifecycle.take_back(kube.cluster(), record)
    assert list(kube.objects.values()) == replaced
