"""The datasets of the registry, each prepared as for training."""

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from llmtrain import registry
from llmtrain.config.schema import SECTIONS_BY_NAME
from llmtrain.data.base import DataModule, PreparedData
from llmtrain.errors import DataError, UsageError
from record_files import write_parquet, write_rows

TRAIN = [f"Train row {i}.\n" for i in range(40)]
VAL = [f"Val row {i}.\n" for i in range(5)]


def module(name: str, seed: int = 1, **fields: Any) -> DataModule:
    data: DataModule = registry.resolve("data.name", name, registry.DATA)(
        SECTIONS_BY_NAME["data"][name](**fields), seed
    )
    return data


def prepare(name: str, cache: Path, **fields: Any) -> PreparedData:
    return module(name, cache_dir=str(cache), **fields).prepare(threads=2)


def text(prepared: PreparedData, split: str) -> str:
    return prepared.tokenizer.decode(getattr(prepared, split).tokens.tolist())


def write(path: Path, content: str) -> str:
    path.write_bytes(content.encode())
    return str(path)


class TestTextFiles:
    @pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.9])
    def test_last_bytes_are_held_out(self, tmp_path: Path, fraction: float) -> None:
        whole = "".join(f"line {i} é\n" for i in range(300))
        prepared = prepare("text_files", tmp_path, files=[write(tmp_path / "a.txt", whole)], val_fraction=fraction)
        train, val = text(prepared, "train").rstrip("\0"), text(prepared, "val").rstrip("\0")
        assert train + val == whole
        assert len(val.encode()) == pytest.approx(fraction * len(whole.encode()), abs=2)

    @pytest.mark.parametrize("border", range(2, 11))
    def test_characters_are_not_split(self, tmp_path: Path, border: int) -> None:
        whole = "é€😀ab"
        prepared = prepare(
            "text_files", tmp_path, files=[write(tmp_path / "a", whole)], val_fraction=1 - (border - 0.5) / 11
        )
        assert (text(prepared, "train") + text(prepared, "val")).replace("\0", "") == whole

    def test_val_fraction_is_of_all_files_together(self, tmp_path: Path) -> None:
        files = [write(tmp_path / f"{i}.txt", f"{i}" * 100) for i in range(4)]
        prepared = prepare("text_files", tmp_path, files=[f"{tmp_path}/?.txt"], val_fraction=0.25)
        assert len(files) == 4
        assert text(prepared, "train") == "".join(f"{i}" * 100 + "\0" for i in range(3))
        assert text(prepared, "val") == "3" * 100 + "\0"

    def test_separate_validation_files(self, tmp_path: Path) -> None:
        train, val = write(tmp_path / "t.txt", "training"), write(tmp_path / "v.txt", "validation")
        prepared = prepare("text_files", tmp_path, files=[train], val_files=[val])
        assert (text(prepared, "train"), text(prepared, "val")) == ("training\0", "validation\0")

    def test_changed_file_is_tokenized_again(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        for content in ("first " * 20, "second " * 20):
            prepared = prepare("text_files", tmp_path, files=[write(path, content)])
            assert content[:10] in text(prepared, "train")

    def test_val_fraction_changes_the_split(self, tmp_path: Path) -> None:
        files = [write(tmp_path / "a.txt", "x" * 1000)]
        sizes = [len(prepare("text_files", tmp_path, files=files, val_fraction=f).val) for f in (0.1, 0.2)]
        assert sizes == [101, 201]

    def test_invalid_utf8_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"ok\nbad \xff")
        with pytest.raises(DataError, match=r"a\.txt, line 2: .*byte 7"):
            prepare("text_files", tmp_path, files=[str(tmp_path / "a.txt")])


class TestDocuments:
    """text_files with data.text_column: each record of a file is a document."""

    DOCUMENTS = ('First,\n"quoted" é.\n', "Second", "", " Third line\n\n") * 5
    ROWS = tuple({"id": str(number), "text": document} for number, document in enumerate(DOCUMENTS))

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"])
    @pytest.mark.parametrize("is_held_out", [True, False])
    def test_documents_are_separated_like_files(self, tmp_path: Path, name: str, is_held_out: bool) -> None:
        """The same tokens as from a plain text file per document."""
        records = [str(write_rows(tmp_path / name, list(self.ROWS)))]
        plain = [write(tmp_path / f"{number:02}.txt", document) for number, document in enumerate(self.DOCUMENTS)]
        fingerprints = []
        for files, fields in ((records, {"text_column": "text"}), (plain, {})):
            split: dict[str, Any] = {"val_fraction": 0.3} if is_held_out else {"val_files": files}
            prepared = prepare("text_files", tmp_path / "cache", files=files, **fields, **split)
            assert text(prepared, "train").count("\0") >= 10
            fingerprints.append(prepared.fingerprint)
        assert fingerprints[0] == fingerprints[1]

    def test_records_and_plain_text_together(self, tmp_path: Path) -> None:
        files = [
            write(tmp_path / "a.txt", "plain"),
            str(write_rows(tmp_path / "b.jsonl", [{"text": "one"}, {"text": "two"}])),
            str(write_rows(tmp_path / "c.parquet", [{"text": "three"}])),
            write(tmp_path / "d.jsonl", ""),
            write(tmp_path / "e.txt", '{"text": "four"}\n'),
        ]
        prepared = prepare("text_files", tmp_path, files=files, val_files=files, text_column="text")
        assert text(prepared, "train") == "plain\0one\0two\0three\0four\0"

    @pytest.mark.parametrize("fraction", [0.05, 0.5])
    def test_single_document_is_split(self, tmp_path: Path, fraction: float) -> None:
        document = "".join(f"line {i} é\n" for i in range(200))
        file = str(write_rows(tmp_path / "a.jsonl", [{"text": document}]))
        prepared = prepare("text_files", tmp_path, files=[file], text_column="text", val_fraction=fraction)
        train, val = text(prepared, "train").rstrip("\0"), text(prepared, "val").rstrip("\0")
        assert train + val == document
        assert len(val.encode()) == pytest.approx(fraction * len(document.encode()), abs=2)

    def test_long_document_is_tokenized_in_parts(self, tmp_path: Path) -> None:
        document = "some words and more of them\n" * 100_000
        file = str(write_rows(tmp_path / "a.jsonl", [{"text": document}, {"text": "b"}]))
        chunks = list(module("text_files", files=[file], val_files=[file], text_column="text").chunks("train"))
        assert len(chunks) > 2
        assert "".join(chunk.text for chunk in chunks) == document + "b"
        assert [chunk.ends_document for chunk in chunks] == [False] * (len(chunks) - 2) + [True, True]

    def test_moved_file_is_the_same_data_and_changed_file_is_not(self, tmp_path: Path) -> None:
        file = write_rows(tmp_path / "a.jsonl", list(self.ROWS))
        fields: dict[str, Any] = {"text_column": "text"}
        first = prepare("text_files", tmp_path, files=[str(file)], **fields)
        (tmp_path / "elsewhere").mkdir()
        moved = file.rename(tmp_path / "elsewhere" / "a.jsonl")
        assert prepare("text_files", tmp_path, files=[str(moved)], **fields).train.path == first.train.path
        write_rows(moved, [*self.ROWS[1:], self.ROWS[0]])
        assert prepare("text_files", tmp_path, files=[str(moved)], **fields).fingerprint != first.fingerprint

    @pytest.mark.parametrize("change", [{"text_column": "id"}, {"text_column": None}, {"on_bad_record": "skip"}])
    def test_store_is_rebuilt_when_a_setting_changes(self, tmp_path: Path, change: dict[str, Any]) -> None:
        file = str(write_rows(tmp_path / "a.jsonl", list(self.ROWS)))
        fields: dict[str, Any] = {"files": [file], "text_column": "text", "val_fraction": 0.5}
        paths = [prepare("text_files", tmp_path, **{**fields, **more}).train.path for more in ({}, change)]
        assert paths[0] != paths[1]

    BAD = (
        ('{"body": "x"}', "'text' is missing; the record has 'body'"),
        ('{"text": null}', "must be text, got None"),
        ('{"text": 5}', "must be text, got 5"),
        ('{"text": ["x"]}', "must be text, got"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "a\\u0000"}', "NUL"),
        ("{", "not valid JSON"),
    )

    @pytest.mark.parametrize(("line", "reason"), BAD)
    def test_bad_record_is_refused(self, tmp_path: Path, line: str, reason: str) -> None:
        file = write(tmp_path / "a.jsonl", f'{{"text": "good"}}\n\n{line}\n')
        with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{reason}") as caught:
            prepare("text_files", tmp_path, files=[file], text_column="text")
        assert "data.on_bad_record" in (caught.value.remedy or "")

    def test_skipped_records_are_counted_in_one_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        lines = ['{"text": "good"}', *(line for line, _ in self.BAD), '{"text": "also"}']
        file = write(tmp_path / "a.jsonl", "\n".join(lines))
        with caplog.at_level(logging.WARNING, "llmtrain"):
            prepared = prepare("text_files", tmp_path, files=[file], text_column="text", on_bad_record="skip")
        assert text(prepared, "train") + text(prepared, "val") == "good\0als\0o\0"
        [warning] = [record.getMessage() for record in caplog.records]
        assert "7 of 9 records" in warning
        assert "line 2" in warning

    @pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
    def test_missing_column_is_refused_with_known_columns(self, tmp_path: Path, name: str) -> None:
        file = str(write_rows(tmp_path / name, list(self.ROWS)))
        with pytest.raises(DataError, match=r"data\.text_column.*'body'") as caught:
            prepare("text_files", tmp_path, files=[file], text_column="body")
        assert caught.value.known == ["id", "text"]

    def test_column_of_numbers_is_refused(self, tmp_path: Path) -> None:
        file = str(write_parquet(tmp_path / "a.parquet", text=[1, 2]))
        with pytest.raises(DataError, match=r"a\.parquet, row 1: .* must be text, got 1"):
            prepare("text_files", tmp_path, files=[file], text_column="text")

    @pytest.mark.parametrize(("name", "warns"), [("a.jsonl", True), ("a.csv", True), ("a.txt", False)])
    def test_documents_read_as_plain_text_are_warned_about(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, warns: bool
    ) -> None:
        """Earlier versions read every file as plain text, and their runs resume."""
        path = write_rows(tmp_path / name.replace("txt", "jsonl"), list(self.ROWS)).rename(tmp_path / name)
        with caplog.at_level(logging.WARNING, "llmtrain"):
            prepared = prepare("text_files", tmp_path, files=[str(path)])
        assert (text(prepared, "train") + text(prepared, "val")).replace("\0", "") == path.read_bytes().decode()
        assert len(caplog.records) == warns

    def test_parquet_as_plain_text_is_refused(self, tmp_path: Path) -> None:
        file = str(write_rows(tmp_path / "a.parquet", list(self.ROWS)))
        with pytest.raises(DataError, match=r"data\.text_column.*a\.parquet") as caught:
            prepare("text_files", tmp_path, files=[file])
        assert caught.value.known == ["id", "text"]

    def test_identity_of_plain_text_is_unchanged(self, tmp_path: Path) -> None:
        """It is the key of stores on disk, and runs of earlier versions resume."""
        file = write(tmp_path / "a.txt", "x" * 100)
        identity = module("text_files", files=[file], cache_dir=str(tmp_path)).identity()
        content = hashlib.sha256(b"x" * 100).hexdigest()
        files = hashlib.sha256(f"a.txt {content}\n".encode()).hexdigest()
        assert identity == {"kind": "text_files", "files": files, "val": 0.05}


class TestHFText:
    def files(self, directory: Path, kind: str) -> dict[str, list[str]]:
        """The same rows as text, JSON lines or Parquet."""
        for name, rows in (("train", TRAIN), ("val", VAL)):
            if kind == "txt":
                write(directory / f"{name}.txt", "".join(rows))
            elif kind == "jsonl":
                write(directory / f"{name}.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
            else:
                datasets.Dataset.from_dict({"text": rows}).to_parquet(directory / f"{name}.parquet")
        return {"files": [f"{directory}/train.{kind}"], "val_files": [f"{directory}/val.{kind}"]}

    @pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
    def test_local_files(self, tmp_path: Path, kind: str) -> None:
        prepared = prepare("hf_text", tmp_path, **self.files(tmp_path, kind))
        assert text(prepared, "train").replace("\0", "") == "".join(TRAIN)
        assert text(prepared, "val").replace("\0", "") == "".join(VAL)

    @pytest.mark.parametrize("kind", ["txt", "jsonl"])
    def test_byte_order_mark_is_dropped(self, tmp_path: Path, kind: str) -> None:
        line = "a line\n" if kind == "txt" else json.dumps({"text": "a line\n"}) + "\n"
        path = write(tmp_path / f"a.{kind}", "\ufeff" + line)
        prepared = prepare("hf_text", tmp_path, files=[path], val_files=[path])
        assert text(prepared, "train") == "a line\n"

    def test_nul_is_refused_with_the_byte_tokenizer_only(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", json.dumps({"text": "a\0b"}) + "\n")
        with pytest.raises(DataError, match=r"Row 0 .*train.*'text'"):
            prepare("hf_text", tmp_path, files=[path], val_files=[path])
        assert prepare("hf_text", tmp_path, files=[path], val_files=[path], tokenizer="char").tokenizer.vocab_size == 3

    def test_rows_that_end_with_a_line_break_are_joined(self, tmp_path: Path) -> None:
        rows = ["one line\n", "and its end", "another"]
        path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
        prepared = prepare("hf_text", tmp_path, files=[path], val_files=[path])
        assert text(prepared, "train") == "one line\nand its end\0another\0"

    def test_single_row_leaves_none_for_validation(self, tmp_path: Path) -> None:
        (tmp_path / "one.txt").write_text("a single line")
        with pytest.raises(DataError, match="1 row: none is left"):
            prepare("hf_text", tmp_path, files=[str(tmp_path / "one.txt")])

    def test_last_rows_are_held_out(self, tmp_path: Path) -> None:
        files = self.files(tmp_path, "txt")["files"]
        prepared = prepare("hf_text", tmp_path, files=files, val_fraction=0.25)
        assert text(prepared, "train").count("\n") == 30
        assert text(prepared, "train") + text(prepared, "val") == "".join(TRAIN)

    def test_directory_with_splits(self, tmp_path: Path) -> None:
        directory = tmp_path / "rows"
        directory.mkdir()
        for split, rows in (("train", TRAIN), ("validation", VAL)):
            datasets.Dataset.from_dict({"content": rows}).to_parquet(directory / f"{split}.parquet")
        prepared = prepare("hf_text", tmp_path, dataset_name=str(directory), text_column="content")
        assert text(prepared, "val") == "".join(VAL)
        sliced = prepare(
            "hf_text", tmp_path, dataset_name=str(directory), text_column="content", train_split="train[:5]"
        )
        assert text(sliced, "train") == "".join(TRAIN[:5])
        with pytest.raises(DataError, match="split"):
            prepare("hf_text", tmp_path, dataset_name=str(directory), text_column="content", val_split="nosuch")

    def test_save_to_disk_directory(self, tmp_path: Path) -> None:
        saved = {"train": TRAIN, "validation": VAL}
        splits = {split: datasets.Dataset.from_dict({"text": rows}) for split, rows in saved.items()}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
        fields: dict[str, Any] = {"dataset_name": str(tmp_path / "saved")}
        prepared = prepare("hf_text", tmp_path, **fields)
        assert (text(prepared, "train"), text(prepared, "val")) == ("".join(TRAIN), "".join(VAL))
        sliced = prepare("hf_text", tmp_path, **fields, train_split="train[:5]+train[50%:]")
        assert text(sliced, "train") == "".join(TRAIN[:5] + TRAIN[20:])
        with pytest.raises(DataError, match="nosuch"):
            prepare("hf_text", tmp_path, **fields, val_split="nosuch")

    def test_save_to_disk_directory_without_splits(self, tmp_path: Path) -> None:
        datasets.Dataset.from_dict({"text": TRAIN}).save_to_disk(tmp_path / "saved")
        fields: dict[str, Any] = {"dataset_name": str(tmp_path / "saved"), "val_fraction": 0.25}
        with pytest.raises(DataError) as caught:
            prepare("hf_text", tmp_path, **fields)
        assert "data.val_split" in (caught.value.remedy or "")
        first, again = (prepare("hf_text", tmp_path, **fields, val_split=None) for _ in range(2))
        assert text(first, "train") + text(first, "val") == "".join(TRAIN)
        assert first.train.path == again.train.path, "the store is reused"
        (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"x")
        with pytest.raises(DataError):
            prepare("hf_text", tmp_path, **fields, val_split=None)

    def test_save_to_disk_directory_with_config_or_without_rows_is_refused(self, tmp_path: Path) -> None:
        datasets.Dataset.from_dict({"text": TRAIN}).save_to_disk(tmp_path / "saved")
        datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
        with pytest.raises(UsageError, match=r"data\.dataset_config"):
            prepare("hf_text", tmp_path, dataset_name=str(tmp_path / "saved"), dataset_config="x", val_split=None)
        with pytest.raises(DataError, match=re.escape(str(tmp_path / "empty"))):
            prepare("hf_text", tmp_path, dataset_name=str(tmp_path / "empty"), val_split=None)

    def test_file_as_dataset_name_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
        with pytest.raises(UsageError) as caught:
            prepare("hf_text", tmp_path, dataset_name=str(tmp_path / "a.jsonl"))
        assert "data.files" in (caught.value.remedy or "")

    def test_missing_column_is_refused_with_known_columns(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"data\.text_column.*'body'") as caught:
            prepare("hf_text", tmp_path, text_column="body", **self.files(tmp_path, "jsonl"))
        assert caught.value.known == ["text"]

    @pytest.mark.parametrize("value", [5, None, ["x"]])
    def test_row_that_is_not_text_is_refused(self, tmp_path: Path, value: object) -> None:
        path = write(tmp_path / "a.jsonl", json.dumps({"text": value}) + "\n")
        with pytest.raises(DataError, match=r"Row 0 .*train.*'text'"):
            prepare("hf_text", tmp_path, files=[path], val_files=[path])

    @pytest.mark.parametrize("name", ["a.csv", "a", "a.txt.gz"])
    def test_unknown_file_format_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(DataError, match=r"data\.files"):
            prepare("hf_text", tmp_path, files=[write(tmp_path / name, "x")])

    def test_mixed_file_formats_are_refused(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / "a.txt", "x"), write(tmp_path / "b.jsonl", "{}")]
        with pytest.raises(DataError, match=r"data\.files"):
            prepare("hf_text", tmp_path, files=paths)

    @pytest.mark.parametrize(("name", "content"), [("a.jsonl", b"{"), ("a.parquet", b"x"), ("a.txt", b"\xff\xfe\x00")])
    def test_damaged_file_is_refused(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=r"data\.files|not valid"):
            prepare("hf_text", tmp_path, files=[str(tmp_path / name)])

    def test_hub_dataset_without_network_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="wikitext") as caught:
            prepare("hf_text", tmp_path, dataset_name="wikitext", dataset_config="wikitext-2-raw-v1")
        assert caught.value.remedy

    def test_unchanged_files_are_not_tokenized_again(self, tmp_path: Path) -> None:
        fields = self.files(tmp_path, "parquet")
        first, second = (prepare("hf_text", tmp_path / "cache", **fields) for _ in range(2))
        assert first.train.path == second.train.path
        assert len(list((tmp_path / "cache" / "tokens").glob("*.lock"))) <= 1


class TestPythonStdlib:
    def test_source_files_are_split_by_file(self, cache: Path) -> None:
        prepared = prepare("python_stdlib", cache)
        train, val = text(prepared, "train"), text(prepared, "val")
        assert "class ArgumentParser" in train + val
        assert len(train) > 5_000_000
        assert 0.005 < len(val) / len(train) < 0.2
        assert not set(train.split("\0")) & set(val.split("\0")) - {""}

    def test_identity_is_deterministic(self) -> None:
        assert module("python_stdlib").identity() == module("python_stdlib").identity()
        assert module("python_stdlib").identity() != module("python_stdlib", val_fraction=0.2).identity()


class TestDummyText:
    def test_text_depends_on_the_seed(self) -> None:
        def train(seed: int) -> str:
            return "".join(chunk.text for chunk in module("dummy_text", seed).chunks("train"))

        assert train(1) == train(1) != train(2)
        assert module("dummy_text", 1).identity() != module("dummy_text", 2).identity()

    def test_validation_text_differs_from_training_text(self) -> None:
        data = module("dummy_text")
        train, val = ({chunk.text for chunk in data.chunks(split)} for split in ("train", "val"))
        assert val
        assert not train & val

    @pytest.mark.parametrize("tokenizer", ["byte", "char"])
    def test_tokenizers(self, tmp_path: Path, tokenizer: str) -> None:
        prepared = prepare("dummy_text", tmp_path, tokenizer=tokenizer)
        assert text(prepared, "train").endswith((".\n", ".\n\0"))
        assert int(prepared.train.tokens.max()) < prepared.tokenizer.vocab_size


@pytest.mark.parametrize("name", ["text_files", "hf_text"])
def test_changed_file_of_equal_size_and_time_is_tokenized_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc\n" * 50)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    before = prepare(name, tmp_path, files=[str(path)], val_files=[str(path)])
    path.write_text("xyz\n" * 50)
    os.utime(path, ns=times)
    after = prepare(name, tmp_path, files=[str(path)], val_files=[str(path)])
    assert text(after, "train").startswith("xyz")
    assert after.fingerprint != before.fingerprint


def test_every_dataset_of_the_registry_is_tested_here() -> None:
    # In test_examples.py, test_preferences.py and training/test_mixture.py.
    elsewhere = {"instruct_jsonl", "chat_jsonl", "preference_jsonl", "mixture"}
    assert set(registry.DATA) - elsewhere == {"text_files", "hf_text", "python_stdlib", "dummy_text"}
