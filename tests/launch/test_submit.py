"""Submit: all objects of a run or none, and none of others; the dry run on the server."""

import json
from collections.abc import Mapping

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
    key_of,
    launch,
    make_plan,
    nth,
    quiet,
    snapshot,
    status,
)

from kube_server import KubeServer
from llmtrain.errors import ClusterError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists, KindNotFound
from llmtrain.kubernetes.client import Cluster, plural_of
from llmtrain.launch import lifecycle
from llmtrain.launch.manifests import render


class TestSubmit:
    @pytest.mark.parametrize("kind", KINDS)
    def test_creates_all_objects_in_order(self, kube: KubeServer, kind: str) -> None:
        add_bystanders(kube)
        before = snapshot(kube)
        plan = make_plan(kind)
        lifecycle.submit(kube.cluster(), plan)
        manifests = render(plan)
        assert [key for key in kube.objects if key not in before] == [key_of(manifest) for manifest in manifests]
        assert changes(kube) == [f"POST {plural_of(manifest['kind'])}" for manifest in manifests]
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
        created = [plural_of(manifest["kind"]) for manifest in render(make_plan())[:number]]
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


def test_terminating_claim_is_refused(kube: KubeServer) -> None:
    """It is deleted with its data as soon as its last pod is gone."""
    claim = render(make_plan())[1]
    kube.add({**claim, "metadata": {**claim["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    with pytest.raises(UsageError, match="deleted"):
        lifecycle.submit(kube.cluster(), make_plan(), keep_data=True)
    assert changes(kube) == []
