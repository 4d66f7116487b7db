"""Objects to the cluster and away again: all of a run or nothing of it, and never anything of somebody else."""

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
from llmtrain.kubernetes.api_errors import AlreadyThere, Missing
from llmtrain.kubernetes.client import PLURALS, Cluster
from llmtrain.kubernetes.labels import READER_LABEL
from llmtrain.launch import lifecycle as apply
from llmtrain.launch.manifests import render
from llmtrain.launch.plan import JobPlan, plan_job
from llmtrain.launch.record import Record, find_record
from llmtrain.launch.work import Work

KINDS = sorted(registry.WORKLOADS)
OBJECTS = 6  # of an indexed_job with a disruption budget: config, claim, policy, budget, Service, Job
Object = dict[str, Any]
Verdict = tuple[int, str] | None


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    monkeypatch.setattr(apply, "CONFIRM_SEC", 0.01)
    with kube_server() as server:
        yield server


@lru_cache
def make_plan(kind: str = "indexed_job", *sets: str, work: Work | None = None) -> JobPlan:
    given = [f"launch.kind={kind}", "output.run_id=demo", "launch.namespace=team", "launch.pod_disruption_budget=true"]
    return plan_job(load_config("ddp_smoke", [*given, *sets]), work or Work())


def launch(kube: KubeServer, plan: JobPlan) -> Record:
    apply.submit(kube.cluster(), plan)
    return find_record(kube.cluster(), plan.run_id, plan.namespace)


def quiet(pods: list[Object]) -> None:
    """Nobody wants to know what is waited for."""


def key_of(manifest: Object) -> tuple[str, str, str]:
    meta = manifest["metadata"]
    return PLURALS[manifest["kind"]], meta["namespace"], meta["name"]


def foreign(manifest: Object) -> Object:
    """An object of somebody else with the same name."""
    return {**manifest, "metadata": {**manifest["metadata"], "labels": {"app": "shop"}}, "theirs": True}


def add_bystanders(kube: KubeServer) -> None:
    """Another run of ours beside it, and things of others; names that begin alike."""
    for manifest in render(plan_job(load_config("ddp_smoke", ["output.run_id=demo-2", "launch.namespace=team"]))):
        kube.add(manifest)
    kube.add({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo-web", "labels": {"app": "shop"}}})
    kube.add({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo", "namespace": "other"}})


def snapshot(kube: KubeServer) -> dict[Any, Object]:
    return copy.deepcopy(kube.objects)


def unversioned(objects: dict[Any, Object]) -> dict[Any, Object]:
    """An object that was changed and put back has another version."""
    return {
        key: {**found, "metadata": {k: v for k, v in found["metadata"].items() if k != "resourceVersion"}}
        for key, found in objects.items()
    }


def changes(kube: KubeServer, since: int = 0) -> list[str]:
    return [request for request in kube.requests[since:] if not request.startswith("GET")]


def nth(method: str, number: int, verdict: Verdict) -> Callable[[str, str, Mapping[str, str]], Verdict]:
    """Answers so to the number-th request of a method, counted from 0; questions about rights do not count."""
    count = itertools.count()

    def gate(asked: str, path: str, headers: Mapping[str, str]) -> Verdict:  # noqa: ARG001
        is_question = path.endswith("accessreviews")
        return verdict if asked == method and not is_question and next(count) == number else None

    return gate


def status(code: int, message: str) -> tuple[int, str]:
    return code, f'{{"kind": "Status", "code": {code}, "message": "{message}"}}'


QUOTA = "is forbidden: exceeded quota: small, requested: pods=2, used: pods=1, limited: pods=2"
FAILURES = {
    "quota": (status(403, QUOTA), UsageError, "would exceed a quota: small"),
    "invalid": (status(422, "spec.x: Invalid value"), UsageError, "spec.x: Invalid value"),
    "server error": (status(500, "etcd is slow"), ClusterError, "etcd is slow"),
    "line drops": ((0, ""), ClusterError, "does not answer"),
}


class TestSubmit:
    @pytest.mark.parametrize("kind", KINDS)
    def test_everything_is_made_in_order(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        plan = make_plan(kind)
        apply.submit(kube.cluster(), plan)
        manifests = render(plan)
        assert [key for key in kube.objects if key not in before] == [key_of(manifest) for manifest in manifests]
        assert changes(kube) == [f"POST {PLURALS[manifest['kind']]}" for manifest in manifests]
        assert changes(kube)[0] == "POST configmaps", "whoever makes it has the name"
        for manifest in manifests:
            made = kube.objects[key_of(manifest)]
            assert {name: value for name, value in made.items() if name != "metadata"} == {
                name: value for name, value in manifest.items() if name != "metadata"
            }
        assert {key: value for key, value in kube.objects.items() if key in before} == before

    @pytest.mark.parametrize("number", range(OBJECTS))
    @pytest.mark.parametrize("is_foreign", [True, False], ids=["foreign", "ours"])
    def test_whatever_is_there_refuses_it_and_stays(self, kube: KubeServer, number: int, is_foreign: bool) -> None:
        plan = make_plan()
        there = render(plan)[number]
        kube.add(foreign(there) if is_foreign else there)
        before = snapshot(kube)
        with pytest.raises(UsageError, match="not of this run" if is_foreign else "exists already|still there") as e:
            apply.submit(kube.cluster(), plan)
        assert isinstance(e.value, AlreadyThere) is not is_foreign
        assert e.value.remedy
        assert (snapshot(kube), changes(kube)) == (before, [])

    def test_a_foreign_claim_is_not_taken_over(self, kube: KubeServer) -> None:
        plan = make_plan()
        claim = foreign(render(plan)[1])
        kube.add(claim)
        with pytest.raises(UsageError, match="not of this run"):
            apply.submit(kube.cluster(), plan, keep_data=True)
        assert changes(kube) == []

    def test_data_of_an_earlier_run_of_that_name(self, kube: KubeServer) -> None:
        plan = make_plan()
        uid = kube.add(render(plan)[1])["metadata"]["uid"]
        with pytest.raises(AlreadyThere, match=r"volume demo-runs .* still there") as caught:
            apply.submit(kube.cluster(), plan)
        assert "--resume" in str(caught.value.remedy)
        apply.submit(kube.cluster(), plan, keep_data=True)
        assert kube.objects["persistentvolumeclaims", "team", "demo-runs"]["metadata"]["uid"] == uid
        assert len(changes(kube)) == OBJECTS - 1
        assert "POST persistentvolumeclaims" not in changes(kube)

    def test_to_keep_data_is_not_to_keep_a_run(self, kube: KubeServer) -> None:
        launch(kube, make_plan())
        before, since = snapshot(kube), len(kube.requests)
        with pytest.raises(AlreadyThere, match="Run 'demo' exists already"):
            apply.submit(kube.cluster(), make_plan(), keep_data=True)
        assert (snapshot(kube), changes(kube, since)) == (before, [])

    @pytest.mark.parametrize("number", range(OBJECTS))
    @pytest.mark.parametrize("failure", FAILURES)
    def test_a_failure_at_any_object_takes_back_what_was_made(
        self, kube: KubeServer, failure: str, number: int
    ) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        verdict, error, words = FAILURES[failure]
        kube.gate = nth("POST", number, verdict)
        with pytest.raises(error, match=words):
            apply.submit(kube.cluster(), make_plan())
        assert snapshot(kube) == before
        made = [PLURALS[manifest["kind"]] for manifest in render(make_plan())[:number]]
        gone = [request.split()[1].partition("/")[0] for request in changes(kube) if request.startswith("DELETE")]
        assert gone == made[::-1], "what was made, the last first, and nothing else"

    def test_the_first_error_is_told_and_the_rest_goes_all_the_same(self, kube: KubeServer) -> None:
        plan = make_plan()
        kube.add(render(plan)[1])
        refuse = nth("POST", 3, FAILURES["quota"][0])

        def gate(method: str, path: str, headers: Mapping[str, str]) -> Verdict:
            if method == "DELETE" and path.endswith("/networkpolicies/demo"):
                return status(500, "not now")
            return refuse(method, path, headers)

        kube.gate = gate
        with pytest.raises(UsageError, match="quota"):
            apply.submit(kube.cluster(), plan, keep_data=True)
        assert sorted(kube.objects) == [
            ("networkpolicies", "team", "demo"),
            ("persistentvolumeclaims", "team", "demo-runs"),
        ], "a claim that was there before the launch is not of the launch"

    def test_an_operator_that_is_missing(self, kube: KubeServer) -> None:
        kube.missing_kinds = {"pytorchjobs"}
        with pytest.raises(Missing, match="knows no PyTorchJob") as caught:
            apply.submit(kube.cluster(), make_plan("pytorch_job"))
        assert "indexed_job" in str(caught.value.remedy)
        assert kube.objects == {}
        assert changes(kube) == []

    @pytest.mark.parametrize("number", range(OBJECTS))
    def test_ctrl_c_takes_back_too(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        fail_at(monkeypatch, number, KeyboardInterrupt(), is_made=False)
        with pytest.raises(KeyboardInterrupt):
            apply.submit(kube.cluster(), make_plan())
        assert snapshot(kube) == before

    @pytest.mark.parametrize("problem", [KeyboardInterrupt(), ClusterError("the line dropped")], ids=["^C", "drop"])
    @pytest.mark.parametrize("number", [0, 1, OBJECTS - 1])
    def test_an_object_whose_making_was_not_answered(
        self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch, number: int, problem: BaseException
    ) -> None:
        """The server made it, but the answer was lost, or Ctrl-C came first."""
        fail_at(monkeypatch, number, problem, is_made=True)
        with pytest.raises(type(problem)):
            apply.submit(kube.cluster(), make_plan())
        assert kube.objects == {}

    def test_of_two_at_once_one_wins_and_is_left_alone(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, real = make_plan(), Cluster.create

        def create(self: Cluster, manifest: Object, dry_run: bool = False) -> Object:
            if manifest["kind"] == "ConfigMap":
                kube.add(manifest)  # the other was faster
            return real(self, manifest, dry_run)

        monkeypatch.setattr(Cluster, "create", create)
        with pytest.raises(AlreadyThere):
            apply.submit(kube.cluster(), plan)
        assert list(kube.objects) == [("configmaps", "team", "demo-config")]


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, problem: BaseException, *, is_made: bool) -> None:
    count, real = itertools.count(), Cluster.create

    def create(self: Cluster, manifest: Object, dry_run: bool = False) -> Object:
        is_it = next(count) == number
        if is_it and not is_made:
            raise problem
        made = real(self, manifest, dry_run)
        if is_it:
            raise problem
        return made

    monkeypatch.setattr(Cluster, "create", create)


class TestClaims:
    def claim(self, kube: KubeServer, *modes: str) -> None:
        meta = {"name": "shared", "namespace": "team"}
        spec = {"accessModes": list(modes)}
        kube.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec})

    def test_one_that_is_named_but_not_there(self, kube: KubeServer) -> None:
        self.claim(kube, "ReadWriteMany")
        with pytest.raises(UsageError, match=r"launch.runs_volume.claim: there is no claim typo") as caught:
            apply.submit(kube.cluster(), make_plan("indexed_job", "launch.runs_volume.claim=typo"))
        assert caught.value.known == ["shared"]
        assert changes(kube) == []

    @pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
    def test_one_machine_at_a_time_is_not_enough_for_two(self, kube: KubeServer, mode: str) -> None:
        self.claim(kube, mode)
        sets = ("launch.runs_volume.claim=shared",)
        with pytest.raises(UsageError, match=f"shared .launch.runs_volume. is {mode}.* 2 nodes"):
            apply.submit(kube.cluster(), make_plan("indexed_job", *sets, "launch.nodes=2"))
        with pytest.raises(UsageError, match="2 nodes"):
            apply.submit(kube.cluster(), make_plan("indexed_job", *sets, "launch.nodes=1:2"))
        assert changes(kube) == []
        apply.submit(kube.cluster(), make_plan("indexed_job", *sets))

    def test_a_claim_that_can_be_shared(self, kube: KubeServer) -> None:
        self.claim(kube, "ReadWriteOnce", "ReadWriteMany")
        before = snapshot(kube)
        plan = make_plan("indexed_job", "launch.runs_volume.claim=shared", "launch.nodes=2")
        record = launch(kube, plan)
        assert record.runs_claim == "shared"
        apply.delete(kube.cluster(), record, True, quiet)
        assert snapshot(kube) == before, "it was there before the run"


class TestResume:
    def resumed(self, kube: KubeServer, record: Record, plan: JobPlan) -> Record:
        apply.resume(kube.cluster(), record, plan)
        return find_record(kube.cluster(), "demo", "team")

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_job_is_made_anew_and_the_data_kept(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        plan = make_plan(kind)
        record = launch(kube, plan)
        assert record.number == 1
        apply.stop(kube.cluster(), record, quiet)
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

    def test_a_job_that_ended_is_removed_first(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        uid = kube.objects["jobs", "team", "demo"]["metadata"]["uid"]
        self.resumed(kube, record, make_plan())
        assert kube.objects["jobs", "team", "demo"]["metadata"]["uid"] != uid

    @pytest.mark.parametrize("new", [kind for kind in KINDS if kind != "indexed_job"])
    @pytest.mark.parametrize("is_back", [False, True])
    def test_another_kind(self, kube: KubeServer, new: str, is_back: bool) -> None:
        first, second = (new, "indexed_job") if is_back else ("indexed_job", new)
        record = launch(kube, make_plan(first))
        again = self.resumed(kube, record, make_plan(second))
        assert again.config.launch.kind == second
        assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan(second))}

    def test_another_number_of_nodes(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan("indexed_job", "launch.nodes=4"))
        again = self.resumed(kube, record, make_plan("indexed_job", "launch.nodes=2"))
        assert kube.objects["jobs", "team", "demo"]["spec"]["completions"] == 2
        assert kube.objects["poddisruptionbudgets", "team", "demo"]["spec"]["minAvailable"] == 2
        assert again.plan.nodes == 2

    def test_more_nodes_than_its_own_claim_can_serve(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        claim = kube.objects["persistentvolumeclaims", "team", "demo-runs"]
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
        before, since = snapshot(kube), len(kube.requests)
        with pytest.raises(UsageError, match="ReadWriteOnce"):
            apply.resume(kube.cluster(), record, make_plan("indexed_job", "launch.nodes=2"))
        assert (snapshot(kube), changes(kube, since)) == (before, [])

    def test_more_nodes_than_a_claim_that_is_taken_over_can_serve(self, kube: KubeServer) -> None:
        kube.add(render(make_plan())[1])
        with pytest.raises(UsageError, match="ReadWriteOnce"):
            apply.submit(kube.cluster(), make_plan("indexed_job", "launch.nodes=2"), keep_data=True)

    @pytest.mark.parametrize("is_stopped", [True, False])
    @pytest.mark.parametrize("number", range(4))
    def test_a_later_refusal_puts_the_record_back(self, kube: KubeServer, number: int, is_stopped: bool) -> None:
        """Of the objects that are made anew: policy, budget, Service, Job."""
        record = launch(kube, make_plan())
        if is_stopped:
            apply.stop(kube.cluster(), record, quiet)
            record = find_record(kube.cluster(), "demo", "team")
        before = snapshot(kube)
        kube.gate = nth("POST", number, FAILURES["quota"][0])
        with pytest.raises(UsageError, match="quota"):
            apply.resume(kube.cluster(), record, make_plan("indexed_job", "launch.processes_per_node=2"))
        kube.gate = None
        assert find_record(kube.cluster(), "demo", "team") == record
        kept = {key: before[key] for key in before if key[0] in ("configmaps", "persistentvolumeclaims")}
        assert unversioned(kube.objects) == unversioned(kept)
        record = find_record(kube.cluster(), "demo", "team")
        assert self.resumed(kube, record, make_plan()).number == 2

    def test_foreign_objects_are_never_touched(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        apply.stop(kube.cluster(), record, quiet)
        service = render(make_plan())[4]
        assert service["kind"] == "Service"
        kube.add(foreign(service))
        before = snapshot(kube)
        with pytest.raises(UsageError, match=r"Service demo .* not of this run"):
            apply.resume(kube.cluster(), record, make_plan())
        assert snapshot(kube) == before

    def test_a_foreign_job_of_the_same_name(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        kube.remove("Job", "demo")
        kube.add(foreign(render(make_plan())[-1]))
        job = copy.deepcopy(kube.objects["jobs", "team", "demo"])
        for act in (
            lambda: apply.stop(kube.cluster(), record, quiet),
            lambda: apply.resume(kube.cluster(), record, make_plan()),
            lambda: apply.take_back(kube.cluster(), make_plan()),
            lambda: apply.delete(kube.cluster(), record, True, quiet),
        ):
            with suppress(UsageError):
                act()
            assert kube.objects["jobs", "team", "demo"] == job

    def test_a_job_that_takes_its_time_to_go(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """A finalizer (of Kueue, an operator, or foreground deletion) keeps it a moment longer than its pods."""
        record = launch(kube, make_plan())

        def gate(method: str, path: str, headers: Mapping[str, str]) -> Verdict:  # noqa: ARG001
            if method != "DELETE" or not path.endswith("/jobs/demo"):
                return None
            kube.change("Job", "demo", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
            return 200, "{}"

        kube.gate = gate
        looks = itertools.count()
        real = Cluster.get

        def get(self: Cluster, api_version: str, kind: str, name: str, namespace: str) -> Object | None:
            if kind == "Job" and next(looks) == 20:
                kube.objects.pop(("jobs", "team", "demo"), None)  # gone at last, should anybody wait for it
            return real(self, api_version, kind, name, namespace)

        monkeypatch.setattr(Cluster, "get", get)
        try:
            apply.resume(kube.cluster(), record, make_plan())
        except LlmtrainError:
            return  # to refuse is fine
        assert "deletionTimestamp" not in kube.objects["jobs", "team", "demo"]["metadata"]

    @pytest.mark.parametrize("cause", ["foreign", "no operator"])
    def test_what_cannot_be_made_costs_nothing(self, kube: KubeServer, cause: str) -> None:
        """The pods of a job that ended still have their logs; the message says that nothing was changed."""
        record = launch(kube, make_plan())
        new = make_plan("pytorch_job")
        if cause == "foreign":
            kube.add(foreign(render(new)[-1]))
        else:
            kube.missing_kinds = {"pytorchjobs"}
        before = snapshot(kube)
        with pytest.raises(UsageError, match=r"not of this run|knows no PyTorchJob"):
            apply.resume(kube.cluster(), record, new)
        assert snapshot(kube) == before

    def test_ctrl_c_puts_back(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        record = launch(kube, make_plan())
        fail_at(monkeypatch, 2, KeyboardInterrupt(), is_made=False)
        with pytest.raises(KeyboardInterrupt):
            apply.resume(kube.cluster(), record, make_plan())
        assert sorted(key[0] for key in kube.objects) == ["configmaps", "persistentvolumeclaims"]
        assert find_record(kube.cluster(), "demo", "team") == record


class TestTwoResumesAtOnce:
    def test_a_record_that_another_resume_has_changed(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        apply.resume(kube.cluster(), record, make_plan())
        before = snapshot(kube)
        with pytest.raises(UsageError) as caught:
            apply.resume(kube.cluster(), record, make_plan())
        assert caught.value.exit_code == 64
        assert snapshot(kube) == before

    @pytest.mark.parametrize("change", ["stopped", "deleted"])
    def test_a_record_that_another_command_has_changed(self, kube: KubeServer, change: str) -> None:
        record = launch(kube, make_plan())
        if change == "stopped":
            apply.stop(kube.cluster(), record, quiet)
        else:
            apply.delete(kube.cluster(), record, False, quiet)
        before = snapshot(kube)
        with pytest.raises(UsageError):
            apply.resume(kube.cluster(), record, make_plan())
        assert snapshot(kube) == before

    @pytest.mark.parametrize("kind", ["indexed_job", "train_job"])
    def test_whenever_the_other_comes_one_wins_and_is_whole(self, kube: KubeServer, kind: str) -> None:
        """The other runs from beginning to end, before the n-th request of this one."""
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, make_plan(kind))
            old = snapshot(kube)
            asked, won = itertools.count(), []

            def other(record: Record = record, won: list[str] = won) -> None:
                with suppress(LlmtrainError):
                    apply.resume(kube.cluster(), record, make_plan(kind))
                    won.append("other")

            def gate(method: str, path: str, headers: Mapping[str, str], number: int = number) -> Verdict:  # noqa: ARG001
                if next(asked) == number:  # noqa: B023
                    kube.gate = None
                    other()
                return None

            kube.gate = gate
            with suppress(LlmtrainError):
                apply.resume(kube.cluster(), record, make_plan(kind))
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

    def test_pods_of_the_winner_are_not_waited_for(self, kube: KubeServer) -> None:
        plan = make_plan()
        record = launch(kube, plan)
        add_pods(kube, plan, "demo-0-old")
        winners: list[Object] = []

        def waiting(pods: list[Object]) -> None:  # noqa: ARG001
            if not winners:
                kube.remove("Pod", "demo-0-old")
                apply.resume(kube.cluster(), record, plan)
                add_pods(kube, plan, "demo-0-new")
                winners.append(snapshot(kube))

        with pytest.raises(UsageError):
            apply.resume(kube.cluster(), record, plan, waiting)
        assert [snapshot(kube)] == winners

    def test_to_take_back_leaves_what_another_has_made_meanwhile(self, kube: KubeServer) -> None:
        """A resume that fails late must not put the old record back over a newer one."""
        record = launch(kube, make_plan())

        def gate(method: str, path: str, headers: Mapping[str, str]) -> Verdict:  # noqa: ARG001
            if method == "POST" and path.partition("?")[0].endswith("/jobs"):
                kube.gate = None
                apply.resume(kube.cluster(), find_record(kube.cluster(), "demo", "team"), make_plan())
                return FAILURES["quota"][0]
            return None

        kube.gate = gate
        with pytest.raises(UsageError):
            apply.resume(kube.cluster(), record, make_plan())
        assert find_record(kube.cluster(), "demo", "team").number == 3
        assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan())}


def fresh(kube: KubeServer) -> Record:
    return find_record(kube.cluster(), "demo", "team")


COMMANDS: dict[str, Callable[[KubeServer, Record, JobPlan], object]] = {
    "stop": lambda kube, record, plan: apply.stop(kube.cluster(), record, quiet),  # noqa: ARG005
    "delete": lambda kube, record, plan: apply.delete(kube.cluster(), record, False, quiet),  # noqa: ARG005
    "delete --data": lambda kube, record, plan: apply.delete(kube.cluster(), record, True, quiet),  # noqa: ARG005
    "resume": lambda kube, record, plan: apply.resume(kube.cluster(), record, plan),
}
ENDINGS = ("stop", "delete", "delete --data")
LEAVES = {"stop": {"configmaps", "persistentvolumeclaims"}, "delete": {"persistentvolumeclaims"}}


def run_before(kube: KubeServer, number: int, other: Callable[[], object]) -> None:
    """The other command runs from beginning to end, before the n-th request of this one."""
    asked = itertools.count()

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Verdict:  # noqa: ARG001
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
class TestTwoCommandsAtOnce:
    @pytest.mark.parametrize("first", ENDINGS)
    def test_a_resume_while_a_run_is_stopped_or_deleted(self, kube: KubeServer, kind: str, first: str) -> None:
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
                "stop": lambda record: apply.stop(kube.cluster(), record, waiting),
                "delete": lambda record: apply.delete(kube.cluster(), record, False, waiting),
                "delete --data": lambda record: apply.delete(kube.cluster(), record, True, waiting),
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
                assert snapshot(kube) == after[0], "nothing of the new launch is touched"
                assert set(kube.objects) >= {key_of(manifest) for manifest in render(plan)}
            else:
                assert problem is None
                assert {key[0] for key in kube.objects} == LEAVES.get(first, set())
        assert True in results

    @pytest.mark.parametrize("second", ENDINGS)
    def test_a_run_that_is_stopped_or_deleted_while_it_is_resumed(
        self, kube: KubeServer, kind: str, second: str
    ) -> None:
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
            assert {key[0] for key in kube.objects} == LEAVES.get(second, set())
            if second == "stop":
                assert fresh(kube).stopped_at is not None

    @pytest.mark.parametrize("second", [*ENDINGS, "resume"])
    def test_a_run_that_is_ended_or_resumed_while_it_is_launched(
        self, kube: KubeServer, kind: str, second: str
    ) -> None:
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            seen: list[LlmtrainError | None] = []

            def other(seen: list[LlmtrainError | None] = seen) -> None:
                seen.append(outcome(lambda: COMMANDS[second](kube, fresh(kube), plan)))

            run_before(kube, number, other)
            problem = outcome(lambda: apply.submit(kube.cluster(), plan))
            was_early, kube.gate = kube.gate is None, None
            whole = {key_of(manifest) for manifest in render(plan)}
            if not was_early or seen[0] is not None:  # there was nothing yet
                assert problem is None
                assert set(kube.objects) == whole
            else:
                assert problem is not None
                assert problem.exit_code == 64
                job = whole if second == "resume" else set()
                assert {key for key in kube.objects if key[0] not in LEAVES["stop"]} == {
                    key for key in job if key[0] not in LEAVES["stop"]
                }
            if not was_early:
                break

    @pytest.mark.parametrize(("first", "second"), [("stop", "stop"), ("delete --data", "stop"), ("stop", "delete")])
    def test_both_end_it(self, kube: KubeServer, kind: str, first: str, second: str) -> None:
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
            assert left <= LEAVES["stop"]
            assert problem is None or problem.exit_code == 64
            assert problem is None or (first, second) != ("stop", "stop"), "both have what they want"
            assert problem is not None or left == LEAVES.get(first, set())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_record_that_others_annotate_is_still_the_same(kube: KubeServer, command: str) -> None:
    """A policy engine or a person may write a note at any time: it is no launch."""
    record = launch(kube, make_plan())
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": {"theirs": "yes"}}})
    assert outcome(lambda: COMMANDS[command](kube, record, make_plan())) is None


def test_a_run_whose_data_began_to_go_is_not_resumed(kube: KubeServer) -> None:
    record = launch(kube, make_plan())
    kube.gate = nth("DELETE", OBJECTS - 2, status(500, "not now"))
    with pytest.raises(ClusterError):
        apply.delete(kube.cluster(), record, True, quiet)
    kube.gate = None
    before = snapshot(kube)
    assert {key[0] for key in before} == {"configmaps", "persistentvolumeclaims"}
    with pytest.raises(UsageError) as caught:
        apply.resume(kube.cluster(), fresh(kube), make_plan())
    assert "llmtrain delete demo --data" in (caught.value.remedy or "")
    assert snapshot(kube) == before
    apply.delete(kube.cluster(), fresh(kube), True, quiet)
    assert kube.objects == {}


@pytest.mark.parametrize("is_stopped", [True, False])
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), ClusterError("the line dropped")], ids=["^C", "drop"])
@pytest.mark.parametrize("is_changed", [True, False])
def test_a_record_whose_change_was_not_answered_is_put_back(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, problem: BaseException, is_stopped: bool, is_changed: bool
) -> None:
    record, real = launch(kube, make_plan()), Cluster.patch
    if is_stopped:
        apply.stop(kube.cluster(), record, quiet, "failed")
        record = fresh(kube)
    config_map = unversioned(snapshot(kube))["configmaps", "team", "demo-config"]

    def patch(self: Cluster, *words: Any) -> Object | None:
        monkeypatch.setattr(Cluster, "patch", real)
        if is_changed:
            real(self, *words)
        raise problem

    monkeypatch.setattr(Cluster, "patch", patch)
    with pytest.raises(type(problem)):
        apply.resume(kube.cluster(), record, make_plan("indexed_job", "launch.processes_per_node=2"))
    assert fresh(kube) == record
    assert unversioned(kube.objects)["configmaps", "team", "demo-config"] == config_map
    apply.resume(kube.cluster(), record, make_plan())
    assert fresh(kube).number == 2


def test_a_change_that_did_not_arrive_takes_nothing_back_of_another(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write the same record: only the mark of the attempt tells whose it is."""
    record, real = launch(kube, make_plan()), Cluster.patch

    def patch(self: Cluster, *words: Any) -> Object | None:  # noqa: ARG001
        monkeypatch.setattr(Cluster, "patch", real)
        apply.resume(kube.cluster(), record, make_plan())
        raise ClusterError("the line dropped")

    monkeypatch.setattr(Cluster, "patch", patch)
    with pytest.raises(ClusterError):
        apply.resume(kube.cluster(), record, make_plan())
    assert fresh(kube).number == 2
    assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan())}


def test_when_a_run_was_stopped_is_told_by_the_clock_of_the_server(kube: KubeServer) -> None:
    kube.ahead_sec = 7200
    record = launch(kube, make_plan())
    before = datetime.fromtimestamp(int(time.time()), UTC)
    apply.stop(kube.cluster(), record, quiet)
    stopped_at = datetime.fromisoformat(fresh(kube).stopped_at or "")
    assert stopped_at >= before + timedelta(hours=1)


class TestResumeVolumes:
    CLAIM = ("persistentvolumeclaims", "team", "demo-runs")

    @pytest.mark.parametrize(
        "change", ["size=200Gi", "size=1Gi", "storage_class=fast", "access_mode=ReadWriteMany"], ids=str
    )
    def test_what_a_resume_cannot_change_is_refused(self, kube: KubeServer, change: str) -> None:
        record = launch(kube, make_plan())
        before = snapshot(kube)
        with pytest.raises(UsageError) as caught:
            apply.resume(kube.cluster(), record, make_plan("indexed_job", f"launch.runs_volume.{change}"))
        assert f"launch.runs_volume.{change.partition('=')[0]}" in caught.value.what
        assert snapshot(kube) == before

    @pytest.mark.parametrize("asked", ["20Gi", "20480Mi", None])
    def test_a_claim_that_has_grown_is_accepted(self, kube: KubeServer, asked: str | None) -> None:
        record = launch(kube, make_plan())
        kube.change("PersistentVolumeClaim", "demo-runs", {"spec": {"resources": {"requests": {"storage": "20Gi"}}}})
        sets = [f"launch.runs_volume.size={asked}"] if asked else []
        apply.resume(kube.cluster(), record, make_plan("indexed_job", *sets))
        assert find_record(kube.cluster(), "demo", "team").number == 2

    def test_a_claim_that_is_gone_is_made_as_asked(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        kube.remove("PersistentVolumeClaim", "demo-runs")
        apply.resume(kube.cluster(), record, make_plan("indexed_job", "launch.runs_volume.size=200Gi"))
        assert kube.objects[self.CLAIM]["spec"]["resources"]["requests"]["storage"] == "200Gi"

    @pytest.mark.parametrize(("asked", "is_fine"), [("200Gi", False), ("10Gi", True), ("1Gi", True)])
    def test_a_volume_that_is_taken_over_must_be_large_enough(
        self, kube: KubeServer, asked: str, is_fine: bool
    ) -> None:
        kube.add(render(make_plan())[1])
        plan = make_plan("indexed_job", f"launch.runs_volume.size={asked}")
        if is_fine:
            apply.submit(kube.cluster(), plan, keep_data=True)
            return
        with pytest.raises(UsageError):
            apply.submit(kube.cluster(), plan, keep_data=True)
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
    def test_the_job_first_then_pods_then_the_rest(self, kube: KubeServer, kind: str) -> None:
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
            assert all(key in kube.objects for key in around), "pods need them to save"
            seen.append([pod["metadata"]["name"] for pod in pods])
            kube.remove("Pod", seen[-1][0])

        assert apply.stop(kube.cluster(), record, waiting) == []
        assert seen == [["demo-0", "demo-1"], ["demo-1"]]
        stays = {("configmaps", "team", "demo-config"), ("persistentvolumeclaims", "team", "demo-runs")}
        assert set(kube.objects) == stays | set(others)
        assert {key: kube.objects[key] for key in others} == others
        stopped = find_record(kube.cluster(), "demo", "team")
        assert stopped.stopped_at is not None
        assert stopped.stopped_at.endswith("Z")
        assert (stopped.number, stopped.config, stopped.work) == (record.number, record.config, record.work)
        assert apply.stop(kube.cluster(), stopped, waiting) == [], "twice is as good as once"

    def test_delete_keeps_data_unless_told(self, kube: KubeServer, kind: str) -> None:
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
            assert apply.delete(kube.cluster(), record, data, quiet) == []
            claim = ("persistentvolumeclaims", "team", "demo-runs")
            assert set(kube.objects) == set(others) | (set() if data else {claim})
            assert {key: kube.objects[key] for key in others} == others
            kube.objects.pop(claim, None)

    def test_take_back(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        launch(kube, make_plan(kind))
        apply.take_back(kube.cluster(), make_plan(kind))
        assert snapshot(kube) == before


def test_to_take_back_leaves_data_that_was_there_before(kube: KubeServer) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    apply.delete(kube.cluster(), record, False, quiet)
    before = snapshot(kube)
    assert list(before) == [("persistentvolumeclaims", "team", "demo-runs")]
    apply.submit(kube.cluster(), plan, keep_data=True)
    apply.take_back(kube.cluster(), find_record(kube.cluster(), "demo", "team").plan)
    assert snapshot(kube) == before


def test_a_launch_on_kept_data_is_another_launch_to_the_run(kube: KubeServer) -> None:
    """LLMTRAIN_LAUNCH is what crashes are counted by: a run that gave up must get its new chance."""
    plan = make_plan()

    def launch_number() -> str:
        pod = kube.objects["jobs", "team", "demo"]["spec"]["template"]["spec"]
        return str({row["name"]: row.get("value") for row in pod["containers"][0]["env"]}["LLMTRAIN_LAUNCH"])

    record = launch(kube, plan)
    first = launch_number()
    apply.delete(kube.cluster(), record, False, quiet)
    apply.submit(kube.cluster(), plan, keep_data=True)
    assert launch_number() != first


def test_pods_that_never_go_are_told(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("indexed_job", "launch.grace_period_sec=100")
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += 10 * max(1.0, seconds)
        if clock.now > 50 and ("pods", "team", "demo-1") in kube.objects:
            kube.remove("Pod", "demo-1")

    monkeypatch.setattr(apply, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    waits: list[float] = []
    assert apply.stop(kube.cluster(), record, lambda pods: waits.append(clock.now)) == ["demo-0"]  # noqa: ARG005
    assert waits[-1] >= 160, "the grace period, and the minute that a pod has after it"
    assert sorted(key[0] for key in kube.objects) == ["configmaps", "persistentvolumeclaims", "pods"]
    assert apply.delete(kube.cluster(), record, True, quiet) == ["demo-0"]
    assert [key[0] for key in kube.objects] == ["pods"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_is_asked_and_keeps_nothing(kube: KubeServer, kind: str) -> None:
    asked: list[str] = []

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Verdict:  # noqa: ARG001
        asked.append(f"{method} {path}")
        return None

    kube.gate = gate
    plan = make_plan(kind)
    skipped = apply.check_on_server(kube.cluster(), plan)
    assert kube.objects == {}
    asked = [request for request in asked if not request.startswith("GET ")]
    assert all(request.startswith("POST ") and "dryRun=All" in request for request in asked)
    assert all("fieldValidation=Strict" in request for request in asked)
    assert len(asked) == len(render(plan)) - len(skipped) + 1  # and a pod
    assert [row.partition(":")[0] for row in skipped] == (["TrainJob demo"] if kind == "train_job" else [])


def test_what_the_server_says_to_a_dry_run(kube: KubeServer) -> None:
    kube.gate = nth("POST", 4, FAILURES["invalid"][0])
    with pytest.raises(UsageError, match=r"refuses Service demo in namespace team: spec\.x"):
        apply.check_on_server(kube.cluster(), make_plan())


def test_a_pod_that_would_be_refused(kube: KubeServer) -> None:
    """The job itself would be accepted."""
    said = (
        'pods "demo-dry-run" is forbidden: exceeded quota: small, requested: memory=8Gi, used: memory=0, limited: 1Gi'
    )

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Verdict:  # noqa: ARG001
        return (403, json.dumps({"message": said})) if method == "POST" and "/pods?" in path else None

    kube.gate = gate
    with pytest.raises(UsageError, match="would exceed a quota: small, requested: memory=8Gi"):
        apply.check_on_server(kube.cluster(), make_plan())
    said = 'pods "demo-dry-run" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    with pytest.raises(UsageError) as caught:
        apply.check_on_server(kube.cluster(), make_plan())
    assert "launch.security" in (caught.value.remedy or "")
    said = 'pods is forbidden: User "me" cannot create resource "pods" in API group "" in the namespace "team"'
    assert apply.check_on_server(kube.cluster(), make_plan()) == [
        "Its pods: You have no right to create pods in namespace team."
    ]


class TestOperators:
    @pytest.mark.parametrize("act", ["stop", "delete", "resume"])
    def test_one_that_was_removed_took_its_jobs_along(self, kube: KubeServer, act: str) -> None:
        record = launch(kube, make_plan("job_set"))
        kube.remove("JobSet", "demo")
        kube.missing_kinds = {"jobsets"}
        if act == "stop":
            apply.stop(kube.cluster(), record, quiet)
        elif act == "delete":
            apply.delete(kube.cluster(), record, True, quiet)
            assert kube.objects == {}
        else:
            apply.resume(kube.cluster(), record, make_plan())
            assert ("jobs", "team", "demo") in kube.objects

    def test_what_it_made_goes_a_moment_after_its_job(self, kube: KubeServer) -> None:
        """JobSet makes the headless Service, and the cluster collects it when it comes to it."""
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
            apply.resume(kube.cluster(), record, make_plan())
        finally:
            collector.join(5)
        assert ("jobs", "team", "demo") in kube.objects


def test_a_claim_that_is_being_deleted_is_no_place_for_a_run(kube: KubeServer) -> None:
    """It waits for its last pod to go; with it goes the data."""
    claim = render(make_plan())[1]
    kube.add({**claim, "metadata": {**claim["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    with pytest.raises(UsageError, match="deleted"):
        apply.submit(kube.cluster(), make_plan(), keep_data=True)
    assert changes(kube) == []


# Pods that should be gone: their machine is lost.


def in_sec(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def set_leaving(kube: KubeServer, name: str, seconds: float) -> None:
    kube.change("Pod", name, {"metadata": {"deletionTimestamp": in_sec(seconds)}})


@pytest.mark.parametrize(("seconds", "expected"), [(None, False), (600, False), (-5, False), (-3600, True)])
def test_when_a_pod_is_overdue(seconds: float | None, expected: bool) -> None:
    stamps = {} if seconds is None else {"deletionTimestamp": in_sec(seconds)}
    assert apply.is_overdue({"metadata": {"name": "demo-0", **stamps}}) is expected


@pytest.mark.parametrize("act", ["stop", "delete", "remove_job"])
def test_lost_pods_are_not_waited_for(kube: KubeServer, act: str) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    for name in ("demo-0", "demo-1"):
        set_leaving(kube, name, -3600)
    waits: list[Object] = []
    acts: dict[str, Callable[[], list[str]]] = {
        "stop": lambda: apply.stop(kube.cluster(), record, waits.extend),
        "delete": lambda: apply.delete(kube.cluster(), record, False, waits.extend),
        "remove_job": lambda: apply.remove_job(kube.cluster(), record, waits.extend),
    }
    assert acts[act]() == ["demo-0", "demo-1"], "they are told"
    assert waits == []
    left = {"configmaps", "persistentvolumeclaims", "pods"} - ({"configmaps"} if act == "delete" else set())
    assert {key[0] for key in kube.objects} == left


@pytest.mark.parametrize("seconds", [None, 600, -5], ids=["not told yet", "in its time", "just over"])
def test_a_pod_that_is_in_its_time_is_waited_for(kube: KubeServer, seconds: float | None) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    set_leaving(kube, "demo-0", -3600)
    if seconds is not None:
        set_leaving(kube, "demo-1", seconds)
    turns = itertools.count()

    def waiting(pods: list[Object]) -> None:
        assert len(pods) == 2
        if next(turns) == 3:
            kube.remove("Pod", "demo-1")

    assert apply.stop(kube.cluster(), record, waiting) == ["demo-0"]
    assert next(turns) == 4


@pytest.mark.parametrize("verdict", [status(503, "soon"), status(401, "Unauthorized"), (0, "")])
def test_a_cluster_that_is_away_while_pods_end(kube: KubeServer, verdict: tuple[int, str]) -> None:
    plan = make_plan()
    record = launch(kube, plan)
    add_pods(kube, plan, "demo-0")
    asked = itertools.count()

    def gate(method: str, path: str, headers: Mapping[str, str]) -> Verdict:  # noqa: ARG001
        if method != "GET" or "/pods?" not in path:
            return None
        return verdict if next(asked) in (1, 2, 3) else None

    kube.gate = gate
    seen: list[int] = []

    def waiting(pods: list[Object]) -> None:
        seen.append(len(pods))
        if len(seen) == 2:
            kube.remove("Pod", "demo-0")

    assert apply.stop(kube.cluster(), record, waiting) == []
    assert seen == [1, 1]
    assert sorted(key[0] for key in kube.objects) == ["configmaps", "persistentvolumeclaims"]


def test_a_cluster_that_stays_away_while_pods_end(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    record = launch(kube, make_plan("indexed_job", "launch.grace_period_sec=100"))
    kube.gate = lambda method, path, headers: status(503, "soon") if "/pods?" in path else None  # noqa: ARG005
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:  # noqa: ARG001
        clock.now += 10

    monkeypatch.setattr(apply, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    with pytest.raises(ClusterError, match="soon"):
        apply.remove_job(kube.cluster(), record, quiet)
    assert clock.now >= 190


HAS_RUN = {
    "runs": {"state": {"running": {}}, "restartCount": 0},
    "ended": {"state": {"terminated": {"exitCode": 1, "startedAt": "2026-01-01T00:00:00Z"}}, "restartCount": 0},
    "waits to be started again": {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 2},
}


@pytest.mark.parametrize("name", [*HAS_RUN, "never"])
def test_to_take_back_leaves_what_a_pod_may_have_written(kube: KubeServer, name: str) -> None:
    plan = make_plan()
    launch(kube, plan)
    add_pods(kube, plan, "demo-0", "demo-1")
    waits = {"state": {"waiting": {"reason": "ImagePullBackOff"}}, "restartCount": 0}
    for pod, row in (("demo-0", waits), ("demo-1", HAS_RUN.get(name, waits))):
        kube.change("Pod", pod, {"status": {"containerStatuses": [{"name": "trainer", **row}]}})
    apply.take_back(kube.cluster(), plan)
    left = sorted(key[0] for key in kube.objects if key[0] != "pods")
    assert left == ([] if name == "never" else ["persistentvolumeclaims"])
