"""`llmtrain plan --probe`: a few real steps on this machine, as a run that later plans use like any finished run."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from llmtrain.config.schema import Config
from llmtrain.config.tracking import TrackingSection
from llmtrain.errors import TrainingFailed
from llmtrain.plan.history import MIN_TIMED_STEPS

NAME = "probe"
STEPS = MIN_TIMED_STEPS + 3
"""Memory is at its peak from the second step on; the times of the first ones say little."""


def probe_config(config: Config) -> Config:
    """The config of a run of a few steps with the same shape: it reports to nobody, and evaluates and saves once."""
    config = config.with_values("run", name=NAME)
    config = config.with_values("output", run_id=None)
    config = config.model_copy(update={"tracking": TrackingSection()})
    return config.with_values(
        "trainer",
        max_steps=STEPS,
        max_epochs=None,
        schedule="constant",
        schedule_steps=None,
        warmup_steps=0,
        early_stopping_patience=None,
        eval_every_steps=None,
        eval_batches=config.trainer.eval_batches or 1,
        eval_prompts=[],
        save_every_steps=None,
        log_every_steps=STEPS,
    )


def run_probe(config: Config, processes: int) -> None:
    """Train a few steps in a process of its own, whose messages appear on standard error."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "probe.yaml"
        path.write_text(yaml.safe_dump(probe_config(config).as_dict()))
        words = [sys.executable, "-P", "-m", "llmtrain", "train", "--config", str(path)]
        if processes > 1:
            words += ["--processes", str(processes)]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if done.returncode:
        raise TrainingFailed(
            f"The probe ended with exit code {done.returncode}.",
            remedy="Read its last message above: if the memory was too small, plan with --find.",
        )
