"""Files of records in every format: what is read, in which order, and what is refused with which message."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.data.records.base import BadRecord, RecordFile
from llmtrain.data.records.csv_rows import CsvRows
from llmtrain.data.records.json_array import JsonArray
from llmtrain.data.records.json_lines import JsonLines
from llmtrain.data.records.open_file import has_records, open_records
from llmtrain.data.records.parquet_rows import ParquetRows
from llmtrain.data.text import reader as text_reader
from llmtrain.errors import DataError
from record_files import write_parquet, write_rows

ROWS = [{"id": str(number), "text": f'row {number}, "é"\nnext line'} for number in range(5)]
Write = Callable[[str, Any], RecordFile]


@pytest.fixture
def opened(tmp_path: Path) -> Write:
    """Writes a file and opens it."""

    def write(name: str, content: str | bytes) -> RecordFile:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return open_records(path, name)

    return write


def values(file: RecordFile) -> list[Any]:
    return [record.value for record in file.read()]


def reasons(file: RecordFile) -> list[str | None]:
    return [record.value.reason if isinstance(record.value, BadRecord) else None for record in file.read()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"])
def test_every_format_has_the_same_records(tmp_path: Path, name: str) -> None:
    file = open_records(write_rows(tmp_path / name, ROWS))
    assert values(file) == ROWS
    assert file.count() == len(ROWS)
    assert file.sample() == ROWS
    assert file.columns() == (["id", "text"] if isinstance(file, CsvRows | ParquetRows) else None)


@pytest.mark.parametrize(
    ("name", "numbers", "unit"),
    [
        ("a.jsonl", [1, 2, 3, 4, 5], "line"),
        ("a.json", [1, 2, 3, 4, 5], "record"),
        ("a.csv", [2, 4, 6, 8, 10], "line"),  # every text has two lines
        ("a.parquet", [1, 2, 3, 4, 5], "row"),
    ],
)
def test_numbers_of_records_are_where_they_begin(tmp_path: Path, name: str, numbers: list[int], unit: str) -> None:
    file = open_records(write_rows(tmp_path / name, ROWS))
    assert ([record.number for record in file.read()], file.unit) == (numbers, unit)


class TestFormat:
    @pytest.mark.parametrize(
        ("name", "content", "kind"),
        [
            ("a.jsonl", '{"a": 1}\n', JsonLines),
            ("a.json", '{"a": 1}\n{"a": 2}\n', JsonLines),  # how many datasets name JSON lines
            ("a.jsonl", '\ufeff \n [{"a": 1}]', JsonArray),
            ("a.txt", '[{"a": 1}]', JsonArray),
            ("a.CSV", "a\n1\n", CsvRows),
            ("examples", '{"a": 1}', JsonLines),
        ],
    )
    def test_content_decides_over_the_name(self, opened: Write, name: str, content: str, kind: type) -> None:
        file = opened(name, content)
        assert type(file) is kind
        assert values(file)[0] in ({"a": 1}, {"a": "1"})

    def test_parquet_under_another_name(self, tmp_path: Path) -> None:
        path = write_parquet(tmp_path / "a.parquet", a=[1]).rename(tmp_path / "a.jsonl")
        assert values(open_records(path)) == [{"a": 1}]

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
    @pytest.mark.parametrize("content", ["", " \n\n"])
    def test_empty_file_is_refused(self, opened: Write, name: str, content: str) -> None:
        with pytest.raises(DataError, match=rf"{name}.* empty"):
            opened(name, content)

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            ("a.txt", "Some text.\n", False),
            ("a.py", "{1, 2}\n", False),
            ("a.md", "[1] A reference.\n", False),
            ("a.txt", "{not json}\n", False),
            ("a.txt", "", False),
            ("a.txt", '{"text": "x"}\n{"text": "y"}\n', True),
            ("a", '\n{"text": "x"}', True),
            ("a.jsonl", "", True),
            ("a.csv", "x", True),
        ],
    )
    def test_records_are_told_from_running_text(self, tmp_path: Path, name: str, content: str, expected: bool) -> None:
        (tmp_path / name).write_text(content)
        assert has_records(tmp_path / name) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class TestJsonArray:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
    @given(
        rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=5),
        block=st.integers(1, 40),
        indent=st.sampled_from([None, 1]),
        ascii_only=st.booleans(),
    )
    def test_elements_are_those_of_json(
        self, tmp_path: Path, rows: list[Any], block: int, indent: int | None, ascii_only: bool
    ) -> None:
        """Whatever the block ends in the middle of: an escape, a number, a character of several bytes."""
        text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
        (tmp_path / "a.json").write_bytes(text.encode(errors="surrogatepass"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_reader, "BLOCK_BYTES", block)
            assert values(open_records(tmp_path / "a.json")) == rows

    def test_elements_that_are_not_objects_can_be_skipped(self, opened: Write) -> None:
        found = reasons(opened("a.json", '[{"a": 1}, 5, "x", [1], null, 1234, {"a": 1, "a": 2}, {"a": 1}]'))
        assert [found[0], found[-1]] == [None, None]
        assert all("JSON object" in str(reason) for reason in found[1:6])
        assert "duplicate key 'a'" in str(found[6])

    @pytest.mark.parametrize(
        "content",
        [
            '[{"a": 1}',
            '[{"a": 1},',
            '[{"a": 1},]',
            '[{"a": 1} {"a": 2}]',
            '[{"a": 1}] x',
            '[{"a": }]',
            '[{"a": "b]',
            "[",
            "[,]",
            '[{"a": ' + "9" * 5000 + "}]",
        ],
    )
    def test_invalid_array_is_refused(self, opened: Write, content: str) -> None:
        with pytest.raises(DataError, match=r"a\.json is not a valid JSON array"):
            values(opened("a.json", content))

    def test_invalid_array_is_not_read_to_its_end(
        self, opened: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = ",".join(['{"a": 1}'] * 1000)
        opened("a.json", f'[{{"a": nul}},{rows}]')
        monkeypatch.setattr(text_reader, "BLOCK_BYTES", 64)
        blocks = iter([])

        def counted(path: Path) -> Any:
            nonlocal blocks
            blocks = text_reader.read_blocks(path)
            return blocks

        monkeypatch.setattr("llmtrain.data.records.json_array.read_blocks", counted)
        with pytest.raises(DataError, match="record 1"):
            values(open_records(tmp_path / "a.json"))
        assert len(list(blocks)) > 100


class TestCsv:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.csv", "q,a\n1,2\n"),
            ("a.csv", "\ufeffq,a\r\n1,2\r\n"),
            ("a.csv", "q;a\n1;2\n"),
            ("a.csv", "q\ta\n1\t2\n"),
            ("a.tsv", "q\ta\n1\t2"),
            ("a.csv", '\n"q","a"\n\n"1","2"\n\n'),
        ],
    )
    def test_separators_and_line_ends(self, opened: Write, name: str, content: str) -> None:
        assert values(opened(name, content)) == [{"q": "1", "a": "2"}]

    def test_every_value_is_text(self, opened: Write) -> None:
        """Readers that guess types turn these into numbers, dates and missing values."""
        row = "NA,null,None,007,1e5,2024-01-01,"
        [value] = values(opened("a.csv", f"a,b,c,d,e,f,g\n{row}\n"))
        assert ",".join(value.values()) == row

    def test_long_value(self, opened: Write) -> None:
        limit = csv.field_size_limit()
        long = "x" * (limit + 1)
        assert values(opened("a.csv", f"a\n{long}\n")) == [{"a": long}]
        assert csv.field_size_limit() == limit, "the limit of the caller's process"

    def test_row_of_another_length_can_be_skipped(self, opened: Write) -> None:
        found = reasons(opened("a.csv", "a,b\n1,2\n1\n1,2,3\n"))
        assert found[0] is None
        assert "1 value," in str(found[1])
        assert "3 values," in str(found[2])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'a,b\n1,2\n1,"2\n3,4\n', "line 3: not valid CSV"),
            (b"a,b\n1,\xff\n", r"line 2: not valid UTF-8 \(0xff\)"),
            ("a,b\n1,2\n".encode("utf-16-le"), "line 1: NUL"),
            (b"a,a\n1,2\n", "'a'"),
            (b"a,b\r1,2\r", "line 1: not valid CSV"),
        ],
    )
    def test_invalid_file_is_refused(self, opened: Write, content: bytes, message: str) -> None:
        with pytest.raises(DataError, match=rf"a\.csv.*{message}") as caught:
            values(opened("a.csv", content))
        assert caught.value.remedy


class TestParquet:
    def test_only_needed_columns_are_read(self, tmp_path: Path) -> None:
        file = open_records(write_parquet(tmp_path / "a.parquet", a=["x"] * 600, b=[1] * 600))
        records = list(file.read(["a", "nothing"]))
        assert [record.value for record in records] == [{"a": "x"}] * 600
        assert records[-1].number == 600

    def test_nulls_and_messages(self, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
        file = open_records(write_parquet(tmp_path / "a.parquet", messages=[messages, None]))
        assert values(file) == [{"messages": messages}, {"messages": None}]

    @pytest.mark.parametrize("content", [b"PAR1", b"not parquet", b"PAR1" + b"x" * 100 + b"PAR1"])
    def test_damaged_file_is_refused(self, opened: Write, content: bytes) -> None:
        with pytest.raises(DataError, match=r"a\.parquet"):
            values(opened("a.parquet", content))

    def test_invalid_utf8_is_refused(self, tmp_path: Path) -> None:
        broken = pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
        )
        write_parquet(tmp_path / "a.parquet", a=broken)
        with pytest.raises(DataError, match=r"a\.parquet"):
            values(open_records(tmp_path / "a.parquet"))
