"""llmtrain chat: chat with a trained model."""

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.arguments import MINIMUM
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
from llmtrain.commands.progress import progress
from llmtrain.commands.stream import TextStream, is_streaming
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.inference.generate import Messages

HELP = """/reset  forget the conversation
/help   print this list
An empty line or Ctrl-D ends the chat; Ctrl-C ends an answer, or the chat."""


def command(
    run: RunOption = None,
    adapter: AdapterOption = None,
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=MINIMUM["max_new_tokens"], help="Maximum number of tokens per answer.")
    ] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=MINIMUM["top_k"], help="Sample from this many most likely tokens.")] = 50,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens that have this total probability.")
    ] = None,
    seed: Annotated[int, typer.Option(min=MINIMUM["seed"], help="Random seed.")] = 0,
    checkpoint: CheckpointOption = "best",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Chat with a model, one line per message. An empty line or Ctrl-D ends the conversation, /help lists commands."""
    from llmtrain.training.shutdown import StopFlag

    with progress("Loading the model"):
        from llmtrain.inference.generate import generate_text, only_continues_text
        from llmtrain.inference.load import Source, load_model
        from llmtrain.training.sample import Sampling

        loaded = load_model(Source(run, adapter, model, checkpoint, root), device)
    sampling = Sampling(max_new_tokens, temperature, top_k, seed, top_p)

    def answer(messages: "Messages") -> str:
        stream = TextStream() if is_streaming(json_) else None
        with StopFlag() as stop:  # Ctrl-C ends the answer, not the conversation
            stop.enter_loop(saves=False)
            text = generate_text(
                loaded,
                messages,
                sampling,
                stop=lambda: stop.requested,
                on_text=(lambda text: stream.show(text.strip())) if stream else None,
            ).strip()
        if stream:
            stream.end(text)
        elif not json_:
            say(text)
        return text

    if only_continues_text(loaded):
        remedy = f"`llmtrain generate --run {run} --prompt TEXT` continues a text"
        say(f"note: {loaded.label} was not trained on questions and answers; {remedy}.", sys.stderr)
    if sys.stdin.isatty():
        say(f"{loaded.label}: an empty line ends the conversation, /help lists commands.", sys.stderr)
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    converse(answer, messages)
    if json_:
        show(True, {"run": loaded.label, "step": loaded.step, "messages": messages}, "")


def converse(answer: Callable[["Messages"], str], messages: "Messages") -> None:
    """Answer each line of standard input, and append both to `messages`, which may begin with a system prompt."""
    first = len(messages)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print(flush=True)  # the prompt of the shell begins on a line of its own
            return
        if not line:
            return
        if line == "/reset":
            del messages[first:]
        elif line == "/help":
            say(HELP, sys.stderr)
        elif re.fullmatch(r"/[a-z]+", line):
            say(f"{line} is not a command; /help lists them.", sys.stderr)
        else:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": answer(messages)})
