"""Time to the same validation loss on one GPU: nanoGPT's model and recipe against the preset gpt_modern_124m (or 350m).

    python benchmarks/time_to_loss_gpu.py [--size 124m] [--seeds 1 2 3] [--baseline-seeds 1 2 3] [--leave-out] \
        [--results results.jsonl] [--minutes 9] [--directory /tmp/corpus]
    python benchmarks/time_to_loss_gpu.py --fp8 --size 350m --steps 3662 --baseline-seeds      bf16 against fp8
    python benchmarks/time_to_loss_gpu.py --tiny      a tiny model on a CPU

Text: every .py file of the standard library and of the installed packages, in GPT-2 tokens (TIKTOKEN_CACHE_DIR where
there is no network). The
baseline is written here from nanoGPT's published hyperparameters: GPT-2 without biases, AdamW, learning rate 6e-4 with
cosine decay to a tenth, 1,000 steps of 64 x 1024 tokens. Both are evaluated on the same tokens. Seconds are those of
training, without compilation and evaluation; `wall` has everything. The loss to reach is the mean of the baseline's
seeds. Results are appended to a file, so that runs can be spread over several calls; `--minutes` starts no further run
after that time. Prints one table, with ratios; `--picture FILE.svg` draws the training losses of the first run of the
baseline and of the recipe over the seconds of training.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain import metrics
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.core.svg import Curve, curve_svg
from llmtrain.distributed.world import World
from llmtrain.training.components import Components, build_components
from llmtrain.training.run import run_training

CORPUS_FILE_BYTES = 8 << 20
EVAL_SEQUENCES = 20 * 64
HIGHEST_LOSS_IN_PICTURE = 5.0  # the first steps would squeeze the rest
LEFT_OUT = {  # what is left out of the recipe -> settings
    "Muon (AdamW 1.5e-3)": ["trainer.optimizer=adamw", "trainer.lr=1.5e-3"],
    "batch of 16 (64, a quarter of the steps)": ["trainer.micro_batch_size=64", "trainer.max_steps={quarter}"],
    "heads of 128 dimensions (64)": ["model.n_heads=12"],
    "ReLU^2 (SwiGLU, exported as Qwen3)": ["model.mlp=swiglu"],
    "linear decay over the last half (cosine)": ["trainer.schedule=cosine"],
    "tied embeddings (untied)": ["model.tie_embeddings=false"],
}
RECIPES = {  # steps of the recipe that reach the loss of the baseline
    "124m": {"steps": 540, "n_layers": 12, "d_model": 768, "n_heads": 12},
    "350m": {"steps": 700, "n_layers": 24, "d_model": 1024, "n_heads": 16},
    "tiny": {"steps": 8, "n_layers": 2, "d_model": 32, "n_heads": 2},
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape  # noqa: N806
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(B, T, C))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class Baseline(nn.Module):
    """nanoGPT's GPT-2: no biases, tied embeddings, vocabulary padded to a multiple of 64."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(-(-vocabulary // 64) * 64, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if is_residual else 1))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def baseline_lr(step: int, steps: int, peak: float) -> float:
    warmup = steps // 20
    if step < warmup:
        return peak * (step + 1) / warmup
    decayed = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * decayed)))


def run_baseline(
    config: Config, seed: int, steps: int, lr: float, evaluation: Components, shape: dict[str, int]
) -> dict[str, Any]:
    """nanoGPT's recipe on the training tokens of a config, evaluated like the recipe."""
    started = time.perf_counter()
    device = evaluation.module.weight.device if hasattr(evaluation.module, "weight") else torch.device(DEVICE)
    components = build_components(config, World(device=torch.device("cpu")))
    torch.manual_seed(seed)
    model = Baseline(
        shape["n_layers"],
        shape["d_model"],
        shape["n_heads"],
        config.model.block_size,
        components.prepared.tokenizer.vocab_size,
    ).to(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model) if device.type == "cuda" else model
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    losses: list[torch.Tensor] = []

    def step(number: int) -> None:
        batch = components.train_batches[number].to(device)
        with autocast:
            loss = compiled(batch.inputs, batch.targets)
        losses.append(loss.detach())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = baseline_lr(number, steps, lr)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for number in range(min(3, steps)):  # compiles; not timed, and part of the training
        step(number)
    synchronize(device)
    reset_memory(device)
    timed = time.perf_counter()
    for number in range(3, steps):
        step(number)
    synchronize(device)
    seconds = (time.perf_counter() - timed) * steps / max(1, steps - 3)
    total, count = 0.0, 0
    with torch.no_grad(), autocast:
        for index in range(len(evaluation.eval_batches)):
            batch = evaluation.eval_batches[index].to(device)
            total += float(model(batch.inputs, batch.targets)) * batch.target_count
            count += batch.target_count
    tokens = steps * config.trainer.micro_batch_size * config.model.block_size
    row = measured(total / count, tokens, seconds, time.perf_counter() - started, device)
    every = max(1, steps // 100)
    means = [float(torch.stack(losses[end - every : end]).mean()) for end in range(every, steps + 1, every)]
    return row | {"curve": [[(index + 1) * every / steps, loss] for index, loss in enumerate(means)]}


def run_recipe(config: Config) -> dict[str, Any]:
    started = time.perf_counter()
    device = torch.device(DEVICE)
    reset_memory(device)
    result = run_training(config)
    tokens = result.steps * config.trainer.micro_batch_size * config.model.block_size
    seconds = tokens / result.tokens_per_second
    row = measured(result.final_val_loss, tokens, seconds, time.perf_counter() - started, device)
    rows = [row for row in metrics(result.run_dir) if "train/loss" in row]
    return row | {"curve": [[row["step"] / result.steps, row["train/loss"]] for row in rows]}


def measured(loss: float, tokens: int, seconds: float, wall: float, device: torch.device) -> dict[str, Any]:
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return {"loss": loss, "tokens": tokens, "seconds": seconds, "wall": wall, "memory": memory}


def draw(rows: list[dict[str, Any]]) -> str:
    """The training losses of one run of the baseline and one of the recipe, over the seconds of training."""
    curves = []
    for color, name in enumerate(("baseline", "recipe")):
        row = next((row for row in rows if row["name"].startswith(name) and row.get("curve")), None)
        if row is None:
            continue
        points = [(part * row["seconds"], loss) for part, loss in row["curve"] if loss <= HIGHEST_LOSS_IN_PICTURE]
        label = "nanoGPT's recipe" if name == "baseline" else f"gpt_modern_{row['size']}"
        curves.append(Curve(label, [x for x, _ in points], [y for _, y in points], color=color))
    return curve_svg("Training loss over seconds, one H200", curves)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def write_corpus(directory: Path, limit: int | None) -> list[str]:
    """Text files with all Python sources of this installation. Their order follows from their names: a package more or
    less, or another version of llmtrain, hardly changes the text, so that sittings can be compared."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files = {
        hashlib.sha256(str(file.relative_to(root)).encode()).hexdigest(): file
        for root in sorted(roots)
        for file in sorted(root.rglob("*.py"))
        if "llmtrain" not in file.relative_to(root).parts
    }
    order = [files[key] for key in sorted(files)][:limit]
    directory.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    part: list[str] = []
    size = 0
    for file in order:
        text = file.read_text(encoding="utf-8", errors="replace")
        part.append(text.replace("\x00", ""))
        size += len(text)
        if size > CORPUS_FILE_BYTES or file is order[-1]:
            path = directory / f"part-{len(written):03d}.txt"
            path.write_text("\n".join(part))
            written.append(str(path))
            part, size = [], 0
    return written


def settings(root: Path, files: list[str], size: str, seed: int) -> list[str]:
    common = [f"data.files={json.dumps(files)}", f"data.cache_dir={root}/cache", f"output.root_dir={root}/runs"]
    common += [f"run.seed={seed}", "trainer.eval_every_steps=null", "trainer.save_every_steps=null"]
    common += ["trainer.max_epochs=null", "logging.level=WARNING", "trainer.max_steps={steps}"]
    common += [f"run.device={DEVICE}", "run.threads=8", "trainer.grad_accum_steps=1", "data.val_fraction=0.025"]
    if size == "tiny":
        common += ["model.size=null", "model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.block_size=32"]
        common += ["data.tokenizer=byte", "trainer.micro_batch_size=2", "trainer.compile=false", "run.threads=1"]
        return [*common, "trainer.precision=fp32", "trainer.eval_batches=2", "trainer.warmup_steps=1"]
    return [*common, "trainer.micro_batch_size=16", f"trainer.eval_batches={EVAL_SEQUENCES // 16}"]


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def plan(arguments: argparse.Namespace, size: str) -> Iterator[tuple[str, int, list[str]]]:
    """(name, seed, settings) of every run. Names of baselines start with `baseline`."""
    for seed in arguments.seeds:
        yield "recipe", seed, []
        if arguments.fp8:
            yield "recipe in fp8", seed, ["trainer.precision=fp8"]
    for seed in arguments.baseline_seeds:
        yield f"baseline {arguments.baseline_lr:g}", seed, []
    if arguments.leave_out is not None:
        steps = arguments.steps or RECIPES[size]["steps"]
        for number, (name, values) in enumerate(LEFT_OUT.items()):
            if number in arguments.leave_out or not arguments.leave_out:
                yield (
                    f"without {name}",
                    arguments.leave_out_seed,
                    [value.format(quarter=steps // 4) for value in values],
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=["124m", "350m"], default="124m")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--baseline-seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--baseline-lr", type=float, default=6e-4)
    parser.add_argument("--baseline-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, help="steps of the recipe")
    parser.add_argument("--leave-out", type=int, nargs="*", help="all, or those with these numbers in LEFT_OUT")
    parser.add_argument("--leave-out-seed", type=int, default=1)
    parser.add_argument("--fp8", action="store_true", help="each run of the recipe also with trainer.precision fp8")
    parser.add_argument("--set", nargs="*", default=[], help="settings for every run of the recipe")
    parser.add_argument("--results", type=Path, help="append to this file, and print all results in it")
    parser.add_argument("--directory", type=Path, help="keep the text and its tokens here for the next call")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        print("skipped: needs a GPU")
        return
    size = "tiny" if arguments.tiny else arguments.size
    shape, deadline = RECIPES[size], time.monotonic() + 60 * arguments.minutes
    steps = arguments.steps or shape["steps"]
    baseline_steps, baseline_batch = (8, 4) if arguments.tiny else (arguments.baseline_steps, 64)
    with tempfile.TemporaryDirectory() as directory:
        root = arguments.directory or Path(directory)
        files = sorted(map(str, (root / "text").glob("*.txt")))
        files = files or write_corpus(root / "text", 60 if arguments.tiny else None)
        results = arguments.results or root / "results.jsonl"
        preset = f"gpt_modern_{arguments.size}"
        for name, seed, more in plan(arguments, size):
            if time.monotonic() > deadline:
                break
            base = [value.format(steps=steps) for value in settings(root, files, size, seed)]
            run_id = f"output.run_id=run-{os.getpid()}-{len(read_results(results))}"
            config = load_config(preset, [*base, *arguments.set, *more, run_id])
            if name.startswith("baseline"):
                evaluation = build_components(config, World(device=torch.device("cpu")))
                batch = load_config(preset, [*base, f"trainer.micro_batch_size={baseline_batch}", run_id])
                row = run_baseline(batch, seed, baseline_steps, arguments.baseline_lr, evaluation, shape)
            else:
                row = run_recipe(config)
            row = {"name": name, "size": size, "seed": seed, **row}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)
        rows = [row for row in read_results(results) if row["size"] == size]
        print_table(rows)
        if arguments.picture:
            arguments.picture.write_text(draw(rows))


def print_table(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["name"] for row in rows))
    runs = {name: [row for row in rows if row["name"] == name] for name in names}
    baseline = next((runs[name] for name in names if name.startswith("baseline")), None)
    print(f"{'':48}{'seeds':>6}{'val loss':>18}{'seconds':>9}{'M tokens':>10}{'tokens/s':>10}{'memory':>9}")
    for name in names:
        mean = {
            field: statistics.mean(row[field] for row in runs[name])
            for field in ("loss", "seconds", "tokens", "memory", "wall")
        }
        losses = [row["loss"] for row in runs[name]]
        spread = f"{mean['loss']:.4f}" + (f" +- {(max(losses) - min(losses)) / 2:.4f}" if len(losses) > 1 else "")
        print(
            f"{name:48}{len(losses):>6}{spread:>18}{mean['seconds']:>9.1f}{mean['tokens'] / 1e6:>10.1f}"
            f"{mean['tokens'] / mean['seconds']:>10,.0f}{mean['memory']:>6.1f} GB"
        )
    if baseline is None or "recipe" not in runs:
        print("ratio: needs runs of the baseline and of the recipe")
        return
    target = statistics.mean(row["loss"] for row in baseline)
    reached = [row["loss"] <= target for row in runs["recipe"]]
    ratios = {
        field: statistics.mean(row[field] for row in runs["recipe"]) / statistics.mean(row[field] for row in baseline)
        for field in ("seconds", "tokens", "wall")
    }
    print(f"loss to reach {target:.4f}: reached by {sum(reached)} of {len(reached)} runs of the recipe")
    print(f"ratio recipe / baseline: seconds {ratios['seconds']:.3f}, tokens {ratios['tokens']:.3f}, ", end="")
    print(f"with compilation and evaluation {ratios['wall']:.3f}")


if __name__ == "__main__":
    main()
