"""Loading data with the datasets library, whose exceptions become DataError and UsageError."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.config.data import HeldOutSection, HfTextSection, HubDatasetSection
from llmtrain.core.text import one_line, plural
from llmtrain.data.text_and_examples import Split
from llmtrain.errors import DataError, LlmtrainError, UsageError


def load_split(config: HubDatasetSection, split: Split) -> Any:
    """The rows of a split of data.dataset_name."""
    from llmtrain.hub.dataset_names import full_dataset_name
    from llmtrain.hub.token import hub_token

    name = config.train_split
    if split == "val" and config.val_split:
        name = config.val_split
    token = hub_token()

    def read(datasets: Any, cache: str) -> Any:
        path = Path(config.dataset_name or "").expanduser()
        if path.is_file():
            raise UsageError(
                f"data.dataset_name must be a dataset on the hub or a directory, got the file '{path}'.",
                remedy=f"Set {_files_field(config)} to read files.",
            )
        if any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
            return _saved_split(datasets, path, name, config.dataset_config)
        full_name = str(path) if path.is_dir() else full_dataset_name(str(config.dataset_name), Path(cache))
        return datasets.load_dataset(full_name, config.dataset_config, split=name, cache_dir=cache, token=token)

    rows = call_datasets(config, read)
    return rows if config.val_split else hold_out(rows, config, split)


def _saved_split(datasets: Any, path: Path, name: str, dataset_config: str | None) -> Any:
    """A split of a save_to_disk directory, which load_dataset refuses. Without splits, all of it is `train`."""
    if dataset_config is not None:
        raise UsageError(
            f"data.dataset_config is '{dataset_config}', but '{path}' was written by save_to_disk and has no "
            "configurations.",
            remedy="Set data.dataset_config to null.",
        )
    try:
        saved = datasets.load_from_disk(str(path))
    except IndexError:  # the library reads the format of the first file, and there is none
        raise DataError(f"Dataset '{path}', or one of its splits, is empty.") from None
    splits = saved if isinstance(saved, dict) else {"train": saved}
    parts = datasets.ReadInstruction.from_spec(name).to_absolute({key: len(rows) for key, rows in splits.items()})
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def hold_out(rows: Any, config: HeldOutSection, split: Split) -> Any:
    """The last val_fraction of the rows for validation, at least one; the rest for training."""
    if len(rows) < 2:
        raise DataError(
            f"The training data has {plural(len(rows), 'row')}: none is left for validation.",
            remedy="Add more rows, or name validation data.",
        )
    border = training_count(len(rows), config)
    return rows.select(range(border) if split == "train" else range(border, len(rows)))


def training_count(count: int, config: HeldOutSection) -> int:
    """Number of rows for training out of `count`; at least one remains for validation."""
    return max(1, min(count - 1, int(count * (1 - config.val_fraction))))


def call_datasets(config: HubDatasetSection, read: Callable[[Any, str], Any]) -> Any:
    """The result of read(datasets module, cache directory), with the library's exceptions converted."""
    import datasets

    datasets.disable_progress_bars()
    try:
        return read(datasets, str(Path(config.cache_dir).expanduser() / "datasets"))
    except LlmtrainError:
        raise
    except Exception as problem:  # the library raises exceptions of many other libraries
        raise _as_error(config, problem) from None


def _files_field(config: HubDatasetSection) -> str:
    return "data.files" if isinstance(config, HfTextSection) else "data.train_file"


def _as_error(config: HubDatasetSection, problem: Exception) -> LlmtrainError:
    from llmtrain.hub.errors import explain_hub_error

    cause = problem.__cause__ or problem
    message = one_line(cause, 300)
    if isinstance(config, HfTextSection) and config.files:
        return DataError(f"The datasets library cannot read data.files: {message}.")
    if isinstance(problem, ConnectionError) or "offline" in message.lower() or "connect" in message.lower():
        return DataError(
            f"Cannot reach dataset '{config.dataset_name}': {message}.",
            remedy=f"Without network access, set {_files_field(config)} to local files, "
            "or data.dataset_name to a directory.",
        )
    error = explain_hub_error(problem, f"Dataset '{config.dataset_name}'")
    if isinstance(error, UsageError):  # the hub refused: license, token or name
        return error
    return DataError(
        f"Cannot load dataset '{config.dataset_name}': {message}.",
        remedy="Check data.dataset_name, data.dataset_config, data.train_split and data.val_split. Without a "
        "validation split, set data.val_split to null: this holds out data.val_fraction of the training rows.",
    )
