"""llmtrain validate: is this config right? Every problem is listed; nothing is run."""

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show


def command(config: ConfigOption = None, set_: SetOption = None, json_: JsonOption = False) -> None:
    """Check a config and list every problem in it. The files it names are not opened."""
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
        f"{source} is valid: {loaded.model.name} on {loaded.data.name}, {loaded.trainer.max_steps} steps.",
    )
