"""Config, the root of the config schema (version 3). Each section has a file of its own.

Sections are frozen and strict, with a docstring under each field: docs/config.md and `llmtrain config-schema` are made
from them. Checks that need several fields are in a section's `problems`, so that all are reported at once.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import Discriminator, Tag

from llmtrain.config.data import (
    DataSection,
    ExampleDataSection,
    ExampleFilesSection,
    PluginDataSection,
    PreferenceJsonlSection,
    PythonStdlibSection,
)
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.launch import LaunchSection
from llmtrain.config.logging import LoggingSection
from llmtrain.config.mixture import DataConfig, SourceSection, data_sections, has_pairs
from llmtrain.config.model import (
    AnyGptSection,
    GptSection,
    HfCausalLmSection,
    LoraSection,
    ModelConfig,
    ModelSection,
    ModernGptSection,
    PluginModelSection,
)
from llmtrain.config.objective import DpoSection, IpoSection, NextTokenSection, PluginObjectiveSection
from llmtrain.config.output import OutputSection
from llmtrain.config.plan import PlanSection
from llmtrain.config.run import RunSection
from llmtrain.config.section import MayChange, Problem, ResumeMarker, Section
from llmtrain.config.tracking import TrackingSection
from llmtrain.config.trainer import FP8_MULTIPLE, TrainerSection

SCHEMA_VERSION = 3
VOCABULARIES = {"byte": 256, "gpt2": 50257}
"""Vocabulary sizes of the tokenizers that need no file."""


class Config(Section):
    """A whole config document."""

    schema_version: Literal[3] = 3
    """Version of this schema. Documents of versions 1 and 2 are upgraded when they are loaded."""
    run: RunSection = RunSection()
    model: ModelConfig = GptSection()
    data: DataConfig = PythonStdlibSection()
    trainer: TrainerSection = TrainerSection()
    distributed: MayChange[DistributedSection] = DistributedSection()
    tracking: MayChange[TrackingSection] = TrackingSection()
    logging: MayChange[LoggingSection] = LoggingSection()
    output: MayChange[OutputSection] = OutputSection()
    launch: MayChange[LaunchSection] = LaunchSection()
    plan: MayChange[PlanSection] = PlanSection()

    def problems(self) -> Iterator[Problem]:
        """What is refused whatever the machine and the files are: sections that are valid alone but not together."""
        yield from self._objective_problems()
        if self.trainer.precision == "fp8":
            yield from self._fp8_problems()
        if isinstance(self.model, HfCausalLmSection):
            yield from self._lora_problems(self.model.lora)
            return
        first = data_sections(self.data)[0]  # all sources of a mixture have the same packing
        packs = isinstance(first, ExampleDataSection | PreferenceJsonlSection) and first.packing
        if packs and self.model.name in SECTIONS_BY_NAME["model"]:
            yield (
                ("model", "data"),
                f"data.packing is true, but model {self.model.name} does not keep packed examples separate. Set "
                "data.packing to false.",
            )
        if getattr(self.data, "document_mask", False) and self.model.name in SECTIONS_BY_NAME["model"]:
            yield (
                ("model", "data"),
                f"data.document_mask is true, but model {self.model.name} computes attention by causal kernels, "
                "which take no mask of documents. Set data.document_mask to false, or use hf_causal_lm.",
            )
        least = VOCABULARIES.get(self.data.tokenizer or "byte", 0)
        if self.model.vocab_size is not None and self.model.vocab_size < least:
            yield (
                ("model", "data"),
                f"model.vocab_size {self.model.vocab_size} is smaller than the tokenizer's vocabulary of {least}. "
                "Leave model.vocab_size out to use the tokenizer's.",
            )

    def _objective_problems(self) -> Iterator[Problem]:
        """Pairs and the objectives that compare two answers belong together. What a plugin needs is not known here."""
        objective = self.trainer.objective
        if isinstance(objective, PluginObjectiveSection):
            return
        known = [section for section in data_sections(self.data) if not isinstance(section, PluginDataSection)]
        if not known:
            return
        pairs = has_pairs(self.data)
        if pairs and isinstance(objective, NextTokenSection):
            yield (
                ("data", "trainer"),
                "data.name preference_jsonl has pairs of answers, and trainer.objective next_token trains on single "
                "ones. Set trainer.objective.name to dpo, ipo, orpo or simpo.",
            )
        if not pairs and not isinstance(objective, NextTokenSection):
            yield (
                ("data", "trainer"),
                f"trainer.objective {objective.name} compares pairs of answers, which data.name {known[0].name} does "
                "not have. Set data.name to preference_jsonl.",
            )

    def _fp8_problems(self) -> Iterator[Problem]:
        """What the device and a Hugging Face model decide is checked at the start (models/fp8.py)."""
        remedy = "Set trainer.precision to bf16"
        if self.run.device == "cpu":
            yield ("run", "trainer"), f"trainer.precision fp8 needs a GPU, and run.device is cpu. {remedy}."
        if isinstance(self.trainer.objective, DpoSection | IpoSection):
            yield (
                ("trainer",),
                f"trainer.precision fp8 does not work with trainer.objective {self.trainer.objective.name}: the "
                f"reference is computed without dropout, as an evaluation is, and evaluations are in bf16. {remedy}.",
            )
        if isinstance(self.model, HfCausalLmSection):
            if self.model.lora and self.model.lora.quantize:
                yield (
                    ("model", "trainer"),
                    "trainer.precision fp8 does not work with model.lora.quantize: 4-bit weights are multiplied in "
                    f"bf16. {remedy}, or model.lora.quantize to false.",
                )
            return
        if not isinstance(self.model, AnyGptSection):
            yield (
                ("model", "trainer"),
                f"trainer.precision fp8 works with model.name gpt and hf_causal_lm, got {self.model.name}. {remedy}.",
            )
            return
        odd = [f"{name} {width}" for name, width in self.model.matrix_widths().items() if width % FP8_MULTIPLE]
        if odd:
            yield (
                ("model", "trainer"),
                f"trainer.precision fp8 needs widths that are multiples of {FP8_MULTIPLE}, got {', '.join(odd)}. "
                f"{remedy}, or change the widths.",
            )

    def _lora_problems(self, lora: LoraSection | None) -> Iterator[Problem]:
        if lora and self.trainer.optimizer == "muon":
            yield (
                ("model", "trainer"),
                "trainer.optimizer muon does not work with LoRA (model.lora): adapters are products of two narrow "
                "matrices, and muon is for whole ones. Use adamw, or remove model.lora to train all weights.",
            )
        if lora and self.trainer.optimizer == "adafactor":
            yield (
                ("model", "trainer"),
                "trainer.optimizer adafactor does not work with LoRA (model.lora): its steps are proportional to the "
                "weights, and half of LoRA's weights start at zero. Use adamw: its state is small, as adapters are.",
            )
        if lora and lora.quantize and self.distributed.strategy == "fsdp":
            yield (
                ("model", "distributed"),
                "model.lora.quantize does not work with distributed.strategy fsdp: 4-bit weights cannot be sharded. "
                "Use distributed.strategy ddp.",
            )

    def sections(self) -> list[Section]:
        return [getattr(self, name) for name in SECTIONS]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; loading them gives this config again."""
        return self.model_dump(mode="json")

    def with_values(self, section: str, **values: object) -> "Config":
        """A copy with some fields of one section replaced. `tracking.mlflow` names a section inside a section."""
        name, _, inner = section.partition(".")
        outer: Section = getattr(self, name)
        if inner:
            values = {inner: getattr(outer, inner).model_copy(update=values)}
        return self.model_copy(update={name: outer.model_copy(update=values)})


PLUGIN_SECTIONS: dict[str, type[Section]] = {"model": PluginModelSection, "data": PluginDataSection}
"""The section of a plugin, whose name is none of SECTIONS_BY_NAME."""


def _sections_by_name(section: str) -> dict[str, type[Section]]:
    """The members of the section's union, by their default name."""
    found = {}
    for tagged in get_args(Config.model_fields[section].annotation):
        member = get_args(tagged)[0]  # Annotated[member, Tag(...)]
        if member not in (PLUGIN_SECTIONS[section], ModernGptSection):
            found[member.model_fields["name"].default] = member
    return found


SECTIONS_BY_NAME: dict[str, dict[str, type[Section]]] = {
    section: _sections_by_name(section) for section in PLUGIN_SECTIONS
}
"""Sections whose class depends on their field `name`: section -> name -> class."""
ARCHITECTURES: dict[str, type[Section]] = {"gpt2": GptSection, "modern": ModernGptSection}
"""model.architecture -> class of `model.name: gpt`; SECTIONS_BY_NAME has the default one."""
SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "model": ModelSection,
    "data": DataSection,
    "trainer": TrainerSection,
    "distributed": DistributedSection,
    "tracking": TrackingSection,
    "logging": LoggingSection,
    "output": OutputSection,
    "launch": LaunchSection,
    "plan": PlanSection,
}
"""Section -> its class; of a section with several kinds, their base class."""
SOURCES = "data.sources"
EXAMPLE_DATA = tuple(name for name, kind in SECTIONS_BY_NAME["data"].items() if issubclass(kind, ExampleFilesSection))
"""Kinds of data with prompts and answers."""


def section_class(section: str, values: dict[str, Any]) -> type[Section] | None:
    """The class of a section with these values: for an unknown `name` that of a plugin, which may not be installed
    here; None if `name` is not text, or `architecture` is unknown."""
    if section not in SECTIONS_BY_NAME:
        return SECTIONS[section]
    name = values.get("name", Config.model_fields[section].default.name)
    if not isinstance(name, str):
        return None
    kind = SECTIONS_BY_NAME[section].get(name, PLUGIN_SECTIONS[section])
    if kind is not GptSection:
        return kind
    architecture = values.get("architecture", "gpt2")
    if not isinstance(architecture, str):
        return None
    return ARCHITECTURES.get(architecture)


def classes_of(section: str) -> list[type[Section]]:
    """All classes that a section may have."""
    if section not in SECTIONS_BY_NAME:
        return [SECTIONS[section]]
    kinds = [*SECTIONS_BY_NAME[section].values(), PLUGIN_SECTIONS[section]]
    if section == "model":
        kinds[:1] = ARCHITECTURES.values()  # the first is GptSection
    return kinds


def subsections(kind: type[Section], field: str) -> dict[str, type[Section]]:
    """The sections inside a section that a field may hold, such as model.lora or the kinds of trainer.objective, by the
    tag that errors of pydantic have; none for any other field."""
    found = {}
    info = kind.model_fields.get(field)
    annotation = info.annotation if info else None
    for part in (annotation, *get_args(annotation)):  # X, or the members of X | None
        tags = [each.tag for each in getattr(part, "__metadata__", ()) if isinstance(each, Tag)]
        inner = get_args(part)[0] if tags else part
        if isinstance(inner, type) and issubclass(inner, Section):
            found[tags[0] if tags else inner.__name__] = inner
    return found


def subsection(kind: type[Section], field: str, value: Any = None) -> type[Section] | None:
    """The section inside a section that a field holds; of several kinds that of `value`. None for any other field."""
    kinds = subsections(kind, field)
    if len(kinds) > 1:
        for each in kind.model_fields[field].metadata:
            if isinstance(each, Discriminator) and callable(each.discriminator):
                return kinds.get(str(each.discriminator({} if value is None else value)))
    return next(iter(kinds.values()), None)


def takes_any_name(kind: type[Section], field: str) -> bool:
    """Whether a field maps names that the user chooses to values, such as launch.env."""
    info = kind.model_fields.get(field)
    return info is not None and get_origin(info.annotation) is dict


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields of two resolved configs of the current schema that differ: (path, old, new)."""
    found = []
    for section in sorted({*old, *new} - {"schema_version"}):
        before = old.get(section)
        after = new.get(section)
        if not isinstance(before, dict) or not isinstance(after, dict):
            found.append((section, before, after))
            continue
        for field in sorted({*before, *after}):
            if before.get(field) != after.get(field):
                found += _field_differences(f"{section}.{field}", before.get(field), after.get(field))
    return found


def _field_differences(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """One for the field, or for each differing field of each source of a mixture."""
    if path != SOURCES or not isinstance(old, list) or not isinstance(new, list) or len(old) != len(new):
        return [(path, old, new)]
    found = []
    for number, (before, after) in enumerate(zip(old, new, strict=True)):
        for field in sorted({*before, *after}):
            if before.get(field) != after.get(field):
                found.append((f"{path}.{number}.{field}", before.get(field), after.get(field)))
    return found


def changed_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a resolved config that differ from their defaults, by section."""
    found: dict[str, Any] = {}
    for section in SECTIONS:
        fields = values.get(section)
        kind = None
        if isinstance(fields, dict):
            kind = section_class(section, fields)
        changed = fields  # damaged, or of a kind that is not known here
        if kind is not None and isinstance(fields, dict):
            changed = _changed(kind.model_construct().model_dump(mode="json", warnings=False), fields)
            if section in SECTIONS_BY_NAME:  # what decides which fields there are
                changed = {key: fields[key] for key in ("name", "architecture") if key in fields} | changed
        if changed:
            found[section] = changed
    return found


def _changed(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        default = defaults.get(name)
        if value == default:
            continue
        if isinstance(default, dict) and isinstance(value, dict):
            value = _changed(default, value)
        found[name] = value
    return found


def may_change(path: str) -> bool:
    """Whether a section or a field may differ between a run and its resumption."""
    section, _, field = path.partition(".")
    if section not in SECTIONS:
        return False
    markers = list(Config.model_fields[section].metadata)
    kinds = classes_of(section)
    if path.startswith(f"{SOURCES}."):  # data.sources.0.files
        kinds = [SourceSection, *kinds]
        field = re.sub(r"^sources\.\d+\.", "", field)
    for kind in kinds:
        if field in kind.model_fields:
            markers += kind.model_fields[field].metadata
    return any(isinstance(marker, ResumeMarker) for marker in markers)
