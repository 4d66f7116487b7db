"""Throughput and memory of the training step on one GPU: tokens/s, MFU and peak memory of the preset gpt2_124m with
what the versions of the numerics changed, with activation checkpointing, and with CUDA graphs.

    python benchmarks/step_throughput.py [--batch 64 16] [--steps 60] [--only NAME ...] [--set section.field=value]
    python benchmarks/step_throughput.py --tiny      a tiny model on a CPU, not compiled

Text: the Python standard library in GPT-2 tokens (TIKTOKEN_CACHE_DIR where there is no network). Every variant is a
process of its own. tokens/s are those of `llmtrain train --json`, without the first step. Prints one table per batch
size; the ratio is to the first.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config

from llmtrain.compat.numerics import Numerics
from llmtrain.config.load import load_config
from llmtrain.models import base
from llmtrain.training import run

TINY = ["run.device=cpu", "run.threads=1", "model.n_layers=2", "model.d_model=32", "model.n_heads=2"]
TINY += ["model.block_size=16", "data.tokenizer=byte", "trainer.compile=false", "data.name=python_stdlib"]


def version(number: int) -> None:
    run.recorded_numerics = lambda _: Numerics(number)


def all_logits() -> None:
    Numerics.chunks_gpt_loss = property(lambda _: False)  # type: ignore[assignment]


def cuda_graphs() -> None:
    base.COMPILE_MODE = "reduce-overhead"


def recompute_cheap() -> None:
    """Of what the backward pass needs, torch saves a fifth less and recomputes it, the cheapest operations first."""
    torch._functorch.config.activation_memory_budget = 0.8  # type: ignore[attr-defined]


Variant = tuple[Callable[[], None] | None, list[str]]
VARIANTS: dict[str, Variant] = {
    "version 1": (partial(version, 1), []),
    "version 2": (partial(version, 2), []),
    "version 3": (partial(version, 3), []),
    "version 4": (None, []),
    "all logits at once": (all_logits, []),
    "selective": (None, ["trainer.activation_checkpointing=selective"]),
    "blocks": (None, ["trainer.activation_checkpointing=blocks"]),
    "recomputes what is cheap": (recompute_cheap, []),
    "CUDA graphs": (cuda_graphs, []),
}
"""Name -> what to change in the program, and settings. All but the first three have the latest numerics."""


def train(name: str, settings: list[str]) -> dict[str, Any]:
    """Train in this process."""
    change, more = VARIANTS[name]
    if change:
        change()
    config = load_config("gpt2_124m", [*settings, *more, "logging.level=WARNING"])
    return run.run_training(config).as_dict()


def train_apart(name: str, settings: list[str]) -> dict[str, Any] | None:
    command = [sys.executable, __file__, "--variant", name, *(part for each in settings for part in ("--set", each))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(train(arguments.variant, arguments.set)))
        return
    if not arguments.tiny and not torch.cuda.is_available():
        print("skipped: needs a GPU")
        return
    with tempfile.TemporaryDirectory() as directory:
        for batch in arguments.batch:
            settings = [f"output.root_dir={directory}/runs", f"data.cache_dir={directory}/cache"]
            settings += ["data.name=python_stdlib", "data.tokenizer=gpt2"]
            settings += [f"trainer.max_steps={arguments.steps}", "trainer.warmup_steps=0", "trainer.eval_batches=1"]
            settings += [f"trainer.micro_batch_size={batch}", "trainer.grad_accum_steps=1"]
            settings += [f"trainer.save_every_steps={arguments.steps}", f"trainer.eval_every_steps={arguments.steps}"]
            settings += [*(TINY if arguments.tiny else []), *arguments.set]
            show(batch, {name: train_apart(name, settings) for name in arguments.only})


def show(batch: int, results: dict[str, dict[str, Any] | None]) -> None:
    print(f"\nbatch {batch:<14}{'tokens/s':>12}{'ratio':>8}{'MFU':>8}{'peak memory':>14}{'loss':>16}")
    first = next((result["tokens_per_second"] for result in results.values() if result), None)
    for name, result in results.items():
        if result is None:
            print(f"{name:20}{'failed: see standard error':>40}")
            continue
        losses = f"{result['first_train_loss']:.2f} -> {result['final_train_loss']:.3f}"
        rate = result["tokens_per_second"]
        print(
            f"{name:20}{rate:>12,.0f}{rate / first:>8.3f}{result['mfu'] or 0:>8.1%}"
            f"{result['peak_memory_bytes'] / 1e9:>11.1f} GB{losses:>16}",
            flush=True,
        )


if __name__ == "__main__":
    main()
