"""The `data` section: one class per kind of data, chosen by `data.name`."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue, Tag

from llmtrain.config.section import (
    PATH_PATTERN,
    PLUGIN_TAG,
    ClassName,
    CountOrZero,
    MayChange,
    Names,
    PositiveInt,
    Problem,
    Section,
    Text,
)


class DataSection(Section):
    """What every kind of data has."""

    name: str
    """Kind of data."""
    tokenizer: MayChange[Text | None] = None
    """`byte`, `char` (one token per character of the text), `gpt2`, or a Hugging Face tokenizer directory
    (`llmtrain tokenizer train` makes one). null uses the model's own for `hf_causal_lm`, else `byte`."""
    cache_dir: MayChange[Annotated[str, Field(pattern=PATH_PATTERN)]] = "~/.cache/llmtrain"
    """Directory of tokenized data, reused while source and tokenizer are unchanged. The default is, in pods,
    .cache/llmtrain on the runs volume."""
    num_workers: MayChange[CountOrZero] = 0
    """Number of worker processes that prepare batches. 0 prepares them in the training process. Workers import the main
    module, so a script of your own needs `if __name__ == "__main__":`."""


class RunningTextSection(DataSection):
    """Data that may be running text."""

    document_mask: bool = False
    """Let attention stop at the ends of documents of text, with positions that restart at 0, for `hf_causal_lm` and
    plugins that keep packed examples separate. false lets a window attend to the documents before it."""


class HeldOutSection(DataSection):
    """Data of which a share may be held out for validation."""

    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the training data held out for validation where no validation data is given."""


class FilesSection(HeldOutSection, RunningTextSection):
    """Data from local text files."""

    files: MayChange[Names] = []
    """Training files or globs. Text must be UTF-8 without NUL characters; a byte order mark is removed."""
    val_files: MayChange[Names] = []
    """Validation files or globs. Empty holds out `val_fraction` of the training text."""
    split_by: Literal["position", "hash"] = "position"
    """What is held out where no validation data is given: `position` the end of the text, `hash` whole documents,
    chosen by a hash of their text, so that a document stays in its split when others are added."""
    max_documents: PositiveInt | None = None
    """Read at most this number of documents for training, and at most this number for validation, for trying things
    out. null reads all."""
    deduplicate: bool = False
    """Leave out documents that are exactly equal to an earlier one; of the validation data also those that are in the
    training data."""
    add_bos: bool = False
    """Begin every document with what the tokenizer puts before a text (BOS), for models that were trained so."""


class HubDatasetSection(HeldOutSection):
    """Data from the datasets library."""

    dataset_name: str | None = None
    """Dataset on the Hugging Face Hub as owner/name, or a directory that the datasets library can load. A legacy name
    without an owner, such as wikitext, is looked up."""
    dataset_config: str | None = None
    """Configuration of the dataset, such as wikitext-2-raw-v1."""
    train_split: str = "train"
    """Split to train on; slices such as `train[:90%]` work."""
    val_split: str | None = "validation"
    """Split to validate on. null holds out `val_fraction` of the training split."""


class DummyTextSection(RunningTextSection):
    """Generated sentences, for smoke tests."""

    name: Literal["dummy_text"] = "dummy_text"
    """Kind of data."""


class PythonStdlibSection(HeldOutSection, RunningTextSection):
    """Source code of the Python standard library of this machine; requires no download."""

    name: Literal["python_stdlib"] = "python_stdlib"
    """Kind of data."""


class TextFilesSection(FilesSection):
    """Local text files, or files of records that have a column of text."""

    name: Literal["text_files"] = "text_files"
    """Kind of data."""
    text_column: Text | None = None
    """Column (in JSON: field) that holds the text in JSON, JSON lines, CSV, TSV and Parquet files; each record is a
    document. null reads every file as plain text, syntax included."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a record that cannot be used (invalid JSON, a missing column, a value that is not text): stop
    with an error that names it, or leave it out and count it."""

    def problems(self) -> Iterator[Problem]:
        if not self.files:
            yield ("files",), "data.files is empty. Set it to at least one text file or glob."


class HfTextSection(FilesSection, HubDatasetSection):
    """Text from a dataset on the Hugging Face Hub, or from local text, json or parquet files."""

    name: Literal["hf_text"] = "hf_text"
    """Kind of data."""
    text_column: str = "text"
    """Column that holds the text. Each row is a document; a row that ends with a line break is joined with the next
    one, as WikiText requires."""

    def problems(self) -> Iterator[Problem]:
        if not self.files and not self.dataset_name:
            yield (
                ("files", "dataset_name"),
                "data.dataset_name is empty. Set it to a dataset on the Hugging Face Hub, or set data.files.",
            )


class ExampleBatchesSection(DataSection):
    """How examples become batches."""

    train_on_prompt: bool = False
    """Compute the loss on prompts too, not only on answers."""
    packing: bool = True
    """Pack several short examples into one sequence of block_size; none attends to another. false pads batches of
    examples of similar length."""
    truncation: Literal["right", "skip", "error"] = "right"
    """What to do with an example longer than block_size: cut its end off, leave it out, or stop with an error. An
    example without any token of its answer left is left out."""


class ExampleFilesSection(HubDatasetSection):
    """Examples from a file of records or from the datasets library."""

    train_file: MayChange[Text | None] = None
    """File of training examples: JSON lines, a JSON array, CSV, TSV or Parquet."""
    val_file: MayChange[Text | None] = None
    """File of validation examples. null holds out `val_fraction` of the training examples."""
    on_bad_example: Literal["error", "skip"] = "error"
    """What to do with an example that cannot be used (invalid JSON, a duplicate key, a missing field, no answer): stop
    with an error that names the line, or leave it out and count it."""

    def problems(self) -> Iterator[Problem]:
        if not self.train_file and not self.dataset_name:
            yield (
                ("train_file", "dataset_name"),
                "data.train_file is empty. Set it to a file of examples, or set data.dataset_name to a dataset on "
                "the Hugging Face Hub.",
            )


class ExampleDataSection(ExampleFilesSection, ExampleBatchesSection):
    """Examples with a prompt and an answer each."""


class InstructJsonlSection(ExampleDataSection):
    """Instruction examples: instruction, optional input, output."""

    name: Literal["instruct_jsonl"] = "instruct_jsonl"
    """Kind of data."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """`chat` renders an example with the tokenizer's chat template, `plain` as paragraphs with headings. `auto` uses
    `chat` if the tokenizer has a template."""
    instruction_field: Text = "instruction"
    """Field that holds the instruction."""
    input_field: Text = "input"
    """Field that holds the input; it may be missing or empty."""
    output_field: Text = "output"
    """Field that holds the answer."""
    add_special_tokens: bool = True
    """Begin an example in `plain` format with the tokenizer's special tokens."""


class ChatJsonlSection(ExampleDataSection):
    """Conversations: a list of messages per example, rendered with the tokenizer's chat template."""

    name: Literal["chat_jsonl"] = "chat_jsonl"
    """Kind of data."""


class PreferenceJsonlSection(ExampleFilesSection):
    """Preference pairs: a prompt, a chosen and a rejected answer per example, as text or as messages, for
    `trainer.objective` dpo, ipo, orpo and simpo. A pair whose answers are equal or empty, or that is longer than
    block_size, is a bad example."""

    name: Literal["preference_jsonl"] = "preference_jsonl"
    """Kind of data."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """`chat` renders a pair with the tokenizer's chat template, `plain` as paragraphs with headings. `auto` uses `chat`
    if the tokenizer has a template. Texts without a prompt are used as they are."""
    packing: bool = True
    """Pack several pairs into one sequence of twice block_size, both answers of a pair in the same one; no answer
    attends to another. false gives each answer a sequence of its own, padded."""


class PluginDataSection(ExampleBatchesSection, RunningTextSection):
    """A dataset class of your own (docs/extending.md). `train_on_prompt`, `packing` and `truncation` apply to examples
    only, `document_mask` to text only."""

    name: ClassName
    """Import path of the class, or the name of an entry point in the group `llmtrain.data`."""
    options: dict[str, JsonValue] = {}
    """Options of the class, validated by its `Options`."""


SourceKinds = (
    Annotated[DummyTextSection, Tag("dummy_text")]
    | Annotated[PythonStdlibSection, Tag("python_stdlib")]
    | Annotated[TextFilesSection, Tag("text_files")]
    | Annotated[HfTextSection, Tag("hf_text")]
    | Annotated[InstructJsonlSection, Tag("instruct_jsonl")]
    | Annotated[ChatJsonlSection, Tag("chat_jsonl")]
    | Annotated[PreferenceJsonlSection, Tag("preference_jsonl")]
    | Annotated[PluginDataSection, Tag(PLUGIN_TAG)]
)
"""What a run can read alone, and what a mixture can read several of."""
SOURCE_NAMES = (
    "python_stdlib",
    "dummy_text",
    "text_files",
    "hf_text",
    "instruct_jsonl",
    "chat_jsonl",
    "preference_jsonl",
)
