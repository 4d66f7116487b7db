"""Submit, resume, stop and delete: all objects of a run or none, and never those of others."""

import copy
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from kube_server import KubeServer, kube_server
from llmtrain import registry
from llmtrain.config.load import load_config
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists, KindNotFound
from llmtrain.kubernetes.client import PLURALS, Cluster
from llmtrain.kubernetes.labels import READER_LABEL
from llmtrain.launch import lifecycle
from llmtrain.launch.manifests import render
from llmtrain.launch.objects import is_overdue
from llmtrain.launch.plan import JobPlan, plan_job
from llmtrain.launch.record import Record, find_record
from llmtrain.launch.work import Work

KINDS = sorted(registry.WORKLOADS)
OBJECTS = 6  # of an indexed_job with a disruption budget: config, claim, policy, budget, Service, Job
Object = dict[str, Any]
Response = tuple[int, str] | None


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    monkeypatch.setattr(lifecycle, "POLL_SEC", 0.01)
    with kube_server() as server:
        yield server


@lru_cache
def make_plan(kind: str = "indexed_job", *sets: str, work: Work | None = None) -> JobPlan:
    given = [f"launch.kind={kind}", "output.run_id=demo", "launch.namespace=team", "launch.pod_disruption_budget=true"]
    return plan_job(load_config("ddp_smoke", [*given, *sets]), work or Work())


def launch(kube: KubeServer, plan: JobPlan) -> Record:
    lifecycle.submit(kube.cluster(), plan)
    return find_record(kube.cluster(), plan.run_id, plan.namespace)


def quiet(pods: list[Object]) -> None:
    """Ignores the pods that are awaited."""


def key_of(manifest: Object) -> tuple[str, str, str]:
    meta = manifest["metadata"]
    return PLURALS[manifest["kind"]], meta["namespace"], meta["name"]


def foreign(manifest: Object) -> Object:
    """An object of the same name that does not belong to llmtrain."""
    return {**manifest, "metadata": {**manifest["metadata"], "labels": {"app": "shop"}}, "foreign": True}


def add_bystanders(kube: KubeServer) -> None:
    """Another run and foreign objects, with names that have the same prefix."""
    for manifest in render(plan_job(load_config("ddp_smoke", ["output.run_id=demo-2", "launch.namespace=team"]))):
        kube.add(manifest)
    kube.add({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo-web", "labels": {"app": "shop"}}})
    kube.add({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo", "namespace": "other"}})


def snapshot(kube: KubeServer) -> dict[Any, Object]:
    return copy.deepcopy(kube.objects)


def unversioned(objects: dict[Any, Object]) -> dict[Any, Object]:
    """Without resource versions: an object that was changed and restored has another one."""
    return {
        key: {**found, "metadata": {k: v for k, v in found["metadata"].items() if k != "resourceVersion"}}
        for key, found in objects.items()
    }


def changes(kube: KubeServer, since: int = 0) -> list[str]:
    return [request for request in kube.requests[since:] if not request.startswith("GET")]


def nth(method: str, number: int, response: Response) -> Callable[[str, str, Mapping[str, str]], Response]:
    """Answers with `response` to the n-th request of a method, counted from 0; access reviews do not count."""
    count = itertools.count()

    def gate(requested: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
        is_review = path.endswith("accessreviews")
        return response if requested == method and not is_review and next(count) == number else None

    return gate


def status(code: int, message: str) -> tuple[int, str]:
    return code, f'{{"kind": "Status", "code": {code}, "message": "{message}"}}'


QUOTA = "is forbidden: exceeded quota: small, requested: pods=2, used: pods=1, limited: pods=2"
FAILURES = {
    "quota": (status(403, QUOTA), UsageError, "small, requested: pods=2"),
    "invalid": (status(422, "spec.x: Invalid value"), UsageError, "spec.x: Invalid value"),
    "server error": (status(500, "etcd is slow"), ClusterError, "etcd is slow"),
    "connection lost": ((0, ""), ClusterError, "context"),
}


class TestSubmit:
    @pytest.mark.parametrize("kind", KINDS)
    def test_creates_all_objects_in_order(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        plan = make_plan(kind)
        lifecycle.submit(kube.cluster(), plan)
        manifests = render(plan)
        assert [key for key in kube.objects if key not in before] == [key_of(manifest) for manifest in manifests]
        assert changes(kube) == [f"POST {PLURALS[manifest['kind']]}" for manifest in manifests]
        assert changes(kube)[0] == "POST configmaps", "its creator owns the name"
        for manifest in manifests:
            created = kube.objects[key_of(manifest)]
            assert {name: value for name, value in created.items() if name != "metadata"} == {
                name: value for name, value in manifest.items() if name != "metadata"
            }
        assert {key: value for key, value in kube.objects.items() if key in before} == before

    @pytest.mark.parametrize("number", range(OBJECTS))
    @pytest.mark.parametrize("is_foreign", [True, False], ids=["foreign", "own"])
    def test_existing_object_refuses_the_launch(self, kube: KubeServer, number: int, is_foreign: bool) -> None:
        plan = make_plan()
        existing = render(plan)[number]
        kube.add(foreign(existing) if is_foreign else existing)
        before = snapshot(kube)
        with pytest.raises(UsageError, match="demo") as e:
            lifecycle.submit(kube.cluster(), plan)
        assert isinstance(e.value, AlreadyExists) is not is_foreign
        assert e.value.remedy
        assert (snapshot(kube), changes(kube)) == (before, [])

    def test_foreign_claim_is_not_used(self, kube: KubeServer) -> None:
        plan = make_plan()
        claim = foreign(render(plan)[1])
        kube.add(claim)
        with pytest.raises(UsageError, match="demo-runs"):
            lifecycle.submit(kube.cluster(), plan, keep_data=True)
        assert changes(kube) == []

    def test_claim_of_an_earlier_run_is_kept_on_request(self, kube: KubeServer) -> None:
        plan = make_plan()
        uid = kube.add(render(plan)[1])["metadata"]["uid"]
        with pytest.raises(AlreadyExists, match=r"demo-runs") as caught:
            lifecycle.submit(kube.cluster(), plan)
        assert "--resume" in str(caught.value.remedy)
        lifecycle.submit(kube.cluster(), plan, keep_data=True)
        assert kube.objects["persistentvolumeclaims", "team", "demo-runs"]["metadata"]["uid"] == uid
        assert len(changes(kube)) == OBJECTS - 1
        assert "POST persistentvolumeclaims" not in changes(kube)

    def test_keep_data_refuses_an_existing_run(self, kube: KubeServer) -> None:
        launch(kube, make_plan())
        before, since = snapshot(kube), len(kube.requests)
        with pytest.raises(AlreadyExists, match="Run 'demo'"):
            lifecycle.submit(kube.cluster(), make_plan(), keep_data=True)
        assert (snapshot(kube), changes(kube, since)) == (before, [])

    @pytest.mark.parametrize("number", range(OBJECTS))
    @pytest.mark.parametrize("failure", FAILURES)
    def test_failure_deletes_what_was_created(self, kube: KubeServer, failure: str, number: int) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        response, error, fact = FAILURES[failure]
        kube.gate = nth("POST", number, response)
        with pytest.raises(error, match=fact):
            lifecycle.submit(kube.cluster(), make_plan())
        assert snapshot(kube) == before
        created = [PLURALS[manifest["kind"]] for manifest in render(make_plan())[:number]]
        deleted = [request.split()[1].partition("/")[0] for request in changes(kube) if request.startswith("DELETE")]
        assert deleted == created[::-1], "in reverse order, and nothing else"

    def test_failing_undo_keeps_the_first_error_and_continues(self, kube: KubeServer) -> None:
        plan = make_plan()
        kube.add(render(plan)[1])
        refuse = nth("POST", 3, FAILURES["quota"][0])

        def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:
            if method == "DELETE" and path.endswith("/networkpolicies/demo"):
                return status(500, "not now")
            return refuse(method, path, headers)

        kube.gate = gate
        with pytest.raises(UsageError, match="quota"):
            lifecycle.submit(kube.cluster(), plan, keep_data=True)
        assert sorted(kube.objects) == [
            ("networkpolicies", "team", "demo"),
            ("persistentvolumeclaims", "team", "demo-runs"),
        ], "the claim existed before the launch"

    def test_missing_crd_is_refused_before_any_change(self, kube: KubeServer) -> None:
        kube.missing_kinds = {"pytorchjobs"}
        with pytest.raises(KindNotFound, match="PyTorchJob") as caught:
            lifecycle.submit(kube.cluster(), make_plan("pytorch_job"))
        assert "indexed_job" in str(caught.value.remedy)
        assert kube.objects == {}
        assert changes(kube) == []

    @pytest.mark.parametrize("number", range(OBJECTS))
    def test_ctrl_c_deletes_created_objects(
        self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        fail_at(monkeypatch, number, KeyboardInterrupt(), is_created=False)
        with pytest.raises(KeyboardInterrupt):
            lifecycle.submit(kube.cluster(), make_plan())
        assert snapshot(kube) == before

    @pytest.mark.parametrize("problem", [KeyboardInterrupt(), ClusterError("connection lost")], ids=["^C", "lost"])
    @pytest.mark.parametrize("number", [0, 1, OBJECTS - 1])
    def test_object_whose_response_was_lost_is_deleted(
        self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch, number: int, problem: BaseException
    ) -> None:
        """The API server created it, but the response was lost, or Ctrl-C came first."""
        fail_at(monkeypatch, number, problem, is_created=True)
        with pytest.raises(type(problem)):
            lifecycle.submit(kube.cluster(), make_plan())
        assert kube.objects == {}

    def test_loser_of_a_race_keeps_the_winner(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, real = make_plan(), Cluster.create

        def create(self: Cluster, manifest: Object, dry_run: bool = False) -> Object:
            if manifest["kind"] == "ConfigMap":
                kube.add(manifest)  # the other command was faster
            return real(self, manifest, dry_run)

        monkeypatch.setattr(Cluster, "create", create)
        with pytest.raises(AlreadyExists):
            lifecycle.submit(kube.cluster(), plan)
        assert list(kube.objects) == [("configmaps", "team", "demo-config")]


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, problem: BaseException, *, is_created: bool) -> None:
    count, real = itertools.count(), Cluster.create

    def create(self: Cluster, manifest: Object, dry_run: bool = False) -> Object:
        is_it = next(count) == number
        if is_it and not is_created:
            raise problem
        created = real(self, manifest, dry_run)
        if is_it:
            raise problem
        return created

    monkeypatch.setattr(Cluster, "create", create)


class TestClaims:
    def claim(self, kube: KubeServer, *modes: str) -> None:
        meta = {"name": "shared", "namespace": "team"}
        spec = {"accessModes": list(modes)}
        kube.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec})

    def test_missing_claim_is_refused(self, kube: KubeServer) -> None:
        self.claim(kube, "ReadWriteMany")
        with pytest.raises(UsageError, match=r"launch.runs_volume.claim.* typo") as caught:
            lifecycle.submit(kube.cluster(), make_plan("indexed_job", "launch.runs_volume.claim=typo"))
        assert caught.value.known == ["shared"]
        assert changes(kube) == []

    @pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
    def test_single_node_claim_is_refused_for_two_pods(self, kube: KubeServer, mode: str) -> None:
        self.claim(kube, mode)
        sets = ("launch.runs_volume.claim=shared",)
        with pytest.raises(UsageError, match=f"shared .launch.runs_volume. is {mode}.* 2 pods"):
            lifecycle.submit(kube.cluster(), make_plan("indexed_job", *sets, "launch.nodes=2"))
        with pytest.raises(UsageError, match="2 pods"):
            lifecycle.submit(kube.cluster(), make_plan("indexed_job", *sets, "launch.nodes=1:2"))
        assert changes(kube) == []
        lifecycle.submit(kube.cluster(), make_plan("indexed_job", *sets))

    def test_shared_claim_is_used_and_never_deleted(self, kube: KubeServer) -> None:
        self.claim(kube, "ReadWriteOnce", "ReadWriteMany")
        before = snapshot(kube)
        plan = make_plan("indexed_job", "launch.runs_volume.claim=shared", "launch.nodes=2")
        record = launch(kube, plan)
        assert record.runs_claim == "shared"
        lifecycle.delete(kube.cluster(), record, True, quiet)
        assert snapshot(kube) == before, "it existed before the run"


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


class TestConcurrentResumes:
    def test_stale_record_after_a_resume_is_refused(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        lifecycle.resume(kube.cluster(), record, make_plan())
        before = snapshot(kube)
        with pytest.raises(UsageError) as caught:
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert caught.value.exit_code == 64
        assert snapshot(kube) == before

    @pytest.mark.parametrize("change", ["stopped", "deleted"])
    def test_stale_record_after_another_command_is_refused(self, kube: KubeServer, change: str) -> None:
        record = launch(kube, make_plan())
        if change == "stopped":
            lifecycle.stop(kube.cluster(), record, quiet)
        else:
            lifecycle.delete(kube.cluster(), record, False, quiet)
        before = snapshot(kube)
        with pytest.raises(UsageError):
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert snapshot(kube) == before

    @pytest.mark.parametrize("kind", ["indexed_job", pytest.param("train_job", marks=pytest.mark.slow)])
    def test_exactly_one_wins_at_any_interleaving(self, kube: KubeServer, kind: str) -> None:
        """The other command runs completely before the n-th request of this one."""
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, make_plan(kind))
            old = snapshot(kube)
            asked, won = itertools.count(), []

            def other(record: Record = record, won: list[str] = won) -> None:
                with suppress(LlmtrainError):
                    lifecycle.resume(kube.cluster(), record, make_plan(kind))
                    won.append("other")

            def gate(method: str, path: str, headers: Mapping[str, str], number: int = number) -> Response:  # noqa: ARG001
                if next(asked) == number:  # noqa: B023
                    kube.gate = None
                    other()
                return None

            kube.gate = gate
            with suppress(LlmtrainError):
                lifecycle.resume(kube.cluster(), record, make_plan(kind))
                won.append("this")
            was_early, kube.gate = kube.gate is None, None
            assert len(won) == 1
            assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan(kind))}
            assert find_record(kube.cluster(), "demo", "team").number == 2
            job = key_of(render(make_plan(kind))[-1])
            assert kube.objects[job]["metadata"]["uid"] != old[job]["metadata"]["uid"]
            if not was_early:
                assert number > 10
                break

    def test_does_not_wait_for_pods_of_the_winner(self, kube: KubeServer) -> None:
        plan = make_plan()
        record = launch(kube, plan)
        add_pods(kube, plan, "demo-0-old")
        winners: list[Object] = []

        def waiting(pods: list[Object]) -> None:  # noqa: ARG001
            if not winners:
                kube.remove("Pod", "demo-0-old")
                lifecycle.resume(kube.cluster(), record, plan)
                add_pods(kube, plan, "demo-0-new")
                winners.append(snapshot(kube))

        with pytest.raises(UsageError):
            lifecycle.resume(kube.cluster(), record, plan, waiting)
        assert [snapshot(kube)] == winners

    def test_failed_resume_keeps_the_objects_of_another(self, kube: KubeServer) -> None:
        """A resume that fails late must not overwrite a newer record with the old one."""
        record = launch(kube, make_plan())

        def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
            if method == "POST" and path.partition("?")[0].endswith("/jobs"):
                kube.gate = None
                lifecycle.resume(kube.cluster(), find_record(kube.cluster(), "demo", "team"), make_plan())
                return FAILURES["quota"][0]
            return None

        kube.gate = gate
        with pytest.raises(UsageError):
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert find_record(kube.cluster(), "demo", "team").number == 3
        assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan())}


def fresh(kube: KubeServer) -> Record:
    return find_record(kube.cluster(), "demo", "team")


COMMANDS: dict[str, Callable[[KubeServer, Record, JobPlan], object]] = {
    "stop": lambda kube, record, plan: lifecycle.stop(kube.cluster(), record, quiet),  # noqa: ARG005
    "delete": lambda kube, record, plan: lifecycle.delete(kube.cluster(), record, False, quiet),  # noqa: ARG005
    "delete --data": lambda kube, record, plan: lifecycle.delete(kube.cluster(), record, True, quiet),  # noqa: ARG005
    "resume": lambda kube, record, plan: lifecycle.resume(kube.cluster(), record, plan),
}
REMOVALS = ("stop", "delete", "delete --data")
FEW_REMOVALS = ("stop", "delete", pytest.param("delete --data", marks=pytest.mark.slow))
REMAINING = {"stop": {"configmaps", "persistentvolumeclaims"}, "delete": {"persistentvolumeclaims"}}


def run_before(kube: KubeServer, number: int, other: Callable[[], object]) -> None:
    """Run the other command completely before the n-th request of this one."""
    asked = itertools.count()

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
        if next(asked) == number:
            kube.gate = None
            other()
        return None

    kube.gate = gate


def outcome(act: Callable[[], object]) -> LlmtrainError | None:
    try:
        act()
    except LlmtrainError as problem:
        return problem
    return None


@pytest.mark.parametrize("kind", ["indexed_job", pytest.param("train_job", marks=pytest.mark.slow)])
class TestConcurrentCommands:
    @pytest.mark.parametrize("first", FEW_REMOVALS)
    def test_resume_during_stop_or_delete(self, kube: KubeServer, kind: str, first: str) -> None:
        plan, results = make_plan(kind), set()
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, plan)
            add_pods(kube, plan, "old")
            seen: list[LlmtrainError | None] = []
            after: list[dict[Any, Object]] = []

            def resume(seen: list[LlmtrainError | None] = seen, after: list[dict[Any, Object]] = after) -> None:
                kube.objects.pop(("pods", "team", "old"), None)
                seen.append(outcome(lambda: COMMANDS["resume"](kube, fresh(kube), plan)))
                if seen == [None]:
                    add_pods(kube, plan, "new")
                after.append(snapshot(kube))

            def waiting(pods: list[Object]) -> None:
                assert [pod["metadata"]["name"] for pod in pods] == ["old"]
                kube.remove("Pod", "old")

            run_before(kube, number, resume)
            acts: dict[str, Callable[[Record], object]] = {
                "stop": lambda record: lifecycle.stop(kube.cluster(), record, waiting),
                "delete": lambda record: lifecycle.delete(kube.cluster(), record, False, waiting),
                "delete --data": lambda record: lifecycle.delete(kube.cluster(), record, True, waiting),
            }
            problem = outcome(lambda: acts[first](record))  # noqa: B023
            was_early, kube.gate = kube.gate is None, None
            if not was_early:
                assert problem is None
                assert number > 10
                break
            results.add(seen[0] is None)
            if seen[0] is None:
                assert problem is not None
                assert problem.exit_code == 64
                assert snapshot(kube) == after[0], "objects of the new launch are unchanged"
                assert set(kube.objects) >= {key_of(manifest) for manifest in render(plan)}
            else:
                assert problem is None
                assert {key[0] for key in kube.objects} == REMAINING.get(first, set())
        assert True in results

    @pytest.mark.parametrize("second", FEW_REMOVALS)
    def test_stop_or_delete_during_resume(self, kube: KubeServer, kind: str, second: str) -> None:
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, plan)
            run_before(kube, number, lambda: COMMANDS[second](kube, fresh(kube), plan))
            problem = outcome(lambda: COMMANDS["resume"](kube, record, plan))  # noqa: B023
            was_early, kube.gate = kube.gate is None, None
            if not was_early:
                assert problem is None
                break
            assert problem is not None
            assert problem.exit_code == 64
            assert {key[0] for key in kube.objects} == REMAINING.get(second, set())
            if second == "stop":
                assert fresh(kube).stopped_at is not None

    @pytest.mark.parametrize("second", [*REMOVALS, "resume"])
    def test_any_command_during_submit(self, kube: KubeServer, kind: str, second: str) -> None:
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            seen: list[LlmtrainError | None] = []

            def other(seen: list[LlmtrainError | None] = seen) -> None:
                seen.append(outcome(lambda: COMMANDS[second](kube, fresh(kube), plan)))

            run_before(kube, number, other)
            problem = outcome(lambda: lifecycle.submit(kube.cluster(), plan))
            was_early, kube.gate = kube.gate is None, None
            whole = {key_of(manifest) for manifest in render(plan)}
            if not was_early or seen[0] is not None:  # there was no record yet
                assert problem is None
                assert set(kube.objects) == whole
            else:
                assert problem is not None
                assert problem.exit_code == 64
                job = whole if second == "resume" else set()
                assert {key for key in kube.objects if key[0] not in REMAINING["stop"]} == {
                    key for key in job if key[0] not in REMAINING["stop"]
                }
            if not was_early:
                break

    @pytest.mark.parametrize(("first", "second"), [("stop", "stop"), ("delete --data", "stop"), ("stop", "delete")])
    def test_stop_and_delete_at_once(self, kube: KubeServer, kind: str, first: str, second: str) -> None:
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, plan)
            run_before(kube, number, lambda: COMMANDS[second](kube, fresh(kube), plan))
            problem = outcome(lambda: COMMANDS[first](kube, record, plan))  # noqa: B023
            was_early, kube.gate = kube.gate is None, None
            if not was_early:
                break
            left = {key[0] for key in kube.objects}
            assert left <= REMAINING["stop"]
            assert problem is None or problem.exit_code == 64
            assert problem is None or (first, second) != ("stop", "stop"), "both succeed"
            assert problem is not None or left == REMAINING.get(first, set())


@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_annotation_does_not_change_the_record(kube: KubeServer, command: str) -> None:
    """A policy engine or a user may annotate objects at any time."""
    record = launch(kube, make_plan())
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": {"example.com/note": "yes"}}})
    assert outcome(lambda: COMMANDS[command](kube, record, make_plan())) is None


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


def test_stopped_at_uses_the_clock_of_the_api_server(kube: KubeServer) -> None:
    kube.ahead_sec = 7200
    record = launch(kube, make_plan())
    before = datetime.fromtimestamp(int(time.time()), UTC)
    lifecycle.stop(kube.cluster(), record, quiet)
    stopped_at = datetime.fromisoformat(fresh(kube).stopped_at or "")
    assert stopped_at >= before + timedelta(hours=1)


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


def without_stamps(found: Object) -> Object:
    meta = {
        name: value
        for name, value in found["metadata"].items()
        if name in ("name", "namespace", "labels", "annotations")
    }
    return {**found, "metadata": meta}


def add_pods(kube: KubeServer, plan: JobPlan, *names: str) -> None:
    for name in names:
        meta = {"name": name, "namespace": "team", "labels": dict(plan.labels)}
        kube.add({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {"phase": "Running"}})


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
        assert (stopped.number, stopped.config, stopped.work) == (record.number, record.config, record.work)
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


def test_launch_on_kept_data_has_a_new_launch_id(kube: KubeServer) -> None:
    """Crashes are counted per LLMTRAIN_LAUNCH: a run that gave up must start counting from 0."""
    plan = make_plan()

    def launch_number() -> str:
        pod = kube.objects["jobs", "team", "demo"]["spec"]["template"]["spec"]
        return str({row["name"]: row.get("value") for row in pod["containers"][0]["env"]}["LLMTRAIN_LAUNCH"])

    record = launch(kube, plan)
    first = launch_number()
    lifecycle.delete(kube.cluster(), record, False, quiet)
    lifecycle.submit(kube.cluster(), plan, keep_data=True)
    assert launch_number() != first


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


@pytest.mark.parametrize("kind", KINDS)
def test_server_side_dry_run_stores_nothing(kube: KubeServer, kind: str) -> None:
    requests: list[str] = []

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
        requests.append(f"{method} {path}")
        return None

    kube.gate = gate
    plan = make_plan(kind)
    skipped = lifecycle.check_on_server(kube.cluster(), plan)
    assert kube.objects == {}
    requests = [request for request in requests if not request.startswith("GET ")]
    assert all(request.startswith("POST ") and "dryRun=All" in request for request in requests)
    assert all("fieldValidation=Strict" in request for request in requests)
    assert len(requests) == len(render(plan)) - len(skipped) + 1  # and a pod
    assert [row.partition(":")[0] for row in skipped] == (["TrainJob demo"] if kind == "train_job" else [])


def test_server_side_dry_run_reports_the_refusal(kube: KubeServer) -> None:
    kube.gate = nth("POST", 4, FAILURES["invalid"][0])
    with pytest.raises(UsageError, match=r"Service demo in namespace team: spec\.x"):
        lifecycle.check_on_server(kube.cluster(), make_plan())


def test_server_side_dry_run_checks_a_pod(kube: KubeServer) -> None:
    """The job itself would be accepted; its pods would be refused later."""
    message = (
        'pods "demo-dry-run" is forbidden: exceeded quota: small, requested: memory=8Gi, used: memory=0, limited: 1Gi'
    )

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
        return (403, json.dumps({"message": message})) if method == "POST" and "/pods?" in path else None

    kube.gate = gate
    with pytest.raises(UsageError, match="small, requested: memory=8Gi"):
        lifecycle.check_on_server(kube.cluster(), make_plan())
    message = 'pods "demo-dry-run" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    with pytest.raises(UsageError) as caught:
        lifecycle.check_on_server(kube.cluster(), make_plan())
    assert "launch.security" in (caught.value.remedy or "")
    message = 'pods is forbidden: User "me" cannot create resource "pods" in API group "" in the namespace "team"'
    [skipped] = lifecycle.check_on_server(kube.cluster(), make_plan())
    assert "create pods in namespace 'team' (RBAC)" in skipped


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
            collector.join(5)
        assert ("jobs", "team", "demo") in kube.objects


def test_terminating_claim_is_refused(kube: KubeServer) -> None:
    """It is deleted with its data as soon as its last pod is gone."""
    claim = render(make_plan())[1]
    kube.add({**claim, "metadata": {**claim["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    with pytest.raises(UsageError, match="deleted"):
        lifecycle.submit(kube.cluster(), make_plan(), keep_data=True)
    assert changes(kube) == []


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


@pytest.mark.parametrize("number", range(25))
def test_take_back_during_a_resume_keeps_its_objects(kube: KubeServer, number: int) -> None:
    record = launch(kube, make_plan())
    resumed: list[bool] = []

    def resume() -> None:
        resumed.append(outcome(lambda: lifecycle.resume(kube.cluster(), fresh(kube), make_plan())) is None)

    run_before(kube, number, resume)
    problem = outcome(lambda: lifecycle.take_back(kube.cluster(), record))
    if resumed == [True]:
        assert problem is not None
        assert problem.exit_code == 64
        assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan())}
    else:
        assert problem is None
        assert kube.objects == {}
