"""Tokenizing WikiText-2 into the token store against datasets.map with the same tokenizer on the same cores.

    python benchmarks/tokenize_speed.py [--data ../shared/data/wikitext-2/train.txt --rounds 3 --tokenizer bpe]

Both start from the text files and end with token ids on disk, for GPT-2's tokens (tiktoken) and for a tokenizer of
the tokenizers library; datasets.map is given both cores (num_proc=2) and batches of 1,000 rows. Set
TIKTOKEN_CACHE_DIR where there is no network. Prints the median ratio for each.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from llmtrain.data.store.token_store import smallest_dtype, write_tokens
from llmtrain.data.text.reader import read_chunks
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.bpe import train_bpe
from llmtrain.data.tokenizers.gpt2 import GPT2Tokenizer
from llmtrain.data.tokenizers.hf import HFTokenizer

PROCESSES = 2


def ours(tokenizer: Tokenizer, source: Path, folder: Path) -> tuple[float, int]:
    started = time.perf_counter()
    dtype = smallest_dtype(tokenizer.vocab_size)
    written = write_tokens(folder / "ours.bin", read_chunks(source), tokenizer, dtype, PROCESSES, "train")
    return time.perf_counter() - started, written.count


def theirs(encode: Callable[[dict[str, Any]], dict[str, Any]], rows: Any, folder: Path) -> tuple[float, int]:
    started = time.perf_counter()
    mapped = rows.map(
        encode,
        batched=True,
        num_proc=PROCESSES,
        remove_columns=["text"],
        load_from_cache_file=False,
        cache_file_name=str(folder / f"mapped-{time.time_ns()}.arrow"),
    )
    seconds = time.perf_counter() - started
    return seconds, int(sum(np.fromiter((len(ids) for ids in mapped["ids"]), dtype=np.int64)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=str(Path(__file__).parents[2] / "shared/data/wikitext-2/train.txt"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", choices=("gpt2", "bpe"), action="append", help="both of them")
    arguments = parser.parse_args()
    source = Path(arguments.data)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = datasets.load_dataset(
            "text", data_files=str(source), split="train", keep_linebreaks=True, cache_dir=str(folder / "datasets")
        )
        train_bpe((piece.text for piece in read_chunks(source)), 8192, folder / "bpe")
        kinds: dict[str, Callable[[], Tokenizer]] = {
            "gpt2": GPT2Tokenizer,
            "bpe": lambda: HFTokenizer(folder / "bpe"),
        }
        for label in arguments.tokenizer or kinds:
            ratios = []
            for _ in range(arguments.rounds):
                tokenizer = kinds[label]()  # a new one per round: ours remembers words
                their_seconds, their_count = theirs(partial(encode, tokenizer), rows, folder)
                our_seconds, our_count = ours(tokenizer, source, folder)
                ratios.append(their_seconds / our_seconds)
                print(f"{label}: datasets.map {their_seconds:.2f} s, {their_count:,} tokens, line by line; ", end="")
                print(f"llmtrain {our_seconds:.2f} s, {our_count:,} tokens, the text as a whole")
            median = statistics.median(ratios)
            print(f"ratio datasets.map / llmtrain, {label}, median of {arguments.rounds}: {median:.2f}")


def encode(tokenizer: Tokenizer, batch: dict[str, Any]) -> dict[str, Any]:
    """What people write for datasets.map, without anything it does not need."""
    if isinstance(tokenizer, GPT2Tokenizer):
        return {"ids": tokenizer._encoding.encode_ordinary_batch(batch["text"], num_threads=1)}
    encodings = tokenizer._tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [encoding.ids for encoding in encodings]}


if __name__ == "__main__":
    main()
