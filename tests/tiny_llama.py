"""A tiny random Llama with a chat tokenizer, and examples to fine-tune it on, created without network access.
The model directory has every file that a real one has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "cat",
    "dog",
    "fish",
    "sun",
    "moon",
    "rain",
    "hill",
    "lake",
    "road",
    "tree",
    "stone",
    "bread",
    "milk",
    "salt",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


VOCAB_SIZE = 300
"""Larger than the tokenizer's, as real models round it up."""


def make_model(directory: Path, seed: int = 0, **changes: object) -> Path:
    """Write a model directory; changes are fields of LlamaConfig."""
    vocab_size = make_tokenizer(directory)
    tiny_llama(seed, **{"vocab_size": vocab_size, **changes}).save_pretrained(directory)
    return directory


def tiny_llama(seed: int = 0, **changes: object) -> Any:
    """The model, with the same weights for the same seed; changes are fields of LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        **changes,
    }
    logging.disable_progress_bar()
    return seeded(seed, lambda: LlamaForCausalLM(LlamaConfig(**values)))  # type: ignore[arg-type]


def tiny_gpt2(seed: int = 0, **changes: object) -> Any:
    """GPT-2's architecture; its layers are Conv1D, not nn.Linear."""
    from transformers import GPT2Config, GPT2LMHeadModel

    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **changes,
    }
    return seeded(seed, lambda: GPT2LMHeadModel(GPT2Config(**values)))  # type: ignore[arg-type]


def seeded(seed: int, build: Callable[[], Any]) -> Any:
    """A model built with torch's generator at this seed, with weights scaled up so that logits differ from 0."""
    import torch

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    torch.set_rng_state(state)
    return model


def make_tokenizer(directory: Path) -> int:
    """Write a BPE tokenizer with ChatML's special tokens and template; returns its vocabulary size."""
    import tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=300, special_tokens=special, show_progress=False)
    bpe.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return int(bpe.get_vocab_size())


def make_examples(path: Path, count: int, first: int = 0) -> Path:
    """Write examples of different lengths, each at most 128 tokens."""
    lines = []
    for number in range(first, first + count):
        words = [WORDS[(number * 7 + i) % len(WORDS)] for i in range(1 + number % 5)]
        example = {"instruction": f"say {words[0]}", "input": " ".join(words[1:]), "output": " ".join(reversed(words))}
        lines.append(json.dumps(example))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def make_chats(path: Path, count: int) -> Path:
    """Write conversations of one or two turns."""
    lines = []
    for number in range(count):
        messages = [{"role": "system", "content": "be brief"}] if number % 3 == 0 else []
        for turn in range(1 + number % 2):
            word = WORDS[(number + turn) % len(WORDS)]
            messages += [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
        lines.append(json.dumps({"messages": messages}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
