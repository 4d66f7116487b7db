"""The model of a config with fake weights, which have shapes but no data."""

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmtrain import registry
from llmtrain.config.mixture import is_packed
from llmtrain.config.model import AnyGptSection, HfCausalLmSection, ModelSection
from llmtrain.config.schema import VOCABULARIES, Config
from llmtrain.core.text import one_line
from llmtrain.errors import LlmtrainError
from llmtrain.hub.find import find_model_config
from llmtrain.models.activation_checkpointing import checkpoint_blocks
from llmtrain.models.base import ModelAdapter, block_matrices, parameter_count, trainable_count
from llmtrain.models.compute_dtype import compute_in
from llmtrain.models.device_precision import cast_dtype, with_device_precision
from llmtrain.plan.memory_value import CHARACTERS, LOGIT_CAPS, QUANTIZED_BYTES
from llmtrain.plan.planned_attention import use_planned_attention
from llmtrain.plan.target import ModelSize

EAGER = "eager"
"""The attention of transformers that keeps the whole matrix of each head."""


class UnknownModel(Exception):
    """The model cannot be built with what is here. The message says why."""


@dataclass(frozen=True)
class FakeModel:
    """The module as one process has it before it is sharded."""

    mode: FakeTensorMode
    adapter: ModelAdapter
    module: nn.Module
    size: ModelSize
    matrices: int
    """Trained weights that muon orthogonalizes."""
    weight_bytes: int
    trained_bytes: int
    """Of the trained weights, among weight_bytes."""
    is_packed: bool
    """Whether a sequence has several examples that do not attend to each other."""
    attention: str | None
    """The attention of a Hugging Face model; None for other models."""

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


def fake_model(config: Config, device_type: str) -> FakeModel:
    """Build it for `cuda` or `cpu`. UnknownModel if that is not possible here; other errors are those of the config."""
    device = torch.device(device_type)
    config = with_device_precision(config, device)
    section = _without_weights(config.model)
    adapter_class = registry.resolve("model.name", section.name, registry.MODELS)
    try:
        adapter: ModelAdapter = adapter_class(section, _vocabulary(config, section))
        has_packed = adapter.can_pack and is_packed(config.data)
        adapter.prepare_for(device, has_packed)
        attention = getattr(adapter, "attention", None)
        if attention not in (None, EAGER):
            adapter.attention = use_planned_attention()  # type: ignore[attr-defined]
        with torch.device("meta"):
            module = adapter.build_empty()
        with FakeTensorMode() as mode:
            _use_fake_tensors(module)
            return _described(config, adapter, module, mode, device, has_packed, attention)
    except (LlmtrainError, UnknownModel):
        raise
    except Exception as problem:  # transformers and plugins raise many types
        raise UnknownModel(f"{type(problem).__name__}: {one_line(problem, 200)}") from None


def _use_fake_tensors(module: nn.Module) -> None:
    """Replace meta tensors by fake tensors of the CPU: operations choose what they do by the device."""
    parameters: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in parameters:
                    parameters[parameter] = nn.Parameter(_fake(parameter), parameter.requires_grad)
                part._parameters[name] = parameters[parameter]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _fake(buffer)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _described(
    config: Config,
    adapter: ModelAdapter,
    module: nn.Module,
    mode: FakeTensorMode,
    device: torch.device,
    is_packed: bool,
    attention: str | None,
) -> FakeModel:
    layers = max(1, len(adapter.blocks(module)))
    size = ModelSize(
        parameter_count(module), trainable_count(module), adapter.flops_per_token(module), layers, adapter.vocab_size
    )
    matrices = sum(parameter.numel() for parameter in block_matrices(adapter, module).values())
    section = adapter.config
    if isinstance(section, HfCausalLmSection):
        _set_stored_dtype(module, section)
        text = adapter.hf_config.get_text_config()  # type: ignore[attr-defined]
        module.has_linear_head = not any(getattr(text, name, None) for name in LOGIT_CAPS)  # type: ignore[assignment]
    dtype = cast_dtype(config.trainer, adapter, device)
    if dtype:
        compute_in(module, dtype)
    checkpointing = config.trainer.activation_checkpointing
    if checkpointing != "none":
        checkpoint_blocks(adapter.blocks(module), checkpointing == "selective", adapter.uses_dropout)
    trained_bytes = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
    if isinstance(section, HfCausalLmSection) and section.lora and section.lora.quantize:
        weight_bytes -= _saved_by_quantization(module)
    return FakeModel(mode, adapter, module, size, matrices, weight_bytes, trained_bytes, is_packed, attention)


def _without_weights(section: ModelSection) -> ModelSection:
    """The section without files of weights, which a plan does not need."""
    if isinstance(section, AnyGptSection):
        return section.model_copy(update={"init": "random"})
    if isinstance(section, HfCausalLmSection):
        directory = find_model_config(section.path, section.revision, section.local_files_only)
        return section.model_copy(update={"path": str(directory)})
    return section


def _vocabulary(config: Config, section: ModelSection) -> int:
    if isinstance(section, HfCausalLmSection):
        return 0  # the model has its own
    model_class = registry.resolve("model.name", section.name, registry.MODELS)
    tokenizer = config.data.tokenizer or model_class.default_tokenizer(section)
    if tokenizer in VOCABULARIES:
        return VOCABULARIES[tokenizer]  # the adapter refuses a model.vocab_size that is smaller
    given = getattr(section, "vocab_size", None)
    if given is not None:
        return int(given)
    if tokenizer == "char":
        return CHARACTERS
    from llmtrain.data.tokenizers.load import load_tokenizer

    return load_tokenizer(tokenizer).vocab_size


def _set_stored_dtype(module: nn.Module, section: HfCausalLmSection) -> None:
    """Weights in the data type in which training loads them; adapters are float32."""
    if section.dtype != "bfloat16":
        return
    for parameter in module.parameters():
        if not (section.lora and parameter.requires_grad):
            parameter.data = parameter.data.to(torch.bfloat16)


def _saved_by_quantization(module: nn.Module) -> int:
    """Bytes by which 4-bit weights are smaller. peft adapts, and bitsandbytes quantizes, all linear layers but the
    output layer."""
    saved = 0.0
    for name, parameter in module.named_parameters():
        if name.endswith("base_layer.weight"):
            saved += parameter.nbytes - QUANTIZED_BYTES * parameter.numel()
    return int(saved)
