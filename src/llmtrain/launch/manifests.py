"""The manifests of a run: the objects that all kinds share (ConfigMap, claims, Service, policies), and YAML."""

import json
import re
from dataclasses import asdict
from typing import Any

import yaml

from llmtrain.core import libyaml
from llmtrain.kubernetes.labels import CODE_LABEL, IMAGE_ANNOTATION, LAUNCH_ANNOTATION, has_labels
from llmtrain.launch.code_map import code_map_data
from llmtrain.launch.job import JOB_FILE, METRICS_PORT, JobPlan, Manifest
from llmtrain.launch.kinds.base import find_kind
from llmtrain.launch.manifest_comments import with_comments
from llmtrain.launch.pod import without_empty
from llmtrain.launch.pod_task import CONFIG_FILE
from llmtrain.tracking.prometheus import PATH as METRICS_PATH

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


def render(plan: JobPlan) -> list[Manifest]:
    """All manifests of a run, in the order of creation: the ConfigMap first, the job last."""
    policies = [*_network_policy(plan), *_disruption_budget(plan), *_pod_monitor(plan)]
    shared = [config_map(plan), *_code_map(plan), *_claims(plan), *policies]
    return [*shared, *find_kind(plan.launch).render(plan)]


def metadata(plan: JobPlan, name: str | None = None, labels: dict[str, str] | None = None) -> Manifest:
    return {"name": name or plan.run_id, "namespace": plan.namespace, "labels": plan.labels | (labels or {})}


def job_metadata(plan: JobPlan) -> Manifest:
    """Metadata of the job, with the labels that Kueue reads."""
    launch = plan.launch
    meta = metadata(plan, labels=without_empty({QUEUE_LABEL: launch.queue, PRIORITY_LABEL: launch.queue_priority}))
    if launch.annotations:
        meta["annotations"] = dict(launch.annotations)
    return meta


def headless_service(plan: JobPlan) -> Manifest:
    """Gives each pod a DNS name. Pods must resolve before they are ready: they wait for each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, plan.service),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": plan.selector,
            "ports": [{"name": "rendezvous", "port": plan.master_port}],
        },
    }


def config_map(plan: JobPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(plan, plan.config_map),
        "data": {CONFIG_FILE: plan.config_text, JOB_FILE: job_text(plan)},
    }


def job_text(plan: JobPlan) -> str:
    """What a resume needs in addition to the config."""
    values: dict[str, Any] = {"work": asdict(plan.task), "number": plan.number, "nonce": plan.nonce}
    if plan.code:
        values["code"] = {"sha256": plan.code.sha256, "paths": plan.code.paths}
    return json.dumps(values)


def _code_map(plan: JobPlan) -> list[Manifest]:
    if plan.code is None:
        return []
    code_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(plan, plan.code_map, CODE_LABEL),
        "immutable": True,
    }
    if plan.code.contents:  # else it is on the cluster already
        code_map |= code_map_data(plan)
    return [code_map]


def _claims(plan: JobPlan) -> list[Manifest]:
    """Claims for the volumes that name no existing one."""
    default = "ReadWriteMany" if plan.nodes > 1 else "ReadWriteOnce"
    claims = []
    for name, volume in plan.launch.volumes.items():
        if volume.claim:
            continue
        meta = metadata(plan, plan.claim(name))
        # A claim may outlive its run: `fetch` then needs the image, and a launch must know who created it.
        meta["annotations"] = {IMAGE_ANNOTATION: plan.launch.image, LAUNCH_ANNOTATION: plan.launch_id}
        spec = {
            "accessModes": [volume.access_mode or default],
            "storageClassName": volume.storage_class,
            "resources": {"requests": {"storage": volume.size}},
        }
        claims.append(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": without_empty(spec)}
        )
    return claims


def _network_policy(plan: JobPlan) -> list[Manifest]:
    """Ranks use ephemeral ports, so all ports are open between pods of the run."""
    if not plan.launch.network_policy:
        return []
    peers = [{"podSelector": {"matchLabels": plan.selector}}]
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    egress: list[Manifest] = [{"to": peers}, {"ports": dns}]
    if plan.egress_ports:
        egress.append({"ports": [{"protocol": "TCP", "port": port} for port in plan.egress_ports]})
    ingress: list[Manifest] = [{"from": peers}]
    if plan.metrics_port:  # Prometheus may run in any namespace
        ingress.append({"ports": [{"protocol": "TCP", "port": plan.metrics_port}]})
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(plan),
            "spec": {
                "podSelector": {"matchLabels": plan.selector},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": ingress,
                "egress": egress,
            },
        }
    ]


def _disruption_budget(plan: JobPlan) -> list[Manifest]:
    """minAvailable is a number: a percentage needs a scale subresource, which Jobs do not have."""
    if not plan.launch.pod_disruption_budget:
        return []
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(plan),
            "spec": {"minAvailable": plan.min_nodes, "selector": {"matchLabels": plan.selector}},
        }
    ]


def _pod_monitor(plan: JobPlan) -> list[Manifest]:
    """For the Prometheus Operator. Selects pod 0, the only one that serves metrics."""
    if not plan.launch.pod_monitor or not plan.metrics_port:
        return []
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": metadata(plan),
            "spec": {
                "selector": {"matchLabels": plan.selector | find_kind(plan.launch).pod_0_labels},
                "podMetricsEndpoints": [{"port": METRICS_PORT, "path": METRICS_PATH}],
            },
        }
    ]


class _Dumper(libyaml.Dumper):  # type: ignore[misc]
    """Multi-line strings as literal blocks; quotes around strings that Go's YAML reads as another type (1e3, y)."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if "\n" in text:
        style = "|"
    elif re.match(r"[-+.]?[0-9]|[yYnN]$", text):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_manifest(manifest: Manifest) -> str:
    text = str(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120))
    is_code = "metadata" in manifest and has_labels(manifest, CODE_LABEL)  # a kustomization has no metadata
    return with_comments("code" if is_code else manifest["kind"], text)


def dump_manifests(manifests: list[Manifest]) -> str:
    return "---\n".join(dump_manifest(manifest) for manifest in manifests)


def as_files(plan: JobPlan, manifests: list[Manifest]) -> dict[str, str]:
    """File name -> content: one numbered file per manifest, and a kustomization."""
    files = {}
    for number, manifest in enumerate(manifests, start=1):
        name = f"{number:02}-{manifest['kind'].lower()}-{manifest['metadata']['name']}.yaml"
        files[name] = dump_manifest(manifest)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": plan.namespace,
        "resources": list(files),
    }
    return {**files, "kustomization.yaml": dump_manifest(kustomization)}
