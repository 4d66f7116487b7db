"""GPT-2 124M on one GPU: tokens/s, MFU and memory of the preset gpt2_124m: compiled and eager, without and with DDP and
FSDP over NCCL (world size 1), and whether interrupted and resumed runs end in the same state.

    python benchmarks/gpt2_gpu.py --files train.txt [--steps 60]
    python benchmarks/gpt2_gpu.py --files train.txt --tiny      a tiny model on a CPU

Prints one table. tokens/s are measured after the warm-up, as reported by `llmtrain train --json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

WORLD = ["--processes", "1"]
FSDP = ["--set", "distributed.strategy=fsdp"]


def train(root: Path, *arguments: str, expect: int = 0, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "llmtrain", "train", "--json", "--set", f"output.root_dir={root}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    if done.returncode != expect:
        sys.exit(f"exit {done.returncode}, expected {expect}: {' '.join(command)}")
    return json.loads(done.stdout) if expect == 0 else {}


def settings(**values: object) -> list[str]:
    return [part for name, value in values.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", nargs="+")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.files or not (arguments.tiny or torch.cuda.is_available()):
        print("skipped: needs a GPU and --files")
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        base = ["--config", "gpt2_124m"]
        base += settings(
            data__files=json.dumps(arguments.files),
            data__cache_dir=root / "cache",
            trainer__max_steps=arguments.steps,
            trainer__warmup_steps=10,
            trainer__micro_batch_size=arguments.micro_batch_size,
            trainer__grad_accum_steps=1,
            trainer__eval_batches=5,
            trainer__save_every_steps=arguments.steps,
        )
        if arguments.tiny:
            base += settings(run__device="cpu", run__threads=1, model__n_layers=1, model__d_model=32, model__n_heads=2)
            base += settings(model__block_size=16, data__tokenizer="byte", model__vocab_size="null")
            base += settings(trainer__compile="false")
        rows = {
            "compile, bf16": train(root, *base),
            "eager, bf16": train(root, *base, *settings(trainer__compile="false")),
            "compile, ddp": train(root, *base, *WORLD),
            "compile, fsdp": train(root, *base, *WORLD, *FSDP),
        }
        small = ["--config", "gpt2_124m", *base[2:], *settings(model__dropout=0.1, run__deterministic="true")]
        small += settings(trainer__max_steps=8, trainer__warmup_steps=2, trainer__micro_batch_size=4)
        small += settings(trainer__save_every_steps=4, trainer__compile="false", trainer__log_every_steps=1)
        hashes = {}
        for name, more in {"plain": [], "ddp": WORLD, "fsdp": [*WORLD, *FSDP]}.items():
            golden = train(root, *small, *more)
            interrupted = settings(output__run_id=f"interrupted-{name}")
            train(root, *small, *more, *interrupted, expect=75, LLMTRAIN_FAULT="after_optimizer:5:0:term")
            resumed = train(root, *small, *more, *interrupted, "--resume", f"interrupted-{name}")
            hashes[name] = golden["state_sha256"], resumed["state_sha256"]
    print(f"{'':16}{'tokens/s':>12}{'MFU':>14}{'peak memory':>14}{'loss':>16}")
    for name, row in rows.items():
        losses = f"{row['first_train_loss']:.2f} -> {row['final_train_loss']:.2f}"
        print(
            f"{name:16}{row['tokens_per_second']:>12,.0f}{row['mfu'] or 0:>13.1%}"
            f"{row['peak_memory_bytes'] / 1e9:>11.1f} GB{losses:>16}"
        )
    rates = [row["tokens_per_second"] for row in rows.values()]
    print(f"ratio compile / eager: {rates[0] / rates[1]:.2f}")
    for name, (golden, resumed) in hashes.items():
        verdict = "same state" if golden == resumed else "DIFFERENT STATE"
        print(f"{name}: interrupted at step 5 and resumed, deterministic: {verdict} {golden[:12]}")


if __name__ == "__main__":
    main()
