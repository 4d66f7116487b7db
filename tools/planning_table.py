"""The tables of docs/planning.md that `llmtrain plan` computes: what fits, and predictions beside measured runs.

python tools/planning_table.py            write them; takes minutes
python tools/planning_table.py --check    only check that they are up to date
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.core.gpus import GIB, find_gpu
from llmtrain.plan.fake_model import fake_model
from llmtrain.plan.memory import estimate_memory
from llmtrain.plan.plan import Verdict, judge, make_plan
from llmtrain.plan.target import Target
from llmtrain.plan.time import estimate_time

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
BEGIN = "<!-- {name}, written by tools/planning_table.py -->\n\n"
END = "\n<!-- end -->\n"
LENGTH = 2048
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# (hidden, intermediate, layers, heads, key-value heads, vocabulary, tied)
SHAPES = {
    "1.2B": (2048, 8192, 16, 32, 8, 128256, True),
    "3.2B": (3072, 8192, 28, 24, 8, 128256, True),
    "6.7B": (4096, 11008, 32, 32, 32, 32000, False),
    "8.0B": (4096, 14336, 32, 32, 8, 128256, False),
    "13B": (5120, 13824, 40, 40, 40, 32000, False),
    "70B": (8192, 28672, 80, 64, 8, 128256, False),
}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora": {"rank": 16}, "dtype": "bfloat16"},
    "QLoRA": {"lora": {"rank": 16, "quantize": True}, "dtype": "bfloat16"},
    "full": {},
}
TARGETS = {
    "16 GB": Target("cuda", int(14.6 * GIB)),
    "24 GB (A10)": Target("cuda", find_gpu("a10-24g").memory_bytes, find_gpu("a10-24g")),
    "48 GB (L40S)": Target("cuda", find_gpu("l40s-48g").memory_bytes, find_gpu("l40s-48g")),
    "80 GB (H100)": Target("cuda", find_gpu("h100-80g").memory_bytes, find_gpu("h100-80g")),
    "141 GB (H200)": Target("cuda", find_gpu("h200-141g").memory_bytes, find_gpu("h200-141g")),
}
H200 = TARGETS["141 GB (H200)"]
COMPILED = {"precision": "bf16", "compile": True, "grad_accum_steps": 1, "warmup_steps": 0, "max_steps": 100}
GPT2 = {"name": "gpt", "n_layers": 12, "d_model": 768, "n_heads": 12, "block_size": 1024, "vocab_size": 50257}
MODERN = {"name": "gpt", "architecture": "modern", "size": "124m", "block_size": 1024, "vocab_size": 50257}
# (what, model, trainer, measured GB): one H200, compiled; docs/experiments.md
MEASURED: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("GPT-2 124M, 64 x 1024, AdamW", GPT2, {"micro_batch_size": 64}, 23.3),
    ("modern 124M, 64 x 1024, AdamW", MODERN, {"micro_batch_size": 64}, 20.9),
    ("modern 124M, 16 x 1024, Muon", MODERN, {"micro_batch_size": 16, "optimizer": "muon"}, 7.6),
    ("modern 350M, 16 x 1024, Muon", MODERN | {"size": "350m"}, {"micro_batch_size": 16, "optimizer": "muon"}, 17.1),
    ("Llama 1.24B, 8 x 2048 packed, LoRA rank 16", KINDS["LoRA"], {"micro_batch_size": 8}, 23.9),
    ("Llama 1.24B, 8 x 2048 packed, all weights", {}, {"micro_batch_size": 8}, 32.4),
    ("Llama 1.24B, 8 x 2048 packed, all weights in bf16", {"dtype": "bfloat16"}, {"micro_batch_size": 8}, 24.4),
]


def llama_config(directory: Path, size: str, model: dict[str, Any], trainer: dict[str, Any]) -> Config:
    hidden, intermediate, layers, heads, key_values, vocabulary, tied = SHAPES[size]
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }
    place = directory / size
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(fields))
    section = {"name": "hf_causal_lm", "path": str(place), "block_size": LENGTH, **model}
    data = {"name": "instruct_jsonl", "train_file": "examples.jsonl", "packing": True}
    return load_config({"model": section, "data": data, "trainer": {**COMPILED, **trainer}}, for_launch=True)


def largest(config: Config) -> dict[str, tuple[int, float | None]]:
    """Target -> the largest micro-batch that fits, and its tokens/s. All targets need the same memory."""
    model = fake_model(config, "cuda")
    best: dict[str, tuple[int, float | None]] = {}
    for size in MICRO_BATCHES:
        changed = config.with_values("trainer", micro_batch_size=size)
        memory = estimate_memory(changed, model, H200)
        fitting = [name for name, target in TARGETS.items() if judge(memory, target)[0] is Verdict.FITS]
        for name in fitting:
            tokens = float(size * LENGTH)
            time = estimate_time(changed, TARGETS[name], model.size, tokens, None)
            best[name] = size, time.tokens_per_second
        if not fitting:
            break
    return best


def fitting_table() -> str:
    lines = [f"| | {' | '.join(TARGETS)} |", f"|---{'|---' * len(TARGETS)}|"]
    with tempfile.TemporaryDirectory() as directory:
        for size in SHAPES:
            for kind in KINDS:
                lines.append(fitting_row(Path(directory), size, kind))
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def fitting_row(directory: Path, size: str, kind: str) -> str:
    config = llama_config(directory, size, KINDS[kind], {})
    checkpointed = config.with_values("trainer", activation_checkpointing="blocks")
    best = largest(config)
    other = largest(checkpointed) if len(best) < len(TARGETS) else {}
    cells = []
    for name in TARGETS:
        mark = "" if name in best else "*"
        found = best.get(name) or other.get(name)
        cells.append(_cell(*found, mark) if found else "-")
    return f"| {size}, {kind} | {' | '.join(cells)} |"


def _cell(size: int, speed: float | None, mark: str) -> str:
    return f"{size}{mark}" if speed is None else f"{size}{mark}, {float(f'{speed:.2g}'):,.0f}/s"


def measured_table() -> str:
    lines = ["| one H200, compiled | measured | predicted | |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        for number in range(len(MEASURED)):
            lines.append(measured_row(Path(directory), number))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def measured_row(directory: Path, number: int) -> str:
    what, model, trainer, measured = MEASURED[number]
    if "Llama" in what:
        config = llama_config(directory, "1.2B", model, trainer)
    else:
        config = load_config({"model": model, "trainer": {**COMPILED, **trainer}}, for_launch=True)
    memory = make_plan(config, H200).memory
    assert memory is not None
    assert memory.peak is not None
    predicted = memory.peak / 1e9
    ratio = 100 * (predicted / measured - 1)
    difference = round(ratio)
    shown = f"{difference:+}" if difference else "0"  # the sign of a difference that rounds to zero says nothing
    return f"| {what} | {measured} GB | {predicted:.1f} GB | {shown} % |"


def replaced(text: str, name: str, content: str) -> str:
    begin = BEGIN.format(name=name)
    changed, count = re.subn(
        re.escape(begin) + ".*?" + re.escape(END), lambda _: begin + content + END, text, flags=re.S
    )
    assert count == 1, f"{PAGE} has no {name} to replace"
    return changed


def main() -> None:
    text = replaced(PAGE.read_text(), "measured", measured_table())
    text = replaced(text, "fits", fitting_table())
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE.name} is out of date: run python tools/planning_table.py")


if __name__ == "__main__":
    main()
