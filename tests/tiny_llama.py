"""A tiny random Llama with a chat tokenizer, and rows to fine-tune it on, made on the spot: no network, no files of
others. Everything that a real model directory has is there."""

import json
from pathlib import Path

WORDS = "red green blue one two three cat dog fish sun moon rain hill lake road tree stone bread milk salt".split()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A model directory; changes are fields of LlamaConfig."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = make_tokenizer(folder)
    values: dict[str, object] = {
        "vocab_size": vocab_size,
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
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)  # type: ignore[arg-type]
    torch.set_rng_state(before)
    return folder


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
