"""`hf_text`: text read by the datasets library, from the hub or from local text, JSON or Parquet files.

Each row is a document. A row that ends with a line break is one line of a longer document, as in WikiText, and is
joined with the next row.
"""

from collections.abc import Iterator
from typing import Any

from llmtrain.config.data import HfTextSection
from llmtrain.data.base import TextData
from llmtrain.data.hf_datasets import call_datasets, hold_out, load_split
from llmtrain.data.text.document_choice import in_split
from llmtrain.data.text.reader import expand_files, files_identity
from llmtrain.data.text_and_examples import SPLITS, Split, TextChunk
from llmtrain.errors import DataError

_BUILDERS = {".txt": "text", ".text": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
ROWS_AT_ONCE = 1000


class HFText(TextData):
    config: HfTextSection

    def identity(self) -> dict[str, Any]:
        config = self.config
        identity: dict[str, Any] = {"kind": "hf_text", "column": config.text_column}
        if config.files:
            identity["files"] = files_identity(expand_files(config.files, "data.files"), self.cache_dir)
            if config.val_files:
                identity["val"] = files_identity(expand_files(config.val_files, "data.val_files"), self.cache_dir)
            else:
                identity["val"] = config.val_fraction
        else:
            # The library's fingerprint changes with the content on the hub.
            identity["rows"] = [self._load(split)._fingerprint for split in ("train", "val")]
        if self._splits_by_hash:
            identity["split"] = "hash"
        return identity

    @property
    def _splits_by_hash(self) -> bool:
        config = self.config
        has_val = bool(config.val_files) if config.files else bool(config.val_split)
        return config.split_by == "hash" and not has_val

    def chunks(self, split: Split) -> Iterator[TextChunk]:
        if self._splits_by_hash:
            return in_split(self._all, split, self.config.val_fraction)
        return self._texts_of(self._load(split), split)

    def _all(self) -> Iterator[TextChunk]:
        for split in SPLITS:
            yield from self._texts_of(self._load(split), split)

    def _texts_of(self, rows: Any, split: Split) -> Iterator[TextChunk]:
        column = self.config.text_column
        if column not in rows.column_names:
            raise DataError(
                f"data.text_column: the dataset has no column '{column}'.",
                known=rows.column_names,
                remedy="Set data.text_column.",
            )
        number = 0
        for batch in rows.select_columns([column]).iter(ROWS_AT_ONCE):
            for text in batch[column]:
                if not isinstance(text, str):
                    raise DataError(
                        f"Row {number} of the {split} data: column '{column}' must be text, got {text!r:.80}."
                    )
                if self.tokenizer_spec == "byte" and "\0" in text:
                    raise DataError(
                        f"Row {number} of the {split} data: column '{column}' contains a NUL character, the byte "
                        "tokenizer's end of text.",
                        remedy="Remove it, or use another tokenizer.",
                    )
                number += 1
                if text:
                    yield TextChunk(text, ends_document=not text.endswith("\n"))

    def _load(self, split: Split) -> Any:
        if self.config.files:
            return call_datasets(self.config, lambda datasets, cache: self._load_files(datasets, split, cache))
        return load_split(self.config, split)

    def _load_files(self, datasets: Any, split: Split, cache: str) -> Any:
        config = self.config
        field = "files"
        names = config.files
        if split == "val" and config.val_files:
            field = "val_files"
            names = config.val_files
        files = expand_files(names, f"data.{field}")
        builders = {_BUILDERS.get(path.suffix) for path in files}
        builder = builders.pop()
        if builders or builder is None:
            raise DataError(
                f"data.{field}: all files must have the same format, got {sorted({p.suffix for p in files})}.",
                known=_BUILDERS,
            )
        options: dict[str, Any] = {}
        if builder == "text":
            options = {"keep_linebreaks": True, "encoding": "utf-8-sig"}
        # The library's own cache key is path and modification time only.
        cache = f"{cache}/{files_identity(files, self.cache_dir)[:20]}"
        rows = datasets.load_dataset(
            builder, data_files=[str(path) for path in files], split="train", cache_dir=cache, **options
        )
        return rows if config.val_files else hold_out(rows, config, split)
