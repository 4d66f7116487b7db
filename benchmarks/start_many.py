"""Time from the start of the command to the first step with 2 processes, compared with torchrun of an all-reduce.

    python benchmarks/start_many.py [--rounds 5]

Both alternate and are measured until they print a line. Target: at most 3 s more.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HELLO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(f"hello {x.item()}", flush=True)
dist.destroy_process_group()
"""


def seconds_until(command: list[str], text: str) -> float:
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        seconds = next((time.perf_counter() - started for line in process.stdout if text in line), None)
        process.stdout.read()
    assert seconds is not None, command
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "hello.py"
        script.write_text(HELLO)
        sets = [
            "trainer.log_every_steps=1",
            f"output.root_dir={directory}",
            "trainer.max_steps=2",
            "trainer.warmup_steps=0",
        ]
        ours = ["train", "--config", "ddp_smoke", "--processes", "2"]
        ours += [part for setting in sets for part in ("--set", setting)]
        commands = {
            "torchrun, hello": (
                [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)],
                "hello",
            ),
            "llmtrain train --processes 2": ([sys.executable, "-m", "llmtrain", *ours], "[TRAIN] step 1/"),
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, (command, text) in commands.items():
                times[name].append(seconds_until(command, text))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:32} {value:6.2f} s")
    first, second = medians.values()
    print(f"{'difference':32} {second - first:6.2f} s, ratio {second / first:.2f}")


if __name__ == "__main__":
    main()
