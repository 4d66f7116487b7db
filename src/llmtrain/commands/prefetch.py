"""llmtrain prefetch: download everything that a config needs into the cache. Run by the init container of a pod."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show
from llmtrain.core.terminal import say
from llmtrain.core.text import plural
from llmtrain.errors import ExitCode, LlmtrainError


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    report: Annotated[str | None, typer.Option("--report", hidden=True)] = None,
    json_: JsonOption = False,
) -> None:
    """Download the model, tokenizer, dataset and tasks that a config names on the hub, so that training needs no
    network."""
    try:
        _fetch(config, set_, json_)
    except LlmtrainError as error:
        if report is None or error.exit_code not in (ExitCode.USAGE, ExitCode.FAILED):
            raise
        from llmtrain.core.files import write_json

        # `llmtrain node` raises it: most platforms restart an init container whatever its exit code.
        write_json(Path(report), error.as_dict())
        say(f"error: {error}", colors={"error:": "red"})


def _fetch(config: str | None, set_: list[str] | None, json_: bool) -> None:
    from llmtrain.config.load import load_config
    from llmtrain.config.model import HfCausalLmSection
    from llmtrain.core.logs import log, setup_logging
    from llmtrain.data.cache_dir import task_data_dir
    from llmtrain.data.hf_datasets import load_split
    from llmtrain.data.tokenizers.gpt2 import GPT2Tokenizer
    from llmtrain.hub.find import find_model
    from llmtrain.hub.needs import hub_needs, needed_datasets
    from llmtrain.hub.task_index import find_stock_tasks
    from llmtrain.hub.tasks import find_task_data

    loaded = load_config(config, set_ or [])
    setup_logging(loaded.logging)
    model = loaded.model
    needs = hub_needs(loaded.model, loaded.data, loaded.trainer.eval_tasks)
    fetched = []
    if needs.model and isinstance(model, HfCausalLmSection):
        find_model(model.path, model.revision, False, code=model.trust_remote_code)
        fetched.append(f"model {model.path}")
    if needs.tokenizer and isinstance(model, HfCausalLmSection) and model.tokenizer_path:
        find_model(model.tokenizer_path, None, False, "model.tokenizer_path")
        fetched.append(f"tokenizer {model.tokenizer_path}")
    for section in needed_datasets(loaded.data):
        load_split(section, "train")
        load_split(section, "val")
        fetched.append(f"dataset {section.dataset_name}")
    if needs.gpt2:
        GPT2Tokenizer()
        fetched.append("tokenizer gpt2")
    if needs.tasks and loaded.trainer.eval_tasks:
        directory = task_data_dir(loaded.data, loaded.trainer.eval_tasks.dir)
        for task in find_stock_tasks(needs.tasks)[0]:
            find_task_data(task, directory)
            fetched.append(f"task {task.name}")
    for name in fetched:
        log("DATA", f"fetched: {name}")
    text = f"{plural(len(fetched), 'download')} complete." if fetched else "Nothing to download: all files are local."
    show(json_, {"fetched": fetched}, text)
