"""Training a byte-pair encoding (`llmtrain tokenizer train`)."""

import json
from collections.abc import Iterable
from pathlib import Path

from llmtrain.data.tokenizers.base import GENERIC_CLASS
from llmtrain.data.tokenizers.gpt2 import END_OF_TEXT
from llmtrain.data.tokenizers.hf import HFTokenizer
from llmtrain.errors import UsageError

MIN_VOCAB_SIZE = 257  # every byte, and end of text


def train_bpe(texts: Iterable[str], vocab_size: int, directory: Path) -> HFTokenizer:
    """Train a byte-level BPE with GPT-2's pre-tokenizer and write it as a Hugging Face tokenizer directory."""
    import tokenizers

    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(
            f"--vocab-size must be at least {MIN_VOCAB_SIZE} (all bytes and end of text), got {vocab_size}."
        )
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"Cannot write to {directory}: {problem.strerror or problem}.") from None
    bpe.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": GENERIC_CLASS, "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    return HFTokenizer(directory)
