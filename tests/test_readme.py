"""The commands of the tours, run as a new user would: in order, in an empty directory, as processes."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import rank_harness as ranks
import yaml

from llmtrain.config.load import load_config
from llmtrain.launch.manifests import render
from llmtrain.launch.plan import plan_job
from llmtrain.registry import LAUNCHERS
from tiny_llama import make_model, make_rows

ROOT = Path(__file__).resolve().parents[1]


def load_tour_tool():
    spec = importlib.util.spec_from_file_location("readme_tour", ROOT / "tools" / "readme_tour.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tour(page, folder):
    """The number of commands, each run in a process of its own (which need not import torch again)."""
    tool = load_tour_tool()
    ran = 0
    for match in tool.BLOCK.finditer(tool.tour((ROOT / page).read_text())):
        for command in tool.commands(match[2]):
            program, *words = shlex.split(command)
            assert program == "llmtrain"
            done = ranks.start_cli(*words, cwd=folder, env={"COLUMNS": "100", "HOME": str(folder)})
            assert done.wait() == int(match[1] or 0), f"{command}\n{done.out}\n{done.err}"
            ran += 1
    return ran


def test_every_command_of_the_tour_works(tmp_path):
    assert run_tour("README.md", tmp_path) >= 16
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "my-tokenizer" / "tokenizer.json").is_file()


def test_every_command_of_the_guide_to_many_processes_works(tmp_path):
    assert run_tour("docs/distributed.md", tmp_path) >= 7
    hashes = [json.loads((tmp_path / "runs" / run / "finished.json").read_text()) for run in ("pair", "single")]
    assert hashes[0]["state_sha256"] == hashes[1]["state_sha256"]


def test_every_command_of_the_guide_to_fine_tuning_works(tmp_path):
    tool = load_tour_tool()
    make_model(tmp_path / tool.MODEL_AT, max_position_embeddings=512)
    make_rows(tmp_path / "data/train.jsonl", 300)
    make_rows(tmp_path / "data/val.jsonl", 30, 500)
    assert run_tour(tool.FINE_TUNING, tmp_path) >= 6
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()


def test_the_tour_shows_every_verb():
    text = (ROOT / "README.md").read_text()
    for verb in ("train", "validate", "print-config", "presets", "generate", "eval", "export", "runs", "tokenizer"):
        assert f"$ llmtrain {verb}" in text, verb
    guide = (ROOT / "docs" / "distributed.md").read_text()
    for verb in ("node", "doctor", "smoke", "train"):
        assert f"$ llmtrain {verb}" in guide, verb
    guide = (ROOT / "docs" / "fine-tuning.md").read_text()
    for verb in ("fetch-model", "fetch-data", "chat", "train", "eval", "generate", "export"):
        assert f"llmtrain {verb}" in guide, verb
    guide = (ROOT / "docs" / "kubernetes.md").read_text()
    for verb in ("launch", "status", "logs", "stop", "resume", "fetch", "delete", "secret", "sync"):
        assert f"llmtrain {verb}" in guide, verb


def test_every_kind_has_a_page_that_the_guide_and_the_readme_link_to():
    for kind in LAUNCHERS:
        assert (ROOT / "docs" / "kinds" / f"{kind}.md").is_file(), kind
        assert f"](kinds/{kind}.md)" in (ROOT / "docs" / "kubernetes.md").read_text(), kind
        assert f"](docs/kinds/{kind}.md)" in (ROOT / "README.md").read_text(), kind


def test_every_link_between_pages_leads_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_the_manifest_on_a_page_is_the_one_that_is_rendered(kind):
    """What a page shows is abridged: all that it says must be so, lists and commands up to their `...`."""
    page = (ROOT / "docs" / "kinds" / f"{kind}.md").read_text()
    shown = list(yaml.safe_load_all(re.search(r"```yaml\n(.*?)```", page, re.S)[1]))
    config = load_config(f"k8s_{kind}", ["output.run_id=first"])
    rendered = {manifest["kind"]: manifest for manifest in render(plan_job(config))}
    for manifest in shown:
        check_abridged(manifest, rendered[manifest["kind"]], manifest["kind"])


def check_abridged(shown, real, where):
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert key in real, f"{where}.{key}"
            check_abridged(value, real[key], f"{where}.{key}")
    elif isinstance(shown, list) and all(isinstance(item, dict) for item in shown) and "env" not in where:
        assert len(shown) == len(real), where
        for number, item in enumerate(shown):
            check_abridged(item, real[number], f"{where}[{number}]")
    elif isinstance(shown, list):
        rest = iter(real)
        assert all(item == "..." or item in rest for item in shown), where  # in this order
    else:
        assert shown == real, where
