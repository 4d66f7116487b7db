"""`extends: BASE` in a config: the base is a preset or another file, and the document sets what differs from it.

Sections are merged field by field; lists are replaced. The resolved config has no `extends`, so neither a resumed run
nor a pod needs the base.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain.compat.upgrade import is_old, moved_lines, upgrade
from llmtrain.config.document import Document, KeyPath, Place, read_document
from llmtrain.config.kind_change import chosen_kind, drop_other_kinds, drop_other_objective
from llmtrain.config.optimizer_change import change_optimizer, chosen_optimizer
from llmtrain.config.problems import shown
from llmtrain.config.schema import SCHEMA_VERSION, SECTIONS_BY_NAME
from llmtrain.errors import ConfigError, UsageError

KEY = "extends"
FindBase = Callable[[str, Path], Path]
"""The file of a base, from its name and the directory of the document that extends it."""


def with_bases(
    document: Document, path: Path, find_base: FindBase, notes: list[str], *, for_launch: bool = False
) -> Document:
    """The document merged over its base, that of the base, and so on. `notes`: what was left out of a base."""
    seen = [path.absolute()]
    chain = [document]
    while KEY in chain[-1].values:
        base_path = _base_path(chain[-1], seen[-1], find_base)
        if base_path.resolve() in [each.resolve() for each in seen]:
            names = " -> ".join(path.name for path in (*seen, base_path))
            raise _problem(chain[-1], f"extends leads back to {base_path.name}: {names}. Remove one of them.")
        seen.append(base_path)
        with _missing_base(chain[-1]):
            base = read_document(base_path)
        chain.append(_current(base, for_launch))
    merged = chain.pop()
    for derived in reversed(chain):
        merged = _merged(derived, merged, notes)
    return merged


def _base_path(document: Document, path: Path, find_base: FindBase) -> Path:
    name = document.values[KEY]
    version = document.values.get("schema_version", SCHEMA_VERSION)
    if not isinstance(name, str) or not name:
        raise _problem(document, f"extends must be the path of a config or the name of a preset, got {shown(name)}.")
    if version != SCHEMA_VERSION:
        raise _problem(document, f"extends needs schema_version {SCHEMA_VERSION}; here it is {shown(version)}.")
    with _missing_base(document):
        return find_base(name, path.parent).absolute()


@contextmanager
def _missing_base(document: Document) -> Iterator[None]:
    """A base that is missing is a problem of the document that extends it."""
    try:
        yield
    except ConfigError:  # of the base, which it names
        raise
    except UsageError as problem:
        raise _problem(document, f"extends: {problem.what_and_known}") from None


def _problem(document: Document, text: str) -> ConfigError:
    place = document.place((KEY,))
    if place:
        text = f"{place} {text}"
    return ConfigError(document.source, [text])


def _current(base: Document, for_launch: bool) -> Document:
    """A base in the current schema."""
    version = base.values.get("schema_version", SCHEMA_VERSION)
    if not is_old(version) or KEY in base.values:  # an old document that extends another is refused by _base_path
        return base
    upgraded = upgrade(base.values, version, for_launch=for_launch)
    if upgraded.problems:
        raise ConfigError(base.source, upgraded.problems)
    return Document(base.source, upgraded.values, moved_lines(base.lines))


def _merged(document: Document, base: Document, notes: list[str]) -> Document:
    inherited = {key: value for key, value in base.values.items() if key != KEY}
    # `run:` without fields is an empty section, which says nothing.
    derived = {key: value for key, value in document.values.items() if value is not None or key not in inherited}
    derived.pop(KEY)
    chosen = {}
    for section in SECTIONS_BY_NAME:
        if isinstance(derived.get(section), dict):
            chosen[section] = chosen_kind(derived[section])
    notes += drop_other_kinds(inherited, chosen).values()
    trainer = derived.get("trainer")
    objective = trainer.get("objective") if isinstance(trainer, dict) else None
    if isinstance(objective, dict):
        drop_other_objective(inherited, objective.get("name"))
    places = dict(base.inherited)
    for path, line in base.lines.items():
        places[path] = Place(line, base.source)
    for path in list(places):
        if not _has(inherited, path):  # drop_other_kinds has left it out
            del places[path]
    values = _overlay(inherited, derived)
    fields: list[str] = []
    if isinstance(trainer, dict):
        fields = [f"trainer.{name}" for name in trainer]
    note = change_optimizer(values, chosen_optimizer(inherited), fields)
    if note:
        notes.append(note)
    return Document(document.source, values, document.lines, places)


def _overlay(base: Any, over: Any) -> Any:
    """Mappings are merged key by key, anything else is replaced."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: _overlay(base.get(key), value) for key, value in over.items()}


def _has(values: Any, path: KeyPath) -> bool:
    for name in path:
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True
