"""The stock tasks of lm_eval, found without importing it: its own index reads 14,000 YAML files for half a minute."""

import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.task_specs import BUNDLED
from llmtrain.core import libyaml
from llmtrain.core.install import install_command
from llmtrain.errors import DataError, UsageError, nearest

_NAME = re.compile(rb"""^["']?(task|group)["']?[ \t]*:[ \t]*["']?([\w.+-]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
_TAG = re.compile(rb"""^["']?tag["']?[ \t]*:[ \t]*(.*(?:\n[ \t]*-[ \t]*.+)*)""", re.MULTILINE)
_WORD = re.compile(rb"[\w.+-]+")


@dataclass(frozen=True)
class StockTask:
    name: str
    file: Path
    dataset: str | None
    """Name of its data on the hub; None if only its code knows where the data is."""


@dataclass
class _Index:
    tasks: dict[str, Path] = field(default_factory=dict)
    groups: dict[str, Path] = field(default_factory=dict)
    tags: dict[str, set[str]] = field(default_factory=dict)


class _Loader(libyaml.Loader):  # type: ignore[misc]
    """Keeps `!function utils.process_docs` as text."""


_Loader.add_multi_constructor("!", lambda loader, _, node: loader.construct_scalar(node))


def task_folder() -> Path:
    """Where lm_eval has its tasks."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            "Stock tasks require lm_eval, which is not installed.",
            remedy=f"{install_command('eval')}\n  Tasks in files (my.jsonl) and {', '.join(BUNDLED)} work without it.",
        )
    return Path(found.submodule_search_locations[0]) / "tasks"


def find_stock_tasks(names: Sequence[str]) -> tuple[list[StockTask], dict[str, Path]]:
    """The tasks that names of tasks, groups and tags stand for, and the files of the groups by their name."""
    index = _read_index(task_folder())
    tasks: dict[str, StockTask] = {}
    groups: dict[str, Path] = {}
    for name in names:
        _collect(name, index, tasks, groups)
    return list(tasks.values()), groups


def _collect(name: str, index: _Index, tasks: dict[str, StockTask], groups: dict[str, Path]) -> None:
    if name in index.tasks:
        tasks[name] = _stock_task(name, index.tasks[name])
    elif name in index.groups:
        groups[name] = index.groups[name]
        for member in _members(groups[name], index):
            _collect(member, index, tasks, groups)
    elif name in index.tags:
        for folder in {index.tasks[member].parent for member in index.tags[name]}:
            _add_inherited_tags(folder, index)
        for member in sorted(index.tags[name]):
            _collect(member, index, tasks, groups)
    else:
        known = [*index.tasks, *index.groups, *index.tags, *BUNDLED]
        raise UsageError(
            f"Task '{name}' is unknown.{nearest(name, known)}",
            remedy=f"Accepted are {', '.join(BUNDLED)}, the {len(known) - len(BUNDLED):,} tasks, groups and tags of "
            "lm_eval, and files of items: their names end in .jsonl, or have a / in them.",
        )


def _members(file: Path, index: _Index) -> Iterator[str]:
    for member in read_task_file(file).get("task") or []:
        name = member
        if isinstance(member, dict):
            name = member.get("task") or member.get("group")
        if not isinstance(name, str):
            raise DataError(f"The group in {file} has members that llmtrain cannot read.", remedy="Name its tasks.")
        if name not in index.tasks and name not in index.groups and name not in index.tags:
            _add_inherited_tags(file.parent, index)  # its tasks have the tag from a file that they include
        yield name


def _add_inherited_tags(folder: Path, index: _Index) -> None:
    for file in sorted(folder.rglob("*.yaml")):
        values = read_task_file(file)
        tags = values.get("tag") or []
        for tag in [tags] if isinstance(tags, str) else tags:
            if isinstance(values.get("task"), str):
                index.tags.setdefault(tag, set()).add(values["task"])


def _stock_task(name: str, file: Path) -> StockTask:
    values = read_task_file(file)
    dataset = values.get("dataset_path")
    has_own_loader = "class" in values or "custom_dataset" in values
    if not isinstance(dataset, str) or not dataset or has_own_loader:
        dataset = None
    return StockTask(name, file, dataset)


def read_task_file(file: Path) -> dict[str, Any]:
    """The values of a YAML file and of those that it includes."""
    values = yaml.load(file.read_bytes(), Loader=_Loader)
    if not isinstance(values, dict):
        return {}
    merged: dict[str, Any] = {}
    included = values.pop("include", [])
    for name in [included] if isinstance(included, str) else included:
        merged |= read_task_file(file.parent / name)
    return {**merged, **values}


@functools.cache
def _read_index(folder: Path) -> _Index:
    index = _Index()
    for file in sorted(folder.rglob("*.yaml")):
        data = file.read_bytes()
        names = {kind.decode(): name.decode() for kind, name in _NAME.findall(data)}
        if "group" in names:
            index.groups.setdefault(names["group"], file)
        elif "task" in names:
            index.tasks.setdefault(names["task"], file)
            for tags in _TAG.findall(data):
                for tag in _WORD.findall(tags.replace(b"\n", b" ")):
                    if tag != b"-":
                        index.tags.setdefault(tag.decode(), set()).add(names["task"])
    return index
