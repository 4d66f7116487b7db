"""Checks the classes of a user's own that a config names: they can be imported, and accept their options."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.data import CustomDataSection
from llmtrain.config.document import Document, KeyPath
from llmtrain.config.model import CustomModelSection
from llmtrain.config.problems import Problems
from llmtrain.config.schema import Config
from llmtrain.errors import ConfigError, UsageError
from llmtrain.plugins import describe_plugin, load_plugin, read_options, search_in
from llmtrain.registry import PLUGINS


@dataclass(frozen=True)
class Choice:
    """A class of the user's own that a config names."""

    field: str
    """Key of registry.PLUGINS."""
    path: KeyPath
    """The section that has `name` and `options`."""
    name: str
    options: dict[str, Any]

    def load(self) -> type[Any]:
        return load_plugin(PLUGINS[self.field], self.name)


def choices(config: Config) -> Iterator[Choice]:
    model, data = config.model, config.data
    if isinstance(model, CustomModelSection):
        yield Choice("model.name", ("model",), model.name, model.options)
    if isinstance(data, CustomDataSection):
        yield Choice("data.name", ("data",), data.name, data.options)
    for index, tracker in enumerate(config.tracking.custom):
        yield Choice("tracking.custom", ("tracking", "custom", str(index)), tracker.name, tracker.options)


def check_plugins(
    config: Config,
    document: Document,
    directories: Iterable[Path] = (),
    *,
    chosen: Sequence[Choice] | None = None,
    overridden: Iterable[str] = (),
    overridden_by: str = "--set",
    unchecked: list[str] | None = None,
) -> None:
    """Import the classes that a config names, from `directories` and the current one too, and validate their options.
    All problems are raised as one ConfigError. `chosen`: only these. `overridden`: keys of
    `overridden_by`. `unchecked`: gets a message for each class that needs a package which is not installed here,
    instead of an error."""
    chosen = list(choices(config)) if chosen is None else chosen
    if not chosen:
        return
    search_in([*directories, Path.cwd()])
    problems = Problems(document, overridden, overridden_by)
    for choice in chosen:
        for path, text in _problems(choice, unchecked):
            problems.add(text, path)
    if problems:
        raise ConfigError(document.source, problems.sorted())


def _problems(choice: Choice, unchecked: list[str] | None) -> Iterator[tuple[KeyPath, str]]:
    try:
        kind = choice.load()
    except UsageError as error:
        if unchecked is not None and error.details.get("missing_module"):
            unchecked.append(f"{error.what} The class is not checked here.")
            return
        yield (*choice.path, "name"), " ".join(filter(None, (error.what_and_known, error.remedy)))
        return
    for path, text in read_options(kind, choice.options)[1]:
        full = (*choice.path, "options", *path)
        yield full, f"{'.'.join(full)}{'' if text.startswith('is unknown') else ':'} {text}"


def describe_plugins(config: Config) -> dict[str, dict[str, Any]]:
    """What a run records about the classes that its config names, by field."""
    return {
        choice.field if choice.path[0] != "tracking" else ".".join(choice.path): describe_plugin(
            choice.name, choice.load()
        )
        for choice in choices(config)
    }
