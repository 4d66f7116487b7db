"""Examples from JSON lines or from the datasets library: the common part of `instruct_jsonl` and `chat_jsonl`."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from llmtrain.config.data import ChatJsonlSection, InstructJsonlSection
from llmtrain.data.base import ExampleData
from llmtrain.data.examples.json_lines import Line, count_lines, find_file, read_json_lines
from llmtrain.data.examples.prompts import adds_special_tokens, choose_format
from llmtrain.data.hf_datasets import load_split, training_count
from llmtrain.data.text.reader import files_identity
from llmtrain.data.tokenizers.chat_template import ChatTemplate
from llmtrain.data.tokenizers.load import tokenizer_dir
from llmtrain.data.types import BadExample, Example, Segment, Split
from llmtrain.errors import DataError
from llmtrain.logs import warn_once

SKIP_REMEDY = "Set data.on_bad_example to skip to drop such examples."


class JsonExamples(ExampleData):
    config: InstructJsonlSection | ChatJsonlSection

    def __init__(self, config: InstructJsonlSection | ChatJsonlSection, seed: int) -> None:
        super().__init__(config, seed)
        self._warned: set[tuple[str, str]] = set()

    @abstractmethod
    def segments(self, record: dict[str, Any]) -> list[Segment]:
        """The prompts and answers of a JSON object; raises BadExample if it cannot be used."""

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
            return self._usable(name, self._held_out(split, read_json_lines(self._path(split), name)))
        dataset = load_split(self.config, split)
        source = f"{self.config.dataset_name} ({split})"
        return self._usable(source, (Line(number, dict(record)) for number, record in enumerate(dataset, 1)))

    def examples_of_file(self, name: str) -> Iterator[Example]:
        """All examples of another file, in the format of this config."""
        return self._usable(name, read_json_lines(find_file(name, "examples"), name))

    @property
    def _has_val(self) -> bool:
        return bool(self.config.val_file) or not self.config.train_file

    def _file(self, split: Split) -> str | None:
        """The file of a split; None if it comes from the datasets library."""
        return self.config.val_file if split == "val" and self._has_val else self.config.train_file

    def _path(self, split: Split) -> Path:
        name = self._file(split)
        assert name
        return find_file(name, "data.val_file" if split == "val" and self._has_val else "data.train_file")

    def _source_identity(self, split: Split) -> Any:
        if self._file(split):
            return files_identity([self._path(split)], self.cache_dir)
        return load_split(self.config, split)._fingerprint  # changes with the content on the hub

    def _held_out(self, split: Split, lines: Iterator[Line]) -> Iterator[Line]:
        """Without a validation file, hold out the last val_fraction of the training examples, at least one."""
        name = self._file(split)
        if self._has_val or not name:
            return lines
        count = count_lines(self._path(split), name)
        if count == 1:
            next(self._usable(name, lines))  # an example that cannot be used is reported first
            raise DataError(
                f"{name} has a single example, so none can be held out for validation.", remedy="Set data.val_file."
            )
        border = training_count(count, self.config)
        return islice(lines, border) if split == "train" else islice(lines, border, None)

    def _usable(self, source: str, lines: Iterable[Line]) -> Iterator[Example]:
        is_plain = self.format == "plain"
        begins_special = is_plain and adds_special_tokens(self.config)
        count, dropped, first = 0, 0, ""
        for line in lines:
            count += 1
            try:
                if isinstance(line.value, BadExample):
                    raise line.value
                segments = self.segments(line.value)
                if self.tokenizer_spec == "byte" and any("\0" in segment.text for segment in segments):
                    raise BadExample("contains a NUL character, the byte tokenizer's end of text")
                yield Example(segments, source, line.number, begins_special, ends_text=is_plain)
            except BadExample as bad:
                if self.config.on_bad_example == "error":
                    raise DataError(
                        f"{source}, line {line.number}: {bad.reason}.",
                        remedy=f"{bad.remedy or 'Fix the example.'} {SKIP_REMEDY}",
                    ) from None
                dropped += 1
                first = first or f"line {line.number}: {bad.reason}"
        if not count:
            raise DataError(f"{source} has no examples.")
        if dropped == count:
            raise DataError(f"{source}: none of the {count:,} examples can be used; the first is {first}.")
        if dropped and (source, first) not in self._warned:
            self._warned.add((source, first))
            warn_once("DATA", f"{dropped:,} of {count:,} examples of {source} were dropped; the first is {first}")


def text_of(value: object, what: str) -> str:
    """The value, checked to be text that can be tokenized."""
    if not isinstance(value, str):
        raise BadExample(f"{what} must be text, got {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadExample(f"{what} contains an unpaired surrogate") from None
    return value
