"""Runs that are launched on the API server of the tests, and what it stores then."""

import copy
import itertools
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import pytest

from kube_server import KubeServer
from llmtrain import registry
from llmtrain.config.load import load_config
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.client import Cluster, plural_of
from llmtrain.launch import lifecycle
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import Record, find_record

KINDS = sorted(registry.KINDS)
OBJECTS = 6  # of an indexed_job with a disruption budget: config, claim, policy, budget, Service, Job
Object = dict[str, Any]
Response = tuple[int, str] | None


@lru_cache
def make_plan(kind: str = "indexed_job", *sets: str, task: PodTask | None = None) -> JobPlan:
    given = [f"launch.kind={kind}", "output.run_id=demo", "launch.namespace=team", "launch.pod_disruption_budget=true"]
    given += ["launch.image=me/train:1"]
    return plan_job(load_config("ddp_smoke", [*given, *sets]), task or PodTask())


def launch(kube: KubeServer, plan: JobPlan) -> Record:
    lifecycle.submit(kube.cluster(), plan)
    return find_record(kube.cluster(), plan.run_id, plan.namespace)


def quiet(pods: list[Object]) -> None:
    """Ignores the pods that are awaited."""


def key_of(manifest: Object) -> tuple[str, str, str]:
    meta = manifest["metadata"]
    return plural_of(manifest["kind"]), meta["namespace"], meta["name"]


def foreign(manifest: Object) -> Object:
    """An object of the same name that does not belong to llmtrain."""
    return {**manifest, "metadata": {**manifest["metadata"], "labels": {"app": "shop"}}, "foreign": True}


def add_bystanders(kube: KubeServer) -> None:
    """Another run and foreign objects, with names that have the same prefix."""
    other = ["output.run_id=demo-2", "launch.namespace=team", "launch.image=me/train:1"]
    for manifest in render(plan_job(load_config("ddp_smoke", other))):
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


def fresh(kube: KubeServer) -> Record:
    return find_record(kube.cluster(), "demo", "team")


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
