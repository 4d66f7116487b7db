"""Scaling: tokens/s of 2 processes compared with 1 process, one thread each, the same step, DDP and FSDP.

    python benchmarks/scaling.py [--rounds 3 --steps 12]

Variants alternate; medians are compared. Target: 1.8 for DDP. Two independent processes at the same time show the upper
bound of the machine, because cores share caches, memory and power.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SHAPE = {
    "run.device": "cpu",
    "run.threads": "1",
    "model.block_size": "128",
    "model.d_model": "256",
    "model.n_layers": "4",
    "model.n_heads": "4",
    "trainer.micro_batch_size": "8",
    "trainer.grad_accum_steps": "4",
    "trainer.warmup_steps": "0",
    "trainer.log_every_steps": "1",
    "trainer.eval_every_steps": "null",
    "trainer.eval_batches": "1",
    "trainer.save_every_steps": "null",
}
VARIANTS = {
    "1 process": ("ddp", 1, "false"),
    "2 processes, ddp": ("ddp", 2, "false"),
    "2 processes, ddp, reproducible_reduce": ("ddp", 2, "true"),
    "2 processes, fsdp": ("fsdp", 2, "false"),
}
INDEPENDENT = "2 independent processes"


def measure(directory: Path, steps: int, strategy: str, processes: int, reproducible: str) -> float:
    variant = {"distributed.strategy": strategy, "distributed.reproducible_reduce": reproducible}
    variant["trainer.max_steps"] = str(steps)
    sets = {**SHAPE, **variant, "output.root_dir": str(directory), "data.cache_dir": str(directory / "cache")}
    command = [sys.executable, "-m", "llmtrain", "train", "--config", "gpt_smoke", "--json"]
    command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    command += ["--processes", str(processes)] if processes > 1 else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--variant", choices=[*VARIANTS, INDEPENDENT], action="append", help="default: all")
    arguments = parser.parse_args()
    chosen = ["1 process", *arguments.variant] if arguments.variant else [*VARIANTS, INDEPENDENT]
    rates_by_name: dict[str, list[float]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.rounds):
            for name in rates_by_name:
                copies = 2 if name == INDEPENDENT else 1
                variant = VARIANTS["1 process" if name == INDEPENDENT else name]
                with ThreadPoolExecutor(copies) as pool:
                    results = [pool.submit(measure, Path(directory), arguments.steps, *variant) for _ in range(copies)]
                    rates_by_name[name].append(sum(result.result() for result in results))
    base = statistics.median(rates_by_name["1 process"])
    print(f"{'variant':40} {'tokens/s':>10} {'ratio':>6}")
    for name, rates in rates_by_name.items():
        rate = statistics.median(rates)
        print(f"{name:40} {rate:10,.0f} {rate / base:6.2f}")


if __name__ == "__main__":
    main()
