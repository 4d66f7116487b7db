"""llmtrain against the Hugging Face Trainer with transformers' GPT-2: same model, batch, data and threads, in turn.

    python benchmarks/gpt_cpu.py [--rounds 5 --steps 60]

Each round trains both for the same number of steps, one after the other, in this process, and counts tokens/s of
the steps after a warm-up. Prints every round and the median of the ratios llmtrain / Hugging Face.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data.batches import TrainBatches
from llmtrain.data.python_stdlib import PythonStdlib
from llmtrain.training.run import run_training

WARM_UP = 10
MODEL = {"block_size": 128, "d_model": 128, "n_layers": 4, "n_heads": 4}
BATCH = 16


class Clock(TrainerCallback):
    """Time of the steps after the warm-up."""

    def __init__(self, steps: int) -> None:
        self.steps, self.started, self.seconds = steps, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == WARM_UP:
            self.started = time.perf_counter()
        if state.global_step == self.steps:
            self.seconds = time.perf_counter() - self.started


def hugging_face(batches: TrainBatches, steps: int, folder: str) -> float:
    shape = {"n_positions": MODEL["block_size"], "n_embd": MODEL["d_model"]}
    shape |= {"n_layer": MODEL["n_layers"], "n_head": MODEL["n_heads"]}
    config = GPT2Config(vocab_size=256, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **shape)
    rows = [{"input_ids": row, "labels": row} for i in range(steps) for row in batches[i].inputs]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        weight_decay=0.1,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    clock = Clock(steps)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows, callbacks=[clock])
    trainer.train()
    return (steps - WARM_UP) * BATCH * MODEL["block_size"] / clock.seconds


def ours(config: Config) -> float:
    # The first step of a process is left out of tokens_per_second; both sides have warmed up torch by then.
    return float(run_training(config)["tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"model.{name}={value}" for name, value in MODEL.items()]
        settings += [f"run.threads={arguments.threads}", f"output.root_dir={folder}", f"data.cache_dir={folder}"]
        settings += [f"trainer.max_steps={arguments.steps}", f"trainer.micro_batch_size={BATCH}", "trainer.lr=1e-3"]
        settings += ["trainer.warmup_steps=0", "trainer.eval_batches=1", "trainer.log_every_steps=10"]
        config = load_config("gpt_stdlib", [*settings, "logging.level=ERROR"])
        prepared = PythonStdlib(config.data, config.run.seed).prepare(arguments.threads)
        batches = TrainBatches(prepared.train, MODEL["block_size"], BATCH, config.run.seed, 256)
        ratios = []
        for number in range(arguments.rounds):
            theirs, mine = hugging_face(batches, arguments.steps, folder), ours(config)
            ratios.append(mine / theirs)
            print(
                f"round {number + 1}: Hugging Face {theirs:,.0f} tokens/s, llmtrain {mine:,.0f}, ratio {ratios[-1]:.2f}"
            )
    print(f"ratio llmtrain / Hugging Face Trainer, median of {arguments.rounds}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
