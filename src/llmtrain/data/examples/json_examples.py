"""Rows from JSON lines or from the datasets library: what `instruct_jsonl` and `chat_jsonl` have in common."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from llmtrain.config.data import ChatJsonlSection, InstructJsonlSection
from llmtrain.data.examples.chat_template import ChatTemplate
from llmtrain.data.examples.example import BadExample, Example, Segment
from llmtrain.data.examples.example_data import ExampleData
from llmtrain.data.examples.json_lines import Line, count_lines, find_file, read_json_lines
from llmtrain.data.examples.prompts import adds_special_tokens, choose_format
from llmtrain.data.hf_datasets import load_split, training_count
from llmtrain.data.store.directory import Split
from llmtrain.data.text.reader import files_identity
from llmtrain.data.tokenizers.tokenizer import tokenizer_dir
from llmtrain.errors import DataError
from llmtrain.logs import warn_once

SKIP = "Set data.on_bad_example to skip to leave such rows out."


class JsonExamples(ExampleData):
    config: InstructJsonlSection | ChatJsonlSection

    def __init__(self, config: InstructJsonlSection | ChatJsonlSection, seed: int) -> None:
        super().__init__(config, seed)
        self._said: set[tuple[str, str]] = set()

    @abstractmethod
    def segments(self, record: dict[str, Any]) -> list[Segment]:
        """The row of a JSON object; raises BadExample where it cannot be used."""

    @cached_property
    def format(self) -> Literal["chat", "plain"]:
        return choose_format(self.config, tokenizer_dir(self.tokenizer_spec))

    @cached_property
    def template(self) -> ChatTemplate:
        folder = tokenizer_dir(self.tokenizer_spec)
        assert folder
        assert self.format == "chat"
        return ChatTemplate(folder)

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

    def rows(self, split: Split) -> Iterator[Example]:
        name = self._file(split)
        if name:
            return self._usable(name, self._held_out(split, read_json_lines(self._path(split), name)))
        dataset = load_split(self.config, split)
        source = f"{self.config.dataset_name} ({split})"
        return self._usable(source, (Line(number, dict(row)) for number, row in enumerate(dataset, 1)))

    def examples_of_file(self, name: str) -> Iterator[Example]:
        """All rows of another file, read as the config says."""
        return self._usable(name, read_json_lines(find_file(name, "rows"), name))

    @property
    def _has_val(self) -> bool:
        return bool(self.config.val_file) or not self.config.train_file

    def _file(self, split: Split) -> str | None:
        """The file of a split; None where it comes from the datasets library."""
        return self.config.val_file if split == "val" and self._has_val else self.config.train_file

    def _path(self, split: Split) -> Any:
        name = self._file(split)
        assert name
        return find_file(name, "data.val_file" if split == "val" and self._has_val else "data.train_file")

    def _source_identity(self, split: Split) -> Any:
        if self._file(split):
            return files_identity([self._path(split)], self.cache_dir)
        return load_split(self.config, split)._fingerprint  # changes when the hub's content does

    def _held_out(self, split: Split, lines: Iterator[Line]) -> Iterator[Line]:
        """Without validation rows of their own: the last val_fraction of the training rows, at least one."""
        name = self._file(split)
        if self._has_val or not name:
            return lines
        count = count_lines(self._path(split), name)
        if count == 1:
            raise DataError(
                f"{name} has one row, so none can be held out for validation.", remedy="Name data.val_file."
            )
        border = training_count(count, self.config)
        return islice(lines, border) if split == "train" else islice(lines, border, None)

    def _usable(self, source: str, lines: Iterable[Line]) -> Iterator[Example]:
        is_plain = self.format == "plain"
        begins_special = is_plain and adds_special_tokens(self.config)
        count, left_out, first = 0, 0, ""
        for line in lines:
            count += 1
            try:
                if isinstance(line.value, BadExample):
                    raise line.value
                segments = self.segments(line.value)
                if self.tokenizer_spec == "byte" and any("\0" in segment.text for segment in segments):
                    raise BadExample("it has a NUL character, which is the byte tokenizer's end of text")
                yield Example(segments, source, line.number, begins_special, ends_text=is_plain)
            except BadExample as bad:
                if self.config.on_bad_example == "error":
                    raise DataError(
                        f"{source}, line {line.number}: {bad.reason}.", remedy=f"{bad.remedy or 'Repair it.'} {SKIP}"
                    ) from None
                left_out += 1
                first = first or f"line {line.number}: {bad.reason}"
        if left_out == count:
            raise DataError(
                f"{source}: none of the {count:,} rows can be used; first {first}."
                if count
                else f"{source} has no rows."
            )
        if left_out and (source, first) not in self._said:
            self._said.add((source, first))
            warn_once("DATA", f"{left_out:,} of {count:,} rows of {source} left out: first {first}")


def text_of(value: object, what: str) -> str:
    """A value that must be text, and text that can be tokenised."""
    if not isinstance(value, str):
        raise BadExample(f"{what} is not text but {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadExample(f"{what} has half of a surrogate pair, which is no character") from None
    return value
