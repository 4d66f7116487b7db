"""Checkpoints from elsewhere, whose hashes fit whatever is in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint import store
from llmtrain.config.load import load_config
from llmtrain.errors import CheckpointError, LlmtrainError, UsageError
from llmtrain.inference import load
from llmtrain.inference.load import Source
from llmtrain.runs.checksums import CHECKSUMS, checksums_text
from llmtrain.training.run import run_training

RUN_ID = "foreign"


@pytest.fixture
def root(tmp_path: Path, tiny: list[str]) -> Path:
    run = ["model.name=gpt", f"output.root_dir={tmp_path}", f"output.run_id={RUN_ID}"]
    run_training(load_config("gpt_smoke", [*tiny, *run]))
    return tmp_path


def change_model_section(root: Path, **values: Any) -> None:
    for folder in (root / RUN_ID / "checkpoints").glob("step_*"):
        path = folder / "state.json"
        state = json.loads(path.read_text())
        state["config"]["model"].update(values)
        path.write_text(json.dumps(state))
        names = [path.name for path in folder.iterdir() if path.name != CHECKSUMS]
        files = {name: store.checksum_entry(folder / name) for name in names}
        (folder / CHECKSUMS).write_text(checksums_text(files))


@pytest.mark.parametrize(("block_size", "error"), [(10**9, UsageError), (10**4, CheckpointError)])
def test_other_sizes_are_refused_before_memory_is_allocated(
    root: Path, monkeypatch: pytest.MonkeyPatch, block_size: int, error: type[LlmtrainError]
) -> None:
    load.load_model(Source(run=RUN_ID, root=str(root)), "cpu")
    change_model_section(root, block_size=block_size)  # 64 GB of positions, and 640 kB
    monkeypatch.setattr(load, "machine_memory", lambda: 8 * 2**30)

    def allocate(*_: object, **__: object) -> None:
        raise AssertionError("the module was built")

    monkeypatch.setattr(load, "build_checked", allocate)
    with pytest.raises(error):
        load.load_model(Source(run=RUN_ID, root=str(root)), "cpu")
