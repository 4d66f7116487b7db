"""Preference tuning (DPO) compared with supervised fine-tuning on the same tokens: time per token and peak memory.

    python benchmarks/preferences.py --model DIR [--pairs pairs.jsonl --steps 8 --rounds 3]
    python benchmarks/preferences.py --llama        a Llama of 1.24 B parameters with random weights, on a GPU

Both sides train on the same batches, which have both answers of every pair: the supervised side with the loss of all
answer tokens. Each runs in a process of its own, with LoRA and with all weights. The reference log-probabilities are
computed before the first step; their time is printed apart. While other programs run, read the ratio of CPU time.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

LORA = {"rank": 16, "alpha": 32.0}
WARM_UP_STEPS = 2
LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def measure_side(options: argparse.Namespace) -> dict[str, float]:
    """Time per token and peak memory of one side, in this process."""
    import torch

    from llmtrain.config.load import load_config
    from llmtrain.config.objective import NextTokenSection
    from llmtrain.distributed.world import World, pick_device
    from llmtrain.training.components import build_components, build_objective
    from llmtrain.training.model_handle import build_model
    from llmtrain.training.objectives.references import compute_references, with_references
    from llmtrain.training.optimizer import build_optimizer
    from llmtrain.training.step import Stepper, TokenCounts
    from llmtrain.training.throughput import peak_memory_bytes
    from llmtrain.training.torch_settings import set_up_torch

    config = load_config(options.config)
    config = config.with_values("run", threads=config.run.threads or torch.get_num_threads())
    set_up_torch(config.run)
    world = World(device=pick_device(config.run.device))
    components = build_components(config, world)
    if options.side == "sft":
        components = replace(components, objective=build_objective(NextTokenSection()))
    model = build_model(components, config.trainer, config.distributed, world)
    reference_seconds = 0.0
    if components.objective.needs_reference:
        began = time.perf_counter()
        components = with_references(components, compute_references(components, model, world, lambda: False))
        reference_seconds = time.perf_counter() - began
    optimizer = build_optimizer(model.adapter, model.module, config.trainer, world)
    stepper = Stepper(model, optimizer, world, 1, config.trainer, lambda *_: None)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens = 0
    began = cpu_began = 0.0
    for step in range(options.steps):
        if step == WARM_UP_STEPS:
            began = time.perf_counter()
            cpu_began = time.process_time()
            tokens = 0
        batch = components.train_batches[step % components.train_batches.steps_in(1)]
        items = components.objective.items(batch)
        result = stepper.train_step(step, [batch], 0, TokenCounts(batch.target_count, batch.token_count, items))
        result.losses.sum().item()  # waits for the GPU
        tokens += batch.token_count
    seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - cpu_began
    memory = float(peak_memory_bytes(world.device))
    if world.device.type != "cuda":
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return {
        "seconds_per_token": seconds / tokens,
        "cpu_seconds_per_token": cpu_seconds / tokens,
        "memory": memory,
        "reference_seconds": reference_seconds,
    }


def write_config(directory: Path, options: argparse.Namespace, is_lora: bool) -> Path:
    data: dict[str, Any] = {
        "name": "preference_jsonl",
        "train_file": str(options.pairs),
        "val_fraction": 0.1,
        "on_bad_example": "skip",
        "cache_dir": str(directory / "cache"),
    }
    model: dict[str, Any] = {"name": "hf_causal_lm", "path": str(options.model), "block_size": options.block_size}
    trainer: dict[str, Any] = {
        "objective": {"name": "dpo"},
        "micro_batch_size": options.micro_batch_size,
        "max_steps": options.steps,
        "lr": 1e-5,
    }
    if is_lora:
        model["lora"] = LORA
    if options.llama:
        data["tokenizer"] = "byte"
        model["dtype"] = "bfloat16" if is_lora else "float32"
        trainer |= {"precision": "bf16", "compile": True}
    path = directory / ("lora.yaml" if is_lora else "full.yaml")
    path.write_text(json.dumps({"model": model, "data": data, "trainer": trainer, "logging": {"level": "ERROR"}}))
    return path


def write_llama(directory: Path) -> None:
    """Random weights, and pairs of random words for the byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA)).bfloat16()
    model.cpu().save_pretrained(directory / "model")
    lines = []
    for number in range(400):
        words = [f"word{(number * 7 + index) % 91}" for index in range(100 + number % 60)]
        lines.append(json.dumps({"prompt": words[0], "chosen": " ".join(words), "rejected": " ".join(words[::-2])}))
    (directory / "pairs.jsonl").write_text("\n".join(lines) + "\n")


def measure(side: str, config: Path, steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--config", str(config), "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.llama:
            write_llama(directory)
            options.model = directory / "model"
            options.pairs = directory / "pairs.jsonl"
        for is_lora in {"lora": (True,), "all": (False,)}.get(options.only, (True, False)):
            config = write_config(directory, options, is_lora)
            ratios: dict[str, list[float]] = {"seconds_per_token": [], "cpu_seconds_per_token": [], "memory": []}
            for number in range(options.rounds):
                sides = {side: measure(side, config, options.steps) for side in ("sft", "dpo")}
                for name, values in ratios.items():
                    values.append(sides["dpo"][name] / sides["sft"][name])
                shown = "; ".join(
                    f"{side} {1 / each['seconds_per_token']:,.0f} tokens/s, "
                    f"{1000 * each['cpu_seconds_per_token']:.2f} CPU ms per token, {each['memory'] / 1e9:.2f} GB"
                    for side, each in sides.items()
                )
                print(f"round {number + 1}: {shown}; references {sides['dpo']['reference_seconds']:.1f} s", flush=True)
            kind = "LoRA" if is_lora else "all weights"
            time_ratio, cpu_ratio, memory_ratio = (statistics.median(values) for values in ratios.values())
            times = f"time per token {time_ratio:.3f} (CPU time {cpu_ratio:.3f})"
            print(f"{kind}: ratio of {times}, memory {memory_ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--only", choices=["lora", "all"], help="with LoRA, or with all weights; default: both")
    parser.add_argument("--side", choices=["sft", "dpo"])
    parser.add_argument("--config")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure_side(options)))
        return
    if options.llama:
        import torch

        if not torch.cuda.is_available():
            print("skipped: --llama needs a GPU")
            return
    elif options.model is None or options.pairs is None:
        parser.error("pass --model and --pairs, or --llama")
    compare(options)


if __name__ == "__main__":
    main()
