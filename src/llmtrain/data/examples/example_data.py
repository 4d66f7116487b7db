"""What a dataset of rows says: where they come from. Add a row to registry.DATA and it can be named in a config."""

from abc import abstractmethod
from collections.abc import Iterator

from llmtrain.data.base import DataModule, PreparedData
from llmtrain.data.examples.chat_template import template_identity
from llmtrain.data.examples.example import Example
from llmtrain.data.store.directory import SPLITS, Split, open_or_build
from llmtrain.data.store.example_store import ExampleStore, example_writer
from llmtrain.data.tokenizers.tokenizer import load_tokenizer, tokenizer_dir, tokenizer_identity


class ExampleData(DataModule):
    """Rows with an answer each: a sample is one of them."""

    @abstractmethod
    def rows(self, split: Split) -> Iterator[Example]:
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
                "template": template_identity(tokenizer_dir(spec)),
            },
            tokenizer=lambda: load_tokenizer(spec, self._texts()),
            write=example_writer(self.rows, threads),
        )
        train, val = (ExampleStore.open(folder, split) for split in SPLITS)
        return PreparedData(folder.tokenizer(), train, val, folder.fingerprint)
