"""llmtrain generate: generate text with a trained model."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.options import SAMPLING, SOURCES, DeviceOption, JsonOption, show, with_option_groups
from llmtrain.commands.side_by_side import columns
from llmtrain.commands.spinner import progress
from llmtrain.commands.stream import TextStream, is_streaming
from llmtrain.core.arguments import Sampling, Source
from llmtrain.core.terminal import say
from llmtrain.errors import DataError, Interrupted, UsageError

if TYPE_CHECKING:
    from llmtrain.training.shutdown import StopFlag

SEPARATOR = "---"
"""Line between two samples."""
OnText = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What every model is asked."""

    prompt: str
    raw: bool
    sampling: Sampling
    num_samples: int
    device: str


@dataclass(frozen=True)
class Answers:
    """The texts of one model."""

    run: str
    step: int | None
    before: str
    """The text that they continue."""
    samples: list[str]

    @property
    def head(self) -> str:
        return self.run if self.step is None else f"{self.run} at step {self.step}"

    @property
    def texts(self) -> list[str]:
        return [self.before + text for text in self.samples]

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run, "step": self.step, "text": self.samples[0], "samples": self.samples}


@with_option_groups
def command(
    sources: Sequence[Source] = SOURCES,
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
    """Generate text from a run, adapter or model directory; from several with the same prompt and seed, shown beside
    each other."""
    from llmtrain.training.shutdown import StopFlag

    prompt = read_prompt(prompt, prompt_file)
    request = Request(prompt, raw, sampling, num_samples, device)
    is_streamed = is_streaming(json_) and len(sources) == 1
    answers: list[Answers] = []
    with StopFlag() as stop:
        for source in sources:
            if not stop.requested:
                answers.append(ask(source, request, is_streamed, stop))
    if not is_streamed:
        show_answers(prompt, answers, is_several=len(sources) > 1, as_json=json_)
    if stop.requested:
        say("interrupted: the output is incomplete.", sys.stderr)
        raise typer.Exit(Interrupted.exit_code)


def ask(source: Source, request: Request, is_streamed: bool, stop: "StopFlag") -> Answers:
    """The texts of one model, which are printed meanwhile if `is_streamed`."""
    with progress("Loading the model"):
        from llmtrain.inference.generate import generate_text, prompt_for
        from llmtrain.inference.load import load_model

        loaded = load_model(source, request.device)
    question = prompt_for(loaded, request.prompt, request.raw)
    before = request.prompt if isinstance(question, str) else ""  # of a text that continues it

    def sample(number: int, on_text: OnText | None) -> str:
        seeded = replace(request.sampling, seed=request.sampling.seed + number)
        return generate_text(loaded, question, seeded, stop=lambda: stop.requested, on_text=on_text)

    stop.enter_loop(saves=False)
    samples: list[str] = []
    while len(samples) < request.num_samples and not (samples and stop.requested):
        number = len(samples)
        samples.append(stream_sample(sample, number, before) if is_streamed else sample(number, None))
    return Answers(loaded.label, loaded.step, before, samples)


def show_answers(prompt: str, answers: "Sequence[Answers]", is_several: bool, as_json: bool) -> None:
    """Print the texts of one model below each other, those of several beside each other."""
    values = [each.as_dict() for each in answers]
    if not is_several:
        show(as_json, {"prompt": prompt, **values[0]}, f"\n{SEPARATOR}\n".join(answers[0].texts))
        return
    heads = [each.head for each in answers]
    count = max(len(each.texts) for each in answers)
    blocks = []
    for number in range(count):
        texts = ["".join(each.texts[number : number + 1]) for each in answers]
        blocks.append(columns(heads, texts))
    show(as_json, {"prompt": prompt, "models": values}, f"\n{SEPARATOR}\n".join(blocks))


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
