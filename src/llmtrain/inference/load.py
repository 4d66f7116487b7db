"""Loads a trained model: from a run, a peft adapter, or a model directory."""

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.state import model_tensors
from llmtrain.checkpoint.store import CheckpointStore, find_checkpoint
from llmtrain.compat.numerics import Numerics
from llmtrain.compat.run_files import is_tokenizer_hash
from llmtrain.config.check_plugins import choices
from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.model import AnyGptSection, HfCausalLmSection, PluginModelSection
from llmtrain.config.schema import Config
from llmtrain.core.arguments import Source
from llmtrain.core.files import read_json
from llmtrain.core.logs import warn
from llmtrain.core.text import format_bytes
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.load import load_saved_tokenizer, load_tokenizer
from llmtrain.distributed.machine_limits import machine_memory
from llmtrain.distributed.world import World, pick_device
from llmtrain.errors import CheckpointError, DataError, UsageError
from llmtrain.hub.find import find_model
from llmtrain.hub.model_names import HubModel, hub_model_of, parse_hub_model
from llmtrain.models.base import ModelAdapter, build_checked
from llmtrain.models.compute_dtype import copy_in
from llmtrain.models.device_precision import Autocast, autocast_for, cast_dtype, with_device_precision
from llmtrain.models.hf.lora import ADAPTER_CONFIG, BASE_RECORD, is_adapter, load_adapter, named_base_model
from llmtrain.plugins import describe_plugin, is_plugin_class
from llmtrain.runs.directory import RunDirectory, find_run
from llmtrain.runs.run_plugins import check_run_plugins
from llmtrain.runs.state import RunState
from llmtrain.runs.task_scores import task_scores_at
from llmtrain.runs.view import RunView
from llmtrain.training.components import GPU_ATTENTION, base_sha256, build_adapter
from llmtrain.training.random_state import preserved
from llmtrain.training.resume import warn_of_changed_code
from llmtrain.training.torch_settings import default_settings


@dataclass(frozen=True)
class LoadedModel:
    label: str
    step: int | None
    config: Config
    adapter: ModelAdapter
    module: nn.Module
    """With its weights as they are stored."""
    tokenizer: Tokenizer
    tokenizer_dir: Path | None
    """Directory that may contain a chat template."""
    world: World
    """The processes that evaluate it together; otherwise this one."""
    progress: dict[str, Any]
    val_loss: float | None = None
    """Validation loss of these weights, if the run evaluated them."""
    base_sha256: str | None = None
    base_path: str | None = None
    base_revision: str | None = None
    base_model: HubModel | None = None
    """On the hub; None if it is not known."""
    is_run: bool = False
    """Whether it was trained by llmtrain, so that `config` is the config of its run."""

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def is_trained_from_scratch(self) -> bool:
        """Whether it is a model of ours, not one of transformers."""
        return not isinstance(self.config.model, HfCausalLmSection)

    def save_tokenizer(self, folder: Path) -> None:
        """As an export has it: that of a model of ours without a BOS token that it has not seen."""
        if self.is_trained_from_scratch:
            self.tokenizer.export(folder, self.adapter.context_length())
        else:
            self.tokenizer.save(folder)

    @property
    def autocast(self) -> Autocast:
        return autocast_for(self.config.trainer, self.adapter, self.device)

    @cached_property
    def computing(self) -> nn.Module:
        """The module in the precision it computes in; `module` has the weights as they are stored."""
        return self.in_compute_dtype(self.module)

    def in_compute_dtype(self, module: nn.Module) -> nn.Module:
        dtype = cast_dtype(self.config.trainer, self.adapter, self.device)
        return copy_in(module, dtype) if dtype else module


@default_settings()
def load_model(source: Source, device: str = "auto", world: World | None = None) -> LoadedModel:
    """`world`: the processes that evaluate the model together, each on its device."""
    check_device(device)
    check_source(source)
    world = world or World(device=pick_device(device))
    if source.run:
        return _load_run(source, world)
    return _load_directory(source, world)


def check_device(name: str) -> None:
    if name not in ("auto", "cpu", "cuda"):
        remedy = "Did you mean 'cuda'?" if name == "gpu" else None
        raise UsageError(f"--device must be auto, cpu or cuda, got '{name}'.", remedy=remedy)


def check_source(source: Source) -> None:
    if source.run and source.adapter:
        raise UsageError("A run and --adapter cannot be combined.", remedy="Pass one of them.")
    if not (source.run or source.adapter or source.model):
        raise UsageError("No model was given.", remedy="Pass a run, --adapter or --model.")


def _load_run(source: Source, world: World) -> LoadedModel:
    assert source.run
    device = world.device
    run = find_run(source.root, source.run)
    checkpoint = choose_checkpoint(run, source.checkpoint)
    checkpoint.verify()
    state = checkpoint.state()
    document = Document(str(checkpoint.path), state["config"])
    config = build_config(document, is_recorded=True)
    model_only = [choice for choice in choices(config) if choice.field == "model.name"]
    check_run_plugins(config, document, run, model_only)
    tokenizer = load_saved_tokenizer(run.tokenizer)
    if not is_tokenizer_hash(state.get("tokenizer_sha256"), tokenizer.sha256()):
        raise CheckpointError(
            f"{checkpoint.path} was trained with another tokenizer than the one in {run.tokenizer}.",
            remedy="Use a newer checkpoint of the run, or restore the tokenizer of this one.",
        )
    base_path = source.model or None
    base_revision = None
    if base_path is None and isinstance(config.model, HfCausalLmSection):
        base_path = config.model.path
        base_revision = config.model.revision
    config = _inference_config(config, run, base_path, device)
    adapter = build_adapter(config.model, tokenizer.vocab_size, Numerics.recorded(state, run.run_id))
    if isinstance(config.model, PluginModelSection):
        warn_of_changed_code(state, {"model.name": describe_plugin(config.model.name, type(adapter))})
    module = _load_weights(adapter, checkpoint, config.data.cache_dir, state.get("base_sha256")).to(device).eval()
    adapter.probe(module)
    return LoadedModel(
        label=run.run_id,
        step=checkpoint.step,
        config=config,
        adapter=adapter,
        module=module,
        tokenizer=tokenizer,
        tokenizer_dir=run.tokenizer,
        world=world,
        progress={**state["progress"], "tasks": task_scores_at(run, checkpoint.step)},
        val_loss=checkpoint.val_loss,
        base_sha256=state.get("base_sha256"),
        base_path=base_path,
        base_revision=base_revision,
        base_model=_base_model(state.get("base_model"), base_path, base_revision),
        is_run=True,
    )


def _base_model(recorded: str | None, path: str | None, revision: str | None) -> HubModel | None:
    """The base model that a checkpoint records, else the one that its directory on this machine records."""
    if recorded:
        return parse_hub_model(recorded, "base_model")
    if path is None:
        return None
    try:
        return hub_model_of(find_model(path, revision, local_files_only=True))
    except UsageError:  # it is not on this machine
        return None


def _inference_config(config: Config, run: RunDirectory, base_path: str | None, device: torch.device) -> Config:
    """The config without settings for training. The weights come from the checkpoint, so the model that the run was
    initialized from may be gone, unless the weights are adapters for it."""
    if not isinstance(config.model, HfCausalLmSection):
        if isinstance(config.model, AnyGptSection):
            config = config.with_values("model", init="random")
        return with_device_precision(config, device)
    model = config.model.model_copy(update={"path": base_path})
    if model.lora is None and run.model_config.is_dir():
        model = model.model_copy(update={"path": str(run.model_config), "revision": None})
    elif base_path != config.model.path:
        model = model.model_copy(update={"revision": None})
    if device.type != "cuda" and model.attention in GPU_ATTENTION:
        model = model.model_copy(update={"attention": "sdpa"})
    if model.lora and model.lora.quantize and device.type != "cuda":
        model = model.model_copy(update={"lora": model.lora.model_copy(update={"quantize": False})})
    return with_device_precision(config.model_copy(update={"model": model}), device)


def _load_weights(adapter: ModelAdapter, checkpoint: Checkpoint, cache_dir: str, base_sha256: str | None) -> nn.Module:
    """The module with the weights of a checkpoint, which in a LoRA run has only the adapters."""
    is_lora = isinstance(adapter.config, HfCausalLmSection) and adapter.config.lora is not None
    if is_lora:
        _check_base(adapter, cache_dir, base_sha256)
    else:
        _check_shapes(adapter, checkpoint)
    with preserved():
        module = build_checked(adapter, is_empty=not is_lora)
    stored = checkpoint.tensors("model")
    try:
        missing, unexpected = module.load_state_dict(stored, strict=False)
    except RuntimeError as problem:
        raise CheckpointError(
            f"{checkpoint.path} contains another model: {' '.join(str(problem).split())[:300]}"
        ) from None
    expected = model_tensors(module).keys()
    wrong = [name for name in missing if name in expected] + unexpected
    if wrong:
        raise CheckpointError(f"{checkpoint.path} contains another model: {', '.join(wrong[:3])} differ.")
    return module


def _check_shapes(adapter: ModelAdapter, checkpoint: Checkpoint) -> None:
    """Refuse another model, and one too large for this machine, before memory is allocated: the config of a checkpoint
    from elsewhere may have any sizes."""
    if is_plugin_class(type(adapter)) or getattr(adapter.config, "trust_remote_code", False):
        return  # the code of others may not build a module without data
    with preserved(), torch.device("meta"):
        module = adapter.build_empty()
    need = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    memory = machine_memory()
    if need > memory:
        raise UsageError(
            f"The model of {checkpoint.path} needs at least {format_bytes(need)} of memory, and there are "
            f"{format_bytes(memory)}.",
            remedy="Use a machine with more memory.",
        )
    expected = {name: list(tensor.shape) for name, tensor in model_tensors(module).items()}
    stored = checkpoint.shapes("model")
    wrong = sorted(name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{checkpoint.path} contains another model: {name} has shape {stored.get(name)}, and by the config of the "
            f"checkpoint {expected.get(name)}."
        )


def _check_base(adapter: ModelAdapter, cache_dir: str, recorded: str | None) -> None:
    """Refuse another base model, even one of the same shapes: adapters are useless on it."""
    if recorded is None:
        return
    actual = base_sha256(adapter, cache_dir)
    if actual != recorded:
        raise DataError(
            f"{getattr(adapter.config, 'path', None)} is not the base model of this adapter: its SHA-256 is "
            f"{str(actual)[:16]}..., expected {recorded[:16]}...",
            remedy="Pass the base model it was trained on with --model.",
        )


def _load_directory(source: Source, world: World) -> LoadedModel:
    from llmtrain.models.hf.causal_lm import CausalLM, HFCausalLMAdapter
    from llmtrain.models.hf.files import read_weights

    base = source.model
    revision = None
    folder = None
    if source.adapter:
        folder = Path(source.adapter).expanduser()
        if not is_adapter(folder):
            raise UsageError(f"{folder} is not an adapter: it has no {ADAPTER_CONFIG}.")
        if not base:
            base, revision = _base_of_adapter(folder)
    if not base:
        raise DataError(f"{source.adapter} does not name its base model.", remedy="Pass the base model with --model.")
    section = {"name": "hf_causal_lm", "path": base, "revision": revision}
    document = {"model": section, "data": {"name": "instruct_jsonl", "train_file": "-"}}
    config = build_config(Document("--model", document))
    assert isinstance(config.model, HfCausalLmSection)
    tokenizer_dir = HFCausalLMAdapter.default_tokenizer(config.model)
    tokenizer = load_tokenizer(tokenizer_dir)
    adapter = HFCausalLMAdapter(config.model.model_copy(update={"block_size": 1}), tokenizer.vocab_size)
    adapter.config = config.model.model_copy(update={"block_size": adapter.context_length()})
    config = config.model_copy(update={"model": adapter.config})
    if folder:
        record = read_json(folder / BASE_RECORD) or {}
        _check_base(adapter, config.data.cache_dir, record.get("base_sha256"))
    with preserved():
        model = read_weights(adapter.directory, adapter.hf_config, adapter.config, adapter.attention)
        if folder:
            model = load_adapter(model, folder)
    module = CausalLM(model, adapter.numerics).to(world.device).eval()
    adapter.probe(module)
    base_model = None
    if folder:
        base_model = named_base_model(folder) or adapter.base_model()
    return LoadedModel(
        label=str(source.adapter or base),
        step=None,
        config=config,
        adapter=adapter,
        module=module,
        tokenizer=tokenizer,
        tokenizer_dir=Path(tokenizer_dir),
        world=world,
        progress={},
        base_model=base_model,
    )


def _base_of_adapter(folder: Path) -> tuple[str | None, str | None]:
    """(directory or name on the hub, revision) of the base model of an adapter."""
    local = (read_json(folder / BASE_RECORD) or {}).get("base_path")
    values = read_json(folder / ADAPTER_CONFIG) or {}
    name = values.get("base_model_name_or_path")
    if isinstance(local, str) and (Path(local).is_dir() or not name):
        return local, None
    return name, values.get("revision")


def choose_checkpoint(run: RunDirectory, name: str) -> Checkpoint:
    store = CheckpointStore(run.checkpoints)
    if name in ("best", "latest"):
        checkpoint = store.pointed(name)
        if checkpoint:
            return checkpoint
        checkpoint = store.pointed("latest") or store.newest_usable()
        if checkpoint:
            warn("SAVE", f"run {run.run_id} has no '{name}' checkpoint; using {checkpoint.path.name}")
            return checkpoint
        raise _no_checkpoint(run)
    try:
        return find_checkpoint(run.checkpoints / name)
    except CheckpointError:
        known = [f"step_{step}" for step in store.steps()]
        raise CheckpointError(
            f"Run '{run.run_id}' has no checkpoint '{name}'.", known=["best", "latest", *known]
        ) from None


def _no_checkpoint(run: RunDirectory) -> CheckpointError:
    """Says when there will be one; `step` and `next_checkpoint` are in the error's JSON."""
    view = RunView(run)
    trainer = view.config.get("trainer")
    every = trainer.get("save_every_steps") if isinstance(trainer, dict) else None
    step = max([view.step, *(rank.step for rank in view.ranks())])
    following = None
    if isinstance(every, int) and every > 0:
        following = min(step // every * every + every, view.max_steps or sys.maxsize)
    if view.state != RunState.RUNNING:
        remedy = f"It is {view.state}. Resume it with: llmtrain train --resume {run.run_id}"
    elif following is None:
        remedy = "The next one is saved at the end of the epoch or of the run."
    else:
        remedy = f"The next one is saved at step {following} (trainer.save_every_steps is {every})."
    error = CheckpointError(f"Run '{run.run_id}' has no checkpoint yet; it is at step {step}.", remedy=remedy)
    error.details = {"step": step, "next_checkpoint": following}
    return error
