"""The commands of the README and the guides, run as a new user would: in order, in an empty directory."""

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
from llmtrain.registry import WORKLOADS
from tiny_llama import make_examples, make_model

ROOT = Path(__file__).resolve().parents[1]


def load_tour_tool():
    spec = importlib.util.spec_from_file_location("readme_tour", ROOT / "tools" / "readme_tour.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tour(page, directory, is_compared=True):
    """Run the commands of a page, each in its own process (forked, so torch is imported once), and compare their output
    with what the page shows, numbers masked. Returns the number of commands."""
    tool = load_tour_tool()
    text = (ROOT / page).read_text()
    tool.write_files(text, directory)
    ran = 0
    for match in tool.BLOCK.finditer(tool.tour(text)):
        for command, shown in tool.examples(match[2]):
            program, *words = shlex.split(command)
            assert program == "llmtrain"
            done = ranks.start_cli(*words, cwd=directory, env={"COLUMNS": "100", "HOME": str(directory)})
            assert done.wait() == int(match[1] or 0), f"{command}\n{done.out}\n{done.err}"
            real = tool.portable(done.out if "--json" in words else done.err + done.out).rstrip().splitlines()
            assert not is_compared or tool.is_shown_output(command, shown, real), f"{command}\n" + "\n".join(real)
            ran += 1
    return ran


def test_readme_commands_succeed(tmp_path):
    assert run_tour("README.md", tmp_path) == 2
    assert (tmp_path / "runs" / "first" / "finished.json").is_file()


def test_readme_config_is_15_lines_and_sets_what_it_shows():
    [(name, text)] = load_tour_tool().FILE.findall((ROOT / "README.md").read_text())
    assert len(text.splitlines()) <= 15, name
    assert set(yaml.safe_load(text)) == {"run", "model", "data", "trainer"}


def test_tour_commands_succeed(tmp_path):
    assert run_tour("docs/tour.md", tmp_path) >= 16
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "my-tokenizer" / "tokenizer.json").is_file()


def test_distributed_guide_commands_succeed_with_equal_hashes(tmp_path):
    assert run_tour("docs/distributed.md", tmp_path) >= 7
    hashes = [json.loads((tmp_path / "runs" / run / "finished.json").read_text()) for run in ("pair", "single")]
    assert hashes[0]["state_sha256"] == hashes[1]["state_sha256"]


def test_fine_tuning_guide_commands_succeed(tmp_path):
    tool = load_tour_tool()
    make_model(tmp_path / tool.MODEL_AT, max_position_embeddings=512)
    make_examples(tmp_path / "data/train.jsonl", 300)
    make_examples(tmp_path / "data/val.jsonl", 30, 500)
    assert run_tour(tool.FINE_TUNING, tmp_path, is_compared=False) >= 6  # the page shows a real model
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()


def test_guides_show_every_command():
    text = (ROOT / "docs" / "tour.md").read_text()
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


def test_every_launch_kind_has_a_linked_page():
    for kind in WORKLOADS:
        assert (ROOT / "docs" / "kinds" / f"{kind}.md").is_file(), kind
        assert f"](kinds/{kind}.md)" in (ROOT / "docs" / "kubernetes.md").read_text(), kind
        assert f"](docs/kinds/{kind}.md)" in (ROOT / "README.md").read_text(), kind


def test_links_between_pages_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("kind", WORKLOADS)
def test_kind_page_shows_rendered_manifest(kind):
    """The page abridges the manifest: every field it shows must be equal; `...` stands for omitted list items."""
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
