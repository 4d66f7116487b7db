"""`llmtrain plan --probe`: real steps, and a plan with what they measured."""

import json
from pathlib import Path

from tests.conftest import Cli

from llmtrain.config.load import load_config
from llmtrain.plan.probe import STEPS, probe_config


def test_probe_measures_memory_and_time_of_the_shape(cli: Cli, workdir: Path) -> None:
    done = cli(
        "plan", "--config", "gpt_smoke", "--set", "run.device=cpu", "--set", "run.threads=1", "--probe", "--json"
    )
    assert done.code == 0, done.err
    plan = done.json
    (run,) = (workdir / "runs").iterdir()
    finished = json.loads((run / "finished.json").read_text())
    assert finished["steps"] == STEPS
    assert plan["memory"]["measured_by"] == run.name
    assert plan["memory"]["peak"] == finished["peak_memory_bytes"]
    assert plan["memory"]["predicted_peak"] > 0
    assert plan["time"]["run_id"] == run.name


def test_probe_keeps_the_shape_of_the_config() -> None:
    config = load_config("gpt_modern_124m")
    probed = probe_config(config)
    assert probed.model == config.model
    for name in ("micro_batch_size", "grad_accum_steps", "optimizer", "precision", "compile"):
        assert getattr(probed.trainer, name) == getattr(config.trainer, name)


def test_probe_of_another_machine_is_refused(cli: Cli) -> None:
    done = cli("plan", "--config", "gpt_smoke", "--gpu", "h100-80g", "--probe")
    assert done.code == 64
