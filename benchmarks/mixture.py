"""Throughput of a mixture against one source: time per batch of the data alone, and tokens/s of training.

    python benchmarks/mixture.py [--rounds 5] [--batches 2000] [--steps 100] [--batch 16] [--block-size 256]

The text is random bytes in files of 2 MB. The sources of a mixture have unequal weights. Rounds alternate, and medians
are shown; the ratio is that to one source. Reading a batch is a small part of a step: the first table shows what a
mixture costs, the second whether that can be noticed.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config
from llmtrain.data.batches import TrainBatches
from llmtrain.data.inspection import open_sources
from llmtrain.training.run import run_training

FILE_BYTES = 2_000_000
SOURCES = {"one source": 1, "mixture of 3": 3, "mixture of 50": 50}


def write_files(directory: Path, count: int) -> list[str]:
    generator = random.Random(1)
    names = []
    for number in range(count):
        path = directory / f"text-{number}.txt"
        path.write_bytes(bytes(generator.choices(range(32, 127), k=FILE_BYTES // (count if count > 3 else 1))))
        names.append(str(path))
    return names


def config_of(directory: Path, count: int, arguments: argparse.Namespace) -> Config:
    folder = directory / str(count)
    folder.mkdir()
    names = write_files(folder, count)
    data: dict[str, Any] = {"name": "text_files", "files": names}
    if count > 1:
        sources = []
        for number, name in enumerate(names):
            sources.append({"name": "text_files", "files": [name], "weight": 1 / (1 + number)})
        data = {"name": "mixture", "sources": sources}
    values = {
        "schema_version": 3,
        "run": {"device": "cpu", "threads": 1},
        "model": {"name": "gpt", "block_size": arguments.block_size, "d_model": 128, "n_layers": 2, "n_heads": 4},
        "data": {**data, "cache_dir": str(directory / "cache")},
        "trainer": {
            "max_steps": arguments.steps,
            "warmup_steps": 0,
            "micro_batch_size": arguments.batch,
            "eval_batches": 1,
            "eval_every_steps": arguments.steps,
            "save_every_steps": arguments.steps,
        },
        "logging": {"level": "WARNING"},
        "output": {"root_dir": str(folder / "runs")},
    }
    return build_config(Document("benchmark", values))


def seconds_per_batch(batches: TrainBatches, first: int, count: int) -> float:
    began = time.process_time()
    for number in range(first, first + count):
        batches[number]
    return (time.process_time() - began) / count


def show(title: str, unit: str, results: dict[str, list[float]], is_rate: bool) -> None:
    print(f"\n{title:16}{unit:>12}{'ratio':>8}")
    first = statistics.median(results["one source"])
    for name, values in results.items():
        middle = statistics.median(values)
        ratio = middle / first if is_rate else first / middle
        print(f"{name:16}{middle:>12,.0f}{ratio:>8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        configs = {name: config_of(directory, count, arguments) for name, count in SOURCES.items()}
        opened = {}
        for name, config in configs.items():
            opened[name] = open_sources(config.data, config.model, config.trainer, config.run).batches
        times: dict[str, list[float]] = {name: [] for name in SOURCES}
        for number in range(arguments.rounds):
            for name, batches in opened.items():
                times[name].append(1e6 * seconds_per_batch(batches, number * arguments.batches, arguments.batches))
        show("data", "CPU µs/batch", times, is_rate=False)
        rates: dict[str, list[float]] = {name: [] for name in SOURCES}
        for _ in range(arguments.rounds):
            for name, config in configs.items():
                rates[name].append(run_training(config).values["tokens_per_second"])
        show("training", "tokens/s", rates, is_rate=True)


if __name__ == "__main__":
    main()
