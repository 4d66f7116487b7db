"""From the command to its end on one GPU: nanoGPT's model and recipe against the preset gpt_modern_124m, each as a
process of its own.

    python benchmarks/startup_gpu.py [--steps 540] [--baseline-steps 1000] [--sides cold warm baseline]
    python benchmarks/startup_gpu.py --tiny      a tiny model on a CPU

`cold` finds no compiled code; `warm` is another machine that shares data.cache_dir with `cold`: its temporary directory
is empty. The sources of all packages are compiled to bytecode and the text is tokenized before. Prints the whole time
of each process, the phases of its start, and the ratios to the baseline.
"""

import argparse
import compileall
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

import time_to_loss_gpu as time_to_loss
from llmtrain.config.load import load_config
from llmtrain.distributed.world import World
from llmtrain.training.components import build_components

CORPUS_FILES = 3000
SEED = 1


def whole_process(command: list[str], folder: Path) -> float:
    """Seconds of a process that finds an empty temporary directory."""
    folder.mkdir()
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *command], env={**os.environ, "TMPDIR": str(folder)}, check=False)
    assert done.returncode == 0
    return time.perf_counter() - started


def train_command(size: str, settings: list[str], run_id: str) -> list[str]:
    preset = "gpt_modern_124m" if size == "tiny" else f"gpt_modern_{size}"
    changes = [argument for setting in settings for argument in ("--set", setting)]
    return ["-m", "llmtrain", "train", "--config", preset, *changes, "--set", f"output.run_id={run_id}"]


def baseline_command(root: Path, steps: int, is_tiny: bool) -> list[str]:
    path = str(Path(time_to_loss.__file__))
    command = [path, "--seeds", "--baseline-seeds", str(SEED), "--baseline-steps", str(steps), "--directory", str(root)]
    return [*command, "--tiny"] if is_tiny else command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=540)
    parser.add_argument("--baseline-steps", type=int, default=1000)
    parser.add_argument("--sides", nargs="+", default=["cold", "warm", "baseline"])
    parser.add_argument("--set", nargs="*", default=[], help="settings for the runs of the preset")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    size = "tiny" if arguments.tiny else "124m"
    if not arguments.tiny:
        for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), *filter(None, sys.path)}:
            compileall.compile_dir(folder, quiet=2, workers=0)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        files = time_to_loss.write_corpus(root / "text", 60 if arguments.tiny else CORPUS_FILES)
        steps = 8 if arguments.tiny else arguments.steps
        settings = [each.format(steps=steps) for each in time_to_loss.settings(root, files, size, SEED)]
        settings += arguments.set
        preset = "gpt_modern_124m"
        on_cpu = load_config(preset, [*settings, "run.device=cpu"])
        build_components(on_cpu, World(device=torch.device("cpu")))  # tokenizes
        seconds: dict[str, float] = {}
        for side in arguments.sides:
            command = train_command(size, settings, side)
            if side == "baseline":
                command = baseline_command(root, arguments.baseline_steps, arguments.tiny)
            seconds[side] = whole_process(command, root / f"tmp-{side}")
            line: dict[str, object] = {"side": side, "whole_seconds": round(seconds[side], 1)}
            finished = root / "runs" / side / "finished.json"
            if finished.exists():
                result = json.loads(finished.read_text())
                line |= {key: result[key] for key in ("timing", "tokens_per_second", "seconds", "final_val_loss")}
                line["peak_memory_bytes"] = result.get("peak_memory_bytes")
            print(json.dumps(line), flush=True)
        for side in ("cold", "warm"):
            if side in seconds and "baseline" in seconds:
                print(f"{side}: {seconds[side] / seconds['baseline']:.3f} x the whole time of the baseline")


if __name__ == "__main__":
    main()
