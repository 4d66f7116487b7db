"""Answers that a model writes: greedily, up to a text to stop at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.core.arguments import Sampling
from llmtrain.core.seeds import derive_seed
from llmtrain.errors import DataError, Interrupted
from llmtrain.training.tasks.task_model import TaskModel
from llmtrain.training.text_generation import Confirm, sample_ids

MAX_ANSWER_TOKENS = 256
"""lm_eval's default too."""
_STOP_MARGIN = 8
"""Tokens in addition to those of a stop text that are decoded to find it: it may begin inside of a token."""


@dataclass(frozen=True)
class Prompt:
    text: str
    stops: tuple[str, ...]
    """The answer ends before the first of them; the end-of-text tokens of the model end it too."""
    max_tokens: int = MAX_ANSWER_TOKENS
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Answer:
    text: str
    is_truncated: bool
    """Whether the beginning of the prompt was cut off."""


def answers(model: TaskModel, prompts: Sequence[Prompt]) -> list[Answer]:
    """One per prompt, in their order. Every rank has all of them."""
    found: dict[int, Answer] = {}
    world = model.world
    step = 1 if model.is_sharded else world.world_size
    for first in range(0, len(prompts), step):
        if model.stop():
            raise Interrupted("Interrupted before the tasks were scored.", remedy="Run the same command again.")
        model.on_progress("Answering", first, len(prompts))
        number = first if model.is_sharded else first + world.rank
        if number < len(prompts):
            found[number] = _answer(model, prompts[number], number)
    for of_rank in world.control.gather(found):
        found |= of_rank
    return [found[number] for number in range(len(prompts))]


def context_length(model: TaskModel) -> int:
    """Most tokens of a prompt and its answer."""
    return min(model.max_length, model.adapter.context_length())


def prompt_room(model: TaskModel, prompt: Prompt) -> int:
    """How many tokens of the prompt the model can read, so that there is room for the answer."""
    length = context_length(model)
    room = length - prompt.max_tokens
    if room < 1:
        raise DataError(
            f"The task asks for answers of up to {prompt.max_tokens} tokens, and the model reads at most {length}.",
            remedy="Leave this task out, or use a model with a longer context.",
        )
    return room


def _answer(model: TaskModel, prompt: Prompt, number: int) -> Answer:
    ids = model.encode(prompt.text) or [model.start_token]
    room = prompt_room(model, prompt)
    tokenizer = model.tokenizer
    ends = model.adapter.stop_token_ids()
    if tokenizer.end_of_text is not None:
        ends = ends | {tokenizer.end_of_text}
    has_stopped = False
    window = _STOP_MARGIN + max((len(tokenizer.encode(stop)) for stop in prompt.stops), default=0)

    def decode(new: Sequence[int]) -> str:
        return tokenizer.decode([token for token in new if token < tokenizer.vocab_size and token not in ends])

    def look_for_stop(new: Sequence[int]) -> None:
        nonlocal has_stopped
        tail = decode(new[-window:])
        has_stopped = any(stop in tail for stop in prompt.stops)

    sampling = Sampling(
        prompt.max_tokens, prompt.temperature, prompt.top_k, derive_seed(model.seed, "task", number), prompt.top_p
    )
    with model.autocast():
        new = sample_ids(
            model.adapter,
            model.module,
            ids[-room:],
            sampling,
            model.adapter.context_length(),
            ends,
            confirm=_until(model, lambda: has_stopped),
            on_ids=look_for_stop,
        )
    text = decode(new)
    for stop in prompt.stops:
        text = text.split(stop)[0]
    return Answer(text, len(ids) > room)


def _until(model: TaskModel, has_stopped: Callable[[], bool]) -> Confirm:
    """Takes each token until the text has a stop. Ranks that generate the same text together take rank 0's token: their
    logits may differ in the last bit."""

    def confirm(token: int) -> int | None:
        if has_stopped():
            return None
        if not model.is_sharded:
            return token
        return model.world.control.sum(token if model.world.is_first else 0)

    return confirm
