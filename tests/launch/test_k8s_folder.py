"""The manifests in k8s/, for people who read YAML first: each is what its own command line prints."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain import registry
from llmtrain.config.load import load_config
from llmtrain.launch.manifest_comments import object_comments, with_comments
from llmtrain.launch.manifests import dump_manifests, render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask

KINDS = sorted(registry.KINDS)
OPTIONS = "--name demo --image registry.example.com/llmtrain:0.2.0 --namespace research --dry-run"
FILES = {kind: f"llmtrain launch --config k8s_{kind} {OPTIONS}" for kind in KINDS}
FILES["pytorch_job_master"] = f"{FILES['pytorch_job']} --set launch.pytorch_master=true"
CONFIG = re.compile(r"(?m)^  train\.yaml: \|\n(?:    .*\n)+")
LEFT_OUT = "  train.yaml: |\n    # like the one in indexed_job.yaml; left out here\n"


@pytest.mark.parametrize("name", FILES)
def test_files_match_the_output_of_launch(cli: Callable[..., Any], repo: Path, name: str) -> None:
    done = cli(*shlex.split(FILES[name])[1:])
    assert done.code == 0, done.err
    manifests = done.out if name == "indexed_job" else CONFIG.sub(LEFT_OUT, done.out)
    text = f"# {FILES[name]}\n---\n{manifests}"
    path = repo / "k8s" / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), "if this is meant: UPDATE_GOLDEN=1 pytest tests/launch/test_k8s_folder.py"


def test_every_kind_has_a_file_and_a_row(repo: Path) -> None:
    files = {path.stem for path in (repo / "k8s").glob("*.yaml")}
    assert files == set(FILES)
    rows = re.findall(r"^\| \[(\w+)\.yaml\]\(\1\.yaml\) \|", (repo / "k8s" / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted(files)


def test_every_object_has_a_comment(repo: Path) -> None:
    comments = object_comments()
    for path in (repo / "k8s").glob("*.yaml"):
        for part in path.read_text().split("---\n")[1:]:
            kind = yaml.safe_load(part)["kind"]
            assert part.startswith(f"# {comments[kind]}\n"), f"{path.name}: {kind}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "task",
    [
        PodTask("train"),
        PodTask("smoke"),
        PodTask("hold"),
        PodTask("command", ("sh", "-c", "echo\ncommand: x\nbackoffLimit: 1\n")),
    ],
    ids=lambda task: task.mode,
)
def test_comments_do_not_change_the_manifests(kind: str, task: PodTask) -> None:
    """Neither the objects nor a text inside them, which may look like a manifest."""
    sets = [f"launch.kind={kind}", "launch.image=x", "model.name=hf_causal_lm", "model.path=somebody/tiny"]
    manifests = render(plan_job(load_config("ddp_smoke", sets), task))
    assert list(yaml.safe_load_all(dump_manifests(manifests))) == manifests


def test_comments_only_appear_where_they_apply() -> None:
    text = "spec:\n  initContainers:\n  - command:\n    - python\n    - -m\n    - llmtrain\n    - prefetch\n"
    text += "    securityContext:\n      readOnlyRootFilesystem: false\n  volumes:\n  - emptyDir: {}\n"
    assert with_comments("Unknown", text) == text


def test_user_chosen_keys_have_no_comments() -> None:
    """A node selector may have a label called like a field of a pod."""
    text = with_comments("Job", "spec:\n  nodeSelector:\n    command: x\n    emptyDir: y\n")
    assert text.count("#") == 1
