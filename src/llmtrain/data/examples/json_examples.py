"""Examples from a file of records or from the datasets library: the common part of `instruct_jsonl` and
`chat_jsonl`."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from llmtrain.config.data import ExampleFilesSection
from llmtrain.data.base import ExampleData
from llmtrain.data.examples.prompts import adds_special_tokens, choose_format
from llmtrain.data.hf_datasets import load_split, training_count
from llmtrain.data.records.base import Record, RecordFile
from llmtrain.data.records.open_file import find_file, open_records
from llmtrain.data.records.usable import UsableRecords, check_no_nul
from llmtrain.data.text.reader import files_identity
from llmtrain.data.text_and_examples import Example, Segment, Split
from llmtrain.data.tokenizers.chat_template import ChatTemplate
from llmtrain.data.tokenizers.load import tokenizer_dir
from llmtrain.errors import DataError


class JsonExamples(ExampleData):
    config: ExampleFilesSection
    noun = "example"
    """What a record is, in messages."""

    def __init__(self, config: ExampleFilesSection, seed: int) -> None:
        super().__init__(config, seed)
        self._records = UsableRecords(config.on_bad_example, "data.on_bad_example", self.noun)

    @abstractmethod
    def segments(self, record: dict[str, Any]) -> list[Segment]:
        """The prompts and answers of a record; raises BadRecord if it cannot be used."""

    @cached_property
    def format(self) -> Literal["chat", "plain"]:
        return choose_format(self.config, tokenizer_dir(self.tokenizer_spec))

    @cached_property
    def template(self) -> ChatTemplate:
        directory = tokenizer_dir(self.tokenizer_spec)
        assert directory
        assert self.format == "chat"
        return ChatTemplate(directory)

    def identity(self) -> dict[str, Any]:
        config = self.config
        return {
            "kind": config.name,
            "version": 1,
            "format": self.format,
            "special": adds_special_tokens(config),
            "bad_rows": config.on_bad_example,
            "train": self._source_identity("train"),
            "val": self._source_identity("val") if self._has_val else config.val_fraction,
        }

    def examples(self, split: Split) -> Iterator[Example]:
        name = self._file(split)
        if name:
            file = open_records(self._path(split), name)
            return self._usable(name, file.unit, self._held_out(split, file))
        dataset = load_split(self.config, split)
        source = f"{self.config.dataset_name} ({split})"
        return self._usable(source, "row", (Record(number, dict(row)) for number, row in enumerate(dataset, 1)))

    def examples_of_file(self, name: str) -> Iterator[Example]:
        """All examples of another file, in the format of this config."""
        file = open_records(find_file(name, "examples"), name)
        return self._usable(name, file.unit, file.read())

    @property
    def _has_val(self) -> bool:
        return bool(self.config.val_file) or not self.config.train_file

    def _file(self, split: Split) -> str | None:
        """The file of a split; None if it comes from the datasets library."""
        if split == "val" and self._has_val:
            return self.config.val_file
        return self.config.train_file

    def _path(self, split: Split) -> Path:
        name = self._file(split)
        assert name
        is_val_file = split == "val" and self._has_val
        return find_file(name, "data.val_file" if is_val_file else "data.train_file")

    def _source_identity(self, split: Split) -> Any:
        if self._file(split):
            return files_identity([self._path(split)], self.cache_dir)
        return load_split(self.config, split)._fingerprint  # changes with the content on the hub

    def _held_out(self, split: Split, file: RecordFile) -> Iterator[Record]:
        """Without a validation file, hold out the last val_fraction of the training examples, at least one."""
        if self._has_val:
            return file.read()
        count = file.count()
        if count == 1:
            next(self._usable(file.name, file.unit, file.read()))  # an example that cannot be used is reported first
            raise DataError(
                f"{file.name} has a single {self.noun}, so none can be held out for validation.",
                remedy="Set data.val_file.",
            )
        border = training_count(count, self.config)
        if split == "train":
            return islice(file.read(), border)
        return islice(file.read(), border, None)

    def _usable(self, source: str, unit: str, records: Iterable[Record]) -> Iterator[Example]:
        is_plain = self.format == "plain"
        begins_special = is_plain and adds_special_tokens(self.config)
        for number, segments in self._records.convert(source, unit, records, self._checked_segments):
            yield Example(segments, source, number, begins_special, ends_text=is_plain, unit=unit)

    def _checked_segments(self, record: dict[str, Any]) -> list[Segment]:
        segments = self.segments(record)
        if self.tokenizer_spec == "byte":
            for segment in segments:
                check_no_nul(segment.text)
        return segments
