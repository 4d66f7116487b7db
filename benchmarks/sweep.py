"""Successive halving compared with training all 27 trials of a grid to their end.

    python benchmarks/sweep.py [--steps 220] [--first-rung 8] [--set FIELD=VALUE ...]

Both train the same 27 configs of gpt_stdlib. Targets: halving finds a trial within 0.01 of the grid's best with at most
0.25 of its steps; the driver takes less than 1 % of the trials' CPU time; 200 trials are listed in under a second.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llmtrain

SPACE = {"trainer.lr": [3e-3, 1e-2, 3e-2], "model.n_layers": [2, 3, 4], "trainer.weight_decay": [0.0, 0.1, 0.5]}


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


def seconds_to_list(directory: Path, trials: int) -> float:
    """`sweep show` of a sweep of 200 trials, with the start of the command."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "sweep"))
    from demo_sweep import write_sweep

    write_sweep(directory, "many", trials)
    command = [sys.executable, "-m", "llmtrain", "sweep", "show", "many", "--root", str(directory)]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--first-rung", type=int, default=8)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--one-layer", action="store_true", help="A grid of 9 trials, for a test.")
    arguments = parser.parse_args()
    space: dict[str, Any] = {**SPACE, "model.n_layers": [1]} if arguments.one_layer else SPACE
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "runs"
        steps = arguments.steps
        sets = [f"trainer.max_steps={steps}", f"trainer.schedule_steps={steps}", "trainer.warmup_steps=2"]
        sets += ["trainer.eval_prompts=[]", f"output.root_dir={root}", "output.report=false", *arguments.set]
        config = llmtrain.load_config("gpt_stdlib", sets)
        options: dict[str, Any] = {"search": "grid", "parallel": arguments.parallel}
        driver, trials = cpu_seconds()
        grid = llmtrain.run_sweep(config, space, name="grid", **options)
        halved = llmtrain.run_sweep(config, space, name="halved", halving=arguments.first_rung, **options)
        driver_after, trials_after = cpu_seconds()
        listed = seconds_to_list(root, 200)
    assert grid.winner
    assert halved.winner
    for name, result in (("grid", grid), ("halving", halved)):
        assert result.winner
        print(f"{name:8} {trained_steps(result):6} steps, best {result.winner['score']:.4f}, {result.winner['values']}")
    same = grid.rows[halved.winner["trial"]]["state_sha256"] == halved.winner["state_sha256"]
    print(f"halving's best within {halved.winner['score'] - grid.winner['score']:.4f} of the grid's (target 0.01)")
    print(f"steps ratio {trained_steps(halved) / trained_steps(grid):.3f} (target 0.25)")
    print(f"the promoted trial {'is' if same else 'IS NOT'} the full run of the grid, by its hash")
    print(
        f"driver's CPU time, ratio to the trials' {(driver_after - driver) / (trials_after - trials):.4f} (target 0.01)"
    )
    print(f"200 trials listed in {listed:.2f} s, with the start of the command")


if __name__ == "__main__":
    main()
