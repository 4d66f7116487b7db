"""Exports a trained model to a directory that transformers or peft loads."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from llmtrain.checkpoint.artifacts import CARD, temporary_path, write_card, write_origin
from llmtrain.config.model import HfCausalLmSection
from llmtrain.errors import DataError, UsageError
from llmtrain.files import is_full
from llmtrain.inference.load import LoadedModel
from llmtrain.models.hf.lora import ADAPTER, has_adapter


def export_model(
    loaded: LoadedModel, folder: Path, merge: bool, dtype: str | None, card_source: Path | None
) -> list[str]:
    """Write weights, config, tokenizer and model card; returns the names of the files. They appear under their names
    only when all of them are written. `dtype` None: see default_dtype."""
    try:
        target = Path(os.path.realpath(folder))  # `.` or a link is filled where it points to, perhaps on another disk
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{folder} exists and is not empty.", remedy="Choose another directory for --to.")
        target.parent.mkdir(parents=True, exist_ok=True)
        _fill_directory(
            target, lambda new: _write_model(loaded, new, merge, dtype or default_dtype(loaded), card_source)
        )
        return sorted(path.name for path in target.iterdir())
    except (OSError, SafetensorError) as problem:  # safetensors raises its own error on ENOSPC
        if is_full(problem) or f"os error {errno.ENOSPC}" in str(problem):
            raise DataError(
                f"Cannot write to {folder}: its disk is full. Nothing was written.",
                remedy="Free some space, or choose a directory on another disk.",
                reason="disk_full",
            ) from None
        raise UsageError(f"Cannot write to {folder}: {getattr(problem, 'strerror', None) or problem}.") from None


def default_dtype(loaded: LoadedModel) -> str:
    """Weights that a run has trained are float32. A base model, also with merged adapters, keeps its own data type."""
    return "float32" if loaded.is_run and not has_adapter(loaded.module) else loaded.adapter.base_dtype()


def _fill_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """A new directory gets its name when it is complete. An existing one is not replaced: it may be a mount point or
    a current directory."""
    is_new = not target.exists()
    new = temporary_path(target, "new") if is_new else temporary_path(target / "model", "new")
    new.mkdir()
    try:
        fill(new)
        if is_new:
            new.rename(target)
        else:
            for path in sorted(new.iterdir()):
                path.rename(target / path.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write_model(loaded: LoadedModel, folder: Path, merge: bool, dtype: str, card_source: Path | None) -> None:
    write_adapter = None if merge else loaded.adapter.checkpoint_extras(loaded.module)
    if write_adapter:
        write_adapter(folder)
        for path in (folder / ADAPTER).iterdir():
            path.rename(folder / path.name)
        (folder / ADAPTER).rmdir()
    else:
        loaded.adapter.export(loaded.module, folder, loaded.tokenizer.end_of_text, dtype)
    if isinstance(loaded.config.model, HfCausalLmSection):
        loaded.tokenizer.save(folder)  # as its model has it
    else:
        loaded.tokenizer.export(folder, loaded.adapter.context_length())
    if write_adapter and loaded.base_sha256:
        write_origin(folder, loaded.base_sha256)
    if loaded.is_run:
        config = loaded.config
        if isinstance(config.model, HfCausalLmSection):
            config = config.with_values("model", path=loaded.base_path)
        elif config.data.tokenizer is None:
            config = config.with_values("data", tokenizer=loaded.tokenizer.kind)
        write_card(folder, config, loaded.progress, loaded.base_sha256, is_adapter=write_adapter is not None)
    elif card_source is not None and (card_source / CARD).is_file():
        shutil.copyfile(card_source / CARD, folder / CARD)
