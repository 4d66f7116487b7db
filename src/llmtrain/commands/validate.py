"""llmtrain validate: check a config without running it."""

from typing import TYPE_CHECKING

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show

if TYPE_CHECKING:
    from llmtrain.config.trainer import TrainerSection


def command(config: ConfigOption = None, set_: SetOption = None, json_: JsonOption = False) -> None:
    """Check a config and list every problem. Files that it names are not opened."""
    from llmtrain.config.load import DEFAULT_PRESET, find_config, load_config

    loaded = load_config(config, set_ or [])
    source = str(find_config(config or DEFAULT_PRESET))
    value = {
        "valid": True,
        "config": source,
        "schema_version": loaded.schema_version,
        "name": loaded.run.name,
    }
    show(
        json_,
        value,
        f"{source} is valid: {loaded.model.name} on {loaded.data.name}, {_length(loaded.trainer)}.",
    )


def _length(trainer: "TrainerSection") -> str:
    epochs = f"{trainer.max_epochs} epochs" if trainer.max_epochs else ""
    if trainer.max_steps is None and epochs:
        return epochs
    return f"{trainer.steps} steps" + (f" or {epochs}" if epochs else "")
