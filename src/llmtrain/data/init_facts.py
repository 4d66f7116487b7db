"""What `llmtrain init` finds out about files: the column of the text, the format of examples, and how much there is."""

import json
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from llmtrain.config.starter import ExampleSizes
from llmtrain.data.examples.formats import Recognized, recognize, refuse_preference_pair, texts_of
from llmtrain.data.preferences.pair_records import is_pair, read_pair
from llmtrain.data.records.base import BadRecord, Record, RecordFile
from llmtrain.data.records.csv_rows import CsvRows
from llmtrain.data.records.open_file import has_records, open_records
from llmtrain.data.records.usable import UsableRecords, field_names
from llmtrain.data.text.documents import DocumentReader, find_text_column
from llmtrain.data.tokenizers.chat_template import Message
from llmtrain.errors import DataError, UsageError

_ENOUGH_BYTES = 1 << 20
"""More text than this changes nothing in the config."""
_MEASURED_EXAMPLES = 2000
# Tokens of a chat model, roughly: English has 4 to 5 bytes per token, and a chat template adds about 30 tokens.
_BYTES_PER_TOKEN = 4
_TEMPLATE_TOKENS = 30
_LONG_QUANTILE = 0.98


def text_column_of(paths: Sequence[Path], column: str | None) -> str | None:
    """The column that holds the text in those files that have records; None if all files are plain text."""
    with_records = [path for path in paths if path.stat().st_size and has_records(path)]
    if column is not None and not with_records:
        raise UsageError("--text-column is set, but all files are plain text.", remedy="Remove it.")
    for path in with_records:
        column = _checked_column(open_records(path), column)
    return column


def _checked_column(file: RecordFile, column: str | None) -> str:
    """`column` if the file has it; without one, the column that holds the text."""
    sample = file.sample()
    if not sample:
        raise _unreadable(file, "To train on the file as plain text, rename it to .txt.")
    columns = dict.fromkeys(chain.from_iterable(sample))  # in order, each once
    found = find_text_column(file) if column is None else column
    if found in columns:
        return str(found)
    shown = [f"{name:.60}" for name in columns]
    remedy = "Pass the column of the text to --text-column."
    if isinstance(file, CsvRows):
        remedy += " The first line must name the columns."
    if column is not None:
        raise DataError(f"{file.name} has no column '{column}'.", known=shown, remedy=remedy)
    if recognize(sample[0]):
        remedy = "These are examples with an answer: pass the file to --instruct."
    raise DataError(f"{file.name}: which column holds the text is unclear.", known=shown, remedy=remedy)


def measure_text(paths: Sequence[Path], column: str | None) -> int:
    """Bytes of text in the files, counted to about a megabyte if they have records."""
    reader = DocumentReader(column, UsableRecords("skip", "data.on_bad_record", "record"), nul_ends_text=False)
    size = 0
    for path in paths:
        if column is None or not has_records(path):
            size += path.stat().st_size
            continue
        for chunk in reader.read(path):
            size += len(chunk.text.encode())
            if size > _ENOUGH_BYTES:
                return size
    return size


def recognized_examples(file: RecordFile) -> Recognized:
    """The data section that reads the examples of a file, by its first one."""
    first = _first_record(file)
    if isinstance(first.value, BadRecord):
        raise _unreadable(file)
    place = f"{file.name}, {file.unit} {first.number}"
    found = recognize(first.value)
    if found is not None:
        return found
    try:
        refuse_preference_pair(first.value)
    except BadRecord as pair:
        raise DataError(f"{place}: {pair.reason}.", remedy=f"Pass the file to --preferences. {pair.remedy}") from None
    remedy = "Copy a preset with --preset lora_instruct, then set data.instruction_field and data.output_field."
    if find_text_column(file):
        remedy = "This is running text: pass the file to --text."
    raise DataError(
        f"{place}: the example has {field_names(first.value)}; which of them is the answer is unclear.", remedy=remedy
    )


def measure_examples(file: RecordFile, found: Recognized) -> ExampleSizes:
    """Number and lengths of the examples, from the first ones and without a tokenizer."""
    count = file.count()
    if count < 2:
        raise DataError(
            f"{file.name} has a single example: none is left for validation.", remedy="Write more examples."
        )
    tokens = []
    for record in islice(file.read(), _MEASURED_EXAMPLES):
        try:
            texts = texts_of(record.value, found) if isinstance(record.value, dict) else []
        except BadRecord:
            continue
        tokens.append(sum(len(text.encode(errors="replace")) for text in texts) / _BYTES_PER_TOKEN + _TEMPLATE_TOKENS)
    tokens.sort()
    long = tokens[min(len(tokens) - 1, int(_LONG_QUANTILE * len(tokens)))]
    return ExampleSizes(count, sum(tokens) / len(tokens), long)


def measure_pairs(file: RecordFile) -> ExampleSizes:
    """Number and lengths of preference pairs: the mean is of both answers with their prompt, a long one is a single
    answer."""
    first = _first_record(file)
    if isinstance(first.value, BadRecord):
        raise _unreadable(file)
    place = f"{file.name}, {file.unit} {first.number}"
    if not is_pair(first.value):
        remedy = "A pair has prompt, chosen and rejected: docs/fine-tuning.md."
        if recognize(first.value):
            remedy = "These are examples with one answer: pass the file to --instruct."
        raise DataError(f"{place}: the example has {field_names(first.value)}, and no two answers.", remedy=remedy)
    count = file.count()
    if count < 2:
        raise DataError(f"{file.name} has a single pair: none is left for validation.", remedy="Write more pairs.")
    pairs = UsableRecords("skip", "data.on_bad_example", "pair").convert(
        file.name, file.unit, islice(file.read(), _MEASURED_EXAMPLES), _tokens_of_pair
    )
    tokens = [both for _, both in pairs]
    longest = sorted(max(both) for both in tokens)
    long = longest[min(len(longest) - 1, int(_LONG_QUANTILE * len(longest)))]
    return ExampleSizes(count, sum(map(sum, tokens)) / len(tokens), long)


def _tokens_of_pair(record: dict[str, Any]) -> tuple[float, float]:
    """About the tokens of the chosen and the rejected answer, each with the prompt."""
    pair = read_pair(record)
    prompt = sum(map(_message_bytes, pair.prompt or ()))
    if pair.tools:
        prompt += _bytes(json.dumps(pair.tools))
    chosen, rejected = (prompt + _message_bytes(answer) for answer in (pair.chosen, pair.rejected))
    return chosen / _BYTES_PER_TOKEN + _TEMPLATE_TOKENS, rejected / _BYTES_PER_TOKEN + _TEMPLATE_TOKENS


def _message_bytes(message: Message) -> int:
    calls = message.get("tool_calls")
    return _bytes(message["content"]) + (_bytes(json.dumps(calls)) if calls else 0)


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _first_record(file: RecordFile) -> Record:
    first = next(file.read(), None)
    if first is None:
        raise DataError(f"{file.name} has no records.")
    return first


def _unreadable(file: RecordFile, remedy: str | None = None) -> DataError:
    """Why the first record of a file cannot be read."""
    first = _first_record(file)
    assert isinstance(first.value, BadRecord)
    text = f"{file.name}, {file.unit} {first.number}: {first.value.reason}."
    return DataError(text, remedy=first.value.remedy or remedy)
