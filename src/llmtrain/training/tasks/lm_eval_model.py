"""The model in memory as lm_eval sees it: text in, log-likelihoods and answers out."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llmtrain.errors import UsageError
from llmtrain.training.tasks.answers import MAX_ANSWER_TOKENS, Prompt, answers
from llmtrain.training.tasks.likelihoods import Likelihood, Request, log_likelihoods
from llmtrain.training.tasks.task_model import Messages, TaskModel


class LmEvalModel(TemplateLM):  # type: ignore[misc]
    """Every rank gets all requests and all results: to lm_eval it is one process."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model
        self.truncated: set[tuple[str, int]] = set()
        """(task, number of the item) of items whose beginning was cut off."""

    @property
    def eot_token_id(self) -> int:
        end = self.model.tokenizer.end_of_text
        return self.model.start_token if end is None else end

    @property
    def prefix_token_id(self) -> int:
        return self.model.start_token

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.sha256()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model.encode(string, adds_prefix=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        return self.model.chat(chat_history, continues=not add_generation_prompt)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:  # noqa: ARG002
        encoded = []
        for instance in requests:
            before, tokens = self.model.encode_pair(*instance.args)
            encoded.append(Request(before, tokens, (instance.task_name, instance.doc_id)))
        found = log_likelihoods(self.model, encoded)
        self._count_truncated(requests, found)
        return [(each.value, each.is_greedy) for each in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Of a whole text, in windows that overlap by one token."""
        windows: list[Request] = []
        owners = []
        for number, instance in enumerate(requests):
            tokens = self.model.encode(instance.args[0])
            for pair in get_rolling_token_windows(tokens, self.model.start_token, self.model.max_length, context_len=1):
                before, after = make_disjoint_window(pair)
                windows.append(Request(before, after, len(windows)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, each in zip(owners, log_likelihoods(self.model, windows), strict=True):
            totals[owner] += each.value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        prompts = [self._prompt(instance) for instance in requests]
        found = answers(self.model, prompts)
        for instance, answer in zip(requests, found, strict=True):
            if answer.is_truncated:
                self.truncated.add((str(instance.task_name), int(instance.doc_id)))
        return [answer.text for answer in found]

    def _prompt(self, instance: Instance) -> Prompt:
        text, options = instance.args
        values: dict[str, Any] = dict(normalize_gen_kwargs(options, MAX_ANSWER_TOKENS))
        stops = tuple(stop for stop in values.get("until", ()) if stop)
        if not stops and self.model.template is None:
            raise UsageError(
                f"Task '{instance.task_name}' has no text at which an answer ends, and a model without a chat template "
                "does not end its answers.",
                remedy="Choose another task, or use a chat model.",
            )
        is_sampled = bool(values.get("do_sample"))
        return Prompt(
            text,
            stops,
            int(values["max_gen_toks"]),
            float(values.get("temperature", 1.0)) if is_sampled else 0.0,
            values.get("top_p") if is_sampled else None,
            values.get("top_k") if is_sampled else None,
        )

    def _count_truncated(self, requests: Sequence[Instance], found: Sequence[Likelihood]) -> None:
        for instance, each in zip(requests, found, strict=True):
            if each.is_truncated:
                self.truncated.add((str(instance.task_name), int(instance.doc_id)))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        raise NotImplementedError("loglikelihood does it")
