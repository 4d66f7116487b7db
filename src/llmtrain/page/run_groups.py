"""Runs of the list in groups with equal values of config fields, with mean and deviation (runs/groups.py)."""

import threading
from collections.abc import Sequence
from typing import Any

from llmtrain.page.local_runs import signature_of
from llmtrain.page.run_catalog import NotFound, RunCatalog
from llmtrain.page.run_values import Values, shown_config
from llmtrain.page.values import flat
from llmtrain.runs.groups import best_group, group_runs, mixed_fields
from llmtrain.runs.json_values import short_text
from llmtrain.runs.view import RunView

MAX_FIELDS = 8
_SEARCHED = ("run_id", "name", "state", "why", "where", "model", "dataset")
_NAMES = ("run.name", "output.run_id")
"""Fields that name a run: each would be a group of its own."""


class RunGroups:
    """Keeps the config of each run, which hardly ever changes."""

    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog
        self._settings: dict[str, tuple[Any, Values]] = {}
        self._lock = threading.Lock()

    def read(self, fields: Sequence[str], text: str = "", state: str = "") -> Values:
        """The groups of the runs that a filter of the list leaves; without fields, only those in which they differ.
        `without_config`: runs that are in no group, as those on a cluster whose files nobody has looked at."""
        every_row = self._catalog.rows()
        rows = [row for row in every_row if _matches(row, text, state)]
        with self._lock:
            for key in self._settings.keys() - {row["key"] for row in every_row}:
                del self._settings[key]
            found = [(row, self._setting(row["key"])) for row in rows]
        known = [(row, setting) for row, setting in found if setting and setting["config"]]
        configs = [setting["config"] for _, setting in known]
        tables = [flat(config) for config in configs]
        values: Values = {"fields": _differing(tables), "without_config": len(rows) - len(known)}
        fields = [field for field in fields[:MAX_FIELDS] if any(field in table for table in tables)]
        if not fields:
            return {**values, "group_by": [], "groups": [], "mixed_fields": [], "best": None}
        summaries = [_summary(row, setting) for row, setting in known]
        groups = group_runs(summaries, configs, fields)
        return {
            **values,
            "group_by": fields,
            "groups": groups,
            "mixed_fields": mixed_fields(configs, fields),
            "best": best_group(groups),
        }

    def _setting(self, key: str) -> Values | None:
        """Config, path and final state of a run; None if its files are not here."""
        if not self._catalog.has_files(key):
            return None
        try:
            view = self._catalog.view(key)
        except NotFound:
            return None
        signature = signature_of((view.run.config, view.run.finished))
        if key not in self._settings or self._settings[key][0] != signature:
            self._settings[key] = (signature, _read_setting(view))
        return self._settings[key][1]


def _read_setting(view: RunView) -> Values:
    return {
        "config": shown_config(view),
        "path": str(view.run.path),
        "state_sha256": short_text(view.result.get("state_sha256")) or None,
    }


def _summary(row: Values, setting: Values) -> Values:
    """What group_runs needs of a run."""
    return {
        "run_id": row["run_id"],
        "path": setting["path"],
        "state_sha256": setting["state_sha256"],
        "train_loss": row["loss"],
        "val_loss": row["val_loss"],
        "best_val_loss": row["best_val_loss"],
    }


def _matches(row: Values, text: str, state: str) -> bool:
    """Whether the list shows a run with this filter."""
    if state and row["state"] != state:
        return False
    searched = " ".join(str(row.get(name) or "") for name in _SEARCHED)
    return text.strip().lower() in searched.lower()


def _differing(tables: Sequence[Values]) -> list[str]:
    """Fields that have several values in these configs."""
    seen: dict[str, set[str]] = {}
    for name in {name for table in tables for name in table}:
        seen[name] = {repr(table.get(name)) for table in tables}
    return sorted(name for name, values in seen.items() if len(values) > 1 and name not in _NAMES)
