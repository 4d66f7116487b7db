"""Loading by the datasets library, with its many errors told as ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.config.data import HeldOutSection, HfTextSection, HubDatasetSection
from llmtrain.data.store.directory import Split
from llmtrain.errors import DataError, LlmtrainError, UsageError


def load_split(config: HubDatasetSection, split: Split) -> Any:
    """A split of data.dataset_name."""
    from llmtrain.hub.dataset_names import full_dataset_name
    from llmtrain.hub.token import hub_token

    name = config.val_split if split == "val" and config.val_split else config.train_split
    token = hub_token()

    def read(datasets: Any, cache: str) -> Any:
        folder = Path(config.dataset_name or "").expanduser()
        if folder.is_file():
            raise UsageError(
                f"data.dataset_name '{folder}' is a file; it must be a dataset of the hub or a directory.",
                remedy=f"Name files in {_files_field(config)}.",
            )
        if any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            return _saved_split(datasets, folder, name, config.dataset_config)
        full_name = str(folder) if folder.is_dir() else full_dataset_name(str(config.dataset_name), Path(cache))
        return datasets.load_dataset(full_name, config.dataset_config, split=name, cache_dir=cache, token=token)

    rows = load(config, read)
    return rows if config.val_split else held_out(rows, config, split)


def _saved_split(datasets: Any, folder: Path, name: str, dataset_config: str | None) -> Any:
    """A split of what `save_to_disk` wrote, which load_dataset refuses. A dataset without splits is all `train`."""
    if dataset_config is not None:
        raise UsageError(
            f"data.dataset_config is '{dataset_config}', but '{folder}' was written by save_to_disk and has no "
            "configurations.",
            remedy="Set data.dataset_config to null.",
        )
    try:
        saved = datasets.load_from_disk(str(folder))
    except IndexError:  # it takes the format from the first of no files
        raise DataError(f"Dataset '{folder}', or one of its splits, has no examples.") from None
    splits = saved if isinstance(saved, dict) else {"train": saved}
    parts = datasets.ReadInstruction.from_spec(name).to_absolute({key: len(rows) for key, rows in splits.items()})
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def held_out(rows: Any, config: HeldOutSection, split: Split) -> Any:
    """The last val_fraction of the rows for validation, at least one; the others for training."""
    border = training_count(len(rows), config)
    return rows.select(range(border) if split == "train" else range(border, len(rows)))


def training_count(count: int, config: HeldOutSection) -> int:
    """How many of so many rows are for training; at least one is left for validation."""
    return max(1, min(count - 1, int(count * (1 - config.val_fraction))))


def load(config: HubDatasetSection, read: Callable[[Any, str], Any]) -> Any:
    """What `read(datasets, cache directory)` returns."""
    import datasets

    datasets.disable_progress_bars()
    try:
        return read(datasets, str(Path(config.cache_dir).expanduser() / "datasets"))
    except LlmtrainError:
        raise
    except Exception as problem:  # the library raises many kinds, few of them its own
        raise _explain(config, problem) from None


def _files_field(config: HubDatasetSection) -> str:
    return "data.files" if isinstance(config, HfTextSection) else "data.train_file"


def _explain(config: HubDatasetSection, problem: Exception) -> LlmtrainError:
    from llmtrain.hub.errors import explain_hub_error

    cause = problem.__cause__ or problem
    what = " ".join(str(cause).split())[:300]
    if isinstance(config, HfTextSection) and config.files:
        return DataError(f"data.files cannot be read by the datasets library: {what}.")
    if isinstance(problem, ConnectionError) or "offline" in what.lower() or "connect" in what.lower():
        return DataError(
            f"Dataset '{config.dataset_name}' cannot be reached: {what}.",
            remedy=f"Without a network, name local files in {_files_field(config)}, "
            "or a directory in data.dataset_name.",
        )
    told = explain_hub_error(problem, f"Dataset '{config.dataset_name}'")
    if isinstance(told, UsageError):  # the hub said no: a licence, a token, a name
        return told
    return DataError(
        f"Dataset '{config.dataset_name}' cannot be loaded: {what}.",
        remedy="Check data.dataset_name, data.dataset_config and the two split names. Without a split for validation, "
        "set data.val_split to null: a share of the training rows is held out.",
    )
