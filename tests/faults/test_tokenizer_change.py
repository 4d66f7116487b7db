"""The tokenizer of a run matches its checkpoints: another one is refused, or replaces it if there are none."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID

from llmtrain.config.schema import Config
from llmtrain.data.tokenizers.load import load_saved_tokenizer
from llmtrain.errors import CheckpointError
from llmtrain.inference.load import Source, load_model
from llmtrain.runs.checksums import CHECKSUMS, checksums_text

MakeConfig = Callable[..., Config]
LOWER = "abcdefgh ijkl mnop\n" * 300


@pytest.fixture
def lower(make_config: MakeConfig, tmp_path: Path) -> Config:
    return _config(make_config, tmp_path / "lower.txt", LOWER)


@pytest.fixture
def upper(make_config: MakeConfig, tmp_path: Path) -> Config:
    """A different alphabet with the same ids: each character has the same index in both."""
    return _config(make_config, tmp_path / "upper.txt", LOWER.upper())


def _config(make_config: MakeConfig, file: Path, text: str) -> Config:
    file.write_text(text)
    return make_config(data__name="text_files", data__files=[str(file)], data__tokenizer="char")


def alphabet(root: Path) -> set[str]:
    description = json.loads((root / RUN_ID / "tokenizer" / "llmtrain_tokenizer.json").read_text())
    return set(description["characters"])


def test_checkpoints_and_run_record_the_tokenizer(lower: Config, root: Path) -> None:
    ended = harness.run(lower)
    assert ended.code == 0, ended.output
    expected = load_saved_tokenizer(root / RUN_ID / "tokenizer").sha256()
    assert {checkpoint.state()["tokenizer_sha256"] for checkpoint in harness.checkpoints(root)} == {expected}
    assert harness.read_result(root)["tokenizer_sha256"] == expected


def test_run_without_checkpoints_accepts_a_new_tokenizer(lower: Config, upper: Config, root: Path) -> None:
    assert harness.run(lower, fault="forward:1:0:kill").code == -9
    assert harness.steps_saved(root) == []
    assert alphabet(root) == set(LOWER)
    ended = harness.run(upper, RUN_ID)
    assert ended.code == 0, ended.output
    assert alphabet(root) == set(LOWER.upper())


def test_new_tokenizer_replaces_all_files(lower: Config, make_config: MakeConfig, root: Path) -> None:
    assert harness.run(lower, fault="forward:1:0:kill").code == -9
    (root / RUN_ID / "tokenizer" / "chat_template.jinja").write_text("of the earlier one")
    ended = harness.run(make_config(), RUN_ID)
    assert ended.code == 0, ended.output
    assert [path.name for path in (root / RUN_ID / "tokenizer").iterdir()] == ["llmtrain_tokenizer.json"]


def test_resume_refuses_changed_tokenizer(lower: Config, upper: Config, root: Path) -> None:
    assert harness.run(lower, fault="forward:5:0:kill").code == -9
    before = harness.tree(root)
    ended = harness.run(upper, RUN_ID)
    assert ended.code == 64, ended.output
    assert "tokenizer_sha256" in ended.output
    assert "data_fingerprint" not in ended.output  # the ids do agree
    assert harness.tree(root) == before

    ended = harness.run(upper, RUN_ID, allow_config_change=True)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 4
    assert alphabet(root) == set(LOWER.upper())


def forget_tokenizer(root: Path) -> None:
    """Make the checkpoints those of an earlier version."""
    for checkpoint in harness.checkpoints(root):
        path = checkpoint.path / "state.json"
        state = json.loads(path.read_text())
        del state["tokenizer_sha256"]
        data = json.dumps(state).encode()
        path.write_bytes(data)
        manifest = checkpoint.path / CHECKSUMS
        files = json.loads(manifest.read_text())["files"]
        files[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(checksums_text(files))


def test_checkpoints_without_tokenizer_hash_resume(lower: Config, upper: Config, root: Path) -> None:
    assert harness.run(lower, fault="forward:5:0:kill").code == -9
    forget_tokenizer(root)
    saved = root / RUN_ID / "tokenizer" / "llmtrain_tokenizer.json"
    description = json.loads(saved.read_text())
    del description["sha256"]
    saved.write_text(json.dumps(description))
    assert harness.run(upper, RUN_ID).code == 64
    ended = harness.run(lower, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 4


def test_load_refuses_a_checkpoint_of_another_tokenizer(lower: Config, upper: Config, root: Path) -> None:
    assert harness.run(lower, fault="forward:5:0:kill").code == -9
    other = harness.run(upper.with_values("output", run_id="other"))
    assert other.code == 0, other.output
    saved = root / RUN_ID / "tokenizer" / "llmtrain_tokenizer.json"
    saved.write_bytes((root / "other" / "tokenizer" / saved.name).read_bytes())
    with pytest.raises(CheckpointError) as caught:
        load_model(Source(root=str(root), run=RUN_ID), "cpu")
    assert caught.value.exit_code == 65
