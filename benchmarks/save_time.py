"""Time that the training loop waits for a checkpoint: synchronous, asynchronous, and torch.save of the same state.

    python benchmarks/save_time.py [--rounds 5 --d-model 512]

A GPT with 30M parameters and AdamW state (360 MB). Target: asynchronous takes at most 0.3 of torch.save.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.state import model_tensors, optimizer_tensors
from llmtrain.checkpoint.store import CheckpointRequest, CheckpointStore
from llmtrain.compat.numerics import Numerics
from llmtrain.config.load import load_config
from llmtrain.config.model import GptSection
from llmtrain.distributed.world import World
from llmtrain.models.gpt.model import GPT
from llmtrain.runs.lock import NullLock
from llmtrain.training.optimizer import build_adamw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--d-model", type=int, default=512)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    module = GPT(GptSection(d_model=arguments.d_model, n_layers=8, n_heads=8, block_size=256), 8192, Numerics())
    optimizer = build_adamw(module, load_config("gpt_smoke").trainer)
    module(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    seconds: dict[str, list[float]] = {"torch.save": [], "synchronous": [], "asynchronous": []}
    with tempfile.TemporaryDirectory() as directory:
        stores = {name: CheckpointStore(Path(directory) / name) for name in ("synchronous", "asynchronous")}
        savers = {
            name: Saver(store, NullLock("bench"), World(), 2, name == "asynchronous") for name, store in stores.items()
        }
        for step in range(1, rounds + 2):  # the first round allocates the memory for copies
            started = time.perf_counter()
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(directory) / "state.pt")
            seconds["torch.save"].append(time.perf_counter() - started)
            for name, saver in savers.items():
                started = time.perf_counter()
                tensors = {"model": model_tensors(module), "optimizer": optimizer_tensors(module, optimizer)}
                saver.save(CheckpointRequest(step, tensors, {}))
                seconds[name].append(time.perf_counter() - started)
                saver.finish()
    base = statistics.median(seconds["torch.save"][1:])
    for name, values in seconds.items():
        median = statistics.median(values[1:])
        print(f"{name:20} {median:7.3f} s  ratio {median / base:5.2f}  (first save {values[0]:.3f} s)")


if __name__ == "__main__":
    main()
