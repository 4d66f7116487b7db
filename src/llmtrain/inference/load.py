"""A trained model, ready for use: of a run, of a peft adapter, or of a plain model directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint
from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.model import GptSection, HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.data.tokenizers.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer
from llmtrain.distributed.world import pick_device
from llmtrain.errors import CheckpointError, DataError, UsageError
from llmtrain.files import read_json
from llmtrain.logs import warn
from llmtrain.models.base import ModelAdapter
from llmtrain.runs.directory import RunDirectory, find_run
from llmtrain.training.build import GPU_ATTENTION, as_computed, base_sha256, build_adapter


@dataclass(frozen=True)
class Source:
    """What the user named: a run, or an adapter and its base, or a base alone. `model` beside a run or an adapter says
    where its base model is now."""

    run: str | None = None
    adapter: str | None = None
    model: str | None = None
    checkpoint: str = "best"
    root: str = "runs"


@dataclass(frozen=True)
class LoadedModel:
    label: str
    step: int | None
    config: Config
    adapter: ModelAdapter
    module: nn.Module
    tokenizer: Tokenizer
    tokenizer_dir: Path | None
    """Where its chat template may be."""
    device: torch.device
    progress: dict[str, Any]
    val_loss: float | None = None
    """Of these weights, where the run evaluated them."""
    base_sha256: str | None = None
    base_path: str | None = None
    is_run: bool = False
    """Whether a config of ours says how it was trained."""


def load_model(source: Source, device: str) -> LoadedModel:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device '{device}' is unknown.", known=("auto", "cpu", "cuda"))
    if source.run and source.adapter:
        raise UsageError("--run and --adapter are two models.", remedy="Give one of them.")
    if source.run:
        return _load_run(source, pick_device(device))
    if source.adapter or source.model:
        return _load_directory(source, pick_device(device))
    raise UsageError("No model is named.", remedy="Give --run, --adapter or --model.")


def _load_run(source: Source, device: torch.device) -> LoadedModel:
    assert source.run
    run = find_run(source.root, source.run)
    chosen = choose_checkpoint(run, source.checkpoint)
    chosen.verify()
    state = chosen.state()
    config = build_config(Document(str(chosen.path), state["config"]))
    tokenizer = load_saved_tokenizer(run.tokenizer)
    if state.get("tokenizer_sha256") not in (None, tokenizer.sha256()):  # None: saved by an earlier version
        raise CheckpointError(
            f"{chosen.path} was trained with another tokenizer than the one in {run.tokenizer}.",
            remedy="Use a newer checkpoint of the run, or put the tokenizer of this one there.",
        )
    base_path = source.model or (config.model.path if isinstance(config.model, HfCausalLmSection) else None)
    config = _as_used(config, run, base_path, device)
    adapter = build_adapter(config, tokenizer.vocab_size)
    module = _fill(adapter, config, chosen, state.get("base_sha256")).to(device).eval()
    adapter.examine(module)
    return LoadedModel(
        label=run.run_id,
        step=chosen.step,
        config=config,
        adapter=adapter,
        module=module,
        tokenizer=tokenizer,
        tokenizer_dir=run.tokenizer,
        device=device,
        progress=state["progress"],
        val_loss=chosen.val_loss,
        base_sha256=state.get("base_sha256"),
        base_path=base_path,
        is_run=True,
    )


def _as_used(config: Config, run: RunDirectory, base_path: str | None, device: torch.device) -> Config:
    """The config without what matters in training only. The weights come from the checkpoint, so whatever the run was
    initialised from need not be there any more, unless they are adapters on it."""
    if not isinstance(config.model, HfCausalLmSection):
        return as_computed(config.with_values("model", **_random_init(config)), device)
    model = config.model.model_copy(update={"gradient_checkpointing": False, "path": base_path})
    if model.lora is None and run.model_config.is_dir():
        model = model.model_copy(update={"path": str(run.model_config), "revision": None})
    elif base_path != config.model.path:
        model = model.model_copy(update={"revision": None})
    if device.type != "cuda" and model.attention in GPU_ATTENTION:
        model = model.model_copy(update={"attention": "sdpa"})
    if model.lora and model.lora.quantize and device.type != "cuda":
        model = model.model_copy(update={"lora": model.lora.model_copy(update={"quantize": False})})
    return as_computed(config.model_copy(update={"model": model}), device)


def _random_init(config: Config) -> dict[str, str]:
    return {"init": "random"} if isinstance(config.model, GptSection) else {}


def _fill(adapter: ModelAdapter, config: Config, checkpoint: Checkpoint, recorded: str | None) -> nn.Module:
    """The module with a checkpoint's weights in it; of a LoRA run they are the adapters, beside the base model's."""
    is_lora = isinstance(config.model, HfCausalLmSection) and config.model.lora is not None
    if is_lora:
        _check_base(adapter, config, recorded)
    module = adapter.build() if is_lora else adapter.build_empty()
    stored = checkpoint.tensors("model")
    try:
        missing, unexpected = module.load_state_dict(stored, strict=False)
    except RuntimeError as problem:
        raise CheckpointError(
            f"{checkpoint.path} holds another model: {' '.join(str(problem).split())[:300]}"
        ) from None
    own = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    wrong = [*(name for name in missing if name in own), *unexpected]
    if wrong:
        raise CheckpointError(f"{checkpoint.path} holds another model: {', '.join(wrong[:3])} differ.")
    return module


def _check_base(adapter: ModelAdapter, config: Config, recorded: str | None) -> None:
    """Adapters mean nothing on another base, even where the shapes agree."""
    if recorded is None:
        return
    found = base_sha256(config, adapter)
    if found != recorded:
        raise DataError(
            f"{getattr(config.model, 'path', None)} is not the base model of this adapter: its SHA-256 is "
            f"{str(found)[:16]}..., not {recorded[:16]}...",
            remedy="Give the directory of the base model it was trained on with --model.",
        )


def _load_directory(source: Source, device: torch.device) -> LoadedModel:
    from llmtrain.models.hf.causal_lm import CausalLM, HFCausalLMAdapter
    from llmtrain.models.hf.files import read_weights
    from llmtrain.models.hf.lora import ADAPTER_CONFIG, ORIGIN, is_adapter, load_adapter

    base = source.model
    if source.adapter:
        folder = Path(source.adapter).expanduser()
        if not is_adapter(folder):
            raise UsageError(f"{folder} is not an adapter: it has no {ADAPTER_CONFIG}.")
        base = base or (read_json(folder / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
    if not base:
        raise DataError(f"{source.adapter} does not say what model it belongs to.", remedy="Give it with --model.")
    document = {"model": {"name": "hf_causal_lm", "path": base}, "data": {"name": "instruct_jsonl", "train_file": "-"}}
    config = build_config(Document("--model", document))
    assert isinstance(config.model, HfCausalLmSection)
    folder_of_tokenizer = HFCausalLMAdapter.own_tokenizer(config.model)
    tokenizer = load_tokenizer(folder_of_tokenizer)
    adapter = HFCausalLMAdapter(config.model.model_copy(update={"block_size": 1}), tokenizer.vocab_size)
    adapter.config = config.model.model_copy(update={"block_size": adapter.context_length()})
    config = config.model_copy(update={"model": adapter.config})
    model = read_weights(adapter.folder, adapter.hf_config, adapter.config)
    if source.adapter:
        folder = Path(source.adapter).expanduser()
        _check_base(adapter, config, (read_json(folder / ORIGIN) or {}).get("base_sha256"))
        model = load_adapter(model, folder)
    module = CausalLM(model).to(device).eval()
    adapter.examine(module)
    return LoadedModel(
        label=str(source.adapter or base),
        step=None,
        config=config,
        adapter=adapter,
        module=module,
        tokenizer=tokenizer,
        tokenizer_dir=Path(folder_of_tokenizer),
        device=device,
        progress={},
    )


def choose_checkpoint(run: RunDirectory, name: str) -> Checkpoint:
    store = CheckpointStore(run.checkpoints)
    if name in ("best", "latest"):
        found = store.pointed(name)
        if found:
            return found
        found = store.pointed("latest") or store.newest_usable()
        if found:
            warn("SAVE", f"run {run.run_id} has no '{name}' checkpoint: {found.path.name} is used")
            return found
        raise CheckpointError(f"Run '{run.run_id}' has no checkpoint yet.")
    try:
        return find_checkpoint(run.checkpoints / name)
    except CheckpointError:
        known = [f"step_{step}" for step in store.steps()]
        raise CheckpointError(
            f"Run '{run.run_id}' has no checkpoint '{name}'.", known=["best", "latest", *known]
        ) from None
