import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.data.text import reader as text_reader
from llmtrain.data.text.reader import expand_files, files_identity, read_chunks
from llmtrain.data.tokenizers.bpe import train_bpe
from llmtrain.data.tokenizers.hf import HFTokenizer
from llmtrain.errors import DataError

TEXT = "".join(f"import m{i}\nimport n{i}\n\ndef f{i}(x):\n\treturn x + {i}  # été\n\n" for i in range(200))


TEXT_CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make files of a few hundred bytes take the code paths of files of gigabytes."""
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", 64)
    monkeypatch.setattr(text_reader, "MAX_CHUNK_CHARACTERS", 1024)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return train_bpe([TEXT], 400, tmp_path_factory.mktemp("bpe"))


def write(path: Path, text: str) -> list[str]:
    path.write_bytes(text.encode())
    chunks = list(read_chunks(path))
    assert [chunk.ends_document for chunk in chunks] == [False] * (len(chunks) - 1) + [True] * bool(chunks)
    return [chunk.text for chunk in chunks]


class TestChunks:
    @pytest.mark.usefixtures("small_blocks")
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(text=st.text(st.sampled_from("ab é€😀\n\r\t "), max_size=800) | st.text(TEXT_CHARACTERS))
    def test_chunks_join_to_the_file(self, tmp_path: Path, text: str) -> None:
        assert "".join(write(tmp_path / "x", text)) == text.removeprefix("\ufeff")

    @pytest.mark.usefixtures("small_blocks")
    def test_words_are_not_split(self, path: Path) -> None:
        chunks = write(path, TEXT)
        assert len(chunks) > 20
        assert all(before[-1].isspace() or after[0].isspace() for before, after in pairwise(chunks))

    def test_file_of_several_megabytes(self, path: Path) -> None:
        text = "a line of text, and no more\n" * 150_000
        chunks = write(path, text)
        assert "".join(chunks) == text
        assert len(chunks) >= 4
        assert max(map(len, chunks)) < 3 << 20

    def test_lines_that_begin_and_end_with_a_space(self, path: Path) -> None:
        """As in WikiText. It must not become one chunk, which one thread would tokenize in memory."""
        assert len(write(path, " a line of text \n" * 250_000)) >= 3

    @pytest.mark.usefixtures("small_blocks")
    @pytest.mark.parametrize("size", [10, 64, 1023, 1024, 1025, 1088, 1089, 5000])
    def test_file_without_line_breaks(self, path: Path, size: int) -> None:
        chunks = write(path, "x" * size)
        assert "".join(chunks) == "x" * size
        assert max(map(len, chunks)) <= 1024 + 64

    def test_empty_file_has_no_chunks(self, path: Path) -> None:
        assert write(path, "") == []

    def test_line_endings_are_preserved(self, path: Path) -> None:
        assert write(path, "a\r\nb\rc\n") == ["a\r\nb\rc\n"]


class TestByteOrderMark:
    def test_dropped_at_the_start(self, path: Path) -> None:
        assert "".join(write(path, "\ufeffa line\n")) == "a line\n"
        assert write(path, "\ufeff") == []

    def test_kept_elsewhere(self, path: Path) -> None:
        assert "".join(write(path, "\ufeff\ufeffa\ufeff\n")) == "\ufeffa\ufeff\n"

    @pytest.mark.usefixtures("small_blocks")
    def test_kept_at_the_start_of_a_later_block(self, path: Path) -> None:
        text = "x" * 64 + "\ufeff" + "y" * 100
        assert "".join(write(path, text)) == text


class TestChunksKeepIds:
    @pytest.mark.usefixtures("small_blocks")
    def test_real_code(self, path: Path, bpe: HFTokenizer) -> None:
        chunks = write(path, TEXT)
        assert len(chunks) > 20
        joined = np.concatenate(list(bpe.encode_many(chunks, 2)))
        assert joined.tolist() == bpe.encode(TEXT).tolist()

    @pytest.mark.usefixtures("small_blocks")
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(text=st.text(st.sampled_from("ab1.'é\n\r\t \x1c\u2028"), min_size=100, max_size=900))
    def test_any_text(self, tmp_path: Path, bpe: HFTokenizer, text: str) -> None:
        ids = [i for chunk in write(tmp_path / "x", text) for i in bpe.encode(chunk).tolist()]
        assert ids == bpe.encode(text).tolist()


class TestInvalidUtf8:
    def problem(self, path: Path, data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(DataError) as caught:
            list(read_chunks(path))
        assert caught.value.exit_code == 65
        assert caught.value.remedy
        assert str(path) in caught.value.what
        return caught.value.what

    @pytest.mark.parametrize("before", [0, 1, 61, 62, 63, 64, 65, 200])
    @pytest.mark.usefixtures("small_blocks")
    def test_message_has_file_line_and_byte(self, path: Path, before: int) -> None:
        good = (b"some text\n" * 30)[:before]
        text = self.problem(path, good + b"\xff" + b"more text\n" * 30)
        line = good.count(b"\n") + 1
        assert f"line {line}:" in text
        assert f"byte {before} (0xff)" in text

    @pytest.mark.parametrize("before", [0, 62, 63, 64, 126, 127])
    @pytest.mark.usefixtures("small_blocks")
    def test_truncated_character_at_the_end(self, path: Path, before: int) -> None:
        text = self.problem(path, b"x" * before + "€".encode()[:2])
        assert f"byte {before} (0xe2)" in text

    @pytest.mark.parametrize("before", [62, 63])
    @pytest.mark.usefixtures("small_blocks")
    def test_truncated_character_across_blocks(self, path: Path, before: int) -> None:
        text = self.problem(path, b"\n" * before + b"\xe2\x82" + b"x" * 100)
        assert f"line {before + 1}:" in text
        assert f"byte {before} (0xe2)" in text

    def test_utf16(self, path: Path) -> None:
        assert "byte 0 (0xff)" in self.problem(path, "hello".encode("utf-16"))


class TestNul:
    @pytest.mark.parametrize("before", [0, 63, 64, 65, 200])
    @pytest.mark.usefixtures("small_blocks")
    def test_message_has_file_line_and_byte(self, path: Path, before: int) -> None:
        good = (b"some text\n" * 30)[:before]
        path.write_bytes(good + b"\0more text\n" * 30)
        with pytest.raises(DataError) as caught:
            list(read_chunks(path))
        assert caught.value.exit_code == 65
        line = good.count(b"\n") + 1
        assert f"{path}, line {line}:" in caught.value.what
        assert f"byte {before}." in caught.value.what

    def test_utf16_without_byte_order_mark(self, path: Path) -> None:
        path.write_bytes("hello".encode("utf-16-le"))
        with pytest.raises(DataError):
            list(read_chunks(path))


class TestExpandFiles:
    def test_globs_are_sorted_without_duplicates(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a.txt", "c.md", "sub/d.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("x")
        files = expand_files([f"{tmp_path}/c.md", f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"], "data.files")
        assert [path.relative_to(tmp_path).as_posix() for path in files] == ["c.md", "a.txt", "b.txt", "sub/d.txt"]

    def test_home_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "a.txt").write_text("x")
        assert expand_files(["~/a.txt"], "data.files") == [tmp_path / "a.txt"]

    def test_existing_file_name_with_brackets(self, path: Path) -> None:
        odd = path.with_name("notes [old].txt")
        odd.write_text("x")
        assert expand_files([str(odd)], "data.files") == [odd]

    @pytest.mark.parametrize("pattern", ["nothing.txt", "*.nothing", "."])
    def test_pattern_without_match_is_refused(self, tmp_path: Path, pattern: str) -> None:
        with pytest.raises(DataError, match=r"data\.files"):
            expand_files([f"{tmp_path}/{pattern}"], "data.files")

    def test_only_empty_files_are_refused(self, path: Path) -> None:
        path.write_text("")
        with pytest.raises(DataError, match=r"data\.val_files.*text\.txt"):
            expand_files([str(path)], "data.val_files")

    @pytest.mark.parametrize("text", ["three", "two"])
    def test_identity_changes_with_the_content(self, path: Path, tmp_path: Path, text: str) -> None:
        """Also if size and modification time stay the same, as with `cp -p` and `rsync -t`."""
        path.write_text("one")
        before, times = files_identity([path], tmp_path), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        assert files_identity([path], tmp_path) == before
        path.write_text(text)
        os.utime(path, ns=times)
        assert files_identity([path], tmp_path) != before

    def test_copy_has_the_same_identity(self, path: Path, tmp_path: Path) -> None:
        """As in an image layer: another inode, other times."""
        path.write_text("one")
        copy = tmp_path / "elsewhere" / path.name
        copy.parent.mkdir()
        copy.write_text("one")
        assert files_identity([copy], tmp_path) == files_identity([path], tmp_path)
