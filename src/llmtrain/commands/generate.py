"""llmtrain generate: text from a trained run."""

from typing import Annotated

import typer

from llmtrain.commands.options import DEFAULT_ROOT, CheckpointOption, JsonOption, RootOption, RunOption, readable, show


def command(
    run: RunOption,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Choose among this many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    checkpoint: CheckpointOption = "best",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Let a run's model write text."""
    from llmtrain.training.inference import generate_text, load_run

    loaded = load_run(root, run, checkpoint, device)
    text = generate_text(loaded, prompt, max_new_tokens, temperature, top_k, seed)
    value = {"run": loaded.run_id, "step": loaded.step, "prompt": prompt, "text": text}
    show(json_, value, readable(prompt + text))
