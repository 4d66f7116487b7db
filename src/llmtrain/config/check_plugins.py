"""Checks the plugins that a config names: they can be imported, and accept their options."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.data import PluginDataSection
from llmtrain.config.document import Document, KeyPath
from llmtrain.config.mixture import MixtureSection
from llmtrain.config.model import PluginModelSection
from llmtrain.config.objective import PluginObjectiveSection
from llmtrain.config.problems import Problems
from llmtrain.config.schema import Config
from llmtrain.errors import ConfigError, UsageError
from llmtrain.plugins import describe_plugin, load_plugin, option_problem, read_options, search_in
from llmtrain.registry import PLUGINS


@dataclass(frozen=True)
class Choice:
    """A plugin that a config names."""

    field: str
    """Key of registry.PLUGINS."""
    path: KeyPath
    """The section that has `name` and `options`."""
    name: str
    options: dict[str, Any]

    def load(self) -> type[Any]:
        return load_plugin(PLUGINS[self.field], self.name)


def choices(config: Config) -> Iterator[Choice]:
    if isinstance(config.model, PluginModelSection):
        yield Choice("model.name", ("model",), config.model.name, config.model.options)
    if isinstance(config.data, PluginDataSection):
        yield Choice("data.name", ("data",), config.data.name, config.data.options)
    if isinstance(config.data, MixtureSection):
        for index, section in enumerate(config.data.sections()):
            if isinstance(section, PluginDataSection):
                yield Choice("data.name", ("data", "sources", str(index)), section.name, section.options)
    objective = config.trainer.objective
    if isinstance(objective, PluginObjectiveSection):
        yield Choice("trainer.objective", ("trainer", "objective"), objective.name, objective.options)
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
    """Import the plugins that a config names, from `directories` and the current one too, and validate their options.
    All problems are raised as one ConfigError. `chosen`: only these. `overridden`: keys of
    `overridden_by`. `unchecked`: gets a message for each plugin that needs a package which is not installed here,
    instead of an error."""
    if chosen is None:
        chosen = list(choices(config))
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
        yield full, option_problem(full, text)


def describe_plugins(config: Config) -> dict[str, dict[str, Any]]:
    """What a run records about the plugins that its config names, by field."""
    described = {}
    for choice in choices(config):
        field = choice.field
        if len(choice.path) > 1:  # of a list: tracking.custom.0, data.sources.0
            field = ".".join(choice.path)
        described[field] = describe_plugin(choice.name, choice.load())
    return described
