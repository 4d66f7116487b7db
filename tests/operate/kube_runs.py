"""Runs in the fake API server: their real manifests, and pods controlled by the test."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kube_server import KubeServer, now
from llmtrain.config.load import load_config
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.job import JobPlan
from llmtrain.launch.kinds.base import find_kind
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import Record, find_record

Object = dict[str, Any]
STEP = "[TRAIN] step {}/30 | loss 5.1922 | lr 3.00e-03 | 27,610 tok/s | 0:00:09 left"
INDEX_LABELS = {
    "indexed_job": "batch.kubernetes.io/job-completion-index",
    "stateful_set": "apps.kubernetes.io/pod-index",
    "pytorch_job": "training.kubeflow.org/replica-index",
    "train_job": "batch.kubernetes.io/job-completion-index",
    "job_set": "batch.kubernetes.io/job-completion-index",
}


def running() -> Object:
    return {"running": {"startedAt": now()}}


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int, reason: str = "") -> Object:
    reason = reason or ("Error" if code else "Completed")
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": now()}}


@dataclass
class FakeRun:
    kube: KubeServer
    plan: JobPlan
    made: int = 0
    pods: dict[int, str] = field(default_factory=dict)
    """Node rank -> name of its newest pod."""
    _record: tuple[Object, Record] | None = None

    @cached_property
    def cluster(self) -> Cluster:
        return self.kube.cluster()

    @property
    def record(self) -> Record:
        """The current record. Cached until it changes, because parsing a config is slow."""
        found = self.kube.objects["configmaps", self.plan.namespace, self.plan.config_map]
        if self._record is None or self._record[0] is not found:
            self._record = found, find_record(self.cluster, self.plan.run_id, self.plan.namespace)
        return self._record[1]

    @property
    def kind(self) -> str:
        return find_kind(self.plan.launch).object_kind

    def pod(self, index: int, state: Object | None = None, role: str = "worker", **more: Any) -> str:
        """Create a pod, running by default. Later pods have later creation times."""
        self.made += 1
        kind = self.plan.launch.kind
        ending = f"-{self.made:05}" if kind in ("indexed_job", "job_set", "train_job") else ""
        name = f"{self.plan.run_id}-{index}{ending}"
        labels = {**self.plan.labels, INDEX_LABELS[kind]: str(index), "training.kubeflow.org/replica-type": role}
        created = {"creationTimestamp": f"2026-01-01T00:00:{self.made:02}Z"}
        self.kube.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": self.plan.namespace, "labels": labels, **created},
                "spec": {"nodeName": f"k8s-node{index}"},
                "status": {"phase": "Pending"},
            }
        )
        self.pods[index] = name
        self.set(index, running() if state is None else state, **more)
        return name

    def set(
        self,
        index: int,
        state: Object,
        *,
        restarts: int = 0,
        last: Object | None = None,
        conditions: list[Object] | None = None,
        is_leaving: bool = False,
    ) -> None:
        """Set the container state of a pod."""
        code = state.get("terminated", {}).get("exitCode")
        phase = "Running" if "running" in state else "Pending"
        if code is not None:
            phase = "Failed" if code else "Succeeded"
        if restarts and "waiting" in state:
            phase = "Running"
        row = {"name": self.plan.container, "state": state, "lastState": last or {}, "restartCount": restarts}
        name = self.pods[index]
        key = ("pods", self.plan.namespace, name)
        with self.kube.lock:
            pod = self.kube.objects[key]
            status = {"phase": phase, "containerStatuses": [row] if state else [], "conditions": conditions or []}
            meta = {**pod["metadata"], **({"deletionTimestamp": now()} if is_leaving else {})}
            self.kube.objects[key] = {**pod, "metadata": meta, "status": status}
        if "running" in state:
            self.kube.say(name, container=self.plan.container)

    def say(self, index: int, *lines: str) -> None:
        self.kube.say(self.pods[index], *lines, container=self.plan.container)

    def end(self, index: int, code: int = 0, reason: str = "") -> None:
        """The container of a pod exits."""
        self.kube.end_log(self.pods[index], container=self.plan.container)
        self.set(index, ended(code, reason))

    def finish(self, condition: str = "Complete", **more: str) -> None:
        row = {"type": condition, "status": "True", **more}
        self.kube.change(self.kind, self.plan.run_id, {"status": {"conditions": [row]}})

    def event(self, reason: str, message: str, kind: str | None = None, name: str | None = None) -> None:
        self.made += 1
        about = {"kind": kind or self.kind, "name": name or self.plan.run_id, "namespace": self.plan.namespace}
        self.kube.add(
            {
                "kind": "Event",
                "metadata": {"name": f"event-{self.made}", "namespace": self.plan.namespace},
                "type": "Warning",
                "involvedObject": about,
                "reason": reason,
                "message": message,
                "lastTimestamp": now(),
            }
        )


def launch(
    kube: KubeServer, kind: str = "indexed_job", *sets: str, name: str = "demo", task: PodTask | None = None
) -> FakeRun:
    """Create all objects of a launch, without pods."""
    given = [f"launch.kind={kind}", f"output.run_id={name}", "launch.namespace=team", "launch.image=me/train:1"]
    config = load_config("ddp_smoke", [*given, "launch.nodes=2", "trainer.max_steps=30", *sets])
    plan = plan_job(config, task or PodTask())
    for manifest in render(plan):
        kube.add(manifest)
    return FakeRun(kube, plan)
