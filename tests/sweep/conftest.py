"""Sweeps of a tiny model, trained for real."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sweep_workers import MakeSweep

from llmtrain.sweep.prepare import Sweep, prepare
from llmtrain.sweep.spec import read_spec

SPACE = {"trainer.lr": "log(1e-3,1e-1)", "trainer.weight_decay": "[0.0,0.1,0.5]"}
HALVING = {"halving": {"first_rung": 4, "eta": 3}, "trials": 9}
STEPS = ["trainer.max_steps=12", "trainer.schedule=wsd", "trainer.schedule_steps=12", "trainer.log_every_steps=2"]


@pytest.fixture
def make_sweep(workdir: Path, tiny: list[str]) -> MakeSweep:
    """A new sweep of nine trials and two rungs: make_sweep("root", trials=3). It is recorded on disk."""

    def make(root: str = "runs", overrides: list[str] | None = None, **values: Any) -> Sweep:
        fields: Mapping[str, Any] = {"name": "demo", "config": "gpt_smoke", "space": SPACE, **HALVING, **values}
        spec, space = read_spec({key: value for key, value in fields.items() if value is not None}, "test")
        sets = [*tiny, *STEPS, f"output.root_dir={workdir / root}", "output.report=false", *(overrides or [])]
        sweep, trials = prepare(spec, space, spec.config, sets)
        sweep.create(trials)
        return sweep

    return make
