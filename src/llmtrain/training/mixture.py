"""What training does for a mixture of sources: checks its length, reports each source, and continues it with other
weights. All of it does nothing for other data."""

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.data import DataSection
from llmtrain.config.mixture import MixtureSection, StageSection
from llmtrain.core.logs import log
from llmtrain.core.text import plural
from llmtrain.data.batches import TrainBatches
from llmtrain.errors import UsageError
from llmtrain.tracking.base import Metrics
from llmtrain.training.evaluate import EvalResult


def check_sources(batches: TrainBatches, steps: int) -> None:
    """Refuse a run that is longer than its sources last, and say which of them end before it."""
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


def with_recorded_weights(data: DataSection, checkpoint: Checkpoint | None) -> DataSection:
    """The data of a run that is resumed with other weights: the recorded ones up to the step of the checkpoint, the new
    ones from the next step on. So the run still reads what follows the samples that it has read."""
    if checkpoint is None or not isinstance(data, MixtureSection):
        return data
    values = upgraded_values(checkpoint.state()["config"]).get("data", {})
    if values.get("name") != "mixture" or len(values["sources"]) != len(data.sources):
        return data
    recorded = MixtureSection(**values)
    sources = []
    for source, before in zip(data.sources, recorded.sources, strict=True):
        sources.append(source.model_copy(update={"weight": before.weight}))
    stages = [stage for stage in recorded.stages if stage.from_step <= checkpoint.step]
    following = data.weights_at(checkpoint.step + 1)
    if following != recorded.weights_at(checkpoint.step):
        stages.append(StageSection(from_step=checkpoint.step + 1, weights=following))
    stages += [stage for stage in data.stages if stage.from_step > checkpoint.step + 1]
    return data.model_copy(update={"sources": sources, "stages": stages})
