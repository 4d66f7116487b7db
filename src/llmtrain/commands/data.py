"""llmtrain data: look at the data of a config before training."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show

if TYPE_CHECKING:
    from llmtrain.config.schema import Config
    from llmtrain.data.inspection import OpenedData

app = typer.Typer(help="Look at the data of a config before training.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at the data of a config before training."""


@app.command("show")
def show_command(
    config: ConfigOption = None,
    set_: SetOption = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Training samples to show of each source.")] = 1,
    json_: JsonOption = False,
) -> None:
    """Show sources, sizes and shares, and samples as the model gets them: what it is trained on, and what not."""
    from llmtrain.commands.data_text import print_samples, source_table

    loaded, opened = _open(config, set_)
    from llmtrain.data import inspection

    value: dict[str, Any] = {
        "tokenizer": opened.tokenizer.kind,
        "vocab_size": opened.tokenizer.vocab_size,
        "block_size": loaded.model.block_size,
        "sources": inspection.source_facts(opened),
        "samples": inspection.samples(opened, samples),
    }
    show(json_, value, source_table(value["sources"]))
    if not json_:
        print_samples(value["samples"])


@app.command("stats")
def stats_command(config: ConfigOption = None, set_: SetOption = None, json_: JsonOption = False) -> None:
    """Count lengths of documents or examples, what the context length cuts off, and exact duplicates."""
    from llmtrain.commands.data_text import stats_lines

    loaded, opened = _open(config, set_)
    from llmtrain.data.inspection import statistics_of

    rows = statistics_of(opened, loaded.model.block_size)
    show(json_, {"sources": rows}, "\n".join(stats_lines(rows)))


def _open(config: str | None, set_: list[str] | None) -> tuple["Config", "OpenedData"]:
    from llmtrain.config.load import load_config
    from llmtrain.core.logs import setup_logging
    from llmtrain.training.requirements import check_requirements

    loaded = load_config(config, set_ or [])
    setup_logging(loaded.logging)
    check_requirements(config or "the config", [loaded.data])
    from llmtrain.data.inspection import open_sources  # imports torch

    return loaded, open_sources(loaded.data, loaded.model, loaded.trainer, loaded.run)
