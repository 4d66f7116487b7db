"""The hash of the files of a base model, and its cache."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from llmtrain.data.content_hash import files_sha256


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    directory = tmp_path / "model"
    directory.mkdir()
    paths = [directory / "config.json", directory / "model.safetensors"]
    paths[0].write_text("{}")
    paths[1].write_bytes(b"weights" * 100)
    return paths


@pytest.fixture
def hashes(tmp_path: Path) -> Path:
    """The cache directory; it may not exist."""
    return tmp_path / "not" / "yet"


def copied(files: list[Path], to: Path) -> list[Path]:
    to.mkdir(parents=True)
    for path in files:
        (to / path.name).write_bytes(path.read_bytes())
    return [to / path.name for path in files]


def test_hash_covers_names_and_contents(files: list[Path], hashes: Path) -> None:
    """A literal value: a changed algorithm would refuse every existing run."""
    lines = "".join(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)
    assert files_sha256(files, hashes) == hashlib.sha256(lines.encode()).hexdigest()


def test_hash_does_not_depend_on_directory(files: list[Path], hashes: Path, tmp_path: Path) -> None:
    elsewhere = copied(files, tmp_path / "moved")
    assert files_sha256(elsewhere, hashes) == files_sha256(files, hashes)


def test_hash_depends_on_names_contents_and_boundaries(files: list[Path], hashes: Path, tmp_path: Path) -> None:
    found = {files_sha256(files, hashes), files_sha256(files[:1], hashes)}
    other = copied(files, tmp_path / "changed")
    other[1].write_bytes(b"weighty" * 100)
    found.add(files_sha256(other, hashes))
    renamed = copied(files, tmp_path / "renamed")
    renamed[1].rename(renamed[1].with_name("other.safetensors"))
    found.add(files_sha256([renamed[0], renamed[1].with_name("other.safetensors")], hashes))
    shifted = copied(files, tmp_path / "shifted")
    shifted[0].write_bytes(b"{}w")
    shifted[1].write_bytes((b"weights" * 100)[1:])
    found.add(files_sha256(shifted, hashes))
    assert len(found) == 5


def test_hash_is_cached(files: list[Path], hashes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = files_sha256(files, hashes)
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert files_sha256(files, hashes) == first


def test_file_of_same_size_and_mtime_is_hashed_again(files: list[Path], hashes: Path) -> None:
    """As image layers, archives and copy tools create them."""
    first, before = files_sha256(files, hashes), files[1].stat()
    files[1].write_bytes(b"weighty" * 100)
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = files_sha256(files, hashes)
    assert changed != first
    other = files[1].with_name("other")
    other.write_bytes(b"weights" * 100)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(files[1])
    assert files_sha256(files, hashes) == first


@pytest.mark.parametrize("change", ["content", "time"])
def test_changed_file_is_hashed_again(files: list[Path], hashes: Path, change: str) -> None:
    first = files_sha256(files, hashes)
    stat = files[1].stat()
    files[1].write_bytes(b"weighty" * 100 + (b"!" if change == "content" else b""))
    if change == "content":  # of another size, at the same time
        os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    else:  # of the same size, later
        os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert files_sha256(files, hashes) != first


def test_cache_entry_of_another_file_is_not_used(files: list[Path], hashes: Path) -> None:
    """An entry lists its files: one with a colliding name, or an edited one, is not used."""
    first = files_sha256(files, hashes)
    (note,) = (hashes / "hashes").iterdir()
    note.write_text(json.dumps({"files": [["/somewhere", 1, 2]], "sha256": "0" * 64}))
    assert files_sha256(files, hashes) == first


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_damaged_cache_entry_is_ignored(files: list[Path], hashes: Path, damage: bytes) -> None:
    first = files_sha256(files, hashes)
    (note,) = (hashes / "hashes").iterdir()
    note.write_bytes(damage)
    assert files_sha256(files, hashes) == first
    assert json.loads(note.read_text())["sha256"] == first


def test_unwritable_cache_is_ignored(files: list[Path], tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert files_sha256(files, in_the_way) == files_sha256(files, tmp_path / "cache")
