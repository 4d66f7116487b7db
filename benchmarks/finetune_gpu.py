"""Fine-tuning a Llama of 1.24 B with random weights on one GPU: tokens/s, peak memory and recompilations of variants.

    python benchmarks/finetune_gpu.py [--seconds 150] [--only "lora;full, float32 weights"] \
        [--profile "lora"] [--no-profile]
    python benchmarks/finetune_gpu.py --fp8                  bf16 against fp8, full and with LoRA
    python benchmarks/finetune_gpu.py --attention            only attention: flex_attention and varlen flash attention
    python benchmarks/finetune_gpu.py --tiny                 a tiny model on a CPU

Each variant trains on 8 x 2048 tokens of synthetic packed examples per step, with the model, loss, optimizer and step
of `llmtrain train` (trainer.compile, precision bf16). tokens/s count no padding; the first steps, which compile, do not
count. `compiled` is the number of graphs that were compiled before and after those first steps. Variants that do not
fit in the time are left out. Then the kernels that take most of the time in a step of the first variant, or of those
named by --profile.
"""

import argparse
import gc
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmtrain.compat.numerics import LATEST

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
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Variant:
    name: str
    has_lora: bool
    dtype: str
    attention: str = "auto"
    is_grouped: bool = True
    """LoRA layers with a common input together."""
    recomputes: bool | None = None
    """Norms and SwiGLU in the backward pass. None: as `llmtrain train` does."""
    precision: str = "bf16"
    numerics: int = LATEST
    """Version: 1 has small chunks of the loss, 2 large ones and the gradient in the place of the logits, 3 one kernel
    for both."""


VARIANTS = [
    Variant("lora", True, "bfloat16"),
    Variant("full, float32 weights", False, "float32"),
    Variant("full, bfloat16 weights and state", False, "bfloat16"),
    Variant("lora, recomputes norms and SwiGLU", True, "bfloat16", recomputes=True),
    Variant("lora, one layer at a time", True, "bfloat16", is_grouped=False),
    Variant("lora, sdpa", True, "bfloat16", attention="sdpa"),
    Variant("lora, numerics version 1", True, "bfloat16", numerics=1),
    Variant("lora, numerics version 2", True, "bfloat16", numerics=2),
    Variant("full, saves norms and SwiGLU", False, "float32", recomputes=False),
    Variant("full, sdpa", False, "float32", attention="sdpa"),
    Variant("full, fp8", False, "float32", precision="fp8"),
    Variant("lora, fp8", True, "bfloat16", precision="fp8"),
]
OF_FP8 = ("full, float32 weights", "full, fp8", "lora", "lora, fp8")


@dataclass(frozen=True)
class Shape:
    config: dict[str, Any]
    sequences: int
    length: int
    device: torch.device
    warm_up: int = 4
    steps: int = 12


def make_batches(shape: Shape, count: int) -> list[Any]:
    """Packed examples of 50 to 950 tokens (on the CPU shorter ones), all with loss on most of their tokens."""
    from llmtrain.core.targets import IGNORE_INDEX
    from llmtrain.data.batches import Batch
    from llmtrain.data.examples.example_batches import pack

    generator = np.random.default_rng(1)
    longest = min(950, shape.length // 2)
    lengths = generator.integers(longest // 19, longest, size=count * shape.sequences * 6)
    bins = pack(lengths, shape.length)
    batches = []
    for number in range(count):
        tokens = generator.integers(3, shape.config["vocab_size"], size=(shape.sequences, shape.length + 1))
        targets, positions = tokens[:, 1:].copy(), np.zeros((shape.sequences, shape.length), dtype=np.int64)
        token_count = 0
        for row in range(shape.sequences):
            start = 0
            for length in lengths[bins[number * shape.sequences + row]].tolist():
                positions[row, start : start + length] = np.arange(length)
                targets[row, start : start + 8] = IGNORE_INDEX  # the prompt
                start += length
            positions[row, start:] = np.arange(shape.length - start)
            targets[row, start:] = IGNORE_INDEX
            token_count += start
        arrays = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets)
        counts = int((targets != IGNORE_INDEX).sum()), number * shape.sequences, token_count
        batch = Batch(*arrays, *counts, torch.from_numpy(positions))
        if shape.device.type == "cuda":  # as the data loader does: else each copy waits for the GPU
            pinned = {name: getattr(batch, name).pin_memory() for name in ("inputs", "targets", "positions")}
            batch = batch._replace(**pinned)
        batches.append(batch)
    return batches


def build(variant: Variant, shape: Shape, directory: Path) -> tuple[Any, Any]:
    """The adapter and the module, initialized on the device."""
    from llmtrain.compat.numerics import Numerics
    from llmtrain.config.model import HfCausalLmSection, LoraSection
    from llmtrain.models.compute_dtype import compute_in
    from llmtrain.models.fp8 import use_fp8
    from llmtrain.models.hf import causal_lm

    (directory / "config.json").write_text(json.dumps(shape.config))
    lora = LoraSection() if variant.has_lora else None
    section = HfCausalLmSection(
        path=str(directory), block_size=shape.length, dtype=variant.dtype, attention=variant.attention, lora=lora
    )
    adapter = causal_lm.HFCausalLMAdapter(section, 100)
    adapter.prepare_for(shape.device, is_packed=True)
    grouped = causal_lm.add_lora
    if not variant.is_grouped:
        causal_lm.add_lora = lambda model, section, **_: grouped(model, section, grouped=False)
    try:
        with torch.device(shape.device):
            module = adapter.build_empty()
    finally:
        causal_lm.add_lora = grouped
    for name, parameter in module.named_parameters():
        if variant.dtype == "bfloat16" and ".lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    module.numerics = Numerics(variant.numerics)
    if variant.precision == "fp8":
        use_fp8(adapter.blocks(module))
    compute_in(module, torch.bfloat16)
    adapter.probe(module)
    assert module.has_linear_head
    assert adapter.separates_packed_examples(module)
    return adapter, module


def make_step(variant: Variant, shape: Shape, directory: Path) -> Callable[[int, Any], Any]:
    from contextlib import nullcontext

    from llmtrain.config.trainer import TrainerSection
    from llmtrain.distributed.parallel import ParallelModel
    from llmtrain.distributed.world import World
    from llmtrain.training.components import build_objective
    from llmtrain.training.model_handle import ModelHandle
    from llmtrain.training.optimizer import build_adamw
    from llmtrain.training.step import Stepper, TokenCounts

    adapter, module = build(variant, shape, directory)
    loss_function = adapter.compiled_loss(module, by_block=True)
    if variant.recomputes is not None:
        torch._functorch.config.ban_recompute_materialized_backward = not variant.recomputes
    config = TrainerSection(max_steps=100, lr=1e-5, max_grad_norm=1.0, schedule="constant")
    optimizer = build_adamw(module, config)
    objective = build_objective(config.objective)
    parallel = ParallelModel(module)
    handle = ModelHandle(adapter, module, parallel, loss_function, nullcontext, objective, adapter.group_losses)
    stepper = Stepper(handle, optimizer, World(device=shape.device), 1, config, lambda *_: None)

    def counts(batch: Any) -> Any:
        return TokenCounts(batch.target_count, batch.token_count, batch.target_count)

    def step(number: int, batch: Any) -> Any:
        return stepper.train_step(number, [batch], 0, counts(batch))

    return step


def measure(variant: Variant, shape: Shape, profile: bool) -> str:
    """Print a row; returns the table of kernels if asked for."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    is_cuda = shape.device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        step = make_step(variant, shape, Path(directory))
    batches = make_batches(shape, shape.warm_up + shape.steps)
    losses = [step(number, batch).losses.sum().item() for number, batch in enumerate(batches[: shape.warm_up])]
    before = counters["stats"]["unique_graphs"]
    if is_cuda:
        torch.cuda.synchronize()
    compiled, started = time.perf_counter() - began, time.perf_counter()
    for number, batch in enumerate(batches[shape.warm_up :]):
        result = step(shape.warm_up + number, batch)
    losses.append(result.losses.sum().item())  # waits for the GPU
    seconds = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else float("nan")
    speed = sum(batch.token_count for batch in batches[shape.warm_up :]) / seconds
    after = counters["stats"]["unique_graphs"] - before
    print(
        f"{variant.name:34}{speed:>10,.0f}{memory:>9.1f} GB{seconds / shape.steps * 1e3:>9.1f} ms"
        f"{before:>7} + {after}{compiled:>9.1f} s   {losses[0]:.3f} -> {losses[-1]:.3f}",
        flush=True,
    )
    return kernels(variant.name, step, batches[-2:], is_cuda) if profile else ""


def kernels(name: str, step: Callable[[int, Any], Any], batches: list[Any], is_cuda: bool) -> str:
    activities = [torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for batch in batches:
            step(0, batch)
        if is_cuda:
            torch.cuda.synchronize()
    events = profiler.key_averages()
    times = {event.key: (event.self_device_time_total if is_cuda else event.self_cpu_time_total) for event in events}
    total = sum(times.values()) / len(batches) / 1e3
    lines = [f"kernels of a step of {name}, {total:.1f} ms in all:"]
    for event in sorted(events, key=lambda event: -times[event.key])[:25]:
        milliseconds = times[event.key] / len(batches) / 1e3
        lines.append(f"  {milliseconds:>8.2f} ms {event.count // len(batches):>6} x  {event.key[:110]}")
    return "\n".join(lines) + "\n"


def compare_attention(shape: Shape) -> None:
    """Milliseconds of the forward and backward pass of one layer: flex_attention, and the flash attention of torch with
    the lengths of the examples (varlen), which needs their number on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    from llmtrain.models.hf.attention import example_mask

    device, config = shape.device, shape.config
    positions = make_batches(shape, 1)[0].positions.to(device)
    count, length = positions.shape
    generator = torch.Generator(device).manual_seed(0)
    heads = [config["num_attention_heads"], *[config["num_key_value_heads"]] * 2]
    size = config["head_dim"]
    q, k, v = (torch.randn(count * length, h, size, device=device, generator=generator).bfloat16() for h in heads)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    starts = (positions.flatten() == 0).nonzero().flatten().int()
    borders = torch.cat([starts, starts.new_tensor([count * length])])
    longest = int(borders.diff().max())
    mask, compiled = example_mask(positions), torch.compile(flex_attention)

    def flex(options: dict[str, Any] | None = None) -> torch.Tensor:
        split = [tensor.view(count, length, -1, size).transpose(1, 2) for tensor in inputs]
        out: torch.Tensor = compiled(*split, block_mask=mask, enable_gqa=True, kernel_options=options)
        return out.transpose(1, 2).reshape(count * length, -1, size)

    def varlen(limit: int = longest) -> torch.Tensor:
        arguments = *inputs, borders, borders, limit, limit, 0.0, True, False
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(*arguments, scale=size**-0.5)[0]
        return out

    def cudnn() -> torch.Tensor:
        q, k, v = inputs
        k, v = (each.repeat_interleave(heads[0] // heads[1], dim=1) for each in (k, v))
        arguments = q, k, v, None, borders, borders, longest, longest, True, 0.0, True, False
        out: torch.Tensor = torch.ops.aten._cudnn_attention_forward(*arguments, scale=size**-0.5)[0]
        return out

    variants: dict[str, Callable[[], torch.Tensor]] = {
        "flex_attention": flex,
        "varlen": varlen,
        "varlen, any length": lambda: varlen(length),
        "cudnn": cudnn,
        "flex_attention, 64 x 64 backward": lambda: flex(
            {"BLOCK_M1": 64, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64, "bwd_num_warps": 4}
        ),
        "varlen, deterministic": varlen,
    }
    print(f"{len(starts)} examples, the longest {longest}", flush=True)
    expected = None
    for name, function in variants.items():
        torch.use_deterministic_algorithms("deterministic" in name)
        try:
            out = function()
            expected = out.detach() if expected is None else expected
            distance = (out - expected).abs().max().item()
            forward = time_of(function)
            both = time_of(partial(backward, function, expected))
            print(f"{name:34}{forward:>8.3f} ms, with backward {both:.3f} ms, distance {distance:.4f}", flush=True)
        except Exception as problem:
            print(f"{name:34} failed: {type(problem).__name__}: {str(problem)[:600]}", flush=True)


def backward(function: Callable[[], torch.Tensor], gradient: torch.Tensor) -> None:
    function().backward(gradient)  # type: ignore[no-untyped-call]


def time_of(function: Callable[[], Any], repeats: int = 20) -> float:
    """Milliseconds on the GPU."""
    for _ in range(3):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150, help="start no variant after this time")
    parser.add_argument("--only", default="", help="names of the variants, separated by semicolons")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="only bf16 and fp8")
    parser.add_argument("--profile", default="", help="show the kernels of these variants, separated by semicolons")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if not (arguments.tiny or torch.cuda.is_available()):
        print("skipped: needs a GPU, or --tiny")
        return
    shape = Shape(LLAMA_1B, 8, 2048, torch.device("cuda"))
    if arguments.tiny:
        shape = Shape(LLAMA_1B | TINY, 2, 64, torch.device("cpu"), warm_up=2, steps=2)
    if arguments.attention:
        compare_attention(shape)
        return
    start = time.perf_counter()
    print(f"{'':34}{'tokens/s':>10}{'memory':>12}{'step':>12}{'compiled':>11}{'start-up':>11}   loss", flush=True)
    table = ""
    names = [name for name in arguments.only.split(";") if name] or (OF_FP8 if arguments.fp8 else [])
    profiled = [name for name in arguments.profile.split(";") if name]
    for variant in VARIANTS:
        if names and variant.name not in names:
            continue
        if time.perf_counter() - start > arguments.seconds:
            print(f"{variant.name:34} left out: no time")
            continue
        is_profiled = variant.name in profiled if profiled else not table
        try:
            table += measure(variant, shape, is_profiled and not arguments.no_profile)
        except Exception as problem:  # one variant must not cost the others their GPU time
            print(f"{variant.name:34} failed: {type(problem).__name__}: {str(problem)[:600]}", flush=True)
        gc.collect()
    print(table)


if __name__ == "__main__":
    main()
