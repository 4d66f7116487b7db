"""The result of a finished run: what training returns, `train --json` prints and finished.json keeps."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmtrain.core.files import read_json, write_json

_JSON_TYPES: dict[Any, type | tuple[type, ...]] = {str: str, Path: str, int: int, float: (int, float)}
"""What finished.json has for a field of each type."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a finished run."""

    run_id: str
    run_dir: Path
    steps: int
    first_train_loss: float
    final_train_loss: float
    final_val_loss: float
    best_val_loss: float
    best_step: int
    tokens_per_second: float
    state_sha256: str
    """Hash of all parameters and of the optimizer state: equal for equal runs."""
    sample: str = field(repr=False)
    """A text that the model generated."""
    values: dict[str, Any] = field(repr=False)
    """All fields of `llmtrain train --json`."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> "TrainResult":
        """From the fields of `train --json`, which must be complete."""
        own = {name: values[name] for name in _names_and_types()}
        own["run_dir"] = Path(values["run_dir"])
        return cls(**own, values=values)

    @classmethod
    def read(cls, path: Path) -> "TrainResult | None":
        """The result in a finished.json; None if there is none, or if it is damaged."""
        values = read_json(path)
        if not isinstance(values, dict):
            return None
        for name, expected in _names_and_types().items():
            value = values.get(name)
            if not isinstance(value, expected) or isinstance(value, bool):  # True is an int in Python
                return None
        return cls.of(values)

    def write(self, path: Path) -> None:
        write_json(path, self.values)

    def as_dict(self) -> dict[str, Any]:
        return dict(self.values)


def _names_and_types() -> dict[str, type | tuple[type, ...]]:
    """The fields that finished.json must have, with their types in JSON."""
    return {each.name: _JSON_TYPES[each.type] for each in fields(TrainResult) if each.name != "values"}
