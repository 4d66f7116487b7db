"""Which documents are used: split by hash, exact duplicates, the first ones, and special tokens before each."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from llmtrain.config.data import HfTextSection, TextFilesSection
from llmtrain.config.mixture import MixtureSection
from llmtrain.data.base import PreparedData
from llmtrain.data.mixture.prepare import Mixture
from llmtrain.data.text import reader
from llmtrain.data.text.text_files import TextFiles
from llmtrain.errors import DataError, UsageError
from tiny_llama import make_model


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def prepared(tmp_path: Path, file: str, **fields: Any) -> PreparedData:
    section = TextFilesSection(
        **{"files": [file], "text_column": "text", "tokenizer": "byte", "cache_dir": str(tmp_path / "cache"), **fields}
    )
    return TextFiles(section, 1).prepare(1)


def documents(store: Any) -> list[str]:
    return bytes(store.tokens.astype(np.uint8)).decode().split("\0")[:-1]


TEXTS = [f"document {number}" for number in range(400)]


def test_split_by_hash_keeps_documents_whole_and_in_their_split(tmp_path: Path) -> None:
    first = prepared(tmp_path, write(tmp_path / "a.jsonl", TEXTS), split_by="hash", val_fraction=0.1)
    train, val = documents(first.train), documents(first.val)
    assert sorted(train + val) == sorted(TEXTS)
    assert 20 < len(val) < 60
    more = [*(f"new {number}" for number in range(100)), *reversed(TEXTS)]
    second = prepared(tmp_path, write(tmp_path / "b.jsonl", more), split_by="hash", val_fraction=0.1)
    assert set(val) < set(documents(second.val))
    assert set(train) < set(documents(second.train))


def test_duplicates_are_left_out_and_do_not_leak_into_validation(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [*TEXTS, *TEXTS[:50], "last"])
    found = prepared(tmp_path, file, deduplicate=True, val_fraction=0.05)
    train, val = documents(found.train), documents(found.val)
    assert len(set(train)) == len(train)
    assert not set(train) & set(val)
    assert "last" in val
    assert prepared(tmp_path, file, val_fraction=0.05).fingerprint != found.fingerprint


def test_documents_of_many_chunks_are_compared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 16)
    long = "many words in several chunks " * 20
    texts = [f"{long} one", f"{long} two", f"{long} one", *(f"end {number} {long}" for number in range(3))]
    found = prepared(tmp_path, write(tmp_path / "a.jsonl", texts), deduplicate=True, val_fraction=0.01)
    assert [text[-4:] for text in documents(found.train)][:3] == [" one", " two", "nks "]


def test_max_documents(tmp_path: Path) -> None:
    found = prepared(tmp_path, write(tmp_path / "a.jsonl", TEXTS), max_documents=7)
    assert documents(found.train) == TEXTS[:7]
    assert len(documents(found.val)) == 7


def test_bos_begins_every_document(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<bos>"])
    number = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", number)])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    file = write(tmp_path / "a.jsonl", TEXTS[:40])
    plain = prepared(tmp_path, file, tokenizer=str(tmp_path / "model"))
    found = prepared(tmp_path, file, tokenizer=str(tmp_path / "model"), add_bos=True)
    (bos,) = found.tokenizer.prefix_ids()
    end = found.tokenizer.end_of_text
    tokens = found.train.tokens.tolist()
    assert tokens[0] == bos
    ends = [index for index, token in enumerate(tokens[:-1]) if token == end]
    assert [tokens[index + 1] for index in ends] == [bos] * len(ends)
    assert [token for token in tokens if token != bos] == [
        token for token in plain.train.tokens.tolist() if token != bos
    ]


def test_bos_of_a_tokenizer_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        prepared(tmp_path, write(tmp_path / "a.jsonl", TEXTS), add_bos=True)


def test_defaults_keep_the_stores_of_before(tmp_path: Path) -> None:
    """The key of a store is a hash of this; other keys would tokenize everything again."""
    file = write(tmp_path / "a.jsonl", TEXTS)
    prepared(tmp_path, file)
    (meta,) = (tmp_path / "cache" / "tokens").glob("*/meta.json")
    identity = json.loads(meta.read_text())["identity"]
    assert set(identity) == {"format", "source", "tokenizer"}
    assert set(identity["source"]) == {"kind", "files", "val", "records"}


def test_mixture_leaves_out_documents_of_earlier_sources(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", TEXTS)
    b = write(tmp_path / "b.jsonl", [*TEXTS[:100], *(f"other {number}" for number in range(100))])
    sources = [{"name": "text_files", "files": [file], "text_column": "text", "weight": 1} for file in (a, b)]
    values = {"sources": sources, "tokenizer": "byte", "cache_dir": str(tmp_path / "cache")}
    plain = Mixture(MixtureSection(**values), 1).prepare(1)
    found = Mixture(MixtureSection(**values, deduplicate=True), 1).prepare(1)
    assert found.sources[0].fingerprint == plain.sources[0].fingerprint
    second = documents(found.sources[1].train) + documents(found.sources[1].val)
    assert second
    assert not set(second) & set(TEXTS)
    assert set(TEXTS[:100]) < set(documents(plain.sources[1].train))


def test_split_by_hash_of_the_datasets_library(tmp_path: Path) -> None:
    from llmtrain.data.text.hf_text import HFText

    section = HfTextSection(
        files=[write(tmp_path / "a.jsonl", TEXTS)],
        split_by="hash",
        val_fraction=0.1,
        tokenizer="byte",
        cache_dir=str(tmp_path / "cache"),
    )
    found = HFText(section, 1).prepare(1)
    by_files = prepared(tmp_path, section.files[0], split_by="hash", val_fraction=0.1)
    assert documents(found.val) == documents(by_files.val)


def test_everything_held_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        prepared(tmp_path, write(tmp_path / "a.jsonl", ["one document"]), split_by="hash")
