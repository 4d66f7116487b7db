import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.data.store import directory as store_directory
from llmtrain.data.store import token_store
from llmtrain.data.store.directory import StoreDirectory, open_or_build
from llmtrain.data.store.example_store import example_writer
from llmtrain.data.store.token_store import TokenStore, smallest_dtype, text_writer, write_tokens
from llmtrain.data.text_and_examples import Example, Segment, Split, TextChunk
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.data.tokenizers.char import CharTokenizer
from llmtrain.data.tokenizers.load import load_saved_tokenizer
from llmtrain.errors import DataError, UsageError

TEXTS = {"train": ["some text\n", "for training"], "val": ["held out"]}


class Source:
    """A text source that records which splits were read."""

    def __init__(self, texts: dict[str, list[str]] = TEXTS) -> None:
        self.texts = texts
        self.read: list[str] = []

    def chunks(self, split: Split) -> Iterator[TextChunk]:
        self.read.append(split)
        yield from (TextChunk(text, ends_document=True) for text in self.texts[split])

    def open(self, cache: Path, tokenizer: Callable[[], Tokenizer] = ByteTokenizer, **identity: Any) -> StoreDirectory:
        return open_or_build(cache, {"source": identity}, tokenizer, text_writer(self.chunks, threads=2))


def text_of(directory: StoreDirectory, split: Split) -> str:
    return bytes(TokenStore.open(directory, split).tokens.tolist()).decode()


def test_store_has_the_tokens_of_the_text(tmp_path: Path) -> None:
    directory = Source().open(tmp_path)
    assert text_of(directory, "train") == "some text\n\0for training\0"
    assert text_of(directory, "val") == "held out\0"
    assert len(TokenStore.open(directory, "val")) == 9
    assert isinstance(directory.tokenizer(), ByteTokenizer)


def test_built_once_and_then_only_opened(tmp_path: Path) -> None:
    source = Source()
    first = source.open(tmp_path)
    written = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    second = source.open(tmp_path)
    assert source.read == ["train", "val"]
    assert second == first
    assert {path: path.stat().st_mtime_ns for path in second.path.iterdir()} == written


def test_other_identity_builds_another_store(tmp_path: Path) -> None:
    source = Source()
    stores = {source.open(tmp_path, version=version).path for version in (1, 2, 1)}
    assert len(stores) == 2
    assert source.read == ["train", "val"] * 2


def test_fingerprint_is_of_the_tokens(tmp_path: Path) -> None:
    first = Source().open(tmp_path / "a", name="one")
    same = Source().open(tmp_path / "b", name="moved elsewhere")
    other = Source({**TEXTS, "val": ["held in"]}).open(tmp_path / "c", name="one")
    assert first.fingerprint == same.fingerprint
    assert first.fingerprint != other.fingerprint
    parts = [hashlib.sha256(text).hexdigest() for text in (b"some text\n\0for training\0", b"held out\0")]
    assert (
        first.fingerprint == hashlib.sha256("".join(parts).encode()).hexdigest()
    )  # recorded in checkpoints, so it must not change


def truncate_tokens(directory: Path) -> None:
    (directory / "train.bin").write_bytes(b"x")


def remove_tokens(directory: Path) -> None:
    (directory / "val.bin").unlink()


def remove_meta(directory: Path) -> None:
    (directory / "meta.json").unlink()


def truncate_meta(directory: Path) -> None:
    (directory / "meta.json").write_text((directory / "meta.json").read_text()[:20])


def truncate_tokenizer(directory: Path) -> None:
    (directory / "tokenizer" / "llmtrain_tokenizer.json").write_text("{")


def drop_sizes(directory: Path) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps({**meta, "sizes": []}))


def overwrite_tokens(directory: Path) -> None:
    """Other content with the same size and modification time."""
    path = directory / "train.bin"
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def overwrite_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer" / "llmtrain_tokenizer.json"
    path.write_text(path.read_text().replace("byte", "gpt2"))


def change_meta(directory: Path) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps({**meta, "fingerprint": "0" * 64}))


def drop_hashes(directory: Path) -> None:
    """Like a store written by an earlier version."""
    meta = json.loads((directory / "meta.json").read_text())
    kept = {name: value for name, value in meta.items() if name not in ("sha256", "meta_sha256")}
    (directory / "meta.json").write_text(json.dumps(kept))
    (directory / "verified.json").unlink()


DAMAGES = [
    truncate_tokens,
    remove_tokens,
    remove_meta,
    truncate_meta,
    truncate_tokenizer,
    drop_sizes,
    overwrite_tokens,
    overwrite_tokenizer,
    change_meta,
    drop_hashes,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_store_is_rebuilt(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    damage(source.open(tmp_path).path)
    with caplog.at_level("INFO", logger="llmtrain"):
        directory = source.open(tmp_path)
    assert len([record for record in caplog.records if "rebuilding" in record.message]) == 1
    assert source.read == ["train", "val"] * 2
    assert text_of(directory, "train") == "some text\n\0for training\0"
    assert isinstance(directory.tokenizer(), ByteTokenizer)
    assert source.open(tmp_path) == directory
    assert source.read == ["train", "val"] * 2


@pytest.mark.parametrize("name", ["train.bin", "train.answers.bin", "val.rows.bin"])
def test_damaged_example_store_is_rebuilt(tmp_path: Path, name: str) -> None:
    examples = [Example([Segment("question", False), Segment(" answer", True)], "file.jsonl", 1, ends_text=True)]
    write = example_writer(lambda _: examples, threads=1)
    path = open_or_build(tmp_path, {}, ByteTokenizer, write).path / name
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    open_or_build(tmp_path, {}, ByteTokenizer, write)
    assert path.read_bytes() == good


def touch_tokens(directory: Path) -> None:
    (directory / "train.bin").touch()


def replace_tokens(directory: Path) -> None:
    """The same content in another inode, with the same modification time."""
    path, copy = directory / "train.bin", directory / "copy"
    shutil.copy2(path, copy)
    copy.replace(path)


def remove_verified(directory: Path) -> None:
    (directory / "verified.json").unlink()


def damage_verified(directory: Path) -> None:
    (directory / "verified.json").write_text("[")


@pytest.mark.parametrize("change", [touch_tokens, replace_tokens, remove_verified, damage_verified])
def test_files_are_verified_once(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    read: list[str] = []
    real = store_directory.file_sha256
    monkeypatch.setattr(store_directory, "file_sha256", lambda path: read.append(path.name) or real(path))
    path = source.open(tmp_path).path
    files = sorted(["train.bin", "val.bin", "llmtrain_tokenizer.json"])
    assert sorted(read) == files
    source.open(tmp_path)
    assert sorted(read) == files  # nothing has changed
    change(path)
    for _ in range(2):
        source.open(tmp_path)
        assert sorted(read) == sorted([*files, *files])
    assert source.read == ["train", "val"]


def test_store_on_a_read_only_volume_is_verified_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    path = source.open(tmp_path).path
    remove_verified(path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store_directory.os, "access", lambda *_: False)
    monkeypatch.setattr(store_directory, "write_json", refuse)
    monkeypatch.setattr(store_directory, "FileLock", refuse)
    assert text_of(source.open(tmp_path), "val") == "held out\0"
    overwrite_tokens(path)
    with pytest.raises(DataError):
        source.open(tmp_path)


def test_partial_store_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    path = Source().open(tmp_path).path
    partial = path.with_name(f"{path.name}.tmp")
    path.rename(partial)
    assert text_of(Source().open(tmp_path), "val") == "held out\0"
    assert not partial.exists()


BUILDER = """
import logging, sys, time
from pathlib import Path
from llmtrain.data.text_and_examples import TextChunk
from llmtrain.data.store.directory import open_or_build
from llmtrain.data.store.token_store import text_writer
from llmtrain.data.tokenizers.byte import ByteTokenizer
cache, journal, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def chunks(split):
    with journal.open("a") as file:
        file.write(f"{split} by {name}\\n")
    for number in range(5):
        time.sleep(0.05)  # long enough for the other process to arrive
        yield TextChunk(f"{split} {number} ", False)
logging.basicConfig(level=logging.INFO)
print("ready", flush=True)
sys.stdin.readline()
print(open_or_build(cache, {"x": 1}, ByteTokenizer, text_writer(chunks, 1)).fingerprint)
"""


def test_concurrent_processes_verify_once(tmp_path: Path) -> None:
    """As the ranks of a run start."""
    command = [sys.executable, "-c", BUILDER, str(tmp_path), str(tmp_path / "journal")]
    subprocess.run([*command, "first"], input="", check=True, capture_output=True, text=True)
    (store,) = [path for path in (tmp_path / "tokens").iterdir() if path.is_dir()]
    remove_verified(store)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen([*command, name], text=True, **pipes) for name in "ab"]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    logs = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "".join(logs).count("verifying the SHA-256") == 1
    assert len((tmp_path / "journal").read_text().splitlines()) == 2  # built once


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "cache"), str(journal)]
    processes = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in "ab"
    ]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len(journal.read_text().splitlines()) == 2


@pytest.mark.parametrize("empty", ["train", "val"])
def test_empty_text_leaves_no_store(tmp_path: Path, empty: str) -> None:
    with pytest.raises(DataError, match="training" if empty == "train" else "validation"):
        Source({**TEXTS, empty: []}).open(tmp_path)
    assert [path.name for path in (tmp_path / "tokens").iterdir() if path.suffix != ".lock"] == []


def test_error_while_reading_leaves_no_store(tmp_path: Path) -> None:
    def chunks(split: Split) -> Iterator[TextChunk]:
        yield TextChunk(split, ends_document=True)
        raise DataError("line 5 is bad")

    with pytest.raises(DataError, match="line 5 is bad"):
        open_or_build(tmp_path, {}, ByteTokenizer, text_writer(chunks, 1))
    assert [path.name for path in (tmp_path / "tokens").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_unusable_cache_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}/file")) as caught:
        Source().open(Path(f"{tmp_path}/file{below}"))
    assert "data.cache_dir" in (caught.value.remedy or "")


def test_text_is_tokenized_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a group is in memory, however long the text is."""
    monkeypatch.setattr(token_store, "GROUP_CHARACTERS", 100)
    in_memory = {"now": 0, "max": 0}

    class Counting(ByteTokenizer):
        def encode_many(self, texts: Any, threads: int) -> Any:
            in_memory["now"] -= sum(map(len, texts))
            return super().encode_many(texts, threads)

    def chunks() -> Iterator[TextChunk]:
        for number in range(1000):
            text = f"chunk {number:4} "
            in_memory["now"] += len(text)
            in_memory["max"] = max(in_memory["max"], in_memory["now"])
            yield TextChunk(text, ends_document=number % 10 == 9)

    written = write_tokens(tmp_path / "x.bin", chunks(), Counting(), np.uint8, 1, "train")
    assert in_memory == {"now": 0, "max": 110}
    data = (tmp_path / "x.bin").read_bytes()
    assert data.replace(b"\0", b"") == b"".join(b"chunk %4d " % number for number in range(1000))
    assert data.count(b"\0") == 100
    assert written.count == len(data)


def test_tokens_are_mapped_not_loaded(tmp_path: Path) -> None:
    tokens = TokenStore.open(Source().open(tmp_path), "train").tokens
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable


@pytest.mark.parametrize(("vocab", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")])
def test_smallest_dtype(vocab: int, dtype: str) -> None:
    assert np.dtype(smallest_dtype(vocab)) == np.dtype(dtype)


def test_tokenizer_is_saved_with_the_tokens(tmp_path: Path) -> None:
    directory = Source().open(tmp_path, lambda: CharTokenizer.from_texts([*TEXTS["train"], *TEXTS["val"]]))
    tokenizer = load_saved_tokenizer(directory.path / "tokenizer")
    assert tokenizer.decode(TokenStore.open(directory, "val").tokens.tolist()) == "held out"
