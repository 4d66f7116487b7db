"""Whole manifests, as they would be applied. UPDATE_GOLDEN=1 writes them anew; read the difference then."""

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import yaml

from golden_cases import CASES, TWO_NODES
from llmtrain.config.load import load_config
from llmtrain.launch.code_bundle import read_bundle
from llmtrain.launch.job import Manifest
from llmtrain.launch.manifests import dump_manifests, render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("case", CASES)
def test_manifests_match_golden_files(case: str) -> None:
    preset, sets = CASES[case]
    check(case, render(plan_job(load_config(preset, sets))))


def test_held_pods_download_models_of_the_config() -> None:
    sets = [*TWO_NODES, "launch.kind=pytorch_job", "launch.pytorch_master=true", "distributed.master_port=23456"]
    plan = plan_job(load_config("lora_llama_1b", sets), PodTask("hold"))
    with mock.patch.object(Path, "read_text", return_value="the text of hold.py"):
        manifests = render(plan)
    check("pytorch_job_hold", manifests)


def test_code_of_the_user_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "model.py").write_text("WIDTH = 64\n")
    code = read_bundle(str(tmp_path / "mine"))
    check("with_code", render(plan_job(load_config("ddp_smoke", TWO_NODES), code=code)))


def check(case: str, manifests: list[Manifest]) -> None:
    if case != "indexed_job":  # the whole config is in one of them; a new field of it need not change all
        manifests[0]["data"]["train.yaml"] = "left out here\n"
    text = dump_manifests(manifests)
    assert list(yaml.safe_load_all(text)) == manifests
    text = re.sub(r"(?m)^ *#.*\n", "", text)  # comments are for the people who read k8s/
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), "if this is meant: UPDATE_GOLDEN=1 pytest tests/launch"


def test_world_size_is_computed_once() -> None:
    for case, nodes, processes in (("gpu_4x1", 4, 1), ("gpu_64x8", 64, 8)):
        preset, sets = CASES[case]
        plan = plan_job(load_config(preset, sets))
        assert plan.world_size == {"gpu_4x1": 4, "gpu_64x8": 512}[case]
        assert plan.command[6:10] == ["--nodes", str(nodes), "--processes-per-node", str(processes)]
