"""Damaged checkpoints are detected, named and skipped; untrusted ones cannot run code or read other files."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import torch
from fault_harness import RUN_ID, STEPS, Outcome

from llmtrain.checkpoint import checkpoint as one_checkpoint
from llmtrain.checkpoint import store as checkpoint_module
from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.store import CheckpointStore, find_checkpoint
from llmtrain.config.schema import Config
from llmtrain.errors import CheckpointError, ConfigError, UsageError
from llmtrain.runs.checksums import checksums_text, is_intact
from llmtrain.runs.directory import find_run, new_run
from slow_cases import some

FILES = ("index.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")
MakeConfig = Callable[..., Config]


def flip_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


@pytest.fixture
def good(tmp_path: Path, golden_root: Path) -> Checkpoint:
    copy = tmp_path / "step_8"
    shutil.copytree(golden_root / RUN_ID / "checkpoints" / "step_8", copy)
    found = Checkpoint(copy)
    found.verify()
    return found


def test_files_of_a_checkpoint(good: Checkpoint) -> None:
    assert sorted(path.name for path in good.path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_bit, truncate])
def test_random_damage_is_detected_and_the_file_named(
    good: Checkpoint, name: str, damage: Callable[[Path, random.Random], None]
) -> None:
    """5 files x 2 kinds of damage x 25 places."""
    rng = random.Random(f"{name}-{damage.__name__}")
    file = good.path / name
    whole = file.read_bytes()
    for _ in range(25):
        damage(file, rng)
        with pytest.raises(CheckpointError, match=name) as caught:
            good.verify()
        assert str(file) in caught.value.what
        file.write_bytes(whole)
    good.verify()


@pytest.mark.parametrize("name", ["index.json", "manifest.json", "state.json"])
def test_named_pipe_is_damage_and_does_not_block(good: Checkpoint, name: str) -> None:
    (good.path / name).unlink()
    os.mkfifo(good.path / name)
    with pytest.raises(CheckpointError, match=name):
        good.verify()
    assert not is_intact(good.path)


def test_state_that_is_a_named_pipe_does_not_block_an_unverified_read(good: Checkpoint) -> None:
    """As the search for the best checkpoint reads it."""
    (good.path / "state.json").unlink()
    os.mkfifo(good.path / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        _ = good.val_loss


def test_manifest_that_is_a_link_is_not_followed(good: Checkpoint) -> None:
    (good.path / "manifest.json").unlink()
    (good.path / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="symbolic link"):
        good.verify()
    assert not is_intact(good.path)


def test_any_changed_byte_of_the_manifest_is_detected(good: Checkpoint) -> None:
    file = good.path / "manifest.json"
    whole = file.read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            good.verify()


def test_any_truncated_manifest_is_detected(good: Checkpoint) -> None:
    file = good.path / "manifest.json"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            good.verify()


@pytest.mark.parametrize("name", FILES)
def test_missing_or_longer_file_is_detected(good: Checkpoint, name: str) -> None:
    file = good.path / name
    whole = file.read_bytes()
    file.write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match=name):
        good.verify()
    file.unlink()
    with pytest.raises(CheckpointError, match=name):
        good.verify()


@pytest.mark.parametrize("name", some(FILES, "model.safetensors", "manifest.json"))
def test_resume_skips_a_damaged_checkpoint(config: Config, killed_root: Path, golden: Outcome, name: str) -> None:
    file = killed_root / RUN_ID / "checkpoints" / "step_6" / name
    flip_bit(file, random.Random(name))
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert str(file) in ended.output
    assert ended.result["resumed_from"] == 4
    assert harness.outcome(killed_root, ended.result) == golden
    harness.verify_all(killed_root)


def test_resume_skips_two_damaged_checkpoints(config: Config, killed_root: Path, golden: Outcome) -> None:
    folder = killed_root / RUN_ID / "checkpoints"
    (folder / "step_6" / "manifest.json").unlink()
    truncate(folder / "step_4" / "model.safetensors", random.Random(1))
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 2
    assert harness.outcome(killed_root, ended.result) == golden
    harness.verify_all(killed_root)


def test_resume_ignores_similar_names(config: Config, killed_root: Path, golden: Outcome) -> None:
    run = killed_root / RUN_ID
    names = ("checkpoints/step_0099", "checkpoints/step_007", "checkpoints/step_\u0663", "epoch-final", "epoch-3")
    for name in names:
        shutil.copytree(run / "checkpoints" / "step_4", run / name)
    before = {name: harness.tree(run / name) for name in names}
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 6
    assert harness.outcome(killed_root, ended.result) == golden
    assert {name: harness.tree(run / name) for name in names} == before


@pytest.mark.parametrize("resume", [RUN_ID, "auto"])
def test_resume_refuses_when_all_checkpoints_are_damaged(config: Config, killed_root: Path, resume: str) -> None:
    for number, checkpoint in enumerate(harness.checkpoints(killed_root)):
        flip_bit(checkpoint.path / FILES[number], random.Random(number))
    before = harness.tree(killed_root)
    ended = harness.run(config, resume)
    assert ended.code == 65, ended.output
    for number, step in enumerate((2, 4, 6)):
        assert f"step_{step}/{FILES[number]}" in ended.output
    assert harness.tree(killed_root) == before
    assert [path.name for path in killed_root.iterdir()] == [RUN_ID]


@pytest.mark.parametrize("what", ["missing", "empty", "dangling link", "file", "unrecorded", "finished"])
def test_resume_refuses_when_checkpoints_are_missing(
    make_config: MakeConfig, config: Config, killed_root: Path, golden_root: Path, what: str
) -> None:
    """For example because its disk is not mounted. Metrics, which a new start would erase, are kept."""
    if what == "finished":
        shutil.rmtree(killed_root)
        harness.copy_root(golden_root, killed_root)
        config = make_config(trainer__max_steps=20)
    run = killed_root / RUN_ID
    shutil.rmtree(run / "checkpoints")
    if what == "empty":
        (run / "checkpoints").mkdir()
    elif what == "dangling link":
        (run / "checkpoints").symlink_to(run.parent / "not-mounted")
    elif what == "file":
        (run / "checkpoints").write_text("")
    elif what == "unrecorded":
        (run / "generations.json").write_text("damaged")
    before = harness.tree(killed_root)
    ended = harness.run(config, RUN_ID)
    assert ended.code == 65, ended.output
    assert str(run / "checkpoints") in ended.output
    assert harness.tree(killed_root) == before


def test_run_killed_before_its_first_checkpoint_starts_again(config: Config, root: Path, golden: Outcome) -> None:
    assert harness.run(config, fault="save_before_rename:2:0:kill").code == -9
    assert (root / RUN_ID / "metrics.jsonl").read_text()
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert harness.outcome(root, ended.result) == golden


@pytest.mark.parametrize(
    "content",
    some(
        ["{}", '{"steps": null}', '{"steps": "8"}', '{"steps": 8}', '{"steps": true}', "[" * 100_000],
        *("{}", '{"steps": 8}', "[" * 100_000),
    ),
)
def test_damaged_result_is_rebuilt(config: Config, finished_root: Path, golden: Outcome, content: str) -> None:
    (finished_root / RUN_ID / "finished.json").write_text(content)
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert harness.outcome(finished_root, ended.result) == golden
    assert harness.read_result(finished_root)["steps"] == STEPS


def test_resume_with_a_deeply_nested_line_of_metrics(config: Config, killed_root: Path, golden: Outcome) -> None:
    with (killed_root / RUN_ID / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert harness.outcome(killed_root, ended.result) == golden


FOLDERS = ("metrics.jsonl", "generations.json", "config.yaml", "finished.json", "checkpoints/latest")


@pytest.mark.parametrize("name", [*FOLDERS, "logs", "heartbeats", "tokenizer"])
def test_wrong_file_type_in_the_run_directory_is_reported(config: Config, killed_root: Path, name: str) -> None:
    """A directory instead of a file, or a file instead of a directory: one line with its path, no traceback."""
    path = killed_root / RUN_ID / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if name in FOLDERS:
        (path / "in-the-way").mkdir(parents=True)
    else:
        path.write_text("")
    ended = harness.run(config, RUN_ID)
    assert ended.code == 65, ended.output
    assert str(path) in ended.output
    assert "Traceback" not in ended.output


def test_resume_from_a_damaged_checkpoint_by_path_is_refused(config: Config, killed_root: Path) -> None:
    file = killed_root / RUN_ID / "checkpoints" / "step_6" / "optimizer.safetensors"
    flip_bit(file, random.Random(0))
    before = harness.tree(killed_root)
    ended = harness.run(config, str(file.parent))
    assert ended.code == 65, ended.output
    assert str(file) in ended.output
    assert harness.tree(killed_root) == before


def test_damaged_checkpoint_does_not_count_as_kept(make_config: MakeConfig, root: Path) -> None:
    """At least two are kept: a damaged newer one must not displace an intact older one."""
    config = make_config(trainer__keep_checkpoints=2, trainer__eval_every_steps=None)
    assert harness.run(config, fault="forward:8:0:kill").code == -9
    assert harness.steps_saved(root) == [4, 6]
    flip_bit(root / RUN_ID / "checkpoints" / "step_6" / "model.safetensors", random.Random(0))
    ended = harness.run(config, RUN_ID, fault="after_optimizer:5:0:term")
    assert ended.code == 75, ended.output
    whole = []
    for checkpoint in harness.checkpoints(root):
        try:
            checkpoint.verify()
            whole.append(checkpoint.step)
        except CheckpointError:
            continue
    assert whole == [4, 5]


def test_keeps_at_least_two_checkpoints_and_the_best(make_config: MakeConfig, root: Path) -> None:
    ended = harness.run(make_config(trainer__keep_checkpoints=2, trainer__eval_every_steps=None))
    assert ended.code == 0, ended.output
    assert harness.steps_saved(root) == [6, 8]
    folder = root / RUN_ID / "checkpoints"
    removed = [CheckpointStore(folder).removal(step) for step in (2, 4, 6, 8)]
    assert [row and row["keep_checkpoints"] for row in removed] == [2, 2, None, None]
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(folder / "step_2.pt")
    assert removed[0]
    assert removed[0]["removed_at"] in str(caught.value)
    (folder / "removed.jsonl").write_text("damaged")
    with pytest.raises(CheckpointError):
        find_checkpoint(folder / "step_2")


def test_keep_checkpoints_all_keeps_every_checkpoint(make_config: MakeConfig, root: Path) -> None:
    ended = harness.run(make_config(trainer__keep_checkpoints="all", trainer__save_every_steps=1))
    assert ended.code == 0, ended.output
    assert harness.steps_saved(root) == list(range(1, STEPS + 1))


# Checkpoints from an untrusted source


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def seal(folder: Path) -> None:
    """A manifest that fits whatever the files are now: an attacker can compute hashes too."""
    names = sorted(path for path in folder.iterdir() if path.name != "manifest.json")
    files = {path.name: checkpoint_module.checksum_entry(path) for path in names}
    (folder / "manifest.json").write_text(checksums_text(files))


def test_pickle_payload_runs_when_unpickled(tmp_path: Path) -> None:
    target = tmp_path / "made"
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()


@pytest.mark.parametrize("place", ["checkpoints/step_20.pt", "step_20.pt", "checkpoints/model.pt"])
def test_resume_refuses_a_pickle_and_does_not_run_it(
    config: Config, killed_root: Path, tmp_path: Path, place: str
) -> None:
    target = tmp_path / "made"
    file = killed_root / RUN_ID / place
    torch.save(Payload(target), file)
    ended = harness.run(config, str(file))
    assert ended.code == 65, ended.output
    assert "pickle" in ended.output
    assert not target.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_pickle_inside_a_valid_checkpoint_is_not_run(
    config: Config, killed_root: Path, tmp_path: Path, name: str
) -> None:
    target = tmp_path / "made"
    folder = killed_root / RUN_ID / "checkpoints" / "step_6"
    (folder / name).write_bytes(pickle.dumps(Payload(target)))
    seal(folder)
    ended = harness.run(config, str(folder))
    assert ended.code == 65, ended.output
    assert name in ended.output
    assert not target.exists()


@pytest.mark.parametrize(
    "state",
    ["", "[]", "{}", '{"format": 1}', '{"format": 99}', '{"format": 1, "config": {}, "progress": {}}', "\0\xff"],
)
def test_checkpoint_with_valid_hashes_and_invalid_state_is_refused(
    config: Config, killed_root: Path, state: str
) -> None:
    folder = killed_root / RUN_ID / "checkpoints" / "step_6"
    (folder / "state.json").write_bytes(state.encode("latin-1"))
    seal(folder)
    ended = harness.run(config, str(folder))
    assert ended.code in (64, 65), ended.output
    assert "Traceback" not in ended.output


def change_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(next(entry for entry in index["model"].values() if len(entry["shape"]) == 2))
        (folder / "index.json").write_text(json.dumps(index))

    return forge


def change_progress(**values: Any) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        state["progress"].update(values)
        (folder / "state.json").write_text(json.dumps(state))

    return forge


def change_state(**values: Any) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, **values}))

    return forge


FORGERIES: dict[str, Callable[[Path], None]] = {
    "offset outside": change_index(lambda entry: entry["pieces"][0].update(offset=[9, 0])),
    "larger": change_index(lambda entry: (entry.update(shape=[4096, 64]), entry["pieces"][0].update(shape=[4096, 64]))),
    "deep index": lambda folder: (folder / "index.json").write_text("[" * 100_000),
    "deep state": lambda folder: (folder / "state.json").write_text("[" * 100_000),
    "step as text": change_progress(step="6"),
    "step as float": change_progress(step=6.0),
    "step of another": change_progress(step=5),
    "loss as text": change_progress(last_val_loss="1.0"),
    "loss beyond floats": change_progress(last_val_loss=10**400),
    "nan": change_progress(best_val_loss=float("nan")),
    "true": change_progress(tokens=True),
    "negative": change_progress(epoch=-1),
    "unknown": change_progress(colour=3),
    "base model as list": change_state(base_model=[1]),
    "base hash as object": change_state(base_sha256={}),
    "tokenizer hash as number": change_state(tokenizer_sha256=5),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_inconsistent_checkpoint_with_valid_hashes_is_skipped(
    config: Config, killed_root: Path, golden: Outcome, name: str
) -> None:
    folder = killed_root / RUN_ID / "checkpoints" / "step_6"
    FORGERIES[name](folder)
    seal(folder)
    with pytest.raises(CheckpointError):
        Checkpoint(folder).verify()
    if name not in ("offset outside", "step as text"):
        return  # a whole run of each takes too long
    ended = harness.run(config, str(folder))
    assert ended.code == 65, ended.output
    assert "Traceback" not in ended.output
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 4
    assert harness.outcome(killed_root, ended.result) == golden


@pytest.mark.parametrize("name", ["index.json", "state.json"])
def test_huge_json_file_is_refused_before_it_is_read(
    good: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse one takes no disk space. Reads without `verify`, such as the search for the best checkpoint, count."""
    monkeypatch.setattr(one_checkpoint, "MAX_JSON_BYTES", 1 << 20)
    file = good.path / name
    file.write_text(file.read_text() + " " * (1 << 20))  # still valid JSON
    with pytest.raises(CheckpointError, match=name):
        _ = good.val_loss if name == "state.json" else good.dtypes("model")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"model.safetensors": None},
        {"model.safetensors": {}},
        {"../step_4/state.json": {"bytes": 1, "sha256": "0"}},
        {"/etc/hostname": {"bytes": 1, "sha256": "0"}},
        {"..": {"bytes": 1, "sha256": "0"}},
    ],
)
def test_invalid_manifest_is_refused(good: Checkpoint, files: dict[str, Any]) -> None:
    (good.path / "manifest.json").write_text(checksums_text(files))
    with pytest.raises(CheckpointError):
        good.verify()


def test_symlinked_checkpoint_is_refused(config: Config, killed_root: Path, tmp_path: Path) -> None:
    folder = killed_root / RUN_ID / "checkpoints" / "step_6"
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = harness.tree(elsewhere)
    ended = harness.run(config, str(folder))
    assert ended.code == 65, ended.output
    assert "symbolic link" in ended.output
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 4
    assert harness.tree(elsewhere) == before


@pytest.mark.parametrize("name", FILES)
def test_symlinked_file_is_refused(config: Config, killed_root: Path, tmp_path: Path, name: str) -> None:
    file = killed_root / RUN_ID / "checkpoints" / "step_6" / name
    elsewhere = tmp_path / name
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    ended = harness.run(config, str(file.parent))
    assert ended.code == 65, ended.output
    assert elsewhere.exists()


@pytest.mark.parametrize("name", ["../step_4", "step_4/../../../outside", "/etc", "", "step_4\nstep_6", "step_x"])
def test_pointer_cannot_lead_outside(killed_root: Path, name: str) -> None:
    folder = killed_root / RUN_ID / "checkpoints"
    (folder / "latest").write_text(name)
    assert CheckpointStore(folder).pointed("latest") is None


BAD_RUN_IDS = ["../evil", "..", ".", "a/../../evil", "/tmp/evil", "a/b", "Evil", "e", "evil-", "-evil", "e" * 41, "a\n"]


@pytest.mark.parametrize("run_id", BAD_RUN_IDS)
def test_invalid_run_ids_are_refused(make_config: MakeConfig, tmp_path: Path, run_id: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="run_id"):
        make_config(output__run_id=run_id)
    with pytest.raises(UsageError):
        new_run(str(tmp_path / "runs"), run_id, "name")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("reference", ["../evil", "..", "a/../../evil", "/etc", "../../../../etc"])
def test_resume_cannot_lead_outside_the_root(config: Config, killed_root: Path, tmp_path: Path, reference: str) -> None:
    (tmp_path / "evil").mkdir()
    with pytest.raises(UsageError):
        find_run(str(killed_root), reference)
    before = harness.tree(tmp_path / "runs")
    assert harness.run(config, reference).code == 64
    assert harness.tree(tmp_path / "runs") == before
    assert list((tmp_path / "evil").iterdir()) == []


def test_symlinked_run_is_resumed(config: Config, killed_root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (killed_root / RUN_ID).rename(elsewhere)
    (killed_root / RUN_ID).symlink_to(elsewhere)
    before = harness.tree(elsewhere)
    assert harness.run(config).code == 64  # a new run with the same id
    assert harness.tree(elsewhere) == before
    assert harness.run(config, RUN_ID).code == 0
    assert (elsewhere / "finished.json").is_file()


def test_checkpoint_records_versions_and_config(good: Checkpoint) -> None:
    state = json.loads((good.path / "state.json").read_text())
    assert state["progress"]["step"] == 8
    assert state["progress"]["tokens"] == 8 * 2 * 2 * 16
    assert state["config"]["run"]["seed"] == 7
    assert state["config"]["trainer"]["precision"] == "fp32"
    assert len(state["data_fingerprint"]) == 64
    assert {"torch", "python", "llmtrain"} <= set(state["versions"])


def test_damaged_token_store_is_refused(
    make_config: Callable[..., Config], root: Path, tmp_path: Path, golden: Outcome
) -> None:
    cache = tmp_path / "own-cache"
    config = make_config(data__cache_dir=str(cache))
    assert harness.run(config, fault="forward:1:0:kill").code == -9
    (tokens,) = cache.glob("tokens/*/train.bin")
    before = tokens.stat()
    tokens.write_bytes(b"x" * before.st_size)
    os.utime(tokens, ns=(before.st_atime_ns, before.st_mtime_ns))
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert harness.outcome(root, ended.result) == golden
