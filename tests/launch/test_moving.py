"""The configs of docs/moving.md, as they would be applied: names, ports and paths of the guides they replace."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask

COMMIT = "9213176726f574b556790deb65791e0c5aa438b6"


def moving(repo: Path) -> str:
    return (repo / "docs" / "moving.md").read_text()


def config_text(repo: Path, name: str) -> str:
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```yaml\n(.*?)```", moving(repo), re.S)
    assert found
    return found[1]


def plan(repo: Path, name: str, task: PodTask) -> JobPlan:
    return plan_job(build_config(parse_document(config_text(repo, name), name)), task)


def replicas(made: JobPlan) -> dict[str, Any]:
    job = render(made)[-1]
    assert job["kind"] == "PyTorchJob"
    return dict(job["spec"]["pytorchReplicaSpecs"])


@pytest.mark.parametrize("mode", ["train", "hold"])
def test_lora_guide_keeps_names_and_paths(repo: Path, mode: Any) -> None:
    made = plan(repo, "ftjb.yaml", PodTask(mode))
    assert (made.run_id, made.master_addr, made.master_port) == ("ftjb", "ftjb-master-0", 23456)
    assert made.warnings == []
    roles = replicas(made)
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 1}
    for role in roles.values():
        spec = role["template"]["spec"]
        (container,), (fetching,) = spec["containers"], spec["initContainers"]
        assert container["name"] == "pytorch"
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        for path in ("/workspace/output", "/workspace/dataset", "/workspace/model"):
            assert "readOnly" not in mounts[path]
        env = {row["name"]: row for row in fetching["env"]}
        assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf-secrets", "key": "HF_TOKEN"}
        assert {"name": "HF_HUB_CACHE", "value": "/workspace/model"} in container["env"]
        assert env["HF_HUB_CACHE"] in container["env"]
    assert f"revision: {COMMIT}" in made.config_text  # .../snapshots/COMMIT, as the guide's --model_name has it


def test_kubeflow_tutorial_keeps_image_and_script(repo: Path) -> None:
    made = plan(repo, "torchrun-cpu.yaml", PodTask("command", ("python", "/app/main.py"), "torchrun"))
    assert (made.namespace, made.master_addr, made.world_size) == ("kubeflow", "torchrun-cpu-master-0", 4)
    assert render(made)[-1]["spec"]["nprocPerNode"] == "2"
    for role in replicas(made).values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["command"][0] == "torchrun"
        assert container["command"][-2:] == ["python", "/app/main.py"]
        assert "securityContext" not in container
        assert "runAsUser" not in role["template"]["spec"]["securityContext"]


def test_colossalai_guide_needs_no_claim(repo: Path) -> None:
    made = plan(repo, "opensora.yaml", PodTask("command", ("python", "train.py"), "torchrun"))
    manifests = render(made)
    assert "PersistentVolumeClaim" not in [manifest["kind"] for manifest in manifests]
    assert made.warnings == []
    pod = manifests[-1]["spec"]["template"]["spec"]
    assert "runAsUser" not in pod["securityContext"], "the image of the guide has its own user"


def test_statefulset_guide_with_an_image_without_llmtrain(cli: Callable[..., Any], repo: Path, workdir: Path) -> None:
    (workdir / "train-llm.yaml").write_text(config_text(repo, "train-llm.yaml"))
    words = ("launch", "--config", "train-llm.yaml", "--name", "train-llm", "--dry-run")
    own = ("--launcher", "torchrun", "--", "python", "/app/src/train_framework.py")
    assert cli(*words, *own).code == 64
    (options,) = re.findall(r"does not have llmtrain, add `(.*?) --launcher torchrun`", moving(repo))
    secrets = ("--set", "launch.env_secrets=[hf-token]")
    done = cli(*words, *options.split(), *secrets, *own)
    assert done.code == 0, done.err
    job = list(yaml.safe_load_all(done.out))[-1]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["kind"] == "Job"
    assert container["envFrom"] == [{"secretRef": {"name": "hf-token"}}]
