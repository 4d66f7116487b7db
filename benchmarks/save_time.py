"""How long the loop waits for a save: llmtrain, blocking and in the background, against torch.save of the same state.

    python benchmarks/save_time.py [--rounds 5 --d-model 512]

A GPT of 30 M parameters with AdamW's averages (360 MB). Target: in the background at most 0.3 of torch.save.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.load import load_config
from llmtrain.config.model import GptSection
from llmtrain.distributed.world import World
from llmtrain.models.gpt.model import GPT
from llmtrain.runs.lock import NullLock
from llmtrain.training.optim import build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--d-model", type=int, default=512)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    module = GPT(GptSection(d_model=arguments.d_model, n_layers=8, n_heads=8, block_size=256), 8192)
    optimizer = build_optimizer(module, load_config("gpt_smoke").trainer)
    module(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    found: dict[str, list[float]] = {"torch.save": [], "blocking": [], "in the background": []}
    with tempfile.TemporaryDirectory() as folder:
        stores = {name: CheckpointStore(Path(folder) / name) for name in ("blocking", "in the background")}
        savers = {
            name: Saver(store, NullLock("bench"), World(), 2, name != "blocking") for name, store in stores.items()
        }
        for step in range(1, rounds + 2):  # the first makes the memory for copies
            started = time.perf_counter()
            torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "state.pt")
            found["torch.save"].append(time.perf_counter() - started)
            for name, saver in savers.items():
                started = time.perf_counter()
                saver.save(step, module, optimizer, {}, None)
                found[name].append(time.perf_counter() - started)
                saver.finish()
    base = statistics.median(found["torch.save"][1:])
    for name, values in found.items():
        middle = statistics.median(values[1:])
        print(f"{name:20} {middle:7.3f} s  ratio {middle / base:5.2f}  (first time {values[0]:.3f} s)")


if __name__ == "__main__":
    main()
