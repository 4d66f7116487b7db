"""Command output shown in the docs is what the commands print."""

import json
import re
from datetime import datetime
from typing import Any

import pytest
import yaml
from console_blocks import BLOCK, HELLO, PAGES, ROOT, SCENES, TEXTS, fill
from kube_runs import launch

from kube_server import KubeServer, now
from llmtrain.guard import watch as guard_module
from llmtrain.guard.install import apply_plan, remove_guard
from llmtrain.guard.manifests import GuardPlan
from llmtrain.guard.watch import Guard

BLOCKS = {f"{page}, {block[2]}": block for page in PAGES for block in BLOCK.finditer((ROOT / page).read_text())}


@pytest.mark.parametrize("name", BLOCKS)
def test_scene_matches_output(name: str) -> None:
    assert BLOCKS[name][0].splitlines() == fill(BLOCKS[name]).splitlines()


def test_every_scene_is_in_the_docs() -> None:
    assert {block[2] for block in BLOCKS.values()} == {*SCENES, *TEXTS}


def test_pushed_file_is_in_the_docs() -> None:
    assert f"```python\n{HELLO}```" in (ROOT / "docs" / "own-scripts.md").read_text()


def test_notification_in_the_docs_matches_the_guard(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(guard_module, "post", lambda _, event: events.append(event))
    run = launch(kube, name="first")
    run.pod(0)
    run.pod(1)
    run.end(0)
    run.end(1)
    Guard(run.cluster, "team", 60.0, "http://localhost").check()
    shown = re.search(r"```json\n(.*?)```", (ROOT / "docs" / "failures.md").read_text(), re.S)
    assert shown
    line = json.loads(shown[1])
    assert datetime.fromisoformat(line["at"])
    [event] = events
    assert list(event) == list(line)
    assert json.loads(json.dumps({**event, "at": line["at"]}).replace("team", "research")) == line


def test_guard_installer_role_is_sufficient_and_minimal(kube: KubeServer) -> None:
    """For install, change and remove, including the rights that it grants."""
    cluster = kube.cluster()
    for webhook in (None, "https://chat.example.com/hook", None):
        apply_plan(cluster, GuardPlan("team", "llmtrain:1", "IfNotPresent", 60.0, now(), webhook))
    granted = kube.objects["roles", "team", "llmtrain-guard"]["rules"]
    apply_plan(cluster, GuardPlan("team", "llmtrain:1", "IfNotPresent", 60.0, now(), "https://chat.example.com/hook"))
    apply_plan(cluster, GuardPlan("team", "llmtrain:1", "IfNotPresent", 60.0, now(), "https://chat.example.com/hook"))
    remove_guard(cluster, "team")
    verbs = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
    used = {(verbs[method], resource.partition("/")[0]) for method, resource in map(str.split, kube.asked())}
    used |= {(verb, resource) for rule in granted for verb in rule["verbs"] for resource in rule["resources"]}
    page = (ROOT / "docs" / "rbac.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    role = next(block for block in blocks if block.get("metadata", {}).get("name") == "llmtrain-guard-installer")
    allowed = {(v, r) for rule in role["rules"] for v in rule["verbs"] for r in rule["resources"]}
    assert used - allowed == set()
    assert allowed - used == {("patch", "rolebindings")}  # beside roles in one rule
