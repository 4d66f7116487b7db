"""Tiny models to score tasks with, on one process or several, and tasks whose items are made here."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.model import GptSection, HfCausalLmSection, ModernGptSection
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.data.tokenizers.hf import HFTokenizer
from llmtrain.distributed.world import World
from llmtrain.models.base import ModelAdapter
from llmtrain.models.device_precision import Autocast
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.training.tasks.task_model import TaskModel
from tiny_llama import WORDS, make_model

SECTIONS = {
    "gpt2": GptSection(d_model=32, n_layers=2, n_heads=2, block_size=512, dropout=0.0),
    "modern": ModernGptSection(d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=64, block_size=512),
}


def gpt_model(
    kind: str = "gpt2", world: World | None = None, block_size: int | None = None, **options: Any
) -> TaskModel:
    """A random model of bytes, whose outputs depend on its inputs."""
    section = SECTIONS[kind]
    adapter = GPTAdapter(section.model_copy(update={"block_size": block_size or section.block_size}), 256)
    torch.manual_seed(0)
    return task_model(adapter, randomized(adapter.build()), ByteTokenizer(), world, **options)


def llama_model(directory: Path, world: World | None = None, **options: Any) -> TaskModel:
    from llmtrain.models.hf.causal_lm import HFCausalLMAdapter

    if not (directory / "config.json").is_file():
        make_model(directory)
    section = HfCausalLmSection(name="hf_causal_lm", path=str(directory), lora=None, block_size=128)
    tokenizer = HFTokenizer(directory)
    adapter = HFCausalLMAdapter(section, tokenizer.vocab_size)
    module = adapter.build()
    adapter.probe(module)
    return task_model(adapter, module, tokenizer, world, **options)


def task_model(
    adapter: ModelAdapter, module: torch.nn.Module, tokenizer: Any, world: World | None, **options: Any
) -> TaskModel:
    from contextlib import nullcontext

    autocast: Autocast = nullcontext
    return TaskModel(adapter, module.eval(), autocast, tokenizer, world or World(), **options)


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    """Blocks of a new model may be the identity: their outputs are made random too."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return module


def sentence(rng: random.Random, length: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(length))


def choice_items(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions with choices of different lengths, some of one token only."""
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        choices = [sentence(rng, rng.randint(1, 4)) for _ in range(rng.randint(2, 5))]
        items.append(
            {
                "question": sentence(rng, rng.randint(1, 12)),
                "choices": choices,
                "answer": rng.randrange(len(choices)),
            }
        )
    return items


def write_items(path: Path, items: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path
