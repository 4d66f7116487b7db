"""The downloads that a config needs: models and datasets of the hub, and the files of the GPT-2 tokenizer."""

from dataclasses import dataclass

from llmtrain.config.data import DataSection, HubDatasetSection
from llmtrain.config.mixture import data_sections
from llmtrain.config.model import HfCausalLmSection, ModelSection
from llmtrain.hub.find import looks_like_path


@dataclass(frozen=True)
class HubNeeds:
    model: bool = False
    tokenizer: bool = False
    """The tokenizer of `hf_causal_lm`, if it is not that of the model."""
    dataset: bool = False
    gpt2: bool = False
    """The tokenizer gpt2, whose files tiktoken downloads."""

    @property
    def any(self) -> bool:
        return self.model or self.tokenizer or self.dataset or self.gpt2


def hub_needs(model: ModelSection, data: DataSection) -> HubNeeds:
    needs_model = False
    needs_tokenizer = False
    if isinstance(model, HfCausalLmSection) and not model.local_files_only:
        needs_model = _is_name(model.path)
        needs_tokenizer = _is_name(model.tokenizer_path)
    return HubNeeds(needs_model, needs_tokenizer, bool(needed_datasets(data)), gpt2=data.tokenizer == "gpt2")


def needed_datasets(data: DataSection) -> list[HubDatasetSection]:
    """The data sections that read a dataset of the hub: of a mixture there may be several."""
    sections = []
    for section in data_sections(data):
        if isinstance(section, HubDatasetSection) and not _reads_files(section) and _is_name(section.dataset_name):
            sections.append(section)
    return sections


def _reads_files(data: HubDatasetSection) -> bool:
    """Local files take precedence over the dataset of the same section."""
    return bool(getattr(data, "files", None) or getattr(data, "train_file", None))


def _is_name(reference: str | None) -> bool:
    return reference is not None and not looks_like_path(reference)
