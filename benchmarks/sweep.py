"""Sweeps: what successive halving finds and saves, what the driver costs, and that the table is always the same.

    python benchmarks/sweep.py [--part NAME ...] [--steps 220] [--halving 8:3 ...] [--device cuda --parallel 14]
                               [--set FIELD=VALUE ...]

halving    27 configs of gpt_stdlib, all trained to their end, and with halving (first rung:eta; several are compared
           with one grid). Target: a trial within 0.01 of the grid's best with at most 0.25 of its steps
overhead   CPU time of the driver, with all checks before the first trial, over that of the trials. Target: below 0.01
tables     a sweep of a tiny model on 1, 2 and 4 workers. Target: the same table.json, byte for byte
list       `sweep show` of 200 trials, with the start of the command. Target: below one second

Without --part, all of them. On a GPU the trials train with run.deterministic, --parallel of them at a time.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmtrain

SPACE = {"trainer.lr": [3e-3, 1e-2, 3e-2], "model.n_layers": [2, 3, 4], "trainer.weight_decay": [0.0, 0.1, 0.5]}
TINY = ["model.block_size=16", "model.d_model=16", "model.n_layers=1", "run.device=cpu", "run.threads=1"]
TINY += ["trainer.schedule=constant", "trainer.warmup_steps=0", "trainer.log_every_steps=2"]


def cpu_seconds() -> tuple[float, float]:
    """Of this process, and of the trials that have ended."""
    found = []
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        found.append(usage.ru_utime + usage.ru_stime)
    return found[0], found[1]


def trained_steps(result: llmtrain.SweepResult) -> int:
    """The last steps of all trials: a promoted trial trains on, it does not begin again."""
    return sum(row["step"] for row in result.rows)


def config_of(root: Path, options: argparse.Namespace) -> llmtrain.Config:
    steps = options.steps
    sets = [f"trainer.max_steps={steps}", f"trainer.schedule_steps={steps}", "trainer.warmup_steps=2"]
    sets += ["trainer.eval_prompts=[]", f"output.root_dir={root}", "output.report=false"]
    if options.device == "cuda":
        sets += ["run.device=cuda", "run.deterministic=true"]
    return llmtrain.load_config("gpt_stdlib", [*sets, *options.set])


def space_of(options: argparse.Namespace) -> dict[str, Any]:
    return {**SPACE, "model.n_layers": [1]} if options.one_layer else SPACE


def print_overhead(before: tuple[float, float]) -> None:
    after = cpu_seconds()
    driver = after[0] - before[0]
    trials = after[1] - before[1]
    print(f"CPU time: driver {driver:.2f} s, trials {trials:.1f} s, ratio {driver / trials:.4f} (target 0.01)")


def measure_halving(root: Path, options: argparse.Namespace) -> None:
    config = config_of(root, options)
    before = cpu_seconds()
    grid = timed_sweep(config, options, "grid", None)
    for number, halving in enumerate(options.halving or [{"first_rung": 8, "eta": 3}]):
        halved = timed_sweep(config, options, f"halved-{number}", halving)
        print(json.dumps(compare(grid, halved, halving)), flush=True)
    print_overhead(before)


def timed_sweep(
    config: llmtrain.Config, options: argparse.Namespace, name: str, halving: dict[str, int] | None
) -> llmtrain.SweepResult:
    began = time.perf_counter()
    result = llmtrain.run_sweep(
        config, space_of(options), name=name, halving=halving, search="grid", parallel=options.parallel
    )
    assert result.winner
    seconds = time.perf_counter() - began
    best = f"best {result.winner['score']:.4f}, trial {result.winner['trial']}, {result.winner['values']}"
    print(f"{name:8} {trained_steps(result):6} steps in {seconds:.0f} s, {best}", flush=True)
    return result


def compare(grid: llmtrain.SweepResult, halved: llmtrain.SweepResult, halving: dict[str, int]) -> dict[str, Any]:
    """Print what halving found and saved, and return it."""
    assert grid.winner
    assert halved.winner
    found = {
        **halving,
        "grid_best": grid.winner["score"],
        "grid_trial": grid.winner["trial"],
        "grid_steps": trained_steps(grid),
        "grid_scores": [row["score"] for row in grid.rows],
        "halving_best": halved.winner["score"],
        "halving_trial": halved.winner["trial"],
        "halving_steps": trained_steps(halved),
        "is_full_run": grid.rows[halved.winner["trial"]]["state_sha256"] == halved.winner["state_sha256"],
    }
    print(f"halving's best within {found['halving_best'] - found['grid_best']:.4f} of the grid's (target 0.01)")
    print(f"steps ratio {found['halving_steps'] / found['grid_steps']:.3f} (target 0.25)")
    print(f"the promoted trial {'is' if found['is_full_run'] else 'IS NOT'} the full run of the grid, by its hash")
    return found


def halving_of(text: str) -> dict[str, int]:
    """`8:3`, the first rung and eta."""
    first_rung, _, eta = text.partition(":")
    return {"first_rung": int(first_rung), "eta": int(eta or 3)}


def measure_overhead(root: Path, options: argparse.Namespace) -> None:
    """Three trials of the grid, in each of which a process starts, trains and evaluates."""
    space = {"trainer.lr": SPACE["trainer.lr"]}
    config = config_of(root, options)
    before = cpu_seconds()
    llmtrain.run_sweep(config, space, name="short", search="grid", parallel=options.parallel)
    print_overhead(before)


def measure_tables(root: Path, options: argparse.Namespace) -> None:  # noqa: ARG001 (as the other parts)
    """Six trials and two rungs."""
    found = set()
    for parallel in (1, 2, 4):
        place = root / f"of-{parallel}"
        config = llmtrain.load_config(
            "gpt_smoke", [*TINY, "trainer.max_steps=12", f"output.root_dir={place}", "output.report=false"]
        )
        began = time.perf_counter()
        llmtrain.run_sweep(
            config, {"trainer.lr": "log(1e-3,1e-1)"}, trials=6, halving=4, name="tiny", parallel=parallel
        )
        digest = hashlib.sha256((place / "tiny" / "table.json").read_bytes()).hexdigest()
        found.add(digest)
        print(f"{parallel} workers: table.json {digest[:16]} in {time.perf_counter() - began:.1f} s", flush=True)
    print(f"the tables are {'identical' if len(found) == 1 else 'DIFFERENT'}")


def measure_list(root: Path, options: argparse.Namespace) -> None:  # noqa: ARG001
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "sweep"))
    from demo_sweep import write_sweep

    write_sweep(root, "many", 200)
    command = [sys.executable, "-m", "llmtrain", "sweep", "show", "many", "--root", str(root)]
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    print(f"200 trials listed in {min(times):.2f} s, the best of three, with the start of the command (target 1)")


PARTS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "halving": measure_halving,
    "overhead": measure_overhead,
    "tables": measure_tables,
    "list": measure_list,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="Only this part. Repeatable.")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--halving", action="append", type=halving_of, metavar="FIRST_RUNG[:ETA]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--one-layer", action="store_true", help="A grid of 9 trials, for a test.")
    options = parser.parse_args()
    for part in options.part or PARTS:
        print(f"--- {part}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            PARTS[part](Path(directory) / "runs", options)


if __name__ == "__main__":
    main()
