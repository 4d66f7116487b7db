"""What a run needs on this machine, found out before torch is loaded: the packages and files that its config names."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from llmtrain.config.data import ExampleFilesSection, FilesSection
from llmtrain.config.mixture import MixtureSection
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.output import OutputSection
from llmtrain.config.section import Section
from llmtrain.config.tracking import TrackingSection
from llmtrain.data.records.open_file import find_file
from llmtrain.data.text.reader import expand_files
from llmtrain.errors import ConfigError, DataError, LlmtrainError, UsageError
from llmtrain.hub.find import existing_directory
from llmtrain.models.hf.installed import check_installed as check_hf_installed
from llmtrain.models.hf.installed import check_quantization_installed
from llmtrain.runs.sync import check_installed as check_sync_installed
from llmtrain.tracking.open import check_tracker, enabled_trackers

Check = Callable[[], object]
"""Raises if something is missing."""


def check_requirements(source: str, sections: Iterable[Section]) -> None:
    """Raise one error that lists everything that the sections of the config `source` name and this machine lacks."""
    missing = missing_requirements(sections)
    if not missing:
        return
    if len(missing) == 1:
        raise missing[0]
    texts = [" ".join([error.what_and_known, *_own_remedy(error, missing)]) for error in missing]
    listed = ConfigError(source, texts)
    if not any(isinstance(error, UsageError) for error in missing):
        raise DataError(str(listed), remedy=_shared_remedy(missing))
    listed.remedy = _shared_remedy(missing)
    raise listed


def missing_requirements(sections: Iterable[Section]) -> list[LlmtrainError]:
    """One error per package or file that is missing."""
    missing: list[LlmtrainError] = []
    for section in sections:
        for check in _checks(section):
            try:
                check()
            except LlmtrainError as error:
                missing.append(error)
    return missing


def _checks(section: Section) -> Iterator[Check]:
    if isinstance(section, HfCausalLmSection):
        yield check_hf_installed
        if section.lora and section.lora.quantize:
            yield check_quantization_installed
        yield partial(existing_directory, section.path, "model.path")
    yield from _file_checks(section, "data")
    if isinstance(section, MixtureSection):
        for index, source in enumerate(section.sections()):
            yield from _file_checks(source, f"data.sources.{index}")
    if isinstance(section, TrackingSection):
        for tracker in enabled_trackers(section):
            yield partial(check_tracker, tracker)
    if isinstance(section, OutputSection) and section.sync_uri:
        yield partial(check_sync_installed, "output.sync_uri is set")


def _file_checks(section: Section, path: str) -> Iterator[Check]:
    if isinstance(section, FilesSection):
        for field in ("files", "val_files"):
            for pattern in getattr(section, field):
                yield partial(expand_files, [pattern], f"{path}.{field}")
    if isinstance(section, ExampleFilesSection):
        for field in ("train_file", "val_file"):
            name = getattr(section, field)
            if name:
                yield partial(find_file, name, f"{path}.{field}")


def _own_remedy(error: LlmtrainError, missing: list[LlmtrainError]) -> list[str]:
    """The remedy of an error, unless several have it."""
    if error.remedy is None or error.remedy == _shared_remedy(missing):
        return []
    return [error.remedy]


def _shared_remedy(missing: list[LlmtrainError]) -> str | None:
    """The remedy that most errors have, if several have it: that paths start at the current directory."""
    remedies = Counter(error.remedy for error in missing if error.remedy)
    remedy, count = max(remedies.items(), key=lambda row: row[1], default=(None, 0))
    return remedy if count > 1 else None
