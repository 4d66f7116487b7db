"""`text_files`: text from files and globs, one document per file, or one per record of a file."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from llmtrain.config.data import TextFilesSection
from llmtrain.core.logs import warn_once
from llmtrain.data.base import PreparedData, TextData
from llmtrain.data.records.open_file import RECORD_SUFFIXES, open_records
from llmtrain.data.records.parquet_rows import ParquetRows
from llmtrain.data.records.usable import UsableRecords
from llmtrain.data.text.document_choice import in_split
from llmtrain.data.text.documents import DocumentReader, find_text_column
from llmtrain.data.text.reader import expand_files, files_identity
from llmtrain.data.text_and_examples import Split, TextChunk
from llmtrain.errors import DataError


class TextFiles(TextData):
    config: TextFilesSection

    @cached_property
    def _reader(self) -> DocumentReader:
        records = UsableRecords(self.config.on_bad_record, "data.on_bad_record", "record")
        return DocumentReader(self.config.text_column, records, self.tokenizer_spec == "byte")

    def identity(self) -> dict[str, Any]:
        config = self.config
        identity: dict[str, Any] = {
            "kind": "text_files",
            "files": files_identity(expand_files(config.files, "data.files"), self.cache_dir),
            "val": config.val_fraction,
        }
        if config.val_files:
            identity["val"] = files_identity(expand_files(config.val_files, "data.val_files"), self.cache_dir)
        elif config.split_by == "hash":
            identity["split"] = "hash"
        if config.text_column is not None:
            identity["records"] = [config.text_column, config.on_bad_record]
        return identity

    def prepare(self, threads: int) -> PreparedData:
        if self.config.text_column is None:
            self._check_plain_text()
        return super().prepare(threads)

    def chunks(self, split: Split) -> Iterator[TextChunk]:
        if self.config.val_files:
            field = "files" if split == "train" else "val_files"
            for path in expand_files(getattr(self.config, field), f"data.{field}"):
                yield from self._reader.read(path)
        elif self.config.split_by == "hash":
            yield from in_split(self._all, split, self.config.val_fraction)
        else:
            yield from self._held_out(split)

    def _all(self) -> Iterator[TextChunk]:
        for path in expand_files(self.config.files, "data.files"):
            yield from self._reader.read(path)

    @cached_property
    def _held_out_from(self) -> int:
        """The byte of the text at which validation begins."""
        sizes = map(self._reader.size, expand_files(self.config.files, "data.files"))
        return int(sum(sizes) * (1 - self.config.val_fraction))

    def _held_out(self, split: Split) -> Iterator[TextChunk]:
        """The last val_fraction of the bytes for validation, the rest for training."""
        border = self._held_out_from
        position = 0
        for path in expand_files(self.config.files, "data.files"):
            for chunk in self._reader.read(path):
                size = len(chunk.text.encode())
                if position + size <= border or position >= border:
                    if (position < border) == (split == "train"):
                        yield chunk
                else:
                    before = chunk.text.encode()[: border - position].decode(errors="ignore")
                    if split == "train":
                        yield TextChunk(before, ends_document=True)
                    else:
                        yield TextChunk(chunk.text[len(before) :], chunk.ends_document)
                position += size

    def _check_plain_text(self) -> None:
        """Warn if files have documents, but are read as plain text, which Parquet cannot be."""
        files = expand_files(self.config.files, "data.files")
        if self.config.val_files:
            files += expand_files(self.config.val_files, "data.val_files")
        with_records = [path for path in files if path.suffix.lower() in RECORD_SUFFIXES and path.stat().st_size]
        if not with_records:
            return
        path = with_records[0]
        file = open_records(path)
        if isinstance(file, ParquetRows):
            raise DataError(
                f"data.text_column is null, but {path} is a Parquet file.",
                known=file.columns(),
                remedy="Set data.text_column to the column that holds the text.",
            )
        try:
            column = find_text_column(file)
        except DataError:
            return  # not records after all
        if column:
            what = f"{path} is read as plain text, syntax included"
            warn_once("DATA", f"{what}; to train on its documents, set data.text_column to {column}")
