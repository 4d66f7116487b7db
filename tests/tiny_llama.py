"""A tiny random Llama with a chat tokenizer, and rows to fine-tune it on, made on the spot: no network, no files of
others. Everything that a real model directory has is there."""

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
"""More than the tokenizer has: real models round theirs up."""


def make_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A model directory; changes are fields of LlamaConfig."""
    vocab_size = make_tokenizer(folder)
    tiny_llama(seed, **{"vocab_size": vocab_size, **changes}).save_pretrained(folder)
    return folder


def tiny_llama(seed: int = 0, **changes: object) -> Any:
    """The model alone, always with the same weights for a seed; changes are fields of LlamaConfig."""
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
    """What `build` makes from torch's generator at this seed, with matrices large enough that logits differ from 0."""
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    torch.set_rng_state(before)
    return model


def make_tokenizer(folder: Path) -> int:
    """Byte pairs with ChatML's special tokens and template; the size of the vocabulary."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=300, special_tokens=special, show_progress=False)
    trained.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return int(trained.get_vocab_size())


def make_rows(path: Path, count: int, first: int = 0) -> Path:
    """Rows of different lengths, all of which fit into 128 tokens."""
    rows = []
    for number in range(first, first + count):
        words = [WORDS[(number * 7 + i) % len(WORDS)] for i in range(1 + number % 5)]
        row = {"instruction": f"say {words[0]}", "input": " ".join(words[1:]), "output": " ".join(reversed(words))}
        rows.append(json.dumps(row))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def make_chats(path: Path, count: int) -> Path:
    """Conversations of one or two turns."""
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "be brief"}] if number % 3 == 0 else []
        for turn in range(1 + number % 2):
            word = WORDS[(number + turn) % len(WORDS)]
            messages += [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
        rows.append(json.dumps({"messages": messages}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path
