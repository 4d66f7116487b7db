"""Each kind, from launch to generate: two nodes, the image of docker/Dockerfile, a restricted namespace."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_faults import wait_for
from kube import Kube, finished_hash, load_image

from llmtrain import registry

KINDS = sorted(registry.KINDS)
# A native sidecar, as docs/pods.md has it, that ends only when it is told to.
SIDECAR = {
    "name": "log-shipper",
    "restartPolicy": "Always",
    "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done"],
    "resources": {"limits": {"cpu": "10m", "memory": "32Mi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
    "volumeMounts": [{"name": "runs", "mountPath": "/out", "readOnly": True}],
}
EVERYTHING = "services,jobs,statefulsets,networkpolicies,pytorchjobs,trainjobs,trainingruntimes,jobsets"


@pytest.fixture(scope="module")
def reference(kube: Kube) -> str:
    """The hash that the same config ends with on this machine, with two processes."""
    result = kube.local("train", "--config", "ddp_smoke", "--processes", "2", "--json").json
    return str(result["state_sha256"])


def is_complete(kube: Kube, run: str) -> bool:
    (job,) = kube.objects("jobs", "-l", f"llmtrain.dev/run={run}")
    return any(row["type"] == "Complete" and row["status"] == "True" for row in job["status"].get("conditions", []))


@pytest.mark.parametrize("kind", KINDS)
def test_from_launch_to_generate(kube: Kube, kind: str, reference: str) -> None:
    run = f"{kind.replace('_', '-')}-e2e"
    more = []
    if kind == "indexed_job":
        patch = {"spec": {"initContainers": [{**SIDECAR, "image": kube.image}]}}
        more = ["--set", f"launch.pod_patch={json.dumps(patch)}"]
    done = kube.llmtrain(*kube.launch_words(kind, run, *more))
    assert "[TRAIN] step 30/30" in done.out + done.err
    assert kube.status(run)["state"] == "finished"
    if kind == "indexed_job":
        wait_for(lambda: is_complete(kube, run), 30, "the job to end, although its sidecars never do by themselves")
        for pod in kube.objects("pods", "-l", f"llmtrain.dev/run={run}"):
            (sidecar,) = pod["status"]["initContainerStatuses"]
            assert "terminated" in sidecar["state"]

    kube.llmtrain("stop", run)
    assert kube.objects("pods", "-l", f"llmtrain.dev/run={run}") == []
    assert kube.objects(EVERYTHING, "-l", f"llmtrain.dev/run={run}") == []

    kube.llmtrain("fetch", run)  # every pod has gone
    result = json.loads((kube.folder / "runs" / run / "finished.json").read_text())
    assert result["state_sha256"] == reference
    wait_for(lambda: kube.objects("pods") == [], 30, "the reader to go, too")
    text = kube.local("generate", "--run", run, "--prompt", "the ", "--max-new-tokens", "8", "--json").json
    assert text["text"]

    kube.llmtrain("delete", run)
    assert kube.objects("configmaps", "-l", f"llmtrain.dev/run={run}") == []


@pytest.fixture(scope="module")
def lenient(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A namespace that takes what the operator adds beside a Master: an init container from alpine, which looks the
    Master's name up. For clusters that cannot pull it, an image of that name with all that it uses."""
    context = tmp_path_factory.mktemp("alpine")
    (context / "nslookup").write_text('#!/bin/sh\nexec getent hosts "$1"\n')
    (context / "nslookup").chmod(0o755)
    (context / "Dockerfile").write_text("FROM python:3.11-slim\nCOPY nslookup /usr/local/bin/nslookup\n")
    load_image(kube.kubeconfig, "alpine:3.10", context)
    made = replace(kube, namespace=f"{kube.namespace}-lenient")
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    made.kubectl("delete", "namespace", made.namespace, "--ignore-not-found")
    made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.namespace, "labels": labels}})
    made.claim("runs")
    yield made
    made.kubectl("delete", "namespace", made.namespace, "--wait=false")


MASTER = ["--set", "launch.pytorch_master=true"]
SHAPES = {
    # One Master and one Worker that meet at port 23456, as a LoRA trainer's manifest has it.
    "ftjb": ["--set", "distributed.master_port=23456"],
    # replicas x nprocPerNode = 2 x 2, with an image that may be root and write anywhere, as a Kubeflow tutorial has it.
    "torchrun-cpu": ["--processes-per-node", "2", "--set", "launch.security=baseline"],
}


@pytest.mark.slow
@pytest.mark.parametrize("run", SHAPES)
def test_pytorch_job_with_master(lenient: Kube, run: str, reference: str) -> None:
    done = lenient.llmtrain(*lenient.launch_words("pytorch_job", run, *MASTER, *SHAPES[run]))
    assert "[TRAIN] step 30/30" in done.out + done.err
    assert lenient.status(run)["state"] == "finished"
    pods = {pod["metadata"]["name"]: pod for pod in lenient.objects("pods", "-l", f"llmtrain.dev/run={run}")}
    assert sorted(pods) == [f"{run}-master-0", f"{run}-worker-0"]
    added = [row["name"] for row in pods[f"{run}-worker-0"]["spec"].get("initContainers", [])]
    assert added == ["init-pytorch"], "the operator's own, which waits for the Master"
    (job,) = lenient.objects("pytorchjobs", "-l", f"llmtrain.dev/run={run}")
    assert job["spec"]["nprocPerNode"] == ("2" if run == "torchrun-cpu" else "1")
    # What the documents type to look at it works as it stands.
    assert "step 30/30" in lenient.kubectl("logs", f"{run}-master-0", "-c", "pytorch")
    assert lenient.kubectl("describe", "pytorchjob", run)
    lenient.llmtrain("stop", run)
    assert finished_hash(lenient, run) == reference
    lenient.llmtrain("delete", run)


@pytest.mark.slow
def test_torchrun_in_a_pytorch_job_with_a_master(lenient: Kube) -> None:
    """torchrun and a script, in an image without llmtrain for all it matters: 2 pods x 2 processes are one world."""
    run, script = (
        "tutorial",
        "import torch.distributed as d; d.init_process_group('gloo'); print('of', d.get_world_size())",
    )
    more = [*MASTER, "--processes-per-node", "2", "--set", "launch.security=none", "--launcher", "torchrun"]
    lenient.llmtrain(*lenient.launch_words("pytorch_job", run, *more), "--", "python3", "-c", script)
    for pod in (f"{run}-master-0", f"{run}-worker-0"):
        assert lenient.kubectl("logs", pod, "-c", "pytorch").count("of 4") == 2
    lenient.llmtrain("delete", run)


@pytest.mark.slow
def test_pytorch_job_with_master_applied_with_kubectl(lenient: Kube) -> None:
    """The script copied into each pod, and torchrun started in the master, then in the worker, with the words of a
    LoRA trainer's guide."""
    run = "by-hand"
    lenient.llmtrain(
        *lenient.launch_words("pytorch_job", run, *MASTER, "--set", "distributed.master_port=23456"), "--hold"
    )
    script = (
        "import torch.distributed as d; d.init_process_group('gloo'); print('rank', d.get_rank(), d.get_world_size())"
    )
    (lenient.folder / "by_hand.py").write_text(script)
    for rank in ("0", "1"):
        lenient.llmtrain("push", run, "by_hand.py", "--pod", rank)
        meet = [f"--master_addr={run}-master-0", "--master_port=23456"]
        torchrun = ["torchrun", "--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1", *meet, "by_hand.py"]
        lenient.llmtrain("exec", run, "--pod", rank, "--detach", "--", *torchrun)
    deadline = time.monotonic() + 60
    while not all(f"rank {rank} 2" in (log := lenient.llmtrain("logs", run).out) for rank in (0, 1)):
        assert time.monotonic() < deadline, log
        time.sleep(1)
    lenient.llmtrain("exec", run, "--kill")
    lenient.llmtrain("delete", run)


def test_restricted_namespace_refuses_lower_security(kube: Kube) -> None:
    """And says which field asked for it; nothing is left."""
    words = kube.launch_words("indexed_job", "as-root", "--set", "launch.security=baseline")
    for more in ([], ["--dry-run=server"]):
        assert "launch.security" in kube.llmtrain(*words, *more, "--json", expect=64).json["remedy"]
    assert kube.objects("configmaps", "-l", "llmtrain.dev/run=as-root") == []


def test_api_server_accepts_rendered_manifests(kube: Kube) -> None:
    for kind in KINDS:
        done = kube.llmtrain(*kube.launch_words(kind, f"asked-{kind.replace('_', '-')}"), "--dry-run=server")
        assert "accepts" in done.out
    assert [c for c in kube.objects("configmaps") if "asked" in c["metadata"]["name"]] == []


def test_default_kubeconfig_is_not_read(kube: Kube) -> None:
    done = kube.local("status", expect=64)
    assert "kubeconfig" in done.err
    assert not (Path(kube.folder) / ".kube").exists()
