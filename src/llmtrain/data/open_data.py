"""The dataset of a config."""

from llmtrain import registry
from llmtrain.config.data import DataSection
from llmtrain.config.model import ModelSection
from llmtrain.data.base import DataModule
from llmtrain.errors import DataError
from llmtrain.plugins import plugin_errors


def open_data(section: DataSection, model: ModelSection, seed: int) -> DataModule:
    """Without data.tokenizer it uses the model's own tokenizer; the recorded config is not changed."""
    model_class = registry.resolve("model.name", model.name, registry.MODELS)
    with plugin_errors(model_class, "default_tokenizer"):
        tokenizer = section.tokenizer or model_class.default_tokenizer(model)
    data_class = registry.resolve("data.name", section.name, registry.DATA)
    with plugin_errors(data_class, "__init__", DataError):
        data: DataModule = data_class(section.model_copy(update={"tokenizer": tokenizer}), seed)
    return data
