"""llmtrain compared with the Hugging Face Trainer and GPT-2 of transformers: same model, batch, data and threads.

    python benchmarks/gpt_cpu.py [--rounds 5 --steps 60]

Each round trains both for the same number of steps, one after the other in this process, and measures tokens/s after a
warm-up. Prints every round and the median of the ratios llmtrain / Hugging Face.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data.text.python_stdlib import PythonStdlib
from llmtrain.data.text.window_batches import WindowBatches
from llmtrain.training.run import run_training

WARM_UP = 10
# (layers, heads, width, context, batch, vocabulary): a first try on a laptop, Tiny Shakespeare, the default preset, the
# vocabulary of GPT-2. Larger shapes spend more of their time in matrix products, which are the same on both sides.
SHAPES = {
    "tiny": (2, 2, 64, 64, 8, 256),
    "small": (4, 4, 128, 64, 12, 256),
    "default": (4, 4, 128, 128, 16, 256),
    "gpt2-vocabulary": (4, 4, 128, 64, 4, 50257),
}
Shape = tuple[int, int, int, int, int, int]


class Clock(TrainerCallback):
    """Measures the steps after the warm-up."""

    def __init__(self, steps: int) -> None:
        self.steps, self.started, self.seconds = steps, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == WARM_UP:
            self.started = time.perf_counter()
        if state.global_step == self.steps:
            self.seconds = time.perf_counter() - self.started


def run_hugging_face(shape: Shape, batches: WindowBatches, steps: int, directory: str) -> float:
    layers, heads, width, context, batch, vocabulary = shape
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    rows = [{"input_ids": row, "labels": row} for i in range(steps) for row in batches[i].inputs]
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=batch,
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
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return (steps - WARM_UP) * batch * context / clock.seconds


def run_llmtrain(config: Config) -> float:
    # tokens_per_second excludes the first step; torch is warm on both sides by then.
    return run_training(config).tokens_per_second


def compare(name: str, shape: Shape, rounds: int, steps: int, threads: int) -> float:
    layers, heads, width, context, batch, vocabulary = shape
    with tempfile.TemporaryDirectory() as directory:
        settings = [f"model.n_layers={layers}", f"model.n_heads={heads}", f"model.d_model={width}"]
        settings += [f"model.block_size={context}", f"model.vocab_size={vocabulary}"]
        settings += [f"run.threads={threads}", f"output.root_dir={directory}", f"data.cache_dir={directory}"]
        settings += [f"trainer.max_steps={steps}", f"trainer.micro_batch_size={batch}", "trainer.lr=1e-3"]
        settings += ["trainer.warmup_steps=0", "trainer.eval_batches=1", "trainer.log_every_steps=10"]
        config = load_config("gpt_stdlib", [*settings, "logging.level=ERROR"])
        prepared = PythonStdlib(config.data, config.run.seed).prepare(threads)
        batches = WindowBatches(prepared.train, context, batch, 1, config.run.seed, vocabulary)
        ratios = []
        for number in range(rounds):
            hf_rate = run_hugging_face(shape, batches, steps, directory)
            llmtrain_rate = run_llmtrain(config)
            ratios.append(llmtrain_rate / hf_rate)
            print(
                f"{name}, round {number + 1}: Hugging Face {hf_rate:,.0f} tokens/s, llmtrain {llmtrain_rate:,.0f}",
                flush=True,
            )
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    for name in arguments.shape or SHAPES:
        ratio = compare(name, SHAPES[name], arguments.rounds, arguments.steps, arguments.threads)
        print(f"ratio llmtrain / Hugging Face Trainer, {name}, median of {arguments.rounds}: {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
