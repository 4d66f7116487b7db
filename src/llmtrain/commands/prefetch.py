"""llmtrain prefetch: what a config takes from the hub, into the cache. A pod's init container runs it."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show
from llmtrain.errors import LlmtrainError
from llmtrain.terminal import say


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    report: Annotated[str | None, typer.Option("--report", hidden=True)] = None,
    json_: JsonOption = False,
) -> None:
    """Fetch the model, tokenizer and dataset that a config names on the hub, so that training needs no network.
    With --report a mistake is written there for `llmtrain node` to end with: platforms read the exit codes of an init
    container each in their own way, and most would start it again."""
    try:
        _fetch(config, set_, json_)
    except LlmtrainError as error:
        if report is None or error.exit_code not in (64, 65):
            raise
        from llmtrain.files import write_json

        write_json(Path(report), error.as_dict())
        say(f"error: {error}")


def _fetch(config: str | None, set_: list[str] | None, json_: bool) -> None:
    from llmtrain.config.data import HubDatasetSection
    from llmtrain.config.load import load_config
    from llmtrain.config.model import HfCausalLmSection
    from llmtrain.data.hf_datasets import load_split
    from llmtrain.data.tokenizers.gpt2 import GPT2Tokenizer
    from llmtrain.hub.find import find_model
    from llmtrain.hub.needs import hub_needs
    from llmtrain.logs import log, setup_logging

    loaded = load_config(config, set_ or [])
    setup_logging(loaded.logging)
    model, data, needs = loaded.model, loaded.data, hub_needs(loaded)
    fetched = []
    if needs.model and isinstance(model, HfCausalLmSection):
        find_model(model.path, model.revision, False, code=model.trust_remote_code)
        fetched.append(f"model {model.path}")
    if needs.tokenizer and isinstance(model, HfCausalLmSection) and model.tokenizer_path:
        find_model(model.tokenizer_path, None, False, "model.tokenizer_path")
        fetched.append(f"tokenizer {model.tokenizer_path}")
    if needs.dataset and isinstance(data, HubDatasetSection):
        load_split(data, "train")
        load_split(data, "val")
        fetched.append(f"dataset {data.dataset_name}")
    if needs.gpt2:
        GPT2Tokenizer()
        fetched.append("tokenizer gpt2")
    for thing in fetched:
        log("DATA", f"fetched: {thing}")
    show(json_, {"fetched": fetched}, f"{len(fetched)} fetched." if fetched else "Nothing to fetch: all is local.")
