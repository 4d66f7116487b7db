"""How long a planned run takes: from a finished run of the same shape, else from its FLOPs. docs/planning.md#time."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from llmtrain.config.schema import Config
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.gpus import Gpu
from llmtrain.distributed.machine_limits import omp_threads, usable_cores
from llmtrain.plan.history import Match, PastRun, efficiency, nearest_run, shape_of
from llmtrain.plan.target import ModelSize, Target
from llmtrain.runs.metadata import cpu_name

# Shares of the peak, measured on one H200 (docs/experiments.md) with bf16 and compiled: GPT 124M 47 to 51 % (modern
# with Muon, 16 x 1024: 41 %), 350M 49 % (42 %), Llama 1.24B full 54 %, LoRA 52 %.
COMPILED_UTILIZATION = 0.47
EAGER_UTILIZATION = 0.30
"""Of 17 shapes on one H200 the prediction was 0.61 to 1.26 of the measured time (docs/experiments.md): small models
reach less, a Llama of 1.24B reaches more."""
FP32_UTILIZATION = 0.5
"""Of the float32 peak, without tensor cores; not measured."""
OPTIMIZER_TOKENS = {"adamw": 600, "adafactor": 900, "muon": 2400}
"""Time of an optimizer step as that of so many tokens. H200: AdamW 1.0 ms at 124M and 10 ms at 1.24B, Muon 5 ms at
124M and 9 ms at 350M; adafactor was not measured."""
LAUNCH_SECONDS = {True: 0.25e-3, False: 1.7e-3}
"""Least time of a layer per micro-batch on a GPU, whatever its size, because kernels have to be launched: compiled (a
thousand kernels in 12 layers), and not (22 ms for 12 layers and one sequence on an H200)."""
CPU_FLOPS_PER_CORE = 40e9
"""Two x86_64 and two aarch64 cores: 44 GFLOP/s per core for a GPT of width 128 and for LoRA of a model of 135M."""
CPU_LAUNCH_SECONDS = 7e-3
"""As LAUNCH_SECONDS, on a CPU: the preset gpt_smoke takes 7 ms per layer and micro-batch on two cores."""
SELECTIVE_SHARE = 0.7
"""Of the forward pass that activation_checkpointing `selective` repeats: all but attention."""

FLOPS_UNCERTAINTY = 0.40
FP32_UNCERTAINTY = 0.60
CPU_UNCERTAINTY = 1.0
WORLD_UNCERTAINTY = 0.10
NODES_UNCERTAINTY = 0.20


@dataclass(frozen=True)
class TimeEstimate:
    """What is not known is None, with the reason in `unknown`."""

    tokens_per_second: float | None
    """Over all processes, of the steps alone."""
    seconds_per_step: float | None
    steps: int | None
    tokens: int | None
    training_seconds: float | None
    """Of all steps."""
    first_step_seconds: float | None
    """From the call of the training to the end of the first step: data, model, compilation."""
    evaluating_seconds: float | None
    saving_seconds: float | None
    """That training waits for checkpoints."""
    saves: int | None
    """At most: a checkpoint is written after each evaluation that is the best so far."""
    uncertainty: float | None
    """Relative, of tokens_per_second: 0.05 is 5 %. 1.0: a factor of two in either direction."""
    source: str
    """`from run first on 1 x H200`"""
    run_id: str | None
    """The finished run that the estimate is from."""
    unknown: dict[str, str]
    """Field -> why it is None."""

    @property
    def total_seconds(self) -> float | None:
        """From the call of the training to its end; parts that are not known count as nothing."""
        if self.training_seconds is None:
            return None
        parts = (self.first_step_seconds, self.evaluating_seconds, self.saving_seconds)
        return self.training_seconds + sum(part for part in parts if part is not None)

    @property
    def saving_share(self) -> float | None:
        """The share of checkpoints in the whole time."""
        total = self.total_seconds
        if self.saving_seconds is None or not total:
            return None
        return self.saving_seconds / total

    @property
    def uncertainty_text(self) -> str:
        """`±5 %`"""
        if self.uncertainty is None:
            return "unknown"
        return "within a factor of 2" if self.uncertainty >= 1 else f"±{self.uncertainty * 100:.0f} %"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_seconds": self.total_seconds, "saving_share": self.saving_share}


@dataclass(frozen=True)
class _Speed:
    tokens_per_second: float | None
    uncertainty: float | None
    source: str
    match: Match | None = None


def estimate_time(
    config: Config,
    target: Target,
    size: ModelSize,
    tokens_per_step: float | None,
    steps: int | None,
    match: Match | None = None,
) -> TimeEstimate:
    """`tokens_per_step`: of all processes, without padding. `match`: see find_match."""
    trainer = config.trainer
    if match:
        speed = _speed_of(match)
    else:
        # Where the data has not been read, without padding.
        shape = shape_of(config.as_dict(), target.world_size)
        tokens = tokens_per_step or shape.micro_batch_size * shape.micro_batches * config.model.block_size
        layers_per_step = size.layers * max(1.0, shape.micro_batches / target.world_size)
        _, threads = _cpu(config, target)
        speed = _speed_from_flops(trainer, target, size, tokens, layers_per_step, threads)
    rate = speed.tokens_per_second
    per_step = tokens_per_step / rate if rate and tokens_per_step else None
    training = per_step * steps if per_step is not None and steps is not None else None
    evaluating = _evaluating(trainer, config.model.block_size, steps, target, rate, match)
    saves = None if steps is None else save_count(trainer, steps)
    saving = first_step = None
    if match and match.run.seconds_per_save is not None and match.run.shape.is_async == trainer.async_save:
        saving = saves * match.run.seconds_per_save if saves is not None else None
    if match:
        first_step = match.run.first_step_seconds
    estimate = TimeEstimate(
        tokens_per_second=rate,
        seconds_per_step=per_step,
        steps=steps,
        tokens=round(tokens_per_step * steps) if tokens_per_step is not None and steps is not None else None,
        training_seconds=training,
        first_step_seconds=first_step,
        evaluating_seconds=evaluating,
        saving_seconds=saving,
        saves=saves,
        uncertainty=speed.uncertainty,
        source=speed.source,
        run_id=match.run.run_id if match else None,
        unknown={},
    )
    return replace(estimate, unknown=_unknown(estimate))


def find_match(config: Config, target: Target, size: ModelSize, history: Sequence[PastRun]) -> Match | None:
    """The finished run that says most about this one."""
    shape = shape_of(config.as_dict(), target.world_size)
    return nearest_run(history, shape, target, size, _cpu(config, target))


def _unknown(estimate: TimeEstimate) -> dict[str, str]:
    """Why parts of an estimate are None."""
    steps = "the number of steps depends on the data, which has not been read"
    measured = "no finished run of this shape has measured it"
    if estimate.tokens_per_second is None:
        speed = estimate.source
    else:
        speed = "the tokens of a step depend on the data, which has not been read"
    without_speed = speed if estimate.seconds_per_step is None else steps
    reasons = {
        "tokens_per_second": speed,
        "seconds_per_step": speed,
        "steps": steps,
        "tokens": steps if estimate.steps is None else speed,
        "training_seconds": without_speed,
        "first_step_seconds": measured,
        "evaluating_seconds": "trainer.eval_batches is null, and no finished run of this shape has measured it",
        "saving_seconds": steps if estimate.steps is None else measured,
        "saves": steps,
    }
    return {name: why for name, why in reasons.items() if getattr(estimate, name) is None}


def _cpu(config: Config, target: Target) -> tuple[str, int]:
    """Name of the CPU, and threads per process as training chooses them on this machine."""
    if target.cpu is not None:
        return target.cpu
    threads = config.run.threads or omp_threads(os.environ) or max(1, usable_cores() // target.processes_per_node)
    return cpu_name(), threads


def _speed_of(match: Match) -> _Speed:
    source = f"from run {match.run.run_id} on {match.run.device_text}"
    if match.differences:
        source += f" with {', '.join(match.differences)}"
    return _Speed(match.tokens_per_second, match.uncertainty, source, match)


def _speed_from_flops(
    trainer: TrainerSection,
    target: Target,
    size: ModelSize,
    tokens_per_step: float,
    layers_per_step: float,
    threads: int,
) -> _Speed:
    """`layers_per_step`: how often a process computes a layer in a step."""
    flops = size.flops_per_token * _recomputation(trainer, size)
    if target.device == "cpu":
        per_second = CPU_FLOPS_PER_CORE * threads
        least = CPU_LAUNCH_SECONDS
        source = f"from FLOPs, at {CPU_FLOPS_PER_CORE / 1e9:.0f} GFLOP/s per core"
        uncertainty = CPU_UNCERTAINTY
    elif target.gpu is None:
        return _Speed(None, None, "only the memory of the GPU is known, not its speed")
    elif trainer.computes_in_bf16 and not target.gpu.has_bf16:
        return _Speed(None, None, f"{target.gpu.name} has no bfloat16 arithmetic; its speed with bf16 is not known")
    else:
        peak, share, uncertainty = _peak(trainer, target.gpu)
        per_second = peak * share
        least = LAUNCH_SECONDS[trainer.compile]
        source = f"from FLOPs, at {share * 100:.0f} % of the peak of {target.gpu.name}"
        if trainer.precision == "fp8":
            source += ", as with bf16"
    seconds_per_token = flops / per_second
    tokens = tokens_per_step / target.world_size  # of one process
    update = OPTIMIZER_TOKENS[trainer.optimizer] * size.trained / max(1, size.parameters) * seconds_per_token
    step = max(tokens * seconds_per_token, layers_per_step * least)
    if target.device == "cuda":
        step += update
    rate = tokens / step * target.world_size * efficiency(target.world_size, target.nodes)
    if target.world_size > 1:
        uncertainty += WORLD_UNCERTAINTY if target.nodes == 1 else NODES_UNCERTAINTY
    return _Speed(rate, round(uncertainty, 2), source)


def _peak(trainer: TrainerSection, gpu: Gpu) -> tuple[float, float, float]:
    """The peak in FLOP/s, the share of it that training reaches, and the uncertainty."""
    if trainer.precision == "fp32":
        return gpu.fp32_flops, FP32_UTILIZATION, FP32_UNCERTAINTY
    share = COMPILED_UTILIZATION if trainer.compile else EAGER_UTILIZATION
    return gpu.bf16_flops, share, FLOPS_UNCERTAINTY


def _recomputation(trainer: TrainerSection, size: ModelSize) -> float:
    """By which factor activation checkpointing raises the FLOPs: another forward pass. Forward is 2 FLOPs per weight,
    the whole 6, and 4 for a frozen weight."""
    if trainer.activation_checkpointing == "none":
        return 1.0
    frozen = size.parameters - size.trained
    forward = 2 * size.parameters / max(1, 4 * frozen + 6 * size.trained)
    return 1 + forward * (1.0 if trainer.activation_checkpointing == "blocks" else SELECTIVE_SHARE)


def _evaluation_count(trainer: TrainerSection, steps: int) -> int:
    """The last step is always evaluated."""
    return ceil(steps / trainer.eval_every_steps) if trainer.eval_every_steps else 1


def save_count(trainer: TrainerSection, steps: int) -> int:
    """Steps with a checkpoint, if every evaluation is the best so far."""
    due = {steps}
    for every in (trainer.save_every_steps, trainer.eval_every_steps):
        if every:
            due.update(range(every, steps + 1, every))
    return len(due)


def _evaluating(
    trainer: TrainerSection,
    block_size: int,
    steps: int | None,
    target: Target,
    rate: float | None,
    match: Match | None,
) -> float | None:
    """Seconds of all evaluations."""
    if steps is None:
        return None
    count = _evaluation_count(trainer, steps)
    if match and match.run.seconds_per_evaluation is not None:
        is_same = match.run.shape.evaluation == (trainer.eval_batches, trainer.micro_batch_size)
        if is_same and match.run.world_size == target.world_size:
            return count * match.run.seconds_per_evaluation
    if trainer.eval_batches is None or rate is None:
        return None
    tokens = trainer.eval_batches * trainer.micro_batch_size * block_size
    return count * tokens / (3 * rate)  # the forward pass is a third of a step
