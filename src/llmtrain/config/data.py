"""The `data` section: one class per kind of data, chosen by `data.name`."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag, TypeAdapter, model_validator

from llmtrain.config.section import (
    PATH_PATTERN,
    PLUGIN_TAG,
    ClassName,
    CountOrZero,
    MayChange,
    Names,
    NotNegative,
    Positive,
    PositiveInt,
    Problem,
    Section,
    Text,
    kind_tag,
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


class HeldOutSection(DataSection):
    """Data of which a share may be held out for validation."""

    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the training data held out for validation where no validation data is given."""


class FilesSection(HeldOutSection):
    """Data from local text files."""

    files: MayChange[Names] = []
    """Training files or globs. Text must be UTF-8 without NUL characters; a byte order mark is removed."""
    val_files: MayChange[Names] = []
    """Validation files or globs. Empty holds out `val_fraction` of the training text."""


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


class DummyTextSection(DataSection):
    """Generated sentences, for smoke tests."""

    name: Literal["dummy_text"] = "dummy_text"
    """Kind of data."""


class PythonStdlibSection(HeldOutSection):
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


class ExampleDataSection(HubDatasetSection, ExampleBatchesSection):
    """Examples with a prompt and an answer each."""

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


class PluginDataSection(ExampleBatchesSection):
    """A dataset class of your own (docs/extending.md). `train_on_prompt`, `packing` and `truncation` apply to examples
    only, not to text."""

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
    | Annotated[PluginDataSection, Tag(PLUGIN_TAG)]
)
"""What a run can read alone, and what a mixture can read several of."""
_KIND_NAMES = ("python_stdlib", "dummy_text", "text_files", "hf_text", "instruct_jsonl", "chat_jsonl")

SHARED_FIELDS = ("tokenizer", "cache_dir", "num_workers")
"""Fields of DataSection that a mixture has for all of its sources."""


@cache
def _source_adapter() -> TypeAdapter[DataSection]:
    return TypeAdapter(Annotated[SourceKinds, Discriminator(kind_tag(*_KIND_NAMES))])


class SourceSection(Section):
    """A source of a mixture: these fields, and those of its `name` as in a data section, without `tokenizer`,
    `cache_dir` and `num_workers`, which belong to the mixture."""

    model_config = ConfigDict(extra="allow")

    weight: Positive
    """Share of the source, relative to the sum of all weights. For text and packed examples it is a share of the
    tokens, for unpacked examples of the examples."""
    max_epochs: PositiveInt | None = None
    """Read the source at most this number of times; after that its share goes to the other sources, in proportion. null
    repeats it for as long as the run lasts."""
    label: MayChange[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None] = None
    """Name of the source in metrics and messages. null takes it from its files or dataset."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, values: Any) -> Any:
        """All fields of the kind, so that a recorded config has them too."""
        if not isinstance(values, dict):
            return values
        own = {name: values[name] for name in cls.model_fields if name in values}
        return {**own, **_fields_of(_section_of(values))}

    def section(self, shared: dict[str, Any]) -> DataSection:
        """The data section that reads this source alone."""
        return _section_of({**(self.model_extra or {}), **shared})

    def default_label(self) -> str:
        values = self.model_extra or {}
        files = values.get("files") or [values.get("train_file") or values.get("dataset_name") or values["name"]]
        return _label_of(str(files[0]))


def _section_of(values: dict[str, Any]) -> DataSection:
    return _source_adapter().validate_python(
        {name: value for name, value in values.items() if name not in SourceSection.model_fields}
    )


def _fields_of(section: DataSection) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude=set(SHARED_FIELDS))


def _label_of(path: str) -> str:
    """`web` for web/*.txt and web.txt, `Poems` for package.module:Poems, `wikitext` for owner/wikitext."""
    parts = [part for part in re.split(r"[/\\:]", path) if part and not re.search(r"[*?\[]", part)]
    name = parts[-1] if parts else "files"
    stem = re.sub(r"\.(txt|text|md|jsonl|json|csv|tsv|parquet)(\.gz)?$", "", name)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-") or "files"


class StageSection(Section):
    """Other weights from a step on."""

    from_step: PositiveInt
    """First step with these weights. Steps count from 1."""
    weights: list[NotNegative]
    """One weight per source, in their order. 0 leaves a source out."""

    def problems(self) -> Iterator[Problem]:
        if not any(self.weights):
            yield ("weights",), "weights: at least one must be above 0."


class MixtureSection(DataSection):
    """Several sources in exact proportions: of all text, or all of examples."""

    name: Literal["mixture"] = "mixture"
    """Kind of data."""
    sources: list[SourceSection] = []
    """The sources, each with the fields of its `name` and those below. The source of a sample depends only on the seed
    and the position of the sample."""
    stages: list[StageSection] = []
    """Other weights from a step on, in order of `from_step`, such as more curated text at the end."""

    def sections(self) -> list[DataSection]:
        """The data section that reads each source alone."""
        shared = {name: getattr(self, name) for name in SHARED_FIELDS}
        return [source.section(shared) for source in self.sources]

    def labels(self) -> list[str]:
        """The names of the sources, each different."""
        taken: set[str] = {source.label for source in self.sources if source.label}
        labels = []
        for source in self.sources:
            label = source.label or source.default_label()
            if not source.label:
                label = _distinct(label, taken)
                taken.add(label)
            labels.append(label)
        return labels

    def problems(self) -> Iterator[Problem]:
        if not self.sources:
            yield ("sources",), "data.sources is empty. List the sources of the mixture, each with a name and a weight."
            return
        labels = [source.label for source in self.sources if source.label]
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield ("sources",), f"data.sources: several sources have the label '{label}'. Give each its own."
        yield from self._kind_problems()
        yield from self._stage_problems()
        if self.tokenizer == "char":
            yield (
                ("tokenizer",),
                "data.tokenizer char takes its vocabulary from one text, and a mixture has several. Use byte, or train "
                "a tokenizer with `llmtrain tokenizer train`.",
            )

    def _kind_problems(self) -> Iterator[Problem]:
        sections = self.sections()
        examples = [isinstance(section, ExampleDataSection) for section in sections]
        texts = [not isinstance(section, ExampleBatchesSection) for section in sections]
        if any(examples) and any(texts):
            example = examples.index(True)
            text = texts.index(True)
            yield (
                ("sources",),
                f"data.sources: source {text} ({sections[text].name}) is text and source {example} "
                f"({sections[example].name}) has examples. Use sources of one kind: train on text first, then "
                "fine-tune on examples (train --from).",
            )
        packing = {section.packing for section in sections if isinstance(section, ExampleDataSection)}
        if len(packing) > 1:
            yield ("sources",), "data.sources: packing is true in one source and false in another. Use one value."

    def _stage_problems(self) -> Iterator[Problem]:
        previous = 0
        for number, stage in enumerate(self.stages):
            place = f"data.stages.{number}"
            if len(stage.weights) != len(self.sources):
                yield (
                    ("stages",),
                    f"{place}.weights must have one weight per source ({len(self.sources)}), got {len(stage.weights)}.",
                )
            for _, text in stage.problems():
                yield ("stages",), f"{place}.{text}"
            if stage.from_step <= previous:
                yield (
                    ("stages",),
                    f"{place}.from_step must be above that of the stage before it ({previous}), got {stage.from_step}.",
                )
            previous = stage.from_step


def _distinct(label: str, taken: set[str]) -> str:
    number = 1
    found = label
    while found in taken:
        number += 1
        found = f"{label}-{number}"
    return found


def data_sections(data: DataSection) -> list[DataSection]:
    """The sections that read data: of a mixture one per source, else the section itself."""
    if isinstance(data, MixtureSection):
        return data.sections()
    return [data]


DataConfig = Annotated[
    SourceKinds | Annotated[MixtureSection, Tag("mixture")],
    Discriminator(kind_tag(*_KIND_NAMES, "mixture")),
]
