"""Time to nanoGPT's validation loss on a CPU: Tiny Shakespeare, characters, 4 layers, width 128, context 64.

    python benchmarks/time_to_loss.py [--data ../shared/data/tinyshakespeare/input.txt --rounds 1 --threads 2]

The baseline is nanoGPT's recipe for CPUs, written here from its published hyperparameters (batch 12, AdamW 1e-3, cosine
decay, 2,000 steps) as a bare PyTorch loop. Ours is `llmtrain train --config shakespeare_char`. Both are processes of
their own, one after the other; their time has everything from the start of Python on: imports, reading the text, and
one evaluation over the whole validation split at the end. The loss to reach is that of the baseline in the same round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[2] / "shared/data/tinyshakespeare/input.txt"
CONTEXT, BATCH = 64, 12


def run_baseline(data: str, steps: int, threads: int) -> None:
    """nanoGPT's recipe; prints the validation loss."""
    import torch
    from torch import nn

    from time_to_loss_gpu import Baseline, baseline_lr

    torch.set_num_threads(threads)
    torch.manual_seed(1337)
    text = Path(data).read_text()
    ids = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[character] for character in text])
    train, val = tokens[: int(0.9 * len(tokens))], tokens[int(0.9 * len(tokens)) :]
    model = Baseline(layers=4, width=128, heads=4, context=CONTEXT, vocabulary=len(ids))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    for step in range(steps):
        starts = torch.randint(len(train) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([train[start : start + CONTEXT + 1] for start in starts.tolist()])
        model(batch[:, :-1], batch[:, 1:].contiguous()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = baseline_lr(step, steps, 1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    windows = torch.stack([val[i : i + CONTEXT + 1] for i in range(0, len(val) - CONTEXT, CONTEXT)])
    with torch.no_grad():
        losses = [model(part[:, :-1], part[:, 1:].contiguous()) * len(part) for part in windows.split(64)]
    print(json.dumps({"loss": float(sum(losses)) / len(windows)}))


def timed(command: list[str], threads: int) -> tuple[float, dict[str, Any]]:
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return time.perf_counter() - started, json.loads(done.stdout)


def run_recipe(data: str, directory: str, arguments: argparse.Namespace) -> tuple[float, float]:
    settings = [f"data.files=[{data}]", f"output.root_dir={directory}", f"data.cache_dir={directory}"]
    settings += [f"run.threads={arguments.threads}", "trainer.eval_every_steps=null", "trainer.save_every_steps=null"]
    settings += [f"trainer.max_steps={arguments.steps}", "trainer.warmup_steps=0"] if arguments.steps else []
    settings += arguments.set
    command = [sys.executable, "-m", "llmtrain", "train", "--config", "shakespeare_char", "--json"]
    seconds, result = timed([*command, *(part for text in settings for part in ("--set", text))], arguments.threads)
    return seconds, result["final_val_loss"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=str(SHARED))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="steps of the recipe instead of the preset's")
    parser.add_argument("--baseline-steps", type=int, default=2000)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe")
    parser.add_argument("--only-baseline", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    data = str(Path(arguments.data).resolve())
    if not Path(data).is_file():
        print(f"skipped: needs the text {data}; Tiny Shakespeare is input.txt of karpathy/char-rnn")
        return
    if arguments.only_baseline:
        run_baseline(data, arguments.baseline_steps, arguments.threads)
        return
    own = [sys.executable, __file__, "--only-baseline", "--data", data, "--threads", str(arguments.threads)]
    own += ["--baseline-steps", str(arguments.baseline_steps)]
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as directory:
            before, baseline = timed(own, arguments.threads)
            seconds, loss = run_recipe(data, directory, arguments)
        verdict = "reached" if loss <= baseline["loss"] else "NOT reached"
        print(f"nanoGPT's recipe: val loss {baseline['loss']:.4f} in {before:.1f} s")
        print(f"shakespeare_char: val loss {loss:.4f} in {seconds:.1f} s: {verdict}")
        print(f"ratio of the times: {seconds / before:.2f}")


if __name__ == "__main__":
    main()
