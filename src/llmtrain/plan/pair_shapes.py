"""The micro-batches of a run on preference pairs, as those of a run on examples."""

from llmtrain.config.data import ChatJsonlSection, PreferenceJsonlSection
from llmtrain.config.mixture import data_sections
from llmtrain.config.schema import Config


def as_examples(config: Config) -> Config:
    """A config on examples with the same packing; any other config unchanged. Of a mixture those of its first source:
    all have the same packing."""
    data = data_sections(config.data)[0]
    if not isinstance(data, PreferenceJsonlSection):
        return config
    examples = ChatJsonlSection(train_file=data.train_file, tokenizer=data.tokenizer, packing=data.packing)
    return config.model_copy(update={"data": examples})


def with_pair_shapes(config: Config) -> Config:
    """A config on examples whose micro-batches have the same shape: a sample has two answers, one behind the other if
    it is packed, else in two sequences. Any other config unchanged."""
    data = data_sections(config.data)[0]
    if not isinstance(data, PreferenceJsonlSection):
        return config
    examples = as_examples(config)
    if data.packing:
        return examples.with_values("model", block_size=2 * config.model.block_size)
    return examples.with_values("trainer", micro_batch_size=2 * config.trainer.micro_batch_size)
