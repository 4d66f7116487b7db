"""Training and validation batches for each kind of data, running text, examples or preference pairs, and for mixtures
of sources."""

from llmtrain.config.data import DataSection, ExampleBatchesSection, PreferenceJsonlSection
from llmtrain.config.mixture import MASK_OF_EXAMPLES, MixtureSection
from llmtrain.core.seeds import derive_seed
from llmtrain.data.base import PreparedData, PreparedMixture
from llmtrain.data.batches import EvalBatches, TrainBatches
from llmtrain.data.examples.example_batches import LENGTH_MULTIPLE, ExampleBatches, ExampleEvalBatches, Samples
from llmtrain.data.examples.selection import select_examples
from llmtrain.data.mixture.mixed_batches import (
    MixedBatches,
    MixedEvalBatches,
    Source,
    check_one_kind,
    make_schedule,
)
from llmtrain.data.mixture.prepare import source_errors
from llmtrain.data.mixture.sample_sets import ExampleSet, PairSet, SampleSet, WindowSet
from llmtrain.data.preferences.pair_batches import PairBatches, PairEvalBatches, make_pair_samples
from llmtrain.data.preferences.pair_store import PairStore
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.store.token_store import TokenStore
from llmtrain.data.text.window_batches import WindowBatches, WindowEvalBatches
from llmtrain.errors import UsageError


def make_batches(
    prepared: PreparedData | PreparedMixture,
    config: DataSection,
    *,
    block_size: int,
    micro_batch_size: int,
    micro_batches: int,
    seed: int,
    vocab_size: int,
    eval_limit: int | None,
    can_pack: bool,
) -> tuple[TrainBatches, EvalBatches]:
    """`micro_batches`: per step, over all processes. `can_pack`: the model keeps packed examples separate."""
    train: TrainBatches
    end_of_text = prepared.tokenizer.end_of_text
    if isinstance(prepared, PreparedMixture):
        assert isinstance(config, MixtureSection)
        sources = _sources(prepared, config, block_size, vocab_size, can_pack, seed)
        schedule = make_schedule(config, sources, micro_batch_size * micro_batches, seed)
        train = MixedBatches(sources, schedule, micro_batch_size, micro_batches)
        return train, _mixed_eval_batches(
            prepared, config, block_size, micro_batch_size, vocab_size, eval_limit, can_pack
        )
    if isinstance(prepared.train, PairStore):
        assert isinstance(config, PreferenceJsonlSection)
        pairs = make_pair_samples(prepared.train, config, block_size, vocab_size, can_pack, "training")
        train = PairBatches(pairs, micro_batch_size, micro_batches, seed)
    elif isinstance(prepared.train, ExampleStore):
        samples = _samples(prepared.train, config, block_size, vocab_size, can_pack, "training")
        train = ExampleBatches(samples, micro_batch_size, micro_batches, seed)
    else:
        end = document_end(config, end_of_text, can_pack)
        train = WindowBatches(prepared.train, block_size, micro_batch_size, micro_batches, seed, vocab_size, end)
    val = make_eval_batches(
        prepared.val,
        config,
        block_size=block_size,
        micro_batch_size=micro_batch_size,
        vocab_size=vocab_size,
        limit=eval_limit,
        can_pack=can_pack,
        end_of_text=end_of_text,
    )
    return train, val


def least_width(block_size: int) -> int:
    """No sequence of any batch is shorter. To check the size of a batch before its samples are ordered, which takes an
    array of that size."""
    return min(block_size, LENGTH_MULTIPLE)


def make_eval_batches(
    store: TokenStore | ExampleStore | PairStore,
    config: DataSection,
    *,
    block_size: int,
    micro_batch_size: int,
    vocab_size: int,
    limit: int | None,
    can_pack: bool,
    end_of_text: int | None = None,
) -> EvalBatches:
    """`end_of_text`: of the tokenizer, for text."""
    if isinstance(store, PairStore):
        assert isinstance(config, PreferenceJsonlSection)
        pairs = make_pair_samples(store, config, block_size, vocab_size, can_pack, "validation")
        return PairEvalBatches(pairs, micro_batch_size, limit)
    if isinstance(store, ExampleStore):
        samples = _samples(store, config, block_size, vocab_size, can_pack, "validation")
        return ExampleEvalBatches(samples, micro_batch_size, limit)
    end = document_end(config, end_of_text, can_pack)
    return WindowEvalBatches(store, block_size, micro_batch_size, vocab_size, limit, end)


def document_end(config: DataSection, end_of_text: int | None, can_pack: bool) -> int | None:
    """The token at which attention stops, if the config has a document mask."""
    if not getattr(config, "document_mask", False):
        return None
    remedy = "Set data.document_mask to false."
    if not can_pack:
        raise UsageError(
            "data.document_mask is true, but this model's attention does not stop at the ends of documents.",
            remedy=remedy,
        )
    if end_of_text is None:
        raise UsageError(
            "data.document_mask needs an end-of-text token, which this tokenizer does not have.", remedy=remedy
        )
    return end_of_text


def _sources(
    prepared: PreparedMixture, config: MixtureSection, block_size: int, vocab_size: int, can_pack: bool, seed: int
) -> list[Source]:
    sources = []
    rows = zip(config.labels(), config.sections(), prepared.sources, strict=True)
    for index, (label, section, each) in enumerate(rows):
        own_seed = derive_seed(seed, "source", index)
        with source_errors(config, index):
            samples: SampleSet
            if isinstance(each.train, ExampleStore):
                chosen = _samples(each.train, section, block_size, vocab_size, can_pack, f"training ({label})")
                samples = ExampleSet(chosen, own_seed)
            elif isinstance(each.train, PairStore):
                assert isinstance(section, PreferenceJsonlSection)
                pairs = make_pair_samples(each.train, section, block_size, vocab_size, can_pack, f"training ({label})")
                samples = PairSet(pairs, own_seed)
            else:
                assert isinstance(each.train, TokenStore)
                end = document_end(section, prepared.tokenizer.end_of_text, can_pack)
                samples = WindowSet(each.train, block_size, own_seed, vocab_size, end)
        sources.append(Source(label, samples))
    check_one_kind(sources)
    return sources


def _mixed_eval_batches(
    prepared: PreparedMixture,
    config: MixtureSection,
    block_size: int,
    micro_batch_size: int,
    vocab_size: int,
    limit: int | None,
    can_pack: bool,
) -> EvalBatches:
    parts = []
    for index, (section, each) in enumerate(zip(config.sections(), prepared.sources, strict=True)):
        with source_errors(config, index):
            part = make_eval_batches(
                each.val,
                section,
                block_size=block_size,
                micro_batch_size=micro_batch_size,
                vocab_size=vocab_size,
                limit=limit,
                can_pack=can_pack,
                end_of_text=prepared.tokenizer.end_of_text,
            )
        parts.append(part)
    return MixedEvalBatches(parts, config.labels(), [source.weight for source in config.sources])


def _samples(
    store: ExampleStore, config: DataSection, block_size: int, vocab_size: int, can_pack: bool, label: str
) -> Samples:
    assert isinstance(config, ExampleBatchesSection)
    if getattr(config, "document_mask", False):  # of a plugin
        raise UsageError(MASK_OF_EXAMPLES)
    if config.packing and not can_pack:
        raise UsageError(
            "data.packing is true, but this model does not keep packed examples separate.",
            remedy="Set data.packing to false.",
        )
    selection = select_examples(store, config, block_size, label)
    return Samples(store, selection, block_size, config.packing, vocab_size, config.train_on_prompt)
