"""llmtrain generate: text from a trained model."""

import sys
from typing import Annotated

import typer

from llmtrain.commands.options import (
    DEFAULT_ROOT,
    AdapterOption,
    CheckpointOption,
    JsonOption,
    ModelOption,
    RootOption,
    RunOption,
    show,
)
from llmtrain.errors import Interrupted
from llmtrain.terminal import say


def command(
    run: RunOption = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    prompt: Annotated[str, typer.Option(help="A question, or text to go on from.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt as it is, also with a model that answers questions.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Choose among this many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    checkpoint: CheckpointOption = "best",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Let a model write: that of a run, an adapter, or a model directory."""
    from llmtrain.inference.inference import answers_questions, generate_text
    from llmtrain.inference.load import Source, load_model
    from llmtrain.training.shutdown import StopFlag

    with StopFlag() as stop:
        loaded = load_model(Source(run, adapter, model, checkpoint, root), device)
        is_question = bool(prompt) and not raw and answers_questions(loaded)
        given = [{"role": "user", "content": prompt}] if is_question else prompt
        stop.enter_loop(saves=False)
        text = generate_text(loaded, given, max_new_tokens, temperature, top_k, seed, stop=lambda: stop.requested)
    value = {"run": loaded.label, "step": loaded.step, "prompt": prompt, "text": text}
    show(json_, value, text if is_question else prompt + text)
    if stop.requested:
        say("stopped: as told; the text is not complete.", sys.stderr)
        raise typer.Exit(Interrupted.exit_code)
