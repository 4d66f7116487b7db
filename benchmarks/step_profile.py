"""Overhead of a training step: the share of its time outside the model and the optimizer (data, logging, bookkeeping).

    python benchmarks/step_profile.py [--config gpt_stdlib] [--steps 200]

Times the loop of `llmtrain train`: forward, backward, clipping and update are the work; everything else between two
steps is overhead. Evaluation and saving are not part of a step and are excluded.
"""

import argparse
import tempfile
import time
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.training import loop as trainer
from llmtrain.training import step
from llmtrain.training.run import run_training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="gpt_stdlib")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    seconds = {"loop": 0.0, "work": 0.0}
    for name in ("_next_batches", "_exchange", "_train_step"):
        _wrap(trainer.Trainer, name, "loop", seconds)
    _wrap(step.Stepper, "train_step", "work", seconds)
    with tempfile.TemporaryDirectory() as directory:
        settings = [f"output.root_dir={directory}", f"trainer.max_steps={arguments.steps}", "trainer.log_every_steps=1"]
        settings += ["trainer.eval_every_steps=null", "trainer.save_every_steps=null", "trainer.eval_batches=1"]
        settings += ["trainer.warmup_steps=0"]
        run_training(load_config(arguments.config, [*settings, "logging.level=WARNING"]))
    loop, work = seconds["loop"], seconds["work"]
    print(f"{arguments.steps} steps, all logged: {loop:.2f} s in the loop, {work:.2f} s in model and optimizer")
    print(f"ratio outside / loop: {(loop - work) / loop:.4f} ({(loop - work) / arguments.steps * 1e6:.0f} us per step)")


def _wrap(owner: Any, name: str, key: str, seconds: dict[str, float]) -> None:
    inner = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds[key] += time.perf_counter() - started

    setattr(owner, name, timed)


if __name__ == "__main__":
    main()
