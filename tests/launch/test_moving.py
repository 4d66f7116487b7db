"""The configs of docs/moving.md, as they would be applied: names, ports and paths of the guides they replace."""

import re
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config
from llmtrain.launch.manifests import render
from llmtrain.launch.plan import JobPlan, plan_job
from llmtrain.launch.work import Work

COMMIT = "9213176726f574b556790deb65791e0c5aa438b6"


def plan(repo: Path, name: str, work: Work) -> JobPlan:
    text = (repo / "docs" / "moving.md").read_text()
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```yaml\n(.*?)```", text, re.S)
    assert found
    return plan_job(build_config(parse_document(found[1], name)), work)


def replicas(made: JobPlan) -> dict[str, Any]:
    job = render(made)[-1]
    assert job["kind"] == "PyTorchJob"
    return dict(job["spec"]["pytorchReplicaSpecs"])


@pytest.mark.parametrize("mode", ["train", "hold"])
def test_lora_guide_keeps_names_and_paths(repo: Path, mode: Any) -> None:
    made = plan(repo, "ftjb.yaml", Work(mode))
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
    made = plan(repo, "torchrun-cpu.yaml", Work("command", ("python", "/app/main.py"), "torchrun"))
    assert (made.namespace, made.master_addr, made.world_size) == ("kubeflow", "torchrun-cpu-master-0", 4)
    assert render(made)[-1]["spec"]["nprocPerNode"] == "2"
    for role in replicas(made).values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["command"][0] == "torchrun"
        assert container["command"][-2:] == ["python", "/app/main.py"]
        assert "securityContext" not in container
        assert "runAsUser" not in role["template"]["spec"]["securityContext"]
