"""The commands of the pages about clusters, in order, with no more rights than the Role of docs/rbac.md."""

import json
import re
from pathlib import Path

import pytest
import readme_tour
import yaml
from cluster_faults import wait_for
from kube import ROOT, Kube

USER = "reader-of-the-guide"


def user_of_the_guide(kube: Kube) -> Path:
    """A kubeconfig of somebody who has the Role of docs/rbac.md, and nothing else."""
    text = (ROOT / "docs" / "rbac.md").read_text()
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
    cluster = readme_tour.Cluster(str(user_of_the_guide(kube)), kube.image)
    tours = "\n".join(readme_tour.tour((ROOT / page).read_text()) for page in readme_tour.CLUSTER_PAGES)
    shown = {}
    for match in readme_tour.BLOCK.finditer(tours):
        interrupt = readme_tour.is_interrupted(match[2])
        for command, _ in readme_tour.examples(match[2]):
            # Exits the test when the code is another.
            shown[command] = readme_tour.run(command, kube.folder, int(match[1] or 0), cluster, interrupt=interrupt)
    assert len(shown) >= 20
    assert "Run second keeps running." in "".join(shown.values())
    result = json.loads((kube.folder / "runs" / "second" / "finished.json").read_text())
    assert result["steps"] == 600
    assert (kube.folder / "again" / "second" / "finished.json").is_file()
    assert kube.objects("configmaps", "-l", "app=llmtrain") == []
    wait_for(lambda: kube.objects("pods") == [], 30, "the last reader to go")
