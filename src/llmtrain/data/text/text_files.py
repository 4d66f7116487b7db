"""`text_files`: text from files and globs, one document per file."""

from collections.abc import Iterator
from typing import Any

from llmtrain.config.data import TextFilesSection
from llmtrain.data.base import TextData
from llmtrain.data.text.reader import expand_files, files_identity, read_chunks
from llmtrain.data.types import Split, TextChunk


class TextFiles(TextData):
    config: TextFilesSection

    def identity(self) -> dict[str, Any]:
        config = self.config
        return {
            "kind": "text_files",
            "files": files_identity(expand_files(config.files, "data.files"), self.cache_dir),
            "val": files_identity(expand_files(config.val_files, "data.val_files"), self.cache_dir)
            if config.val_files
            else config.val_fraction,
        }

    def chunks(self, split: Split) -> Iterator[TextChunk]:
        if self.config.val_files:
            field = "files" if split == "train" else "val_files"
            for path in expand_files(getattr(self.config, field), f"data.{field}"):
                yield from read_chunks(path)
        else:
            yield from self._held_out(split)

    def _held_out(self, split: Split) -> Iterator[TextChunk]:
        """The last val_fraction of the bytes for validation, the rest for training."""
        files = expand_files(self.config.files, "data.files")
        border = int(sum(path.stat().st_size for path in files) * (1 - self.config.val_fraction))
        position = 0
        for path in files:
            for chunk in read_chunks(path):
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
