"""Resume: the job is recreated and the data kept, or nothing changes."""

import copy
import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from launched_runs import (
    FAILURES,
    KINDS,
    OBJECTS,
    Object,
    Response,
    add_bystanders,
    changes,
    fail_at,
    foreign,
    fresh,
    key_of,
    launch,
    make_plan,
    nth,
    quiet,
    snapshot,
    status,
    unversioned,
    without_stamps,
)

from kube_server import KubeServer
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch import lifecycle
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.record import Record, find_record


class TestResume:
    def resumed(self, kube: KubeServer, record: Record, plan: JobPlan) -> Record:
        lifecycle.resume(kube.cluster(), record, plan)
        return find_record(kube.cluster(), "demo", "team")

    @pytest.mark.parametrize("kind", KINDS)
    def test_recreates_the_job_and_keeps_the_data(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        plan = make_plan(kind)
        record = launch(kube, plan)
        assert record.number == 1
        lifecycle.stop(kube.cluster(), record, quiet)
        before = snapshot(kube)
        again = self.resumed(kube, find_record(kube.cluster(), "demo", "team"), plan)
        assert (again.number, again.stopped_at) == (2, None)
        kept = [key for key in before if key[0] != "configmaps" or key[2] != "demo-config"]
        assert [key for key in kept if kube.objects[key] != before[key]] == []
        assert set(kube.objects) == set(before) | {key_of(manifest) for manifest in render(plan)}
        assert again.plan.number == 2
        assert render(again.plan)[-1] == without_stamps(kube.objects[key_of(render(plan)[-1])])
        assert "'LLMTRAIN_LAUNCH', 'value': '2'" in str(render(again.plan))
        third = self.resumed(kube, again, plan)
        assert third.number == 3

    def test_deletes_the_ended_job_first(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        uid = kube.objects["jobs", "team", "demo"]["metadata"]["uid"]
        self.resumed(kube, record, make_plan())
        assert kube.objects["jobs", "team", "demo"]["metadata"]["uid"] != uid

    @pytest.mark.parametrize("new", [kind for kind in KINDS if kind != "indexed_job"])
    @pytest.mark.parametrize("is_back", [False, True])
    def test_changes_the_workload(self, kube: KubeServer, new: str, is_back: bool) -> None:
        first, second = (new, "indexed_job") if is_back else ("indexed_job", new)
        record = launch(kube, make_plan(first))
        again = self.resumed(kube, record, make_plan(second))
        assert again.config.launch.kind == second
        assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan(second))}

    def test_changes_the_number_of_pods(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan("indexed_job", "launch.nodes=4"))
        again = self.resumed(kube, record, make_plan("indexed_job", "launch.nodes=2"))
        assert kube.objects["jobs", "team", "demo"]["spec"]["completions"] == 2
        assert kube.objects["poddisruptionbudgets", "team", "demo"]["spec"]["minAvailable"] == 2
        assert again.plan.nodes == 2

    def test_refuses_more_pods_than_its_claim_allows(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        claim = kube.objects["persistentvolumeclaims", "team", "demo-runs"]
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
        before, since = snapshot(kube), len(kube.requests)
        with pytest.raises(UsageError, match="ReadWriteOnce"):
            lifecycle.resume(kube.cluster(), record, make_plan("indexed_job", "launch.nodes=2"))
        assert (snapshot(kube), changes(kube, since)) == (before, [])

    def test_refuses_more_pods_than_a_kept_claim_allows(self, kube: KubeServer) -> None:
        kube.add(render(make_plan())[1])
        with pytest.raises(UsageError, match="ReadWriteOnce"):
            lifecycle.submit(kube.cluster(), make_plan("indexed_job", "launch.nodes=2"), keep_data=True)

    @pytest.mark.parametrize("is_stopped", [True, False])
    @pytest.mark.parametrize("number", range(4))
    def test_failure_restores_the_record(self, kube: KubeServer, number: int, is_stopped: bool) -> None:
        """At each of the recreated objects: policy, budget, Service, Job."""
        record = launch(kube, make_plan())
        if is_stopped:
            lifecycle.stop(kube.cluster(), record, quiet)
            record = find_record(kube.cluster(), "demo", "team")
        before = snapshot(kube)
        kube.gate = nth("POST", number, FAILURES["quota"][0])
        with pytest.raises(UsageError, match="quota"):
            lifecycle.resume(kube.cluster(), record, make_plan("indexed_job", "launch.processes_per_node=2"))
        kube.gate = None
        assert find_record(kube.cluster(), "demo", "team") == record
        kept = {key: before[key] for key in before if key[0] in ("configmaps", "persistentvolumeclaims")}
        assert unversioned(kube.objects) == unversioned(kept)
        record = find_record(kube.cluster(), "demo", "team")
        assert self.resumed(kube, record, make_plan()).number == 2

    def test_foreign_object_refuses_the_resume(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        lifecycle.stop(kube.cluster(), record, quiet)
        service = render(make_plan())[4]
        assert service["kind"] == "Service"
        kube.add(foreign(service))
        before = snapshot(kube)
        with pytest.raises(UsageError, match=r"Service demo"):
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert snapshot(kube) == before

    def test_foreign_job_is_never_deleted(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        kube.remove("Job", "demo")
        kube.add(foreign(render(make_plan())[-1]))
        job = copy.deepcopy(kube.objects["jobs", "team", "demo"])
        for act in (
            lambda: lifecycle.stop(kube.cluster(), record, quiet),
            lambda: lifecycle.resume(kube.cluster(), record, make_plan()),
            lambda: lifecycle.take_back(kube.cluster(), record),
            lambda: lifecycle.delete(kube.cluster(), record, True, quiet),
        ):
            with suppress(UsageError):
                act()
            assert kube.objects["jobs", "team", "demo"] == job

    def test_waits_for_a_job_with_a_finalizer(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of Kueue, of an operator, or of foreground deletion: the job outlives its pods for a moment."""
        record = launch(kube, make_plan())

        def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
            if method != "DELETE" or not path.endswith("/jobs/demo"):
                return None
            kube.change("Job", "demo", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
            return 200, "{}"

        kube.gate = gate
        reads = itertools.count()
        real = Cluster.get

        def get(self: Cluster, api_version: str, kind: str, name: str, namespace: str) -> Object | None:
            if kind == "Job" and next(reads) == 20:
                kube.objects.pop(("jobs", "team", "demo"), None)  # the finalizer is done
            return real(self, api_version, kind, name, namespace)

        monkeypatch.setattr(Cluster, "get", get)
        try:
            lifecycle.resume(kube.cluster(), record, make_plan())
        except LlmtrainError:
            return  # a refusal is fine
        assert "deletionTimestamp" not in kube.objects["jobs", "team", "demo"]["metadata"]

    @pytest.mark.parametrize("cause", ["foreign", "no operator"])
    def test_refusal_changes_nothing(self, kube: KubeServer, cause: str) -> None:
        """The pods of an ended job still have their logs."""
        record = launch(kube, make_plan())
        new = make_plan("pytorch_job")
        if cause == "foreign":
            kube.add(foreign(render(new)[-1]))
        else:
            kube.missing_kinds = {"pytorchjobs"}
        before = snapshot(kube)
        with pytest.raises(UsageError, match=r"PyTorchJob"):
            lifecycle.resume(kube.cluster(), record, new)
        assert snapshot(kube) == before

    def test_ctrl_c_restores_the_record(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        record = launch(kube, make_plan())
        fail_at(monkeypatch, 2, KeyboardInterrupt(), is_created=False)
        with pytest.raises(KeyboardInterrupt):
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert sorted(key[0] for key in kube.objects) == ["configmaps", "persistentvolumeclaims"]
        assert find_record(kube.cluster(), "demo", "team") == record


def test_partly_deleted_run_is_not_resumed(kube: KubeServer) -> None:
    record = launch(kube, make_plan())
    kube.gate = nth("DELETE", OBJECTS - 2, status(500, "not now"))
    with pytest.raises(ClusterError):
        lifecycle.delete(kube.cluster(), record, True, quiet)
    kube.gate = None
    before = snapshot(kube)
    assert {key[0] for key in before} == {"configmaps", "persistentvolumeclaims"}
    with pytest.raises(UsageError) as caught:
        lifecycle.resume(kube.cluster(), fresh(kube), make_plan())
    assert "llmtrain delete demo --data" in (caught.value.remedy or "")
    assert snapshot(kube) == before
    lifecycle.delete(kube.cluster(), fresh(kube), True, quiet)
    assert kube.objects == {}


@pytest.mark.parametrize("is_stopped", [True, False])
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), ClusterError("connection lost")], ids=["^C", "lost"])
@pytest.mark.parametrize("is_changed", [True, False])
def test_record_is_restored_if_the_response_to_its_change_was_lost(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, problem: BaseException, is_stopped: bool, is_changed: bool
) -> None:
    record, real = launch(kube, make_plan()), Cluster.patch
    if is_stopped:
        lifecycle.stop(kube.cluster(), record, quiet, "failed")
        record = fresh(kube)
    config_map = unversioned(snapshot(kube))["configmaps", "team", "demo-config"]

    def patch(self: Cluster, *words: Any) -> Object | None:
        monkeypatch.setattr(Cluster, "patch", real)
        if is_changed:
            real(self, *words)
        raise problem

    monkeypatch.setattr(Cluster, "patch", patch)
    with pytest.raises(type(problem)):
        lifecycle.resume(kube.cluster(), record, make_plan("indexed_job", "launch.processes_per_node=2"))
    assert fresh(kube) == record
    assert unversioned(kube.objects)["configmaps", "team", "demo-config"] == config_map
    lifecycle.resume(kube.cluster(), record, make_plan())
    assert fresh(kube).number == 2


def test_lost_change_does_not_undo_another_resume(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write the same record; only the attempt id distinguishes them."""
    record, real = launch(kube, make_plan()), Cluster.patch

    def patch(self: Cluster, *words: Any) -> Object | None:  # noqa: ARG001
        monkeypatch.setattr(Cluster, "patch", real)
        lifecycle.resume(kube.cluster(), record, make_plan())
        raise ClusterError("connection lost")

    monkeypatch.setattr(Cluster, "patch", patch)
    with pytest.raises(ClusterError):
        lifecycle.resume(kube.cluster(), record, make_plan())
    assert fresh(kube).number == 2
    assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan())}


class TestResumeVolumes:
    CLAIM = ("persistentvolumeclaims", "team", "demo-runs")

    @pytest.mark.parametrize(
        "change", ["size=200Gi", "size=1Gi", "storage_class=fast", "access_mode=ReadWriteMany"], ids=str
    )
    def test_changed_claim_fields_are_refused(self, kube: KubeServer, change: str) -> None:
        record = launch(kube, make_plan())
        before = snapshot(kube)
        with pytest.raises(UsageError) as caught:
            lifecycle.resume(kube.cluster(), record, make_plan("indexed_job", f"launch.runs_volume.{change}"))
        assert f"launch.runs_volume.{change.partition('=')[0]}" in caught.value.what
        assert snapshot(kube) == before

    @pytest.mark.parametrize("size", ["20Gi", "20480Mi", None])
    def test_expanded_claim_is_accepted(self, kube: KubeServer, size: str | None) -> None:
        record = launch(kube, make_plan())
        kube.change("PersistentVolumeClaim", "demo-runs", {"spec": {"resources": {"requests": {"storage": "20Gi"}}}})
        sets = [f"launch.runs_volume.size={size}"] if size else []
        lifecycle.resume(kube.cluster(), record, make_plan("indexed_job", *sets))
        assert find_record(kube.cluster(), "demo", "team").number == 2

    def test_deleted_claim_is_recreated_with_the_new_size(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        kube.remove("PersistentVolumeClaim", "demo-runs")
        lifecycle.resume(kube.cluster(), record, make_plan("indexed_job", "launch.runs_volume.size=200Gi"))
        assert kube.objects[self.CLAIM]["spec"]["resources"]["requests"]["storage"] == "200Gi"

    @pytest.mark.parametrize(("size", "is_fine"), [("200Gi", False), ("10Gi", True), ("1Gi", True)])
    def test_kept_claim_must_be_large_enough(self, kube: KubeServer, size: str, is_fine: bool) -> None:
        kube.add(render(make_plan())[1])
        plan = make_plan("indexed_job", f"launch.runs_volume.size={size}")
        if is_fine:
            lifecycle.submit(kube.cluster(), plan, keep_data=True)
            return
        with pytest.raises(UsageError):
            lifecycle.submit(kube.cluster(), plan, keep_data=True)
        assert list(kube.objects) == [self.CLAIM]
