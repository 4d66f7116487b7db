"""What a model can be exported to."""

from dataclasses import dataclass

from llmtrain.inference.export import default_dtype
from llmtrain.inference.gguf.write import GGUF_DTYPES, gguf_problem
from llmtrain.inference.load import LoadedModel
from llmtrain.models.base import EXPORT_DTYPES, ModelAdapter
from llmtrain.models.hf.lora import has_adapter


@dataclass(frozen=True)
class ExportKind:
    options: str
    """Of `llmtrain export`, besides the model and the destination."""
    loads_in: str
    dtypes: list[str]
    """For --dtype; the default comes first. Empty where there is no choice."""
    problem: str | None = None
    """Why the model cannot become this; None if it can."""


def list_exports(loaded: LoadedModel) -> list[ExportKind]:
    rows = []
    is_adapter = has_adapter(loaded.module)
    merge = "--merge" if is_adapter else ""
    default = default_dtype(loaded)
    if is_adapter:
        rows.append(ExportKind("", "peft", []))
    config = loaded.adapter.export_config()
    if config is not None:
        name = f"transformers ({config['model_type']}), vLLM"
        rows.append(ExportKind(merge, name, _default_first(default, EXPORT_DTYPES)))
    else:
        writes = type(loaded.adapter).export is not ModelAdapter.export
        problem = None if writes else f"{type(loaded.adapter).__qualname__} does not implement `export`"
        rows.append(ExportKind("", "programs that know the format of the plugin", [], problem))
    short = next(name for name, dtype in GGUF_DTYPES.items() if dtype == default)
    options = f"{merge} --format gguf".strip()
    rows.append(ExportKind(options, "llama.cpp, Ollama", _default_first(short, GGUF_DTYPES), gguf_problem(loaded)))
    return rows


def _default_first(default: str, dtypes: "tuple[str, ...] | dict[str, str]") -> list[str]:
    return [default, *(name for name in dtypes if name != default)]
