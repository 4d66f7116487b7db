"""Does a run fit, how long will it take, and what will it cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from llmtrain.config.data import ExampleBatchesSection
from llmtrain.config.mixture import data_sections
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.errors import ExitCode, LlmtrainError
from llmtrain.plan.cost import CostEstimate, estimate_cost, node_type_of
from llmtrain.plan.formula import CannotTell, estimate_by_formula
from llmtrain.plan.history import PastRun
from llmtrain.plan.memory_value import Memory, with_measured_peak
from llmtrain.plan.pair_shapes import with_pair_shapes
from llmtrain.plan.target import ModelSize, Target
from llmtrain.plan.time import TimeEstimate, estimate_time, find_match, save_count
from llmtrain.plan.token_store import TokenStoreSize, token_store_size

if TYPE_CHECKING:  # they import torch
    from llmtrain.plan.fake_model import FakeModel


class Verdict(StrEnum):
    FITS = "fits"
    TIGHT = "may fit"
    """The limit is within the uncertainty of the estimate."""
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> ExitCode:
        if self is Verdict.FITS:
            return ExitCode.FINISHED
        return ExitCode.PROBLEM if self is Verdict.DOES_NOT_FIT else ExitCode.CANNOT_TELL


@dataclass(frozen=True)
class Plan:
    """What is not known is None, with the reason in `unknown` of its part."""

    target: Target
    verdict: Verdict
    reason: str
    size: ModelSize | None
    memory: Memory | None
    time: TimeEstimate | None
    cost: CostEstimate | None
    token_store: TokenStoreSize | None = None
    """Tokenized data on the disk of data.cache_dir."""
    problem: LlmtrainError | None = None
    """Why the model cannot be built: an error of the config."""

    def as_dict(self) -> dict[str, Any]:
        target = asdict(self.target) | {"world_size": self.target.world_size}
        target["gpu"] = self.target.gpu.name if self.target.gpu else None
        return {
            "verdict": self.verdict.value,
            "reason": self.reason,
            "target": target,
            "model": asdict(self.size) if self.size else None,
            "memory": self.memory.as_dict() if self.memory else None,
            "time": self.time.as_dict() if self.time else None,
            "cost": asdict(self.cost) if self.cost else None,
            "token_store": self.token_store.as_dict() if self.token_store else None,
        }


def make_plan(config: Config, target: Target, history: Sequence[PastRun] = ()) -> Plan:
    """By tracing a step, or without torch from a formula. `history`: finished runs, for the time (see past_runs)."""
    if find_spec("torch") is None:
        return plan_by_formula(config, target, history)
    from llmtrain.plan.fake_model import UnknownModel, fake_model

    try:
        model = fake_model(config, target.device)
    except UnknownModel as problem:
        return _without_model(target, f"the model cannot be built here: {problem}")
    except LlmtrainError as error:
        return _without_model(target, error.what_and_known, error)
    return plan_model(config, model, target, history)


def plan_model(config: Config, model: "FakeModel", target: Target, history: Sequence[PastRun] = ()) -> Plan:
    from llmtrain.plan.memory import estimate_memory

    memory = estimate_memory(config, model, target, _saves(config))
    return _with_time(config, target, model.size, memory, history)


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """The config with the size of the vocabulary where that may depend on the data."""
    if isinstance(config.model, HfCausalLmSection):
        return config  # it has its own
    return config.with_values("model", vocab_size=vocab_size)


def plan_by_formula(config: Config, target: Target, history: Sequence[PastRun] = ()) -> Plan:
    """Without torch, in milliseconds."""
    try:
        size, memory = estimate_by_formula(config, target, _saves(config))
    except CannotTell as problem:
        return _without_model(target, f"the formula cannot tell: {problem}")
    return _with_time(config, target, size, memory, history)


def _saves(config: Config) -> int | None:
    steps = planned_steps(config)
    return None if steps is None else save_count(config.trainer, steps)


def _with_time(config: Config, target: Target, size: ModelSize, memory: Memory, history: Sequence[PastRun]) -> Plan:
    match = find_match(config, target, size, history)
    if match is not None and match.is_same(target) and match.run.peak_memory_bytes is not None:
        memory = with_measured_peak(memory, match.run.peak_memory_bytes, match.run.run_id, target)
    steps = planned_steps(config)
    time = estimate_time(config, target, size, tokens_per_step(config, target), steps, match)
    node_type = node_type_of(config.launch.node_selector)
    cost = estimate_cost(config.plan.prices, target, time.total_seconds, node_type)
    verdict, reason = judge(memory, target)
    store = token_store_size(config.data, size.vocab_size)
    return Plan(target, verdict, reason, size, memory, time, cost, store)


def judge(memory: Memory, target: Target) -> tuple[Verdict, str]:
    """Whether the processes of a node fit in its memory, or one process in that of its GPU."""
    limit = target.memory_bytes
    sharing = 1 if target.device == "cuda" else target.processes_per_node
    if limit is None:
        return Verdict.UNKNOWN, "the memory of the target is not known. Pass --gpu or --memory."
    if memory.at_least * sharing > limit:
        return Verdict.DOES_NOT_FIT, "weights, gradients and optimizer alone are larger than the memory"
    if memory.needed is None or memory.peak is None:
        return Verdict.UNKNOWN, memory.unknown.get("peak", "the activations are not known")
    need = memory.needed * sharing
    margin = memory.peak * memory.uncertainty * sharing
    if need + margin <= limit:
        return Verdict.FITS, f"{100 * need / limit:.0f} % of the memory"
    if need <= limit:
        return Verdict.TIGHT, "what is left is less than the uncertainty of the estimate"
    if memory.is_from_formula and need - margin <= limit:
        return Verdict.TIGHT, "it is more than the memory by less than the uncertainty of the formula"
    return Verdict.DOES_NOT_FIT, f"{need / limit:.2f} times the memory"


def _without_model(target: Target, reason: str, problem: LlmtrainError | None = None) -> Plan:
    return Plan(target, Verdict.UNKNOWN, reason, None, None, None, None, None, problem)


def planned_steps(config: Config) -> int | None:
    """None if the number of steps depends on the data."""
    trainer = config.trainer
    if trainer.max_epochs is not None:
        return None
    return trainer.steps


def tokens_per_step(config: Config, target: Target) -> float | None:
    """None where examples are not packed: their lengths are not known before the data is read."""
    config = with_pair_shapes(config)
    data = data_sections(config.data)[0]  # all sources of a mixture have the same packing
    if isinstance(data, ExampleBatchesSection) and not data.packing:
        return None
    trainer = config.trainer
    micro_batches = micro_batches_in_step(trainer, config.distributed, target.world_size)
    return float(micro_batches * trainer.micro_batch_size * config.model.block_size)
