"""Config, the root of the config schema (version 3). Each section has a file of its own.

Sections are frozen and strict, with a docstring under each field: docs/config.md and `llmtrain config-schema` are made
from them. Checks that need several fields are in a section's `problems`, so that all are reported at once.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from llmtrain.config.data import CustomDataSection, DataConfig, DataSection, ExampleDataSection, PythonStdlibSection
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.launch import LaunchSection
from llmtrain.config.logging import LoggingSection
from llmtrain.config.model import (
    CustomModelSection,
    GptSection,
    HfCausalLmSection,
    ModelConfig,
    ModelSection,
    ModernGptSection,
)
from llmtrain.config.output import OutputSection
from llmtrain.config.run import RunSection
from llmtrain.config.section import MayChange, Problem, ResumeMarker, Section
from llmtrain.config.tracking import TrackingSection
from llmtrain.config.trainer import TrainerSection

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

    def problems(self) -> Iterator[Problem]:
        if isinstance(self.model, HfCausalLmSection):
            if self.model.lora and self.trainer.optimizer == "muon":
                yield (
                    ("model", "trainer"),
                    "trainer.optimizer muon does not work with LoRA (model.lora): adapters are products of two narrow "
                    "matrices, and muon is for whole ones. Use adamw, or remove model.lora to train all weights.",
                )
            return
        least = VOCABULARIES.get(self.data.tokenizer or "byte", 0)
        if self.model.vocab_size is not None and self.model.vocab_size < least:
            yield (
                ("model", "data"),
                f"model.vocab_size {self.model.vocab_size} is smaller than the tokenizer's vocabulary of {least}. "
                "Leave model.vocab_size out to use the tokenizer's.",
            )

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


CUSTOM: dict[str, type[Section]] = {"model": CustomModelSection, "data": CustomDataSection}
"""The section of a class of the user's own, whose name is none of KINDS."""
KINDS: dict[str, dict[str, type[Section]]] = {
    section: {
        kind.model_fields["name"].default: kind
        for kind in (get_args(tagged)[0] for tagged in get_args(Config.model_fields[section].annotation))
        if kind not in (CUSTOM[section], ModernGptSection)
    }
    for section in CUSTOM
}
"""Sections that have one class per kind: section -> name -> class."""
ARCHITECTURES: dict[str, type[Section]] = {"gpt2": GptSection, "modern": ModernGptSection}
"""model.architecture -> class of `model.name: gpt`; KINDS has the default one."""
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
}
"""Section -> its class; of a section with several kinds, their base class."""
EXAMPLE_DATA = tuple(name for name, kind in KINDS["data"].items() if issubclass(kind, ExampleDataSection))


def section_class(section: str, values: dict[str, Any]) -> type[Section] | None:
    """The class of a section with these values: for an unknown `name` that of a user's own class, which may not be
    installed here; None if `name` is not text, or `architecture` is unknown."""
    if section not in KINDS:
        return SECTIONS[section]
    name = values.get("name", Config.model_fields[section].default.name)
    kind = KINDS[section].get(name, CUSTOM[section]) if isinstance(name, str) else None
    if kind is not GptSection:
        return kind
    architecture = values.get("architecture", "gpt2")
    return ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None


def classes_of(section: str) -> list[type[Section]]:
    """All classes that a section may have."""
    if section not in KINDS:
        return [SECTIONS[section]]
    kinds = [*KINDS[section].values(), CUSTOM[section]]
    return [*ARCHITECTURES.values(), *kinds[1:]] if section == "model" else kinds


def subsection(kind: type[Section], field: str) -> type[Section] | None:
    """The section inside a section that a field holds, such as model.lora; None for any other field."""
    info = kind.model_fields.get(field)
    parts = (info.annotation, *get_args(info.annotation)) if info else ()
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def takes_any_name(kind: type[Section], field: str) -> bool:
    """Whether a field maps names of the user's own to values, such as launch.env."""
    info = kind.model_fields.get(field)
    return info is not None and get_origin(info.annotation) is dict


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields of two resolved configs of the current schema that differ: (path, old, new)."""
    found = []
    for section in sorted({*old, *new} - {"schema_version"}):
        before, after = (values.get(section) for values in (old, new))
        if not isinstance(before, dict) or not isinstance(after, dict):
            found.append((section, before, after))
            continue
        for field in sorted({*before, *after}):
            if before.get(field) != after.get(field):
                found.append((f"{section}.{field}", before.get(field), after.get(field)))
    return found


def changed_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a resolved config that differ from their defaults, by section."""
    found: dict[str, Any] = {}
    for section in SECTIONS:
        fields = values.get(section)
        kind = section_class(section, fields) if isinstance(fields, dict) else None
        if kind is None or not isinstance(fields, dict):  # damaged, or of a kind that is not known here
            found |= {section: fields} if fields else {}
            continue
        changed = _changed(kind.model_construct().model_dump(mode="json", warnings=False), fields)
        if section in KINDS:  # what decides which fields there are
            changed = {key: fields[key] for key in ("name", "architecture") if key in fields} | changed
        found |= {section: changed} if changed else {}
    return found


def _changed(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        default = defaults.get(name)
        if value != default:
            found[name] = _changed(default, value) if isinstance(default, dict) and isinstance(value, dict) else value
    return found


def may_change(path: str) -> bool:
    """Whether a section or a field may differ between a run and its resumption."""
    section, _, field = path.partition(".")
    if section not in SECTIONS:
        return False
    infos = [Config.model_fields[section]]
    infos += [kind.model_fields[field] for kind in classes_of(section) if field in kind.model_fields]
    return any(isinstance(marker, ResumeMarker) for info in infos for marker in info.metadata)
