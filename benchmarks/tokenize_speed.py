"""Tokenizing WikiText-2 into the token store, compared with datasets.map, same tokenizer and cores.

    python benchmarks/tokenize_speed.py [--data ../shared/data/wikitext-2/train.txt --rounds 3 --tokenizer bpe]

Both read the text file and write token ids to disk, with the GPT-2 tokenizer (tiktoken) and with one of the tokenizers
library. datasets.map uses two processes and batches of 1,000 rows. Without a network set TIKTOKEN_CACHE_DIR. Prints the
median ratio for each tokenizer.
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
from llmtrain.errors import LlmtrainError

PROCESSES = 2


def run_llmtrain(tokenizer: Tokenizer, source: Path, directory: Path) -> tuple[float, int]:
    started = time.perf_counter()
    dtype = smallest_dtype(tokenizer.vocab_size)
    written = write_tokens(directory / "tokens.bin", read_chunks(source), tokenizer, dtype, PROCESSES, "train")
    return time.perf_counter() - started, written.count


def run_datasets_map(
    encode: Callable[[dict[str, Any]], dict[str, Any]], rows: Any, directory: Path
) -> tuple[float, int]:
    started = time.perf_counter()
    mapped = rows.map(
        encode,
        batched=True,
        num_proc=PROCESSES,
        remove_columns=["text"],
        load_from_cache_file=False,
        cache_file_name=str(directory / f"mapped-{time.time_ns()}.arrow"),
    )
    seconds = time.perf_counter() - started
    return seconds, int(sum(np.fromiter((len(ids) for ids in mapped["ids"]), dtype=np.int64)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=str(Path(__file__).parents[2] / "shared/data/wikitext-2/train.txt"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", choices=("gpt2", "bpe"), action="append", help="default both")
    arguments = parser.parse_args()
    source = Path(arguments.data)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = datasets.load_dataset(
            "text", data_files=str(source), split="train", keep_linebreaks=True, cache_dir=str(directory / "datasets")
        )
        train_bpe((chunk.text for chunk in read_chunks(source)), 8192, directory / "bpe")
        kinds: dict[str, Callable[[], Tokenizer]] = {
            "gpt2": GPT2Tokenizer,
            "bpe": lambda: HFTokenizer(directory / "bpe"),
        }
        for label in arguments.tokenizer or kinds:
            try:
                kinds[label]()
            except LlmtrainError as error:
                print(f"{label}: skipped, {error}")
                continue
            ratios = []
            for _ in range(arguments.rounds):
                tokenizer = kinds[label]()  # a new one per round, because tokenizers cache words
                map_seconds, map_count = run_datasets_map(partial(encode, tokenizer), rows, directory)
                llmtrain_seconds, llmtrain_count = run_llmtrain(tokenizer, source, directory)
                ratios.append(map_seconds / llmtrain_seconds)
                print(f"{label}: datasets.map {map_seconds:.2f} s, {map_count:,} tokens, line by line; ", end="")
                print(f"llmtrain {llmtrain_seconds:.2f} s, {llmtrain_count:,} tokens, whole text")
            median = statistics.median(ratios)
            print(f"ratio datasets.map / llmtrain, {label}, median of {arguments.rounds}: {median:.2f}")


def encode(tokenizer: Tokenizer, batch: dict[str, Any]) -> dict[str, Any]:
    """The usual function for datasets.map."""
    if isinstance(tokenizer, GPT2Tokenizer):
        return {"ids": tokenizer._encoding.encode_ordinary_batch(batch["text"], num_threads=1)}
    encodings = tokenizer._tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [encoding.ids for encoding in encodings]}


if __name__ == "__main__":
    main()
