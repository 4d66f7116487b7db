"""The downloads that a config needs: models, datasets and tasks of the hub, and the files of the GPT-2
tokenizer."""

from dataclasses import dataclass

from llmtrain.config.data import DataSection, HubDatasetSection
from llmtrain.config.mixture import data_sections
from llmtrain.config.model import HfCausalLmSection, ModelSection
from llmtrain.config.trainer import EvalTasksSection
from llmtrain.hub.find import looks_like_path


@dataclass(frozen=True)
class HubNeeds:
    model: bool = False
    tokenizer: bool = False
    """The tokenizer of `hf_causal_lm`, if it is not that of the model."""
    dataset: bool = False
    gpt2: bool = False
    """The tokenizer gpt2, whose files tiktoken downloads."""

    tasks: tuple[str, ...] = ()
    """Stock tasks of trainer.eval_tasks, whose data is downloaded."""

    @property
    def any(self) -> bool:
        return self.model or self.tokenizer or self.dataset or self.gpt2 or bool(self.tasks)


def hub_needs(model: ModelSection, data: DataSection, eval_tasks: EvalTasksSection | None = None) -> HubNeeds:
    needs_model = False
    needs_tokenizer = False
    if isinstance(model, HfCausalLmSection) and not model.local_files_only:
        needs_model = _is_name(model.path)
        needs_tokenizer = _is_name(model.tokenizer_path)
    tasks = tuple(spec.name for spec in eval_tasks.specs() if spec.is_stock) if eval_tasks else ()
    needs_dataset = bool(needed_datasets(data))
    return HubNeeds(needs_model, needs_tokenizer, needs_dataset, gpt2=data.tokenizer == "gpt2", tasks=tasks)


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
