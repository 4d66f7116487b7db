"""llmtrain validate: check a config without running it."""

from typing import TYPE_CHECKING

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, print_warning, show
from llmtrain.core.text import plural

if TYPE_CHECKING:
    from llmtrain.config.trainer import TrainerSection


def command(config: ConfigOption = None, set_: SetOption = None, json_: JsonOption = False) -> None:
    """Check a config and list every problem. What this machine lacks for it, packages and files, is a warning."""
    from llmtrain.config.load import DEFAULT_PRESET, find_config, load_config
    from llmtrain.training.requirements import missing_requirements

    loaded = load_config(config, set_ or [])
    missing = missing_requirements(loaded.sections())
    source = str(find_config(config or DEFAULT_PRESET))
    value = {
        "valid": True,
        "config": source,
        "schema_version": loaded.schema_version,
        "name": loaded.run.name,
        "missing": [error.what_and_known for error in missing],
    }
    for error in missing:  # only warnings: the config may be for another machine
        print_warning(str(error))
    show(
        json_,
        value,
        f"{source} is valid: {loaded.model.name} on {loaded.data.name}, {_length(loaded.trainer)}.",
    )


def _length(trainer: "TrainerSection") -> str:
    if not trainer.max_epochs:
        return plural(trainer.steps, "step")
    if trainer.max_steps is None:
        return plural(trainer.max_epochs, "epoch")
    return f"{plural(trainer.max_steps, 'step')} or {plural(trainer.max_epochs, 'epoch')}"
