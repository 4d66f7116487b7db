"""What the guides show of a cluster is what the commands print there."""

import json
import re
from datetime import datetime
from typing import Any

import pytest
import yaml
from doc_scenes import BLOCK, HELLO, PAGES, ROOT, SCENES, TEXTS, fill
from kube_runs import launch

from kube_server import KubeServer, now
from llmtrain.launch.guard import GuardPlan, install, remove
from llmtrain.operate.guard import watch as guard_module
from llmtrain.operate.guard.watch import Guard

BLOCKS = {f"{page}, {block[2]}": block for page in PAGES for block in BLOCK.finditer((ROOT / page).read_text())}
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_scene(name: str) -> None:
    assert BLOCKS[name][0].splitlines() == fill(BLOCKS[name]).splitlines()


def test_every_scene_is_shown() -> None:
    assert {block[2] for block in BLOCKS.values()} == {*SCENES, *TEXTS}


def test_the_file_that_is_pushed_is_the_one_on_the_page() -> None:
    assert f"```python\n{HELLO}```" in GUIDE


def test_what_the_guard_posts(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(guard_module, "post", lambda _, event: told.append(event))
    run = launch(kube, name="first")
    run.pod(0)
    run.pod(1)
    run.end(0)
    run.end(1)
    Guard(run.cluster, "team", 60.0, "http://localhost").check()
    shown = re.search(r"```json\n(.*?)```", GUIDE, re.S)
    assert shown
    line = json.loads(shown[1])
    assert datetime.fromisoformat(line["at"])
    [event] = told
    assert list(event) == list(line)
    assert json.loads(json.dumps({**event, "at": line["at"]}).replace("team", "research")) == line


def test_the_role_for_the_guard_is_enough_and_no_more(kube: KubeServer) -> None:
    """To install it, change it and remove it, and to hold what is given to it."""
    cluster = kube.cluster()
    for webhook in (None, "https://chat.example.com/hook", None):
        install(cluster, GuardPlan("team", "llmtrain:1", "IfNotPresent", 60.0, now(), webhook, with_logs=True))
    given = kube.objects["roles", "team", "llmtrain-guard"]["rules"]
    install(cluster, GuardPlan("team", "llmtrain:1", "IfNotPresent", 60.0, now(), "https://chat.example.com/hook"))
    install(cluster, GuardPlan("team", "llmtrain:1", "IfNotPresent", 60.0, now(), "https://chat.example.com/hook"))
    remove(cluster, "team")
    verbs = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
    asked = {(verbs[method], resource.partition("/")[0]) for method, resource in map(str.split, kube.asked())}
    asked |= {(verb, resource) for rule in given for verb in rule["verbs"] for resource in rule["resources"]}
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)]
    role = next(block for block in blocks if block.get("metadata", {}).get("name") == "llmtrain-guard-installer")
    allowed = {(v, r) for rule in role["rules"] for v in rule["verbs"] for r in rule["resources"]}
    assert asked - allowed == set()
    assert allowed - asked == {("patch", "rolebindings")}  # beside roles in one rule
