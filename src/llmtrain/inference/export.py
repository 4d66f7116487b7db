"""Exports a trained model to a directory that transformers or peft loads."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from llmtrain.checkpoint.artifacts import CARD, temporary_path, write_origin
from llmtrain.checkpoint.model_card import card_with_base_model, model_card
from llmtrain.config.model import HfCausalLmSection
from llmtrain.core.arguments import Source
from llmtrain.core.files import is_full, write_atomic
from llmtrain.core.logs import warn
from llmtrain.errors import DataError, UsageError
from llmtrain.hub.model_names import HubModel
from llmtrain.inference.load import LoadedModel
from llmtrain.models.hf.lora import ADAPTER, ADAPTER_CONFIG, has_adapter, name_base_model
from llmtrain.training.torch_settings import default_settings


@default_settings()
def export_model(loaded: LoadedModel, folder: Path, merge: bool, dtype: str | None, source: Source) -> list[str]:
    """Write weights, config, tokenizer and model card; returns the names of the files. They appear under their names
    only when all of them are written. `dtype` None: see default_dtype. `source`: what `loaded` was loaded from."""
    if loaded.base_model is None and _has_base_model(loaded):
        is_adapter = has_adapter(loaded.module) and not merge
        files = f"{CARD} does"
        if is_adapter:
            files = f"{CARD} and {ADAPTER_CONFIG} do"
        warn(
            "SAVE",
            f"the name of the base model on the hub is not known, so {files} not name it. Pass --base-model "
            "owner/name@revision to add it.",
        )
    try:
        target = Path(os.path.realpath(folder))  # `.` or a link is filled where it points to, perhaps on another disk
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{folder} exists and is not empty.", remedy="Choose another directory for --to.")
        check_finite(loaded.module)
        target.parent.mkdir(parents=True, exist_ok=True)
        _fill_directory(target, lambda new: _write_model(loaded, new, merge, dtype or default_dtype(loaded), source))
        return sorted(path.name for path in target.iterdir())
    except (OSError, SafetensorError) as problem:  # safetensors raises its own error on ENOSPC
        if is_full(problem) or f"os error {errno.ENOSPC}" in str(problem):
            raise DataError(
                f"Cannot write to {folder}: its disk is full. Nothing was written.",
                remedy="Free some space, or choose a directory on another disk.",
                reason="disk_full",
            ) from None
        raise UsageError(f"Cannot write to {folder}: {getattr(problem, 'strerror', None) or problem}.") from None


def check_finite(module: nn.Module) -> None:
    """Refuse a model that cannot compute anything: one whose training diverged, or whose weights are damaged."""
    # detach: where the caller is in inference mode, torch fails to compute isfinite of a trained parameter.
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not parameter.detach().isfinite().all():
            raise DataError(
                f"The weights contain values that are not finite: {name}.",
                remedy="Export an earlier checkpoint: --checkpoint step_<N>.",
                reason="not_finite",
            )


def with_base_model(loaded: LoadedModel, base: HubModel | None) -> LoadedModel:
    """The model with another name for its base model; None keeps what was recorded."""
    if base is None:
        return loaded
    if not _has_base_model(loaded):
        raise UsageError(
            f"--base-model: {loaded.label} is not a fine-tuned model.",
            remedy="Leave it out, or pass a run of hf_causal_lm or an adapter.",
        )
    return replace(loaded, base_model=base)


def _has_base_model(loaded: LoadedModel) -> bool:
    is_tuned_run = loaded.is_run and isinstance(loaded.config.model, HfCausalLmSection)
    return is_tuned_run or has_adapter(loaded.module)


def default_dtype(loaded: LoadedModel) -> str:
    """Weights that a run has trained are float32. A base model, also with merged adapters, keeps its own data type."""
    if loaded.is_run and not has_adapter(loaded.module):
        return "float32"
    return loaded.adapter.base_dtype()


def _fill_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """A new directory gets its name when it is complete. An existing one is not replaced: it may be a mount point or
    a current directory."""
    is_new = not target.exists()
    new = temporary_path(target if is_new else target / "model", "new")
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


def _write_model(loaded: LoadedModel, folder: Path, merge: bool, dtype: str, source: Source) -> None:
    write_adapter = None if merge else loaded.adapter.checkpoint_extras(loaded.module)
    if write_adapter:
        write_adapter(folder)
        name_base_model(folder / ADAPTER, loaded.base_model)
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
    _write_card(loaded, folder, source, is_adapter=write_adapter is not None)


def _write_card(loaded: LoadedModel, folder: Path, source: Source, is_adapter: bool) -> None:
    """Write a new model card for a run; copy that of an adapter or a model directory, if it has one."""
    if loaded.is_run:
        config = loaded.config
        if config.data.tokenizer is None and not isinstance(config.model, HfCausalLmSection):
            config = config.with_values("data", tokenizer=loaded.tokenizer.kind)
        card = model_card(config, loaded.progress, loaded.base_model, loaded.base_sha256, is_adapter)
        write_atomic(folder / CARD, card)
        return
    path = Path(source.adapter or source.model or "").expanduser() / CARD
    if path.is_file():
        card = card_with_base_model(path.read_text(encoding="utf-8"), loaded.base_model)
        write_atomic(folder / CARD, card)
