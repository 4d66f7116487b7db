"""What `llmtrain plan` predicts beside what training needs: peak memory and time of a step.

    python benchmarks/plan.py [--out results.json] [--only "gpt2 124m;llama lora"]     the shapes of this machine
    python benchmarks/plan.py --tiny                                                   one tiny shape, on a CPU

On a GPU: torch.cuda.max_memory_allocated of steps with the model, loss, optimizer and step of `llmtrain train`, random
weights and random tokens. On a CPU: the peak of the process. Each shape is measured in a process of its own; one that
fails is reported, and the next one follows. ratio: predicted / measured. Time is predicted from FLOPs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config

PEAK_STEPS = 3
TIMED_STEPS = {"cuda": 4, "cpu": 1}
LIMIT_SECONDS = 150
LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
SMALL: dict[str, Any] = {"name": "gpt", "n_layers": 12, "d_model": 768, "n_heads": 12, "block_size": 1024}
SMALL |= {"vocab_size": 50304}
MEDIUM = SMALL | {"n_layers": 24, "d_model": 1024, "n_heads": 16}
MODERN: dict[str, Any] = {"name": "gpt", "architecture": "modern", "size": "124m", "block_size": 1024}
MODERN |= {"vocab_size": 50304}
MODERN_MEDIUM = MODERN | {"size": "350m"}
LLAMA: dict[str, Any] = {"name": "hf_causal_lm", "block_size": 2048}
LORA = LLAMA | {"lora": {"rank": 16}, "dtype": "bfloat16"}
CPU_SMALL: dict[str, Any] = {"name": "gpt", "n_layers": 4, "d_model": 256, "n_heads": 4, "block_size": 256}
CPU_SMALL |= {"vocab_size": 8192}
CPU_MODERN = {**CPU_SMALL, "architecture": "modern"}
del CPU_MODERN["n_heads"]
CPU_WIDE = CPU_SMALL | {"n_layers": 6, "d_model": 512, "n_heads": 8, "vocab_size": 50304}
TINY = CPU_SMALL | {"n_layers": 1, "d_model": 64, "block_size": 64, "vocab_size": 300}


@dataclass(frozen=True)
class Shape:
    name: str
    model: dict[str, Any]
    micro_batch: int
    trainer: dict[str, Any]
    is_packed: bool = False
    is_sharded: bool = False

    def config(self, directory: Path, device: str) -> Config:
        """The config of a run of this shape; the Llama's directory is written."""
        model = dict(self.model)
        trainer = {"precision": "bf16" if device == "cuda" else "fp32", "compile": False, **self.trainer}
        trainer |= {"micro_batch_size": self.micro_batch, "max_steps": 100, "warmup_steps": 0, "schedule": "constant"}
        trainer.setdefault("grad_accum_steps", 1)
        document: dict[str, Any] = {"model": model, "trainer": trainer, "run": {"device": device}}
        if model["name"] == "hf_causal_lm":
            (directory / "config.json").write_text(json.dumps(LLAMA_1B))
            model["path"] = str(directory)
            document["data"] = {"name": "instruct_jsonl", "train_file": "examples.jsonl", "packing": self.is_packed}
        if self.is_sharded:
            document["distributed"] = {"strategy": "fsdp"}
        return load_config(document, for_launch=True)


GPU_SHAPES = [
    Shape("gpt2 124m", SMALL, 1, {}),
    Shape("gpt2 124m", SMALL, 16, {}),
    Shape("gpt2 124m", SMALL, 64, {}),
    Shape("gpt2 124m, accumulation 2", SMALL, 8, {"grad_accum_steps": 2}),
    Shape("gpt2 124m, muon", SMALL, 16, {"optimizer": "muon"}),
    Shape("gpt2 124m, checkpointing blocks", SMALL, 32, {"activation_checkpointing": "blocks"}),
    Shape("modern 124m", MODERN, 16, {}),
    Shape("modern 124m, muon", MODERN, 8, {"optimizer": "muon"}),
    Shape("modern 124m, checkpointing selective", MODERN, 16, {"activation_checkpointing": "selective"}),
    Shape("gpt2 350m", MEDIUM, 16, {}),
    Shape("modern 350m, muon", MODERN_MEDIUM, 4, {"optimizer": "muon"}),
    Shape("gpt2 124m, fsdp", SMALL, 16, {}, is_sharded=True),
    Shape("llama lora", LORA, 4, {}),
    Shape("llama lora, packed", LORA, 4, {}, is_packed=True),
    Shape("llama lora, checkpointing blocks", LORA, 8, {"activation_checkpointing": "blocks"}),
    Shape("llama full", LLAMA, 4, {}),
    Shape("llama full, bf16 weights, packed", LLAMA | {"dtype": "bfloat16"}, 2, {}, is_packed=True),
    Shape("gpt2 124m, compiled", SMALL, 64, {"compile": True}),
    Shape("modern 124m, muon, compiled", MODERN, 16, {"optimizer": "muon", "compile": True}),
    Shape("modern 350m, muon, compiled", MODERN_MEDIUM, 16, {"optimizer": "muon", "compile": True}),
    Shape("llama lora, packed, compiled", LORA, 8, {"compile": True}, is_packed=True),
    Shape("llama full, packed, compiled", LLAMA, 8, {"compile": True}, is_packed=True),
]
CPU_SHAPES = [
    Shape("gpt2 5m", CPU_SMALL, 4, {}),
    Shape("gpt2 5m", CPU_SMALL, 16, {}),
    Shape("gpt2 5m", CPU_SMALL, 48, {}),
    Shape("gpt2 5m, checkpointing blocks", CPU_SMALL, 16, {"activation_checkpointing": "blocks"}),
    Shape("gpt2 5m, accumulation 2", CPU_SMALL, 8, {"grad_accum_steps": 2}),
    Shape("modern 5m", CPU_MODERN, 16, {}),
    Shape("modern 5m, muon", CPU_MODERN, 8, {"optimizer": "muon"}),
    Shape("gpt2 45m", CPU_WIDE, 1, {}),
    Shape("gpt2 45m", CPU_WIDE, 6, {}),
    Shape("gpt2 45m, muon", CPU_WIDE, 2, {"optimizer": "muon"}),
]
TINY_SHAPES = [Shape("tiny", TINY, 2, {})]


def predict(config: Config) -> dict[str, Any]:
    from llmtrain.core.gpus import gpu_of_device
    from llmtrain.plan.plan import make_plan
    from llmtrain.plan.target import Target

    target = Target("cpu", None)
    if config.run.device == "cuda":
        target = Target("cuda", None, gpu_of_device(torch.cuda.get_device_name(0)))
    began = time.perf_counter()
    plan = make_plan(config, target)
    if plan.memory is None or plan.memory.peak is None or plan.time is None:
        raise RuntimeError(plan.reason if plan.memory is None else str(plan.memory.unknown))
    return {
        "predicted_peak": plan.memory.peak,
        "predicted_memory": plan.memory.as_dict(),
        "predicted_seconds": plan.time.seconds_per_step or _seconds(config, plan.time.tokens_per_second),
        "plan_seconds": time.perf_counter() - began,
    }


def _seconds(config: Config, tokens_per_second: float | None) -> float | None:
    """Of a step without padding."""
    trainer = config.trainer
    tokens = trainer.micro_batch_size * trainer.grad_accum_steps * config.model.block_size
    return tokens / tokens_per_second if tokens_per_second else None


def make_batches(config: Config, vocabulary: int, is_packed: bool) -> list[Any]:
    """The micro-batches of a step: random tokens, packed ones as four examples per sequence."""
    from llmtrain.data.batches import Batch

    trainer = config.trainer
    rows, length = trainer.micro_batch_size, config.model.block_size
    generator = np.random.default_rng(1)
    positions = None
    if is_packed:
        positions = torch.from_numpy(np.tile(np.arange(length) % (length // 4), (rows, 1)))
    batches = []
    for number in range(trainer.grad_accum_steps):
        tokens = torch.from_numpy(generator.integers(3, vocabulary, size=(rows, length + 1)))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        batches.append(Batch(inputs, targets, inputs.numel(), number * rows, inputs.numel(), positions))
    return batches


def open_world(config: Config) -> AbstractContextManager[Any]:
    """A world of one process: joined with FSDP, which shards only then."""
    from llmtrain.distributed.world import World, join_world

    if config.distributed.strategy != "fsdp":
        return nullcontext(World(device=torch.device(config.run.device)))
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"})
    return join_world(config.distributed, config.run)


def measure(shape: Shape, config: Config) -> dict[str, Any]:
    """Train a few steps in this process."""
    from llmtrain import registry
    from llmtrain.models.compute_dtype import compute_in
    from llmtrain.models.device_precision import cast_dtype
    from llmtrain.training.components import build_objective
    from llmtrain.training.model_handle import build_model
    from llmtrain.training.optimizer import build_optimizer
    from llmtrain.training.step import Stepper, TokenCounts
    from llmtrain.training.throughput import peak_memory_bytes
    from llmtrain.training.torch_settings import set_up_torch

    config = config.with_values("run", threads=config.run.threads or torch.get_num_threads())
    set_up_torch(config.run)
    trainer = config.trainer
    with open_world(config) as world:
        is_cuda = world.device.type == "cuda"
        adapter = registry.resolve("model.name", config.model.name, registry.MODELS)(config.model, 0)
        adapter.prepare_for(world.device, shape.is_packed)
        with torch.device(world.device):
            module = adapter.build_empty()
        if getattr(config.model, "dtype", None) == "bfloat16":
            for name, parameter in module.named_parameters():
                if ".lora_" not in name:
                    parameter.data = parameter.data.bfloat16()
        dtype = cast_dtype(trainer, adapter, world.device)
        if dtype and not shape.is_sharded:
            compute_in(module, dtype)
        adapter.probe(module)
        objective = build_objective(trainer.objective)
        components: Any = SimpleNamespace(
            adapter=adapter, module=module, objective=objective, micro_batches=trainer.grad_accum_steps
        )
        model = build_model(components, trainer, config.distributed, world)
        optimizer = build_optimizer(adapter, module, trainer, world)
        stepper = Stepper(model, optimizer, world, 1, trainer, lambda *_: None)
        vocabulary = LLAMA_1B["vocab_size"] if config.model.name == "hf_causal_lm" else adapter.vocab_size
        batches = make_batches(config, vocabulary, shape.is_packed)
        tokens = sum(batch.token_count for batch in batches)
        if is_cuda:  # of building the model
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def step(number: int) -> None:
            result = stepper.train_step(number, batches, 0, TokenCounts(tokens, tokens, tokens))
            result.losses.sum().item()  # waits for the GPU

        for number in range(PEAK_STEPS):
            step(number)
        peak = peak_memory_bytes(world.device)
        reserved = torch.cuda.max_memory_reserved() if is_cuda else None
        began = time.perf_counter()
        timed = TIMED_STEPS[world.device.type]
        for number in range(PEAK_STEPS, PEAK_STEPS + timed):
            step(number)
        seconds = (time.perf_counter() - began) / timed
    return {"measured_peak": peak, "measured_seconds": seconds, "measured_reserved": reserved}


def measure_in_child(number: int, shapes: str, device: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", str(number), "--shapes", shapes, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(shape: Shape, result: dict[str, Any]) -> str:
    name = f"{shape.name}, {shape.micro_batch}"
    if "error" in result:
        return f"{name:44}failed: {result['error'][:100]}"
    peaks = result["predicted_peak"], result["measured_peak"]
    text = f"{name:44}{peaks[0] / 1e9:>9.2f}{peaks[1] / 1e9:>10.2f} GB{peaks[0] / peaks[1]:>8.2f}"
    predicted = result["predicted_seconds"]
    if predicted is None:
        return f"{text}{'unknown':>11}{result['measured_seconds'] * 1e3:>10.0f} ms"
    ratio = predicted / result["measured_seconds"]
    return f"{text}{predicted * 1e3:>11.0f}{result['measured_seconds'] * 1e3:>10.0f} ms{ratio:>8.2f}"


def run(shapes: list[Shape], name: str, device: str, only: list[str], out: Path | None) -> None:
    columns = f"{'plan':>9}{'measured':>10}   {'ratio':>8}{'plan':>11}{'measured':>10}   {'ratio':>8}"
    print(f"{'shape, micro-batch':44}{columns}")
    results = []
    for number, shape in enumerate(shapes):
        if only and not any(part in shape.name for part in only):
            continue
        result: dict[str, Any] = asdict(shape)
        try:
            with tempfile.TemporaryDirectory() as directory:
                result |= predict(shape.config(Path(directory), device))
            result |= measure_in_child(number, name, device)
        except Exception as problem:  # the next shape may work
            result["error"] = f"{type(problem).__name__}: {problem}"
        results.append(result)
        print(row(shape, result), flush=True)
        if out:
            out.write_text(json.dumps(results, indent=1))
    ratios = [each["predicted_peak"] / each["measured_peak"] for each in results if "error" not in each]
    if ratios:
        largest = max(ratios, key=lambda ratio: abs(ratio - 1))
        print(f"memory: ratio {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} shapes, farthest {largest:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Write all results as JSON.")
    parser.add_argument("--only", default="", help="Parts of names of shapes, separated by semicolons.")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", choices=("gpu", "cpu", "tiny"), help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu")
    name = arguments.shapes or ("tiny" if arguments.tiny else "gpu" if device == "cuda" else "cpu")
    shapes = {"gpu": GPU_SHAPES, "cpu": CPU_SHAPES, "tiny": TINY_SHAPES}[name]
    if arguments.measure is not None:
        shape = shapes[arguments.measure]
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(measure(shape, shape.config(Path(directory), device))))
        return
    run(shapes, name, device, [part for part in arguments.only.split(";") if part], arguments.out)


if __name__ == "__main__":
    main()
