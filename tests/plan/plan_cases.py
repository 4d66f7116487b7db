"""Small models to plan, with configs of their runs."""

import json
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.plan.target import Target

GPT2: dict[str, Any] = {"name": "gpt", "n_layers": 2, "d_model": 64, "n_heads": 4, "block_size": 64, "vocab_size": 300}
MODERN: dict[str, Any] = {
    "name": "gpt",
    "architecture": "modern",
    "n_layers": 2,
    "d_model": 64,
    "block_size": 64,
    "vocab_size": 300,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
LLAMA_1B = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
EXAMPLES = {"name": "instruct_jsonl", "train_file": "examples.jsonl"}
GPU = Target("cuda", 24 * 10**9)
CPU = Target("cpu", 8 * 10**9)


def make_llama(directory: Path, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """The `model` of a config: a Llama of which only config.json exists."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields or LLAMA))
    return {"name": "hf_causal_lm", "path": str(directory), "block_size": 64}


def make_config(model: dict[str, Any], **fields: Any) -> Config:
    """`fields`: of the trainer, or sections."""
    sections = {name: fields.pop(name) for name in ("data", "distributed", "run", "launch") if name in fields}
    trainer = {"micro_batch_size": 4, "grad_accum_steps": 1, "max_steps": 10, "warmup_steps": 0, **fields}
    document: dict[str, Any] = {"model": model, "trainer": trainer, **sections}
    if model["name"] == "hf_causal_lm":
        document.setdefault("data", EXAMPLES)
    return load_config(document, for_launch=True)
