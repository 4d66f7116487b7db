"""What a dataset of rows says: where they come from. Add a row to registry.DATA and it can be named in a config."""

from abc import abstractmethod
from collections.abc import Iterator

from llmtrain.data.base import DataModule, PreparedData
from llmtrain.data.chat_template import template_identity
from llmtrain.data.row_store import RowStore, row_writer
from llmtrain.data.rows import Row
from llmtrain.data.store_folder import SPLITS, Split, open_or_build
from llmtrain.data.tokenizer import load_tokenizer, tokenizer_folder, tokenizer_identity


class RowData(DataModule):
    """Rows with an answer each: a sample is one of them."""

    @abstractmethod
    def rows(self, split: Split) -> Iterator[Row]:
        """The rows of a split, in order."""

    def _texts(self) -> Iterator[str]:
        return (segment.text for split in SPLITS for row in self.rows(split) for segment in row.segments)

    def prepare(self, threads: int) -> PreparedData:
        spec = self.tokenizer_spec
        folder = open_or_build(
            self.cache_dir,
            identity={
                "rows": self.identity(),
                "tokenizer": tokenizer_identity(spec),
                "template": template_identity(tokenizer_folder(spec)),
            },
            tokenizer=lambda: load_tokenizer(spec, self._texts()),
            write=row_writer(self.rows, threads),
        )
        train, val = (RowStore.open(folder, split) for split in SPLITS)
        return PreparedData(folder.tokenizer(), train, val, folder.fingerprint)
