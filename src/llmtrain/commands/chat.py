"""llmtrain chat: chat with a trained model."""

import io
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.options import SOURCE, DeviceOption, JsonOption, complete_run, show, with_option_groups
from llmtrain.commands.side_by_side import columns, named_source
from llmtrain.commands.spinner import progress
from llmtrain.commands.stream import TextStream, is_streaming
from llmtrain.core.arguments import Sampling, Source
from llmtrain.core.terminal import say
from llmtrain.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from llmtrain.inference.generate import Messages
    from llmtrain.inference.load import LoadedModel

PROMPT = "> "
ANSWERS = Sampling(max_new_tokens=300, temperature=0.7)
HELP = """/reset  forget the conversation
/help   print this list
An empty line or Ctrl-D ends the chat; Ctrl-C ends an answer, or the chat."""


@with_option_groups
def command(
    source: Source = SOURCE,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="MODEL",
            help="Another run, adapter or model directory that gets the same messages; answers are shown beside each "
            "other, and each model sees only its own.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    sampling: Sampling = ANSWERS,
    device: DeviceOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Chat with a model, one line per message. An empty line or Ctrl-D ends the conversation, /help lists commands."""
    with progress("Loading the model"):
        from llmtrain.inference.generate import only_continues_text
        from llmtrain.inference.load import load_model

        loaded = load_model(source, device)
        models = [loaded]
        if compare is not None:
            options = replace(source, model=None, checkpoint=SOURCE.checkpoint)
            models.append(load_model(named_source(compare, options), device))
    for each in models:
        if only_continues_text(each):
            remedy = f"`llmtrain generate {each.label} --prompt TEXT` continues a text"
            say(f"note: {each.label} was not trained on questions and answers; {remedy}.", sys.stderr)
    if sys.stdin.isatty():
        labels = " and ".join(each.label for each in models)
        say(f"{labels}: an empty line ends the conversation, /help lists commands.", sys.stderr)
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    beginning = list(messages)
    others: Messages = []
    """The conversation of the model to compare with, which sees its own answers."""
    is_streamed = is_streaming(json_) and compare is None
    is_printed = not json_ and compare is None

    def answer(messages: "Messages") -> str:
        text = _answer(loaded, messages, sampling, is_streamed, is_printed)
        if compare is None:
            return text
        if len(messages) == len(beginning) + 1:  # the first question, also after /reset
            others[:] = beginning
        others.append(messages[-1])
        theirs = _answer(models[1], others, sampling)
        others.append({"role": "assistant", "content": theirs})
        if not json_:
            say(columns([each.label for each in models], [text, theirs]))
        return text

    # In a log, each question stands before its answer, as in a terminal.
    converse(answer, messages, shows_questions=not json_ and not sys.stdin.isatty())
    if json_:
        value: dict[str, Any] = {"run": loaded.label, "step": loaded.step, "messages": messages}
        if compare is not None:
            value["compared"] = {"run": models[1].label, "step": models[1].step, "messages": others}
        show(True, value, "")


def _answer(
    loaded: "LoadedModel",
    messages: "Messages",
    sampling: Sampling,
    is_streamed: bool = False,
    is_printed: bool = False,
) -> str:
    """The answer of a model; printed while it is generated, when it is complete, or not at all."""
    from llmtrain.inference.generate import generate_text
    from llmtrain.training.shutdown import StopFlag

    stream = TextStream()

    def show_so_far(text: str) -> None:
        stream.show(text.strip())

    with StopFlag() as stop:  # Ctrl-C ends the answer, not the conversation
        stop.enter_loop(saves=False)
        # Without a reader the text so far is not decoded after each token.
        on_text = show_so_far if is_streamed else None
        text = generate_text(loaded, messages, sampling, stop=lambda: stop.requested, on_text=on_text).strip()
    if is_streamed:
        stream.end(text)
    elif is_printed:
        say(text)
    if stop.received not in (None, signal.SIGINT):
        raise Interrupted("Interrupted; the conversation has ended.")
    return text


def converse(answer: Callable[["Messages"], str], messages: "Messages", shows_questions: bool = False) -> None:
    """Answer each line of standard input, and append both to `messages`, which may begin with a system prompt."""
    first = len(messages)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Else `input` raises UnicodeDecodeError, and loses the lines that it has read ahead.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print(flush=True)  # the prompt of the shell begins on a line of its own
            return
        if not line:
            return
        if not _is_valid_text(line):
            if not sys.stdin.isatty():
                raise UsageError("Standard input must be valid UTF-8.", remedy="Convert it, for example with iconv.")
            say("The message is not valid UTF-8 and was not sent.", sys.stderr)
            continue
        if shows_questions:
            say(f"{PROMPT}{line}")
        if line == "/reset":
            del messages[first:]
        elif line == "/help":
            say(HELP, sys.stderr)
        elif re.fullmatch(r"/[a-z]+", line):
            say(f"{line} is not a command; /help lists them.", sys.stderr)
        else:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": answer(messages)})


def _is_valid_text(line: str) -> bool:
    """Whether it has no bytes that are not UTF-8, which are surrogates here."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True
