"""Batches of a mixture. Every source contributes the samples that the schedule gives it, wherever the batch is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmtrain.config.mixture import MixtureSection
from llmtrain.data.batches import Batch, EvalBatches, EvalGroup, Indexes, SourceProgress, TrainBatches
from llmtrain.data.mixture.sample_sets import Part, SampleSet
from llmtrain.data.mixture.schedule import MixtureSchedule, Stage
from llmtrain.errors import UsageError


@dataclass(frozen=True)
class Source:
    """A source of a mixture, ready to be sampled."""

    label: str
    samples: SampleSet


def make_schedule(section: MixtureSection, sources: Sequence[Source], step_samples: int, seed: int) -> MixtureSchedule:
    """`step_samples`: samples per step, over all processes."""
    stages = [Stage(0, tuple(source.weight for source in section.sources))]
    for stage in section.stages:
        first = (stage.from_step - 1) * step_samples
        if first == 0:
            stages.clear()
        stages.append(Stage(first, tuple(stage.weights)))
    caps = []
    for config, source in zip(section.sources, sources, strict=True):
        caps.append(None if config.max_epochs is None else config.max_epochs * len(source.samples))
    return MixtureSchedule(stages, seed, caps)


def check_one_kind(sources: Sequence[Source]) -> None:
    """Refuse sources whose samples cannot be in one batch."""
    first = sources[0]
    for source in sources[1:]:
        if source.samples.kind != first.samples.kind:
            raise UsageError(
                f"data.sources: source '{first.label}' has {first.samples.kind} and source '{source.label}' has "
                f"{source.samples.kind}, which cannot be mixed.",
                remedy="Use sources of one kind; for examples and pairs, set packing to the same value in each.",
            )


class MixedBatches(TrainBatches):
    """An epoch is as many samples as the sources have together. Every source also has epochs of its own."""

    def __init__(
        self, sources: Sequence[Source], schedule: MixtureSchedule, micro_batch_size: int, micro_batches: int
    ) -> None:
        super().__init__(micro_batch_size, micro_batches)
        self.sources = list(sources)
        self.schedule = schedule
        self._step: tuple[int, tuple[Indexes, Indexes]] | None = None  # the samples of the last step: a cache

    def with_samples(self, sets: Sequence[SampleSet]) -> "MixedBatches":
        """The same batches from other sets, which have the same samples."""
        sources = [replace(source, samples=samples) for source, samples in zip(self.sources, sets, strict=True)]
        return MixedBatches(sources, self.schedule, self.size, self.micro_batches)

    @property
    def _step_samples(self) -> int:
        return self.size * self.micro_batches

    @property
    def _epoch_samples(self) -> int:
        return sum(len(source.samples) for source in self.sources)

    def __getitem__(self, number: int) -> Batch:
        sources, numbers = self._samples_of(number)
        parts = []
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            parts.append(Part(self.sources[source].samples, numbers[rows], rows))
        return parts[0].samples.mixed(parts, number * self.size)

    def first_shape(self) -> tuple[int, int]:
        sequences, tokens = self[0].inputs.shape
        return sequences, tokens

    def steps_in(self, epochs: int) -> int:
        return -(-epochs * self._epoch_samples // self._step_samples)

    def epochs_after(self, step: int) -> int:
        return step * self._step_samples // self._epoch_samples

    def available_steps(self, steps: int) -> int:
        return self.schedule.last_sample(steps * self._step_samples) // self._step_samples

    def exhausted(self, steps: int) -> dict[str, int]:
        found = self.schedule.exhausted(steps * self._step_samples)
        return {self.sources[source].label: sample // self._step_samples + 1 for source, sample in found.items()}

    @property
    def tokens(self) -> int:
        return sum(source.samples.tokens for source in self.sources)

    @property
    def tokens_per_step(self) -> float:
        """Of the first steps: other weights later may have shorter samples."""
        sample_count = max(1, self.schedule.last_sample(1024 * self._step_samples))
        counts = self.schedule.counts(sample_count)
        tokens = 0.0
        for count, source in zip(counts.tolist(), self.sources, strict=True):
            tokens += count * source.samples.tokens / len(source.samples)
        return self._step_samples * tokens / sample_count

    def source_progress(self, step: int) -> dict[str, SourceProgress]:
        counts = self.schedule.counts(step * self._step_samples)
        found = {}
        for count, source in zip(counts.tolist(), self.sources, strict=True):
            epochs = count / len(source.samples)
            found[source.label] = SourceProgress(round(epochs * source.samples.tokens), epochs)
        return found

    def describe_samples(self, step: int) -> str:
        sources, numbers = self._samples_of_step(step - 1)
        parts = []
        for source in np.unique(sources):
            each = self.sources[source]
            parts.append(f"{each.label}: {each.samples.describe(numbers[sources == source])}")
        return f"{super().describe_samples(step)} ({'; '.join(parts)})"

    def labels_of(self, number: int) -> list[str]:
        """The source of each sample of a micro-batch."""
        return [self.sources[source].label for source in self._samples_of(number)[0]]

    def _samples_of(self, number: int) -> tuple[Indexes, Indexes]:
        """The source of each sample of a micro-batch, and its number there."""
        step, micro = divmod(number, self.micro_batches)
        sources, numbers = self._samples_of_step(step)
        part = slice(micro * self.size, (micro + 1) * self.size)
        return sources[part], numbers[part]

    def _samples_of_step(self, step: int) -> tuple[Indexes, Indexes]:
        if self._step is None or self._step[0] != step:
            samples = self.schedule.samples(step * self._step_samples, self._step_samples)
            if not self.sources[0].samples.has_equal_lengths:
                samples = self._by_length(*samples)
            self._step = step, samples
        return self._step[1]

    def _by_length(self, sources: Indexes, numbers: Indexes) -> tuple[Indexes, Indexes]:
        """The samples of a step with those of similar length in one micro-batch: less padding."""
        lengths = np.empty(len(sources), np.int64)
        for source in np.unique(sources):
            is_source = sources == source
            lengths[is_source] = self.sources[source].samples.lengths(numbers[is_source])
        order = np.argsort(lengths, kind="stable")
        return sources[order], numbers[order]


class MixedEvalBatches(EvalBatches):
    """The validation batches of each source, one source after the other."""

    def __init__(self, parts: Sequence[EvalBatches], labels: Sequence[str], weights: Sequence[float]) -> None:
        self.parts = list(parts)
        """Of each source."""
        self._labels = list(labels)
        self._shares = [weight / sum(weights) for weight in weights]

    def with_parts(self, parts: Sequence[EvalBatches]) -> "MixedEvalBatches":
        return MixedEvalBatches(parts, self._labels, self._shares)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Batch:
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)

    def largest_shape(self) -> tuple[int, int]:
        return max((part.largest_shape() for part in self.parts), key=lambda shape: shape[0] * shape[1])

    def groups(self) -> list[EvalGroup]:
        rows = zip(self._labels, self._shares, self.parts, strict=True)
        return [EvalGroup(label, share, len(part)) for label, share, part in rows]
