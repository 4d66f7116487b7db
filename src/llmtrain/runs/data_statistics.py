"""What `llmtrain data stats` has counted of the data of a run, as meta.json records it, for the report."""

from typing import Any

from llmtrain.runs.json_values import dictionary, finite, short_text
from llmtrain.runs.sources import cells_by_source

Values = dict[str, Any]
FIELD = "data_statistics"
"""In meta.json. Absent if nothing was counted before the first start."""
_MAX_ROWS = 1000


def statistics_rows(meta: Values) -> list[Values]:
    """One row per source; empty if nothing is recorded. meta.json may be damaged."""
    recorded = meta.get(FIELD)
    if not isinstance(recorded, list):
        return []
    rows = []
    for each in map(dictionary, recorded[:_MAX_ROWS]):
        lengths = dictionary(each.get("lengths"))
        row: Values = {"source": short_text(each.get("source")), "unit": short_text(each.get("unit"))}
        for name in ("count", "tokens", "longer_than_context", "tokens_cut_off", "duplicates"):
            row[name] = finite(each.get(name))
        rows.append({**row, "median": finite(lengths.get("median")), "longest": finite(lengths.get("longest"))})
    return rows


def statistics_cells(rows: list[Values]) -> list[list[str]]:
    columns = {
        "count": (rows[0]["unit"], ",.0f"),
        "tokens": ("tokens", ",.0f"),
        "median": ("median length", ",.0f"),
        "longest": ("longest", ",.0f"),
        "longer_than_context": ("over the context", ".1%"),
        "tokens_cut_off": ("tokens cut off", ".1%"),
        "duplicates": ("exact duplicates", ",.0f"),
    }
    return cells_by_source(rows, columns)
