"""A run with architecture modern: it learns, resumes to the same bits, and starts another run."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.errors import UsageError
from llmtrain.training.run import run_training


def run(tiny: list[str], root: Path, run_id: str, *changes: str, **options: Any) -> dict[str, Any]:
    sets = [*tiny, "model.name=gpt", "model.architecture=modern", "model.n_layers=2", "model.d_model=16"]
    sets += ["trainer.schedule=constant", f"output.root_dir={root}", f"output.run_id={run_id}", *changes]
    return run_training(load_config("gpt_smoke", sets), **options).as_dict()


@pytest.mark.parametrize("mlp", [pytest.param("swiglu", marks=pytest.mark.slow), "relu2"])
def test_resumed_run_has_the_same_bits(tiny: list[str], tmp_path: Path, mlp: str) -> None:
    whole = run(tiny, tmp_path, "whole", f"model.mlp={mlp}")
    assert whole["final_train_loss"] < whole["first_train_loss"]
    run(tiny, tmp_path, "parts", f"model.mlp={mlp}", "trainer.max_steps=2")
    resumed = run(tiny, tmp_path, "parts", f"model.mlp={mlp}", resume="parts")
    assert resumed["state_sha256"] == whole["state_sha256"]


def test_another_architecture_is_refused_on_resume(tiny: list[str], tmp_path: Path) -> None:
    run(tiny, tmp_path, "one", "trainer.max_steps=2")
    with pytest.raises(UsageError) as error:
        run(tiny, tmp_path, "one", "model.mlp=swiglu", resume="one")
    assert "model.mlp" in error.value.what
