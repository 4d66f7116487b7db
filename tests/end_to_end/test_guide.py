"""The commands of docs/kubernetes.md, in order, with no more rights than the Role that it shows."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from breaking import wait_for
from kube import ROOT, Kube

USER = "reader-of-the-guide"


def load_tour_tool() -> Any:
    spec = importlib.util.spec_from_file_location("readme_tour", ROOT / "tools" / "readme_tour.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def user_of_the_guide(kube: Kube, text: str) -> Path:
    """A kubeconfig of somebody who has the guide's Role, and nothing else."""
    role = next(block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if "kind: Role\n" in block)
    kube.apply(yaml.safe_load(role))
    kube.kubectl("create", "serviceaccount", USER)
    kube.kubectl("create", "rolebinding", USER, "--role=llmtrain", f"--serviceaccount={kube.namespace}:{USER}")
    config = yaml.safe_load(kube.kubeconfig.read_text())
    context = next(row["context"] for row in config["contexts"] if row["name"] == config["current-context"])
    token = kube.kubectl("create", "token", USER, "--duration=1h").strip()
    config["users"] = [{"name": USER, "user": {"token": token}}]
    place = {"cluster": context["cluster"], "user": USER, "namespace": kube.namespace}
    config |= {"contexts": [{"name": "guide", "context": place}], "current-context": "guide"}
    path = kube.folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


@pytest.mark.slow
def test_every_command_of_the_guide_works(kube: Kube) -> None:
    tool = load_tour_tool()
    text = (ROOT / tool.KUBERNETES).read_text()
    cluster = tool.Cluster(str(user_of_the_guide(kube, text)), kube.image)
    shown = {}
    for match in tool.BLOCK.finditer(tool.tour(text)):
        interrupt = tool.is_interrupted(match[2])
        for command, _ in tool.examples(match[2]):
            # Exits the test when the code is another.
            shown[command] = tool.run(command, kube.folder, int(match[1] or 0), cluster, interrupt=interrupt)
    assert len(shown) >= 18
    assert "Run second keeps running." in "".join(shown.values())
    result = json.loads((kube.folder / "runs" / "second" / "finished.json").read_text())
    assert result["steps"] == 600
    assert (kube.folder / "again" / "second" / "finished.json").is_file()
    assert kube.objects("configmaps", "-l", "app=llmtrain") == []
    wait_for(lambda: kube.objects("pods") == [], 30, "the last reader to go")
