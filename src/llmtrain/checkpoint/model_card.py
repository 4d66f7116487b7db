"""The model card (README.md) of an adapter or an exported model: its origin, its losses and its config."""

from typing import Any

import yaml

from llmtrain.config.model import HfCausalLmSection, LoraSection
from llmtrain.config.schema import Config
from llmtrain.redact import redact

_FIELDS = {
    "data": ("name", "tokenizer", "packing", "train_on_prompt", "prompt_format"),
    "trainer": ("max_steps", "max_epochs", "micro_batch_size", "grad_accum_steps", "optimizer", "lr", "schedule"),
    "run": ("seed",),
}

_FINE_TUNED = ("block_size", "dtype", "lora")


def model_card(config: Config, progress: dict[str, Any], base_sha256: str | None, is_adapter: bool) -> str:
    """Markdown with a YAML header. `progress` is that of the checkpoint the weights come from."""
    base = _base(config)
    head = {
        **({"base_model": base} if base else {}),
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llmtrain", *(["lora"] if _lora(config) else [])],
    }
    rows = [
        ("steps", progress.get("step")),
        ("epochs", progress.get("epoch")),
        ("target tokens seen", progress.get("tokens")),
        ("training loss, first logged", progress.get("first_train_loss")),
        ("training loss, last logged", progress.get("last_train_loss")),
        (f"validation loss{_at(progress, 'evaluated_step')}", progress.get("last_val_loss")),
        (f"best validation loss{_at(progress, 'best_step')}", progress.get("best_val_loss")),
    ]
    parts = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        f"# {config.run.name}",
        "",
        _origin(config, base_sha256),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_number(value)} |" for name, value in rows if value is not None),
        "",
        "## Config",
        "",
        "```yaml",
        yaml.safe_dump(_config_excerpt(config), sort_keys=False).strip(),
        "```",
        *([] if config.run.notes is None else ["", config.run.notes]),
    ]
    return redact("\n".join(parts) + "\n")


def _origin(config: Config, base_sha256: str | None) -> str:
    data = config.data
    named = (getattr(data, name, None) for name in ("train_file", "dataset_name"))
    source = next(filter(None, named), None) or ", ".join(getattr(data, "files", [])) or data.name
    base, trained = _base(config), "Low-rank adapters (LoRA)" if _lora(config) else "All weights"
    if not base:
        return f"A `{config.model.name}` model trained from scratch on `{source}` by llmtrain."
    sha = f" (SHA-256 of its files `{base_sha256}`)" if base_sha256 else ""
    return f"{trained} of `{base}`{sha}, trained on `{source}` ({data.name}) by llmtrain."


def _at(progress: dict[str, Any], name: str) -> str:
    """A note for a loss that was measured at another step."""
    step = progress.get(name)
    return "" if step in (None, progress.get("step")) else f" (of step {step}, not of these weights)"


def _config_excerpt(config: Config) -> dict[str, Any]:
    values = config.as_dict()
    # A model from scratch is described by its whole section, a fine-tuned one by its base model and few fields. `init`
    # is not the one of the run: weights that are loaded from a checkpoint are not initialized again.
    of_model = _FINE_TUNED if _base(config) else [name for name in values["model"] if name != "init"]
    return {
        section: {name: values[section][name] for name in names if values[section].get(name) is not None}
        for section, names in {"model": of_model, **_FIELDS}.items()
    }


def _base(config: Config) -> str | None:
    """The model that was fine-tuned."""
    return config.model.path if isinstance(config.model, HfCausalLmSection) else None


def _lora(config: Config) -> LoraSection | None:
    return config.model.lora if isinstance(config.model, HfCausalLmSection) else None


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
