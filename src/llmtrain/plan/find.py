"""Settings with which a run fits: the cheapest change of one that does not, and a list of all that do."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmtrain.config.model import HfCausalLmSection, LoraSection
from llmtrain.config.schema import Config
from llmtrain.errors import LlmtrainError
from llmtrain.plan.fake_model import FakeModel, UnknownModel, fake_model
from llmtrain.plan.history import PastRun
from llmtrain.plan.plan import Plan, Verdict, plan_model
from llmtrain.plan.target import Target

PROCESSES = (2, 4, 8)
"""Numbers of GPUs that fsdp is tried on."""
MANY_SEQUENCES = 4096
"""In a micro-batch: more than fit on any GPU."""
Settings = dict[str, Any]
"""Config field -> value"""


@dataclass(frozen=True)
class Option:
    """What to change so that a run fits."""

    settings: Settings
    processes_per_node: int | None
    """None if it stays as it is."""
    plan: Plan

    def as_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "processes_per_node": self.processes_per_node, **self.plan.as_dict()}

    @property
    def arguments(self) -> str:
        """As options of `llmtrain plan`, `train` and `launch`; `nothing to change` if there are none."""
        words = [f"--set {name}={_text(value)}" for name, value in self.settings.items()]
        if self.processes_per_node is not None:
            words.append(f"--processes-per-node {self.processes_per_node}")
        return " ".join(words) or "nothing to change"


def cheapest_change(config: Config, target: Target) -> Option | None:
    """The first that fits, of changes that cost more and more: a smaller micro-batch (the same result), activations
    computed again (the same result, slower), more GPUs, and LoRA or 4-bit weights (another kind of training)."""
    return next(_options(config, target, ()), None)


def find_options(config: Config, target: Target, history: Sequence[PastRun] = ()) -> list[Option]:
    """All that fit, each with its largest micro-batch. The fewest seconds of all GPUs per token come first."""
    return sorted(_options(config, target, history), key=_gpu_seconds_per_token)


def _gpu_seconds_per_token(option: Option) -> float:
    time = option.plan.time
    if time is None or not time.tokens_per_second:
        return 0.0
    return option.plan.target.world_size / time.tokens_per_second


def _options(config: Config, target: Target, history: Sequence[PastRun]) -> Iterator[Option]:
    models: dict[str, FakeModel | None] = {}
    for change in _changes(config, target):
        changed = _changed(config, change.settings)
        key = str({name: value for name, value in change.settings.items() if name != STRATEGY})
        if key not in models:
            models[key] = _model(changed, target)
        model = models[key]
        if model is None:
            continue
        processes = change.processes_per_node
        there = target if processes is None else replace(target, processes_per_node=processes)
        option = _with_largest_batch(changed, change, model, there, history)
        if option is not None:
            yield option


@dataclass(frozen=True)
class _Change:
    settings: Settings
    processes_per_node: int | None = None


STRATEGY = "distributed.strategy"
CHECKPOINTING = "trainer.activation_checkpointing"


def _changes(config: Config, target: Target) -> Iterator[_Change]:
    """What to change besides the micro-batch, the cheapest first."""
    for kind in _kinds_of_training(config, target):
        for checkpointing in _checkpointing(config):
            yield _Change({**kind, **checkpointing})
        is_quantized = kind.get("model.lora.quantize", False)
        if target.device != "cuda" or is_quantized or config.trainer.optimizer == "adafactor":
            continue
        for processes in PROCESSES:
            if processes > target.processes_per_node:
                for checkpointing in _checkpointing(config):
                    yield _Change({**kind, STRATEGY: "fsdp", **checkpointing}, processes)


def _kinds_of_training(config: Config, target: Target) -> Iterator[Settings]:
    yield {}
    model = config.model
    if not isinstance(model, HfCausalLmSection) or config.trainer.optimizer == "muon":
        return
    if model.lora is None:
        yield {"model.lora.rank": LoraSection().rank, "model.dtype": "bfloat16"}
    if target.device == "cuda" and not (model.lora and model.lora.quantize):
        rank = model.lora.rank if model.lora else LoraSection().rank
        yield {"model.lora.rank": rank, "model.lora.quantize": True, "model.dtype": "bfloat16"}


def _checkpointing(config: Config) -> Iterator[Settings]:
    yield {}
    order = ("none", "selective", "blocks")
    for kind in order[order.index(config.trainer.activation_checkpointing) + 1 :]:
        yield {CHECKPOINTING: kind}


def _changed(config: Config, settings: Settings) -> Config:
    for name, value in settings.items():
        section, _, field = name.partition(".")
        if field.startswith("lora."):
            lora = getattr(config.model, "lora", None) or LoraSection()
            value = lora.model_copy(update={field.removeprefix("lora."): value})
            field = "lora"
        config = config.with_values(section, **{field: value})
    return config


def _model(config: Config, target: Target) -> FakeModel | None:
    try:
        return fake_model(config, target.device)
    except (LlmtrainError, UnknownModel):
        return None


def _with_largest_batch(
    config: Config, change: _Change, model: FakeModel, target: Target, history: Sequence[PastRun]
) -> Option | None:
    """The option with the largest micro-batch that fits; None if not even one sequence does. The sequences of a step
    stay the same."""
    sizes = _micro_batches(config, target)
    low = 0  # sizes[:low] do not fit
    high = len(sizes)  # sizes[high:] fit
    best: Option | None = None
    middle = 0  # the largest first: often it fits
    while low < high:
        size, count = sizes[middle]
        changed = config.with_values("trainer", micro_batch_size=size, grad_accum_steps=count)
        plan = plan_model(changed, model, target, history)
        if plan.verdict is Verdict.FITS:
            settings = {**change.settings, **_batch_settings(config, size, count)}
            best = Option(settings, change.processes_per_node, plan)
            high = middle
        elif _never_fits(plan):
            return None
        else:
            low = middle + 1
        middle = (low + high) // 2
    return best


def _never_fits(plan: Plan) -> bool:
    """Whether not even one sequence can fit, or that is not known for any number of them."""
    memory = plan.memory
    limit = plan.target.memory_bytes
    if memory is None or memory.peak is None or limit is None:
        return True
    sharing = 1 if plan.target.device == "cuda" else plan.target.processes_per_node
    return memory.at_least * sharing > limit


def _micro_batches(config: Config, target: Target) -> list[tuple[int, int]]:
    """(micro-batch, micro-batches per step) with as many sequences per step as now, the largest micro-batch first."""
    trainer = config.trainer
    if trainer.scale_batch:
        return [(trainer.micro_batch_size, trainer.grad_accum_steps)]
    sequences = trainer.micro_batch_size * trainer.grad_accum_steps
    sizes: Iterable[int] = range(trainer.micro_batch_size, 0, -1)
    if trainer.micro_batch_size > MANY_SEQUENCES:  # only parts of it
        sizes = [trainer.micro_batch_size // parts for parts in range(1, MANY_SEQUENCES)]
    found = []
    for size in dict.fromkeys(sizes):
        if sequences % size == 0 and sequences // size >= target.world_size:
            found.append((size, sequences // size))
    return found


def _batch_settings(config: Config, size: int, count: int) -> Settings:
    if size == config.trainer.micro_batch_size:
        return {}
    return {"trainer.micro_batch_size": size, "trainer.grad_accum_steps": count}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
