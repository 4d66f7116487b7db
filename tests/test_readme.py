"""The commands of the README and the guides, run as a new user would: in order, in an empty directory."""

import json
import re
import shlex
from pathlib import Path

import pytest
import rank_harness as ranks
import readme_tour
import yaml

from llmtrain.config.load import load_config
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.registry import KINDS
from tiny_llama import make_examples, make_model

ROOT = Path(__file__).resolve().parents[1]


def run_tour(page, directory, is_compared=True):
    """Run the commands of a page, each in its own process (forked, so torch is imported once), and compare their output
    with what the page shows, numbers masked. Returns the number of commands."""
    text = (ROOT / page).read_text()
    readme_tour.write_files(text, directory)
    ran = 0
    for match in readme_tour.BLOCK.finditer(readme_tour.tour(text)):
        for command, shown in readme_tour.examples(match[2]):
            program, *words = shlex.split(command)
            assert program == "llmtrain"
            done = ranks.start_cli(*words, cwd=directory, env={"COLUMNS": "100", "HOME": str(directory)})
            assert done.wait() == int(match[1] or 0), f"{command}\n{done.out}\n{done.err}"
            output = done.out if "--json" in words else done.err + done.out
            real = readme_tour.portable(output).rstrip().splitlines()
            if is_compared:
                assert readme_tour.is_shown_output(command, shown, real), f"{command}\n" + "\n".join(real)
            ran += 1
    return ran


def test_readme_commands_succeed(tmp_path):
    assert run_tour("README.md", tmp_path) == 2
    assert (tmp_path / "runs" / "first" / "finished.json").is_file()


def test_readme_config_is_15_lines_and_sets_what_it_shows():
    [(name, text)] = readme_tour.FILE.findall((ROOT / "README.md").read_text())
    assert len(text.splitlines()) <= 15, name
    assert set(yaml.safe_load(text)) == {"run", "model", "data", "trainer"}


def test_tour_commands_succeed(tmp_path):
    assert run_tour("docs/tour.md", tmp_path) >= 16
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "my-tokenizer" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_distributed_guide_commands_succeed_with_equal_hashes(tmp_path):
    assert run_tour("docs/distributed.md", tmp_path) >= 7
    hashes = [json.loads((tmp_path / "runs" / run / "finished.json").read_text()) for run in ("pair", "single")]
    assert hashes[0]["state_sha256"] == hashes[1]["state_sha256"]


def test_fine_tuning_guide_commands_succeed(tmp_path):
    make_model(tmp_path / readme_tour.MODEL_AT, max_position_embeddings=512)
    make_examples(tmp_path / "data/train.jsonl", 300)
    make_examples(tmp_path / "data/val.jsonl", 30, 500)
    assert run_tour(readme_tour.FINE_TUNING, tmp_path, is_compared=False) >= 6  # the page shows a real model
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
    for verb in ("launch", "status", "logs", "stop", "resume", "fetch", "delete"):
        assert f"$ llmtrain {verb}" in guide, verb
    storage = (ROOT / "docs" / "storage.md").read_text()
    for verb in ("secret", "sync"):
        assert f"llmtrain {verb}" in storage, verb


def test_every_launch_kind_has_a_linked_page():
    for kind in KINDS:
        assert (ROOT / "docs" / "kinds" / f"{kind}.md").is_file(), kind
        assert f"](kinds/{kind}.md)" in (ROOT / "docs" / "kubernetes.md").read_text(), kind
        assert f"](docs/kinds/{kind}.md)" in (ROOT / "README.md").read_text(), kind


def test_links_between_pages_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("kind", KINDS)
def test_kind_page_shows_rendered_manifest(kind):
    """The page abridges the manifest: every field it shows must be equal; `...` stands for omitted list items."""
    page = (ROOT / "docs" / "kinds" / f"{kind}.md").read_text()
    shown = list(yaml.safe_load_all(re.search(r"```yaml\n(.*?)```", page, re.S)[1]))
    config = load_config(f"k8s_{kind}", ["output.run_id=first", "launch.image=me/train:1"])
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
