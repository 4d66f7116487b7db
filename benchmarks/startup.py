"""Startup time of `llmtrain --help` and `llmtrain validate`, compared with `python -c pass`.

python benchmarks/startup.py [--rounds 7]
"""

import argparse
import statistics
import subprocess
import sys
import time


def seconds(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    commands = {
        "python -c pass": ("-c", "pass"),
        "llmtrain --help": ("-m", "llmtrain", "--help"),
        "llmtrain validate": ("-m", "llmtrain", "validate"),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            times[name].append(seconds(*arguments))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, value in medians.items():
        print(f"{name:20}{value:7.3f} s   {value / medians['python -c pass']:6.1f} x python -c pass")


if __name__ == "__main__":
    main()
