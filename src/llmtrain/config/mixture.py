"""The `data` section of a mixture of sources, and the union of all kinds of data."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, model_validator

from llmtrain.config.data import (
    SOURCE_NAMES,
    DataSection,
    ExampleDataSection,
    ExampleFilesSection,
    PluginDataSection,
    PreferenceJsonlSection,
    RunningTextSection,
    SourceKinds,
)
from llmtrain.config.section import MayChange, PositiveInt, Problem, Section, kind_tag

SHARED_FIELDS = ("tokenizer", "cache_dir", "num_workers", "document_mask")
"""Fields that a mixture has for all of its sources."""
MAX_WEIGHT = 1e9
LEAST_SHARE = 1e-6
"""A source with less would hardly be read, and not in its share."""
TEXT = "text"
EXAMPLES = "examples"
PAIRS = "pairs"
MASK_OF_EXAMPLES = (
    "data.document_mask is for running text, and this data has examples, which never attend to each other. Remove it."
)


@cache
def _source_adapter() -> TypeAdapter[DataSection]:
    return TypeAdapter(Annotated[SourceKinds, Discriminator(kind_tag(*SOURCE_NAMES))])


class SourceSection(Section):
    """A source of a mixture: these fields, and those of its `name` as in a data section, without `tokenizer`,
    `cache_dir`, `num_workers` and `document_mask`, which belong to the mixture."""

    model_config = ConfigDict(extra="allow")

    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)]
    """Share of the source, relative to the sum of all weights. For text and for packed examples or pairs it is a share
    of the tokens, for unpacked ones of the examples or pairs."""
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
        section = _section_of(self.model_extra or {})
        fields = type(section).model_fields
        return section.model_copy(update={name: value for name, value in shared.items() if name in fields})

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
    weights: list[Annotated[float, Field(ge=0, le=MAX_WEIGHT)]]
    """One weight per source, in their order. 0 leaves a source out."""

    def problems(self) -> Iterator[Problem]:
        if not any(self.weights):
            yield ("weights",), "weights: at least one must be above 0."


class MixtureSection(RunningTextSection):
    """Several sources in exact proportions: all of text, all of examples, or all of preference pairs."""

    name: Literal["mixture"] = "mixture"
    """Kind of data."""
    sources: list[SourceSection] = []
    """The sources, each with the fields of its `name` and those below. The source of a sample depends only on the seed
    and the position of the sample."""
    stages: list[StageSection] = []
    """Other weights from a step on, in order of `from_step`, such as more curated text at the end."""

    deduplicate: bool = False
    """Leave out documents of text that are exactly equal to an earlier one of the same source, or to one of a source
    that is listed before."""

    def sections(self) -> list[DataSection]:
        """The data section that reads each source alone."""
        shared = {name: getattr(self, name) for name in SHARED_FIELDS}
        return [source.section(shared) for source in self.sources]

    def weights_at(self, step: int) -> list[float]:
        """The weights of the sources in a step."""
        weights = [source.weight for source in self.sources]
        for stage in self.stages:
            if stage.from_step <= step:
                weights = stage.weights
        return weights

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
        yield from self._share_problems()
        yield from self._stage_problems()
        if self.tokenizer == "char":
            yield (
                ("tokenizer",),
                "data.tokenizer char takes its vocabulary from one text, and a mixture has several. Use byte, or train "
                "a tokenizer with `llmtrain tokenizer train`.",
            )

    def _kind_problems(self) -> Iterator[Problem]:
        sections = self.sections()
        first: dict[str, int] = {}  # what sources have -> the first source that has it
        for index, section in enumerate(sections):
            content = _content(section)
            if content is not None:
                first.setdefault(content, index)
        if len(first) > 1:
            (one, source), (other, other_source), *_ = first.items()
            yield (
                ("sources",),
                f"data.sources: source {source} ({sections[source].name}) has {one} and source {other_source} "
                f"({sections[other_source].name}) has {other}. Use sources of one kind: train on text first, then on "
                "examples and then on pairs (train --from).",
            )
        if self.document_mask and not first.keys() <= {TEXT}:
            yield ("document_mask",), MASK_OF_EXAMPLES
        packing = {getattr(section, "packing", None) for section in sections if _content(section) in (EXAMPLES, PAIRS)}
        if len(packing) > 1:
            yield ("sources",), "data.sources: packing is true in one source and false in another. Use one value."

    def _share_problems(self) -> Iterator[Problem]:
        rows = {"data.sources.{}.weight": [source.weight for source in self.sources]}
        for number, stage in enumerate(self.stages):
            rows[f"data.stages.{number}.weights.{{}}"] = stage.weights
        for place, weights in rows.items():
            for index, weight in enumerate(weights):
                if 0 < weight < LEAST_SHARE * sum(weights):
                    field = "sources" if place.startswith("data.sources") else "stages"
                    yield (
                        (field,),
                        f"{place.format(index)} {weight:g} is a share of less than a millionth. Raise it, or leave the "
                        "source out.",
                    )

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


def _content(section: DataSection) -> str | None:
    """What a source has; None for a plugin, whose data is not known before it is read."""
    if isinstance(section, PluginDataSection):
        return None
    if isinstance(section, PreferenceJsonlSection):
        return PAIRS
    return EXAMPLES if isinstance(section, ExampleDataSection) else TEXT


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


def has_examples(data: DataSection) -> bool:
    """Whether it is known that the data are examples or preference pairs: their prompts are questions. Of a plugin it
    is not known."""
    return isinstance(data_sections(data)[0], ExampleFilesSection)


def has_pairs(data: DataSection) -> bool:
    """Whether it is known that the data are preference pairs."""
    return any(isinstance(section, PreferenceJsonlSection) for section in data_sections(data))


def is_packed(data: DataSection) -> bool:
    """Whether a sequence has several examples, pairs or documents that do not attend to each other. All sources of a
    mixture are alike in this."""
    section = data_sections(data)[0]
    return getattr(section, "packing", False) is True or getattr(section, "document_mask", False) is True


DataConfig = Annotated[
    SourceKinds | Annotated[MixtureSection, Tag("mixture")],
    Discriminator(kind_tag(*SOURCE_NAMES, "mixture")),
]
