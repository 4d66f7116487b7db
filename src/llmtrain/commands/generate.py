"""llmtrain generate: generate text with a trained model."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import SAMPLING, SOURCE, DeviceOption, JsonOption, show, with_option_groups
from llmtrain.commands.spinner import progress
from llmtrain.commands.stream import TextStream, is_streaming
from llmtrain.core.arguments import Sampling, Source
from llmtrain.core.terminal import say
from llmtrain.errors import DataError, Interrupted, UsageError

SEPARATOR = "---"
"""Line between two samples."""
OnText = Callable[[str], None]


@with_option_groups
def command(
    source: Source = SOURCE,
    prompt: Annotated[str, typer.Option(help="A question, or text to continue.")] = "",
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", help="Read the prompt from a file, or from standard input if it is '-'."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the prompt format of the model.")
    ] = False,
    sampling: Sampling = SAMPLING,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of texts; sample N uses --seed plus N - 1.")] = 1,
    device: DeviceOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Generate text from a run, adapter or model directory."""
    from llmtrain.training.shutdown import StopFlag

    prompt = read_prompt(prompt, prompt_file)
    with StopFlag() as stop:
        with progress("Loading the model"):
            from llmtrain.inference.generate import generate_text, prompt_for
            from llmtrain.inference.load import load_model

            loaded = load_model(source, device)
        question = prompt_for(loaded, prompt, raw)
        before = prompt if isinstance(question, str) else ""  # of a text that continues it

        def sample(number: int, on_text: OnText | None) -> str:
            seeded = replace(sampling, seed=sampling.seed + number)
            return generate_text(loaded, question, seeded, stop=lambda: stop.requested, on_text=on_text)

        stop.enter_loop(saves=False)
        is_streamed = is_streaming(json_)
        samples: list[str] = []
        while len(samples) < num_samples and not (samples and stop.requested):
            number = len(samples)
            samples.append(stream_sample(sample, number, before) if is_streamed else sample(number, None))
    if not is_streamed:
        value = {"run": loaded.label, "step": loaded.step, "prompt": prompt, "text": samples[0], "samples": samples}
        show(json_, value, f"\n{SEPARATOR}\n".join(before + text for text in samples))
    if stop.requested:
        say("interrupted: the output is incomplete.", sys.stderr)
        raise typer.Exit(Interrupted.exit_code)


def stream_sample(sample: Callable[[int, OnText], str], number: int, before: str) -> str:
    """Print a sample while it is generated, after the text that it continues."""
    if number:
        say(SEPARATOR)
    stream = TextStream(before)
    text = sample(number, stream.show)
    stream.end(text)
    return text


def read_prompt(prompt: str, file: str | None) -> str:
    """The prompt, verbatim: a line break at the end of the file belongs to it."""
    if file is None:
        return prompt
    if prompt:
        raise UsageError("--prompt and --prompt-file cannot be combined.", remedy="Pass one of them.")
    if file == "-" and sys.stdin is None:
        raise UsageError("--prompt-file -: standard input is closed.", remedy="Pass a file, or --prompt.")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
        return data.decode()
    except OSError as problem:
        raise UsageError(f"--prompt-file: cannot read {file}: {problem.strerror or problem}.") from None
    except UnicodeDecodeError:
        raise DataError(f"--prompt-file: {file} is not UTF-8 text.") from None
