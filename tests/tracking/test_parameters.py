"""The config as flat parameters."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.core.env import LAUNCH
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import begin_generation
from llmtrain.tracking.base import TrackedRun
from llmtrain.tracking.parameters import flat_parameters


def parameters(config: Config, run: RunDirectory) -> dict[str, Any]:
    return flat_parameters(TrackedRun(run, config, resumed_from=0, evaluated_step=0, facts={}))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "first")
    directory.path.mkdir()
    return directory


def test_nested_sections_are_flat(run: RunDirectory) -> None:
    begin_generation(run, 0, 1, is_unattended=False)
    values = parameters(load_config("lora_instruct", ["model.lora.rank=4"]), run)
    assert values["model.lora.rank"] == 4
    assert not [name for name, value in values.items() if isinstance(value, dict)]
    assert "schema_version" not in values


@pytest.mark.parametrize(("launch", "processes"), [(None, 1), (None, 2), ("1", 1), ("1", 4)])
def test_sections_that_the_run_does_not_use_are_left_out(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, launch: str | None, processes: int
) -> None:
    if launch:
        monkeypatch.setenv(LAUNCH, launch)
    begin_generation(run, 0, processes, is_unattended=False)
    values = parameters(load_config("gpt_smoke"), run)
    assert ("launch.nodes" in values) == bool(launch)
    assert ("distributed.rendezvous.backend" in values) == (processes > 1)
    assert ("distributed.strategy" in values) == (processes > 1)


def test_names_that_mlflow_refuses_are_changed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH, "1")
    begin_generation(run, 0, 1, is_unattended=False)
    config = load_config("gpt_smoke").with_values("launch", node_selector={"a@b": "c"})
    assert parameters(config, run)["launch.node_selector.a_b"] == "c"
