"""llmtrain chat: chat with a trained model."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

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
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.inference.generate import Messages


def command(
    run: RunOption = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    checkpoint: CheckpointOption = "best",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Chat with a model, one line per message. An empty line or Ctrl-D ends the conversation."""
    from llmtrain.inference.generate import generate_text
    from llmtrain.inference.load import Source, load_model
    from llmtrain.training.sample import Sampling
    from llmtrain.training.shutdown import StopFlag

    loaded = load_model(Source(run, adapter, model, checkpoint, root), device)

    sampling = Sampling(max_new_tokens, temperature, top_k, seed)

    def answer(messages: "Messages") -> str:
        with StopFlag() as stop:  # Ctrl-C ends the answer, not the conversation
            stop.enter_loop(saves=False)
            return generate_text(loaded, messages, sampling, stop=lambda: stop.requested)

    if sys.stdin.isatty():
        say(f"{loaded.label}: an empty line ends the conversation.", sys.stderr)
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    converse(answer, messages, is_quiet=json_)
    if json_:
        show(True, {"run": loaded.label, "step": loaded.step, "messages": messages}, "")


def converse(answer: Callable[["Messages"], str], messages: "Messages", is_quiet: bool) -> None:
    """Answer each line of standard input on standard output, and append both to `messages`."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        text = answer(messages).strip()
        messages.append({"role": "assistant", "content": text})
        if not is_quiet:
            say(text)
