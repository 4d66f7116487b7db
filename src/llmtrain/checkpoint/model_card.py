"""The model card (README.md) of an adapter or an exported model: its origin, losses, scores and config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.data import DataSection, ExampleFilesSection, FilesSection, HubDatasetSection
from llmtrain.config.mixture import MixtureSection
from llmtrain.config.model import HfCausalLmSection, ModelSection
from llmtrain.config.schema import Config
from llmtrain.core.redact import redact
from llmtrain.hub.find import looks_like_path
from llmtrain.hub.model_names import HubModel

_FIELDS = {
    "data": ("name", "tokenizer", "packing", "train_on_prompt", "prompt_format", "sources", "stages"),
    "trainer": ("max_steps", "max_epochs", "micro_batch_size", "grad_accum_steps", "optimizer", "lr", "schedule"),
    "run": ("seed",),
}

_FINE_TUNED = ("block_size", "dtype", "lora")


def model_card(
    config: Config, progress: dict[str, Any], base: HubModel | None, base_sha256: str | None, is_adapter: bool
) -> str:
    """Markdown with a YAML header. `progress` is that of the checkpoint the weights come from; its `tasks` are the
    scores of these weights."""
    head: dict[str, Any] = {}
    if base:
        head["base_model"] = base.name
    head["library_name"] = "peft" if is_adapter else "transformers"
    head["pipeline_tag"] = "text-generation"
    head["tags"] = ["llmtrain"]
    if _has_lora(config.model):
        head["tags"].append("lora")
    rows = [
        ("steps", progress.get("step")),
        ("epochs", progress.get("epoch")),
        ("target tokens seen", progress.get("tokens")),
        ("training loss, first logged", progress.get("first_train_loss")),
        ("training loss, last logged", progress.get("last_train_loss")),
        (f"validation loss{_at(progress, 'evaluated_step')}", _last_val_loss(progress)),
        (f"best validation loss{_at(progress, 'best_step')}", progress.get("best_val_loss")),
    ]
    parts = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        f"# {config.run.name}",
        "",
        _origin(config.model, config.data, base, base_sha256),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_number(value)} |" for name, value in rows if value is not None),
        *_task_lines(progress.get("tasks") or {}),
        "",
        "## Config",
        "",
        "```yaml",
        yaml.safe_dump(_config_excerpt(config), sort_keys=False).strip(),
        "```",
    ]
    if config.run.notes is not None:
        parts += ["", config.run.notes]
    return redact("\n".join(parts) + "\n")


def _task_lines(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of the scores on tasks, with what makes them comparable: version, examples, items and their hash."""
    if not tasks:
        return []
    lines = ["", "## Tasks", "", "| task | version | few-shot | items | SHA-256 of the items | score |"]
    lines.append("|---|---|---|---|---|---|")
    for name, score in sorted(tasks.items()):
        metrics = ", ".join(f"{metric} {value:.4f}" for metric, value in score["metrics"].items())
        version = score.get("version") or "-"
        cells = [name, version, score.get("few_shot"), score.get("items"), f"`{score.get('sha256')}`", metrics]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def card_with_base_model(card: str, base: HubModel | None) -> str:
    """A card that was written before, with this base model. Without one, a base model that is a path is removed."""
    from huggingface_hub import ModelCard

    parsed = ModelCard(card, ignore_metadata_errors=True)
    before = parsed.data.get("base_model")
    is_path = isinstance(before, str) and (looks_like_path(before) or Path(before).is_dir())
    if base and before != base.name:
        parsed.data["base_model"] = base.name
    elif not base and is_path:
        parsed.data.pop("base_model")
    else:
        return card
    text = str(parsed)
    if is_path:
        text = text.replace(f"`{before}`", _shown(base))
    return text


def _shown(base: HubModel | None) -> str:
    if base is None:
        return "a base model whose name is not known"
    if not base.revision:
        return f"`{base.name}`"
    return f"`{base.name}` at revision `{base.revision}`"


def _origin(model: ModelSection, data: DataSection, base: HubModel | None, base_sha256: str | None) -> str:
    source = _source(data)
    if not isinstance(model, HfCausalLmSection):
        return f"A `{model.name}` model trained from scratch on `{source}` by llmtrain."
    shown = _shown(base)
    if base_sha256:
        shown += f" (SHA-256 of its files `{base_sha256}`)"
    trained = "Low-rank adapters (LoRA)" if model.lora else "All weights"
    return f"{trained} of {shown}, trained on `{source}` ({data.name}) by llmtrain."


def _source(data: DataSection) -> str:
    """The file, hub dataset or files of a data section, of each source of a mixture; else its name."""
    if isinstance(data, MixtureSection):
        return ", ".join(_source(section) for section in data.sections())
    if isinstance(data, ExampleFilesSection) and data.train_file:
        return data.train_file
    if isinstance(data, HubDatasetSection) and data.dataset_name:
        return data.dataset_name
    if isinstance(data, FilesSection) and data.files:
        return ", ".join(data.files)
    return data.name


def _at(progress: dict[str, Any], name: str) -> str:
    """A note for a loss that was measured at another step."""
    step = progress.get(name)
    if step in (None, progress.get("step")):
        return ""
    return f" (of step {step}, not of these weights)"


def _last_val_loss(progress: dict[str, Any]) -> Any:
    """None if the best is of the same step: it has a row of its own."""
    if progress.get("evaluated_step") == progress.get("best_step"):
        return None
    return progress.get("last_val_loss")


def _config_excerpt(config: Config) -> dict[str, Any]:
    values = config.as_dict()
    # A model from scratch is described by its whole section, a fine-tuned one by its base model and few fields. `init`
    # is not the one of the run: weights that are loaded from a checkpoint are not initialized again.
    model_fields = tuple(name for name in values["model"] if name != "init")
    if isinstance(config.model, HfCausalLmSection):
        model_fields = _FINE_TUNED
    excerpt: dict[str, Any] = {}
    for section, names in {"model": model_fields, **_FIELDS}.items():
        excerpt[section] = {}
        for name in names:
            if values[section].get(name) is not None:
                excerpt[section][name] = values[section][name]
    lora = excerpt["model"].get("lora")
    if lora and not lora["target_modules"]:
        lora["target_modules"] = "all-linear"  # as peft calls it; an empty list reads like none
    return excerpt


def _has_lora(model: ModelSection) -> bool:
    return isinstance(model, HfCausalLmSection) and model.lora is not None


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
