"""Exports a trained model to a directory that transformers, peft or llama.cpp loads, and proves that it does."""

import errno
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from torch import nn

from llmtrain.checkpoint.artifacts import CARD, TEMPORARY, write_origin
from llmtrain.checkpoint.model_card import card_with_base_model, model_card
from llmtrain.config.model import HfCausalLmSection
from llmtrain.core.arguments import Source, check_one_of
from llmtrain.core.files import is_full, write_atomic, write_json
from llmtrain.core.logs import warn
from llmtrain.data.tokenizers.keep_ids import keep_ids
from llmtrain.errors import DataError, UsageError
from llmtrain.hub.model_names import HubModel
from llmtrain.inference.export_check.check import (
    CHECK,
    Check,
    Target,
    check_export,
    check_merged,
    why_unchecked,
)
from llmtrain.inference.export_check.expected import Expected, expect
from llmtrain.inference.export_check.rounding import constant_buffers, expect_rounded
from llmtrain.inference.export_directory import fill_directory, remove_leftovers
from llmtrain.inference.gguf.write import GGUF_DTYPES, GGUF_FILE, check_gguf, is_read_by_transformers, write_gguf
from llmtrain.inference.load import LoadedModel
from llmtrain.models.base import EXPORT_DTYPES
from llmtrain.models.hf.causal_lm import HFCausalLMAdapter
from llmtrain.models.hf.lora import ADAPTER, ADAPTER_CONFIG, has_adapter, merge_adapters, name_base_model
from llmtrain.training.torch_settings import default_settings

Format = Literal["hf", "gguf"]
FORMATS = ("hf", "gguf")
_CHECK_SECTION = "\n## Export check\n"
"""In a model card: the last section."""


@dataclass(frozen=True)
class ExportOptions:
    """What to write. `dtype` None: see default_dtype."""

    merge: bool = False
    dtype: str | None = None
    format: Format = "hf"
    check: bool = True


@dataclass(frozen=True)
class Exported:
    files: list[str]
    check: Check | None
    """None if it was not checked."""


@default_settings()
def export_model(loaded: LoadedModel, folder: Path, options: ExportOptions, source: Source) -> Exported:
    """Write weights, config, tokenizer and model card, and check that they compute what the model computes. The files
    appear under their names only then. `source`: what `loaded` was loaded from, which is used up."""
    _warn_of_unnamed_base(loaded, options.merge)
    if options.format == "gguf":
        check_gguf(loaded, options.merge)
    try:
        target = Path(os.path.realpath(folder))  # `.` or a link is filled where it points to, perhaps on another disk
        remove_leftovers(target)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{folder} exists and is not empty.", remedy="Choose another directory for --to.")
        check_finite(loaded.module)
        target.parent.mkdir(parents=True, exist_ok=True)
        checks = []
        fill_directory(target, lambda new: checks.append(_write_checked(loaded, new, options, source)))
        return Exported(sorted(path.name for path in target.iterdir()), checks[0])
    except (OSError, SafetensorError) as problem:  # safetensors raises its own error on ENOSPC
        if is_full(problem) or f"os error {errno.ENOSPC}" in str(problem):
            raise DataError(
                f"Cannot write to {folder}: its disk is full. Nothing was written.",
                remedy="Free some space, or choose a directory on another disk.",
                reason="disk_full",
            ) from None
        raise UsageError(f"Cannot write to {folder}: {getattr(problem, 'strerror', None) or problem}.") from None


def _warn_of_unnamed_base(loaded: LoadedModel, merge: bool) -> None:
    if loaded.base_model is not None or not _has_base_model(loaded):
        return
    files = f"{CARD} does"
    if has_adapter(loaded.module) and not merge:
        files = f"{CARD} and {ADAPTER_CONFIG} do"
    warn(
        "SAVE",
        f"the name of the base model on the hub is not known, so {files} not name it. Pass --base-model "
        "owner/name@revision to add it.",
    )


def _write_checked(loaded: LoadedModel, folder: Path, options: ExportOptions, source: Source) -> Check | None:
    """Write the export, and raise DataError if it does not compute what the model computes."""
    unchecked: str | None = "exported with --no-check"
    expected: Expected | None = None
    if options.check:
        unchecked = why_unchecked(loaded, options.format)
    if unchecked is None:
        expected = expect(loaded)
    dtype = options.dtype or default_dtype(loaded)
    is_adapter = has_adapter(loaded.module) and not options.merge
    is_rounded = dtype != "float32" and not is_adapter
    if options.merge and has_adapter(loaded.module):
        merge_adapters(loaded.module)
        if expected is not None and is_rounded:
            check_merged(loaded, expected)
    buffers = constant_buffers(loaded.module)
    _write_model(loaded, folder, options, dtype)
    if options.format == "hf" and not loaded.is_trained_from_scratch:
        keep_ids(loaded.tokenizer, folder)
    if expected is None:
        if options.check:
            warn("SAVE", f"the export is not checked: {unchecked}")
        _write_card(loaded, folder, source, is_adapter, f"Not checked: {unchecked}.")
        return None
    if is_rounded:
        expected = expect_rounded(loaded, expected, dtype, buffers)
    loaded.module.to("meta")  # the process that checks needs the memory
    check = check_export(folder, expected, _target(loaded, options.format, dtype, is_adapter))
    write_json(folder / CHECK, check.as_dict())
    _write_card(loaded, folder, source, is_adapter, check.note)
    return check


def _target(loaded: LoadedModel, format_: Format, dtype: str, is_adapter: bool) -> Target:
    trusts_code = isinstance(loaded.config.model, HfCausalLmSection) and loaded.config.model.trust_remote_code
    if format_ == "gguf":
        return Target(dtype, file=GGUF_FILE, has_ids_in_transformers=is_read_by_transformers(loaded))
    if not is_adapter:
        return Target(dtype, trust_remote_code=trusts_code)
    assert isinstance(loaded.adapter, HFCausalLMAdapter)
    return Target("float32", base=loaded.adapter.directory, trust_remote_code=trusts_code)


def parse_dtype(name: str, dtype: str | None, format_: str) -> str | None:
    """The data type that an option names; for GGUF also by its names there."""
    if dtype is None:
        return None
    if format_ == "gguf":
        check_one_of(name, dtype, [*GGUF_DTYPES, *EXPORT_DTYPES])
        return GGUF_DTYPES.get(dtype, dtype)
    check_one_of(name, dtype, EXPORT_DTYPES)
    return dtype


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


def _write_model(loaded: LoadedModel, folder: Path, options: ExportOptions, dtype: str) -> None:
    if options.format == "gguf":
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as files:
            stored = dtype if dtype in EXPORT_DTYPES else "float32"
            _write_model(loaded, Path(files), replace(options, format="hf"), stored)
            write_gguf(Path(files), folder / GGUF_FILE, loaded, dtype)
        return
    write_adapter = None if options.merge else loaded.adapter.checkpoint_extras(loaded.module)
    if write_adapter:
        write_adapter(folder)
        name_base_model(folder / ADAPTER, loaded.base_model)
        for path in (folder / ADAPTER).iterdir():
            path.rename(folder / path.name)
        (folder / ADAPTER).rmdir()
    else:
        loaded.adapter.export(loaded.module, folder, loaded.tokenizer.end_of_text, dtype)
    loaded.save_tokenizer(folder)
    if write_adapter and loaded.base_sha256:
        write_origin(folder, loaded.base_sha256)


def _write_card(loaded: LoadedModel, folder: Path, source: Source, is_adapter: bool, check: str) -> None:
    """Write a new model card for a run; copy that of an adapter or a model directory, if it has one. `check`: how the
    export was checked."""
    card = ""
    path = Path(source.adapter or source.model or "").expanduser() / CARD
    if loaded.is_run:
        config = loaded.config
        if config.data.tokenizer is None and not isinstance(config.model, HfCausalLmSection):
            config = config.with_values("data", tokenizer=loaded.tokenizer.kind)
        card = model_card(config, loaded.progress, loaded.base_model, loaded.base_sha256, is_adapter)
    elif path.is_file():
        card = card_with_base_model(path.read_text(encoding="utf-8"), loaded.base_model)
        card = card.partition(_CHECK_SECTION)[0]  # that of the export it is
    write_atomic(folder / CARD, f"{card}{_CHECK_SECTION}\n{check}\n")
