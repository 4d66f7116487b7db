"""What training does for a mixture of sources: checks its length, reports each source, and continues it with other
weights. All of it does nothing for other data."""

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.data import DataSection
from llmtrain.config.mixture import MixtureSection, StageSection
from llmtrain.core.logs import log, warn
from llmtrain.core.text import plural
from llmtrain.data.batches import TrainBatches
from llmtrain.errors import UsageError
from llmtrain.tracking.base import Metrics
from llmtrain.training.evaluate import EvalResult


def check_sources(data: DataSection, batches: TrainBatches, steps: int) -> None:
    """Refuse a run that is longer than its sources last, and say which of them end before it."""
    for number, stage in enumerate(getattr(data, "stages", [])):
        if stage.from_step > steps:
            warn("DATA", f"data.stages.{number} begins in step {stage.from_step}, and the run ends with step {steps}")
    available = batches.available_steps(steps)
    exhausted = batches.exhausted(steps)
    if available < steps:
        raise UsageError(
            f"The run has {plural(steps, 'step')}, but all sources of the mixture reach their max_epochs after "
            f"{plural(available, 'step')}.",
            remedy=f"Lower trainer.max_steps to at most {available}, or raise max_epochs of a source, or remove it.",
        )
    for label, step in exhausted.items():
        log("DATA", f"source {label} reaches its max_epochs in step {step}; from there on the others have its share")


def source_use(batches: TrainBatches, step: int) -> Metrics:
    """How much of each source has been used."""
    metrics: Metrics = {}
    for label, progress in batches.source_progress(step).items():
        metrics[f"train/tokens/{label}"] = progress.tokens
        metrics[f"train/epoch/{label}"] = progress.epochs
    return metrics


def source_scores(result: EvalResult) -> Metrics:
    """Validation loss of each source, with bits per byte or the metrics of the objective."""
    metrics: Metrics = {}
    for label, each in result.by_source.items():
        metrics[f"val/loss/{label}"] = each.loss
        if each.bits_per_byte is not None:
            metrics[f"val/bits_per_byte/{label}"] = each.bits_per_byte
        for name, value in each.metrics.items():
            metrics[f"val/{name}/{label}"] = value
    return metrics


def with_recorded_weights(data: DataSection, checkpoint: Checkpoint | None, allow_change: bool) -> DataSection:
    """The data of a resumed run: the recorded weights up to the step of the checkpoint, those of the config from the
    next step on. So the run still reads what follows the samples that it has read.

    Without `allow_change` only if that is what the run does anyway, as with a config whose weights were allowed before;
    other weights are left for check_config to refuse."""
    if checkpoint is None or not isinstance(data, MixtureSection):
        return data
    values = upgraded_values(checkpoint.state()["config"]).get("data", {})
    if values.get("name") != "mixture" or len(values["sources"]) != len(data.sources):
        return data
    recorded = MixtureSection(**values)
    if _weights(data) == _weights(recorded):
        return data
    continued = _continued(data, recorded, checkpoint.step)
    if not allow_change and _weights(continued) != _weights(recorded):
        return data
    log("DATA", f"weights: {_weights_text(continued)}")
    if _weights(data)[0] != _weights(continued)[0]:
        for number, stage in enumerate(data.stages):
            if stage.from_step <= checkpoint.step + 1:
                warn("DATA", f"other weights of data.sources change nothing: data.stages.{number} decides already")
                break
    return continued


def _continued(data: MixtureSection, recorded: MixtureSection, step: int) -> MixtureSection:
    """`recorded` up to a step, and `data` from the next one on."""
    sources = []
    for source, before in zip(data.sources, recorded.sources, strict=True):
        sources.append(source.model_copy(update={"weight": before.weight}))
    stages = [stage for stage in recorded.stages if stage.from_step <= step]
    following = data.weights_at(step + 1)
    if following != recorded.weights_at(step):
        stages.append(StageSection(from_step=step + 1, weights=following))
    stages += [stage for stage in data.stages if stage.from_step > step + 1]
    return data.model_copy(update={"sources": sources, "stages": stages})


def _weights(data: MixtureSection) -> tuple[list[float], list[StageSection]]:
    return [source.weight for source in data.sources], data.stages


def _weights_text(data: MixtureSection) -> str:
    """`web 0.7, books 0.3; from step 201 on web 0.5, books 0.5`"""
    labels = data.labels()

    def text(weights: list[float]) -> str:
        return ", ".join(f"{label} {weight:g}" for label, weight in zip(labels, weights, strict=True))

    parts = [text([source.weight for source in data.sources])]
    parts += [f"from step {stage.from_step} on {text(stage.weights)}" for stage in data.stages]
    return "; ".join(parts)
