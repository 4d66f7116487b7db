"""Text generation with a trained model."""

from collections.abc import Callable
from typing import Any

from llmtrain.config.mixture import has_examples
from llmtrain.core.arguments import Sampling, as_integer, as_number
from llmtrain.data.examples.prompts import has_chat_template, prompt_prefix, prompt_text
from llmtrain.errors import UsageError
from llmtrain.inference.load import LoadedModel
from llmtrain.training.text_generation import sample_text, until
from llmtrain.training.torch_settings import default_settings

# Beyond them logits overflow or are all equal.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100
Messages = list[dict[str, Any]]


def answers_questions(loaded: LoadedModel) -> bool:
    """Whether a prompt is a question, formatted like the training examples, rather than text to continue."""
    return has_examples(loaded.config.data) and (loaded.is_run or has_chat_template(loaded.tokenizer_dir))


def only_continues_text(loaded: LoadedModel) -> bool:
    """Whether it is known that the model was never trained to answer."""
    return loaded.is_run and not has_examples(loaded.config.data) and not has_chat_template(loaded.tokenizer_dir)


def prompt_for(loaded: LoadedModel, prompt: str, raw: bool) -> str | Messages:
    """A question as a conversation, formatted like the training examples; or text to continue."""
    is_question = bool(prompt) and not raw and answers_questions(loaded)
    return [{"role": "user", "content": prompt}] if is_question else prompt


@default_settings()
def generate_text(
    loaded: LoadedModel,
    prompt: str | Messages,
    sampling: Sampling,
    stop: Callable[[], bool] = lambda: False,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The continuation of a text, or the answer to a conversation. `on_text` is called with the text so far whenever
    there is more of it."""
    sampling = check_sampling(sampling)
    data = loaded.config.data
    if not isinstance(prompt, str):
        text = prompt_text(data, loaded.tokenizer_dir, prompt)
        prefix = prompt_prefix(data, loaded.tokenizer_dir, loaded.tokenizer)
    else:
        text = prompt
        prefix = [] if loaded.is_run else loaded.tokenizer.prefix_ids()
    with loaded.autocast():
        return sample_text(
            loaded.adapter,
            loaded.computing,
            loaded.tokenizer,
            text,
            sampling,
            loaded.adapter.context_length(),
            prefix=prefix,
            confirm=until(stop),
            on_text=on_text,
        )


def check_sampling(sampling: Sampling) -> Sampling:
    temperature = as_number("temperature", sampling.temperature)
    top_p = None if sampling.top_p is None else as_number("top_p", sampling.top_p)
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise UsageError(
            f"temperature must be 0, or between {MIN_TEMPERATURE} and {MAX_TEMPERATURE}, got {sampling.temperature!r}."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p must be above 0 and at most 1, got {sampling.top_p!r}.")
    return Sampling(
        as_integer("max_new_tokens", sampling.max_new_tokens),
        temperature,
        None if sampling.top_k is None else as_integer("top_k", sampling.top_k),
        as_integer("seed", sampling.seed),
        top_p,
    )
