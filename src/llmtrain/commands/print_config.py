"""llmtrain print-config: the resolved config, with defaults and overrides."""

from typing import Annotated

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print a reference of all fields instead, as Markdown.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Print the resolved config as YAML, or with --json as JSON."""
    from llmtrain.config.load import dump_config, load_config
    from llmtrain.config.reference import reference_markdown

    if reference:
        text = reference_markdown()
        show(json_, {"reference": text}, text.rstrip("\n"))
    else:
        loaded = load_config(config, set_ or [])
        show(json_, loaded.as_dict(), dump_config(loaded).rstrip("\n"))
