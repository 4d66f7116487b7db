"""Fine-tuned and exported once for all tests."""

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fine_tune_workspace import Workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> "Workspace":
    from fine_tune_workspace import GENERATION, Workspace, train_in, write_config

    from tiny_llama import make_examples, make_model

    directory = tmp_path_factory.mktemp("fine-tune")
    make_model(directory / "base")
    (directory / "base" / "generation_config.json").write_text(json.dumps(GENERATION))
    make_examples(directory / "train.jsonl", 60)
    make_examples(directory / "val.jsonl", 6, first=100)
    write_config(directory)
    created = Workspace(directory, {})
    kinds = {"lora": [], "full": ["model.lora=null", "trainer.lr=1e-3"]}
    for run_id, overrides in kinds.items():
        created.results[run_id] = train_in(directory, created.train(*overrides, f"output.run_id={run_id}"))
    return created


@pytest.fixture(scope="session")
def exported(workspace: "Workspace") -> dict[str, Path]:
    from llmtrain.cli import main

    directories = {name: workspace.directory / "exported" / name for name in ("merged", "adapter", "full")}
    calls = {
        "merged": [*workspace.run_options(), "--merge"],
        "adapter": [*workspace.run_options()],
        "full": [*workspace.run_options("full")],
    }
    for name, arguments in calls.items():
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
            main(["export", *arguments, "--to", str(directories[name])])
        assert ended.value.code == 0
        assert str(directories[name]) in out.getvalue()
    return directories
