"""What a config takes from the network: the hub's models and datasets, and the files of GPT-2's tokenizer."""

from dataclasses import dataclass

from llmtrain.config.schema import EXAMPLE_DATA, Config
from llmtrain.hub.find import looks_like_path


@dataclass(frozen=True)
class HubNeeds:
    model: bool = False
    tokenizer: bool = False
    """Of `hf_causal_lm`, where it is not the model's own."""
    dataset: bool = False
    gpt2: bool = False
    """The tokenizer gpt2, whose files tiktoken fetches."""

    @property
    def any(self) -> bool:
        return self.model or self.tokenizer or self.dataset or self.gpt2


def hub_needs(config: Config) -> HubNeeds:
    model, data = config.model, config.data
    may_ask = model.name == "hf_causal_lm" and not model.local_files_only
    return HubNeeds(
        model=may_ask and _is_name(model.path),
        tokenizer=may_ask and _is_name(model.tokenizer_path),
        dataset=data.name in ("hf_text", *EXAMPLE_DATA) and not _reads_files(config) and _is_name(data.dataset_name),
        gpt2=data.tokenizer == "gpt2",
    )


def _reads_files(config: Config) -> bool:
    """Local files come before the dataset of the same section."""
    return bool(config.data.files or config.data.train_file)


def _is_name(reference: str | None) -> bool:
    return reference is not None and not looks_like_path(reference)
