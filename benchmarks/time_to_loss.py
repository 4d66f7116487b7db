"""Time and steps to a validation loss of 1.886 on Tiny Shakespeare: characters, 4 layers, 4 heads, width 128, context
64, batch 12.

    python benchmarks/time_to_loss.py [--data ../shared/data/tinyshakespeare/input.txt --steps 2000]

Uses the preset shakespeare_char. The time is that of the whole training loop: steps, evaluations over the whole
validation split, and checkpoints. The baseline is a bare PyTorch loop with the same model and steps and nothing else
(no evaluation, logging, clipping or schedule): the ratio is the cost of the trainer.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.runs.metrics import read_metrics
from llmtrain.training.build import build_components
from llmtrain.training.run import run_training

TARGET = 1.886


def bare_loop(config: Config, steps: int) -> float:
    """Seconds for the same steps in a bare loop."""
    components = build_components(config, World(device=torch.device("cpu")))
    optimizer = torch.optim.AdamW(components.module.parameters(), lr=config.trainer.lr, fused=True)
    batches = [components.train_batches[i] for i in range(steps)]
    started = time.perf_counter()
    for batch in batches:
        loss = components.adapter.loss(components.module, batch.inputs, batch.targets) / batch.target_count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=str(Path(__file__).parents[2] / "shared/data/tinyshakespeare/input.txt"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, help="override the preset")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        settings = [f"data.files=[{arguments.data}]", f"output.root_dir={directory}", f"data.cache_dir={directory}"]
        settings += [f"run.threads={arguments.threads}", "logging.level=WARNING"]
        if arguments.steps:
            settings += [f"trainer.max_steps={arguments.steps}", "trainer.warmup_steps=0"]
        config = load_config("shakespeare_char", settings)
        result = run_training(config)
        rows = [row for row in read_metrics(Path(result["run_dir"]) / "metrics.jsonl") if "val/loss" in row]
        bare = bare_loop(config, result["steps"])
    for row in rows:
        print(f"step {row['step']:5d}  val loss {row['val/loss']:.4f}")
    reached = next((row["step"] for row in rows if row["val/loss"] <= TARGET), None)
    outcome = f"reached at step {reached}" if reached else "NOT reached"
    print(f"target {TARGET} {outcome}; best {result['best_val_loss']:.4f}")
    print(f"training loop {result['seconds']:.1f} s for {result['steps']} steps")
    print(f"ratio to a bare loop of the same steps ({bare:.1f} s): {result['seconds'] / bare:.2f}")


if __name__ == "__main__":
    main()
