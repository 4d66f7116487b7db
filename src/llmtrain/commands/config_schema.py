"""llmtrain config-schema: the JSON Schema of config files."""

import json

from llmtrain.commands.options import JsonOption, show


def command(json_: JsonOption = False) -> None:
    """Print the JSON Schema of config files, for editors that complete and check them."""
    from llmtrain.config.reference import json_schema

    schema = json_schema()
    show(json_, schema, json.dumps(schema, indent=1))
