"""`hf_text`: text by the datasets library, from the hub or from local text, json or parquet files.

Each row is a document. A row that ends with a line break is a line of a longer text (WikiText is stored so), and
is joined with the next one.
"""

from collections.abc import Iterator
from typing import Any

from llmtrain.config.data import HfTextSection
from llmtrain.data.base import Split, TextChunk, TextData
from llmtrain.data.hf_datasets import held_out as held_out_rows
from llmtrain.data.hf_datasets import load, load_split
from llmtrain.data.text.reader import expand_files, files_identity
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
            # The library's own fingerprint changes when the hub's content does.
            identity["rows"] = [self._load(split)._fingerprint for split in ("train", "val")]
        return identity

    def chunks(self, split: Split) -> Iterator[TextChunk]:
        rows = self._load(split)
        column = self.config.text_column
        if column not in rows.column_names:
            raise DataError(
                f"data.text_column '{column}' is not a column of the data.",
                known=rows.column_names,
                remedy="Set data.text_column.",
            )
        number = 0
        for batch in rows.select_columns([column]).iter(ROWS_AT_ONCE):
            for text in batch[column]:
                if not isinstance(text, str):
                    raise DataError(
                        f"Row {number} of the {split} data: column '{column}' is not text but {text!r:.80}."
                    )
                if self.tokenizer_spec == "byte" and "\0" in text:
                    raise DataError(
                        f"Row {number} of the {split} data: column '{column}' has a NUL character, which is the byte "
                        "tokenizer's end of text.",
                        remedy="Remove it, or use another tokenizer.",
                    )
                number += 1
                if text:
                    yield TextChunk(text, ends_document=not text.endswith("\n"))

    def _load(self, split: Split) -> Any:
        if self.config.files:
            return load(self.config, lambda datasets, cache: self._load_files(datasets, split, cache))
        return load_split(self.config, split)

    def _load_files(self, datasets: Any, split: Split, cache: str) -> Any:
        config = self.config
        held_out = not config.val_files
        patterns, field = (config.files, "files") if split == "train" or held_out else (config.val_files, "val_files")
        files = expand_files(patterns, f"data.{field}")
        kinds = {_BUILDERS.get(path.suffix) for path in files}
        kind = kinds.pop()
        if kinds or kind is None:
            raise DataError(
                f"data.{field}: files must be of one kind, but they end in {sorted({p.suffix for p in files})}.",
                known=_BUILDERS,
            )
        options = {"keep_linebreaks": True, "encoding": "utf-8-sig"} if kind == "text" else {}
        # The library knows a file that it has converted by its path and time of change alone.
        cache = f"{cache}/{files_identity(files, self.cache_dir)[:20]}"
        rows = datasets.load_dataset(
            kind, data_files=[str(path) for path in files], split="train", cache_dir=cache, **options
        )
        if not held_out:
            return rows
        return held_out_rows(rows, config, split)
