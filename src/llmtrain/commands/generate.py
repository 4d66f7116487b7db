"""llmtrain generate: generate text with a trained model."""

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
    prompt: Annotated[str, typer.Option(help="A question, or text to continue.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the prompt format of the model.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    checkpoint: CheckpointOption = "best",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Generate text from a run, adapter or model directory."""
    from llmtrain.inference.generate import answers_questions, generate_text
    from llmtrain.inference.load import Source, load_model
    from llmtrain.training.sample import Sampling
    from llmtrain.training.shutdown import StopFlag

    with StopFlag() as stop:
        loaded = load_model(Source(run, adapter, model, checkpoint, root), device)
        is_question = bool(prompt) and not raw and answers_questions(loaded)
        stop.enter_loop(saves=False)
        text = generate_text(
            loaded,
            [{"role": "user", "content": prompt}] if is_question else prompt,
            Sampling(max_new_tokens, temperature, top_k, seed),
            stop=lambda: stop.requested,
        )
    value = {"run": loaded.label, "step": loaded.step, "prompt": prompt, "text": text}
    show(json_, value, text if is_question else prompt + text)
    if stop.requested:
        say("interrupted: the output is incomplete.", sys.stderr)
        raise typer.Exit(Interrupted.exit_code)
