"""The sources of a mixture in the config and the metrics of a run: `val/loss/web` is the validation loss of the source
`web`."""

from typing import Any

from llmtrain.core.terminal import format_table
from llmtrain.runs.json_values import dictionary, finite, short_text
from llmtrain.runs.metrics import Row

Values = dict[str, Any]
LOSS = "val/loss/"
_TOKENS = "train/tokens/"
_OF_PAIRS = ("accuracy", "margin", "rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected", "kl")


def first_source(data: Values) -> Values:
    """What stands for all sources in a recorded data section: of a mixture the first one, else the section itself."""
    sources = data.get("sources")
    return dictionary(sources[0]) if isinstance(sources, list) and sources else data


def source_rows(train: Row, val: Row) -> list[Values]:
    """What the last rows of metrics say about each source; empty for a run without a mixture."""
    labels = [name.removeprefix(_TOKENS) for name in train if name.startswith(_TOKENS)]
    tokens = {label: finite(train.get(f"{_TOKENS}{label}")) or 0.0 for label in labels}
    total = sum(tokens.values())
    rows = []
    for label in labels:
        rows.append(
            {
                "source": short_text(label),
                "tokens": tokens[label],
                "share": tokens[label] / total if total else None,
                "epochs": finite(train.get(f"train/epoch/{label}")),
                "val_loss": finite(val.get(f"{LOSS}{label}")),
                "bits_per_byte": finite(val.get(f"val/bits_per_byte/{label}")),
                "accuracy": finite(val.get(f"val/accuracy/{label}")),
                "margin": finite(val.get(f"val/margin/{label}")),
            }
        )
    return rows


def pair_metrics(val: Row) -> Values | None:
    """What the last validation says about preference pairs; None for a run without pairs."""
    found = {name: finite(val.get(f"val/{name}")) for name in _OF_PAIRS}
    return found if found["accuracy"] is not None else None


def source_cells(rows: list[Values]) -> list[list[str]]:
    columns = {
        "tokens": ("tokens", ",.0f"),
        "share": ("used", ".1%"),  # so far: stages change it
        "epochs": ("epochs", ".2f"),
        "val_loss": ("val_loss", ".4f"),
        "bits_per_byte": ("bits_per_byte", ".3f"),
        "accuracy": ("accuracy", ".1%"),
        "margin": ("margin", ".4f"),
    }
    return cells_by_source(rows, columns)


def cells_by_source(rows: list[Values], columns: dict[str, tuple[str, str]]) -> list[list[str]]:
    """A table with a head; columns that no source has are left out. `columns`: name -> title and format."""
    shown = {name: column for name, column in columns.items() if any(row[name] is not None for row in rows)}
    cells = [["source", *(title for title, _ in shown.values())]]
    for row in rows:
        values = [format(row[name], style) if row[name] is not None else "-" for name, (_, style) in shown.items()]
        cells.append([row["source"], *values])
    return cells


def source_table(rows: list[Values]) -> list[str]:
    return format_table(source_cells(rows)).splitlines()
