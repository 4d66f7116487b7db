"""Finished runs of this user, from which the time of a planned run is estimated.

Which run is used (docs/planning.md#time). A run counts only if these are equal: the device; the numbers of all and of
trained weights; the section `model` without where weights come from; trainer.precision, compile,
activation_checkpointing; whether weights are sharded (fsdp); data.packing; on a CPU also the threads and the number of
processes. What else decides the speed may differ, and each difference adds to the uncertainty of 5 % (GPU) or 10 %
(CPU): trainer.micro_batch_size (up to a factor of 4), the micro-batches of one process per step, the optimizer, the
data of unpacked examples, the number of processes. The run with the least uncertainty is used; of several the newest.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2
from typing import Any

from llmtrain.core.gpus import gpu_of_device
from llmtrain.plan.target import ModelSize, Target
from llmtrain.runs.directory import RunDirectory, list_runs
from llmtrain.runs.json_values import dictionary, finite, integer
from llmtrain.runs.sources import first_source
from llmtrain.runs.state import RunState
from llmtrain.runs.view import RunView

GPU_UNCERTAINTY = 0.05
CPU_UNCERTAINTY = 0.10
PER_DOUBLING = 0.10
"""For each factor of 2 in the micro-batch or in the number of processes."""
PER_DIFFERENCE = 0.05
MAX_BATCH_RATIO = 4
MIN_TIMED_STEPS = 5
"""Runs with fewer say little."""
EFFICIENCY_ON_A_NODE = 0.9
EFFICIENCY_OVER_NODES = 0.8
"""Speed of n processes, divided by n times that of one: conservative values for DDP and FSDP."""
_ORIGIN = {"init", "path", "revision", "tokenizer_path", "local_files_only", "trust_remote_code", "vocab_size", "size"}
"""Fields of `model` that do not decide the speed, or only through the number of weights."""
Values = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What decides the speed of a run, of its config."""

    model: Values
    fixed: Values
    micro_batch_size: int
    micro_batches: int
    """Per step, over all processes."""
    optimizer: str
    data: Values | None
    """None for packed sequences, whose content does not matter."""
    evaluation: tuple[int | None, int]
    """trainer.eval_batches, micro_batch_size."""
    is_async: bool


@dataclass(frozen=True)
class PastRun:
    run_id: str
    shape: Shape
    device_name: str
    is_gpu: bool
    threads: int
    world_size: int
    parameters: int
    trained: int
    tokens_per_second: float
    """Of the steps alone, over all processes."""
    peak_memory_bytes: int | None
    first_step_seconds: float | None
    """Until the end of the first step: data, model, compilation."""
    seconds_per_save: float | None
    seconds_per_evaluation: float | None

    @property
    def device_text(self) -> str:
        """`2 x H100 80GB`"""
        name = self.device_name.removeprefix("NVIDIA ")
        if not self.is_gpu and self.world_size == 1:
            return name
        return f"{self.world_size} x {name}"


@dataclass(frozen=True)
class Match:
    """A past run, and what it says of a planned one."""

    run: PastRun
    uncertainty: float
    tokens_per_second: float
    """Scaled to the number of processes of the planned run."""
    differences: tuple[str, ...]
    """What differs, in words."""

    def is_same(self, target: Target) -> bool:
        """Whether nothing differs that decides speed or memory."""
        return not self.differences and self.run.world_size == target.world_size


def shape_of(config: Values, world_size: int) -> Shape:
    """`config`: resolved, with the names of the current schema, such as RunView.current_config or Config.as_dict."""
    trainer = dictionary(config.get("trainer"))
    data = dictionary(config.get("data"))
    distributed = dictionary(config.get("distributed"))
    model = {name: value for name, value in dictionary(config.get("model")).items() if name not in _ORIGIN}
    micro_batches = integer(trainer.get("grad_accum_steps")) or 1
    if trainer.get("scale_batch"):
        micro_batches *= world_size
    fixed = {name: trainer.get(name) for name in ("precision", "compile", "activation_checkpointing")}
    fixed["sharded"] = distributed.get("strategy") == "fsdp"
    source = first_source(data)  # all sources of a mixture have the same packing
    fixed["packing"] = source.get("packing")
    fixed["document_mask"] = data.get("document_mask") is True
    fixed["pairs"] = source.get("name") == "preference_jsonl"
    names = ("name", "dataset_name", "train_file", "files", "sources")
    micro_batch_size = integer(trainer.get("micro_batch_size"))
    return Shape(
        model=model,
        fixed=fixed,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        optimizer=str(trainer.get("optimizer")),
        data={name: data.get(name) for name in names} if source.get("packing") is False else None,
        evaluation=(trainer.get("eval_batches"), micro_batch_size),
        is_async=trainer.get("async_save") is True,
    )


def past_runs(root: str, newest: int | None = None) -> list[PastRun]:
    """The finished runs of a directory that say how fast they were, oldest first. `newest`: only of this many runs
    that were started last, because reading one takes 5 ms."""
    found = []
    runs = list_runs(root)
    if newest is not None:
        runs = runs[-newest:]
    for run in runs:
        past = read_past_run(run)
        if past is not None:
            found.append(past)
    return found


def read_past_run(run: RunDirectory) -> PastRun | None:
    """None for a run that is not finished, too short, or of a version that did not record its device."""
    view = RunView(run)
    if view.state != RunState.FINISHED:
        return None
    result = view.result
    speed = finite(result.get("tokens_per_second"))
    device = result.get("device_name")
    timed = integer(result.get("steps")) - integer(result.get("resumed_from")) - 1
    if not speed or speed < 0 or not isinstance(device, str) or timed < MIN_TIMED_STEPS or not view.current_config:
        return None
    world_size = integer(result.get("world_size")) or 1
    timing = dictionary(result.get("timing"))
    return PastRun(
        run_id=run.run_id,
        shape=shape_of(view.current_config, world_size),
        device_name=device,
        is_gpu=str(result.get("device")).startswith("cuda"),
        threads=integer(result.get("threads")),
        world_size=world_size,
        parameters=integer(result.get("parameters")),
        trained=integer(result.get("trainable_parameters")),
        tokens_per_second=speed,
        peak_memory_bytes=max(0, integer(result.get("peak_memory_bytes"))) or None,
        first_step_seconds=_seconds(timing.get("first_step")),
        seconds_per_save=_mean(timing.get("saving"), timing.get("saves")),
        seconds_per_evaluation=_mean(timing.get("evaluating"), timing.get("evaluations")),
    )


def _seconds(value: Any) -> float | None:
    number = finite(value)
    return None if number is None or number < 0 else number


def _mean(seconds: Any, count: Any) -> float | None:
    total = _seconds(seconds)
    return total / integer(count) if total is not None and integer(count) > 0 else None


def nearest_run(
    history: Iterable[PastRun], shape: Shape, target: Target, size: ModelSize, cpu: tuple[str, int]
) -> Match | None:
    """The past run that says most of a planned one. `cpu`: name and threads per process of the planned run's CPU."""
    best: Match | None = None
    for run in history:
        if not _is_same_kind(run, shape, target, size, cpu):
            continue
        match = _match(run, shape, target)
        if match is not None and (best is None or match.uncertainty <= best.uncertainty):
            best = match
    return best


def _is_same_kind(run: PastRun, shape: Shape, target: Target, size: ModelSize, cpu: tuple[str, int]) -> bool:
    if run.is_gpu != (target.device == "cuda"):
        return False
    if run.is_gpu:
        gpu = gpu_of_device(run.device_name)
        if gpu is None or gpu != target.gpu:
            return False
    elif (run.device_name, run.threads) != cpu or run.world_size != target.world_size:
        return False
    if (run.parameters, run.trained) != (size.parameters, size.trained):
        return False
    return _agrees(run.shape.model, shape.model) and _agrees(run.shape.fixed, shape.fixed)


def _agrees(old: Values, new: Values) -> bool:
    """Whether fields that both have are equal: a version may have added some. `auto` agrees with any attention."""
    for name in old.keys() & new.keys():
        is_resolved = name == "attention" and "auto" in (old[name], new[name])
        if old[name] != new[name] and not is_resolved:
            return False
    return True


def _match(run: PastRun, shape: Shape, target: Target) -> Match | None:
    uncertainty = GPU_UNCERTAINTY if run.is_gpu else CPU_UNCERTAINTY
    differences = []
    old = run.shape
    if not old.micro_batch_size or not shape.micro_batch_size:
        return None
    batch_ratio = shape.micro_batch_size / old.micro_batch_size
    if max(batch_ratio, 1 / batch_ratio) > MAX_BATCH_RATIO:
        return None
    if batch_ratio != 1:
        uncertainty += PER_DOUBLING * abs(log2(batch_ratio))
        differences.append(f"micro-batch {old.micro_batch_size}")
    per_process = old.micro_batches / run.world_size
    if per_process != shape.micro_batches / target.world_size:
        uncertainty += PER_DIFFERENCE
        differences.append(f"{per_process:g} micro-batches per process and step")
    if old.optimizer != shape.optimizer:
        uncertainty += PER_DIFFERENCE
        differences.append(old.optimizer)
    if old.data != shape.data:
        uncertainty += PER_DIFFERENCE
        differences.append("other data")
    factor = 1.0
    if run.world_size != target.world_size:
        ratio = target.world_size / run.world_size
        uncertainty += PER_DOUBLING * abs(log2(ratio))
        # How many nodes the run had is not recorded: it is taken as one.
        factor = ratio * efficiency(target.world_size, target.nodes) / efficiency(run.world_size, 1)
    return Match(run, round(uncertainty, 2), run.tokens_per_second * factor, tuple(differences))


def efficiency(world_size: int, nodes: int) -> float:
    """Speed of this number of processes, divided by world_size times that of one."""
    if world_size == 1:
        return 1.0
    return EFFICIENCY_ON_A_NODE if nodes == 1 else EFFICIENCY_OVER_NODES
