"""The statistics of the data that `llmtrain data stats` has counted before a run starts, for its report."""

from typing import Any

from llmtrain.config.data import DataSection
from llmtrain.config.mixture import MixtureSection
from llmtrain.data.cache_dir import token_cache_dir
from llmtrain.data.statistics import StatisticsFile
from llmtrain.runs.data_statistics import FIELD


def known_statistics(data: DataSection, block_size: int, recorded: dict[str, Any]) -> dict[str, Any]:
    """What meta.json records; empty if nothing was counted: that reads all tokens, which a start does not wait for."""
    labels = data.labels() if isinstance(data, MixtureSection) else [data.name]
    file = StatisticsFile.of(
        token_cache_dir(data), recorded["data_fingerprint"], recorded["tokenizer_sha256"], block_size
    )
    rows = file.read(labels)
    return {} if rows is None else {FIELD: rows}
