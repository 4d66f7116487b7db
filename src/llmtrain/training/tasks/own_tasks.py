"""Tasks in files of records: `{"question", "choices", "answer"}` or `{"prompt", "answer"}`, one item per record.

The score of a choice is the log-likelihood of " " and its text after the question; acc counts how often the answer has
the highest one, acc_norm how often it has the highest one per character, both as lm_eval defines them. A prompt is
answered greedily: exact_match compares the whole answer without the white space around it, contains looks for it.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.core.seeds import derive_seed
from llmtrain.data.records.base import BadRecord
from llmtrain.data.records.open_file import open_records
from llmtrain.errors import DataError, UsageError
from llmtrain.training.tasks.answers import MAX_ANSWER_TOKENS, Prompt, answers, context_length, prompt_room
from llmtrain.training.tasks.item_kinds import METRICS, SHAPES, Kind, kind_of
from llmtrain.training.tasks.likelihoods import Request, is_cut, log_likelihoods
from llmtrain.training.tasks.score import TaskScore, check_readable, items_sha256, mean, standard_error
from llmtrain.training.tasks.task_model import Messages, TaskModel

FEW_SHOT_SEED = 1234
_BETWEEN = "\n\n"
"""Between an example and the next question."""


@dataclass(frozen=True)
class Item:
    question: str
    choices: tuple[str, ...]
    """Empty if the model writes the answer."""
    answer: str
    until: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnTask:
    name: str
    kind: Kind
    items: list[Item]
    few_shot: int
    limit: int | None

    @property
    def metrics(self) -> tuple[str, ...]:
        return METRICS[self.kind]

    @property
    def scored(self) -> list[Item]:
        return self.items[: self.limit]

    def score(self, model: TaskModel) -> TaskScore:
        score_items = _score_choices if self.kind == "choices" else _score_answers
        values, truncated = score_items(self, model)
        return TaskScore(
            task=self.name,
            version=None,
            few_shot=self.few_shot,
            items=len(self.scored),
            truncated=truncated,
            chat_template=model.template is not None,
            sha256=items_sha256([json.dumps([each.question, each.choices, each.answer]) for each in self.scored]),
            metrics={name: mean(found) for name, found in values.items()},
            stderr={name: standard_error(found) for name, found in values.items()},
            values=values,
        )

    def context(self, number: int, model: TaskModel) -> str:
        """The text before the answer of an item: examples, then its question."""
        item = self.items[number]
        examples = self._examples(number)
        if model.template is None:
            return "".join(f"{each.question} {each.answer}{_BETWEEN}" for each in examples) + item.question
        messages: Messages = []
        for each in examples:
            messages.append({"role": "user", "content": each.question})
            messages.append({"role": "assistant", "content": each.answer})
        return model.chat([*messages, {"role": "user", "content": item.question}])

    def _examples(self, number: int) -> list[Item]:
        """Other items of the file; which ones depends on the number of the item only."""
        others = [other for index, other in enumerate(self.items) if index != number] if self.few_shot else []
        return random.Random(derive_seed(FEW_SHOT_SEED, number)).sample(others, self.few_shot)


def read_task(path: Path, name: str, few_shot: int, limit: int | None) -> OwnTask:
    """The task in a file; raises DataError for the first record that is none."""
    kind: Kind | None = None
    items = []
    for record in open_records(path).read():
        place = f"{path}:{record.number}"
        if isinstance(record.value, BadRecord):
            raise DataError(f"{place}: {record.value.reason}.", remedy=record.value.remedy)
        found = kind_of(record.value, place)
        if kind is not None and found != kind:
            raise DataError(
                f"{place}: a task has one kind of items, and the ones before are another kind.",
                remedy="Put them into two files.",
            )
        kind = found
        items.append(_item(record.value, kind, place))
    if kind is None:
        raise DataError(f"{path} has no items.", remedy=f"Each line must be {SHAPES}.")
    if few_shot >= len(items):
        raise UsageError(
            f"--tasks {name}:{few_shot} needs {few_shot} examples besides the item itself, and {path} has "
            f"{len(items)} items.",
            remedy="Ask for fewer examples, or add items.",
        )
    return OwnTask(name, kind, items, few_shot, limit)


def _item(value: dict[str, Any], kind: Kind, place: str) -> Item:
    if kind == "answers":
        until = value.get("until", [])
        stops = [until] if isinstance(until, str) else until
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise DataError(f"{place}: until must be a text or a list of texts, got {json.dumps(until):.60}.")
        for stop in stops:
            _check_encodable(stop, "until", place)
        return Item(
            _text(value["prompt"], "prompt", place), (), _text(value["answer"], "answer", place).strip(), tuple(stops)
        )
    choices = value["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"{place}: choices must be a list of at least two texts, got {json.dumps(choices):.60}.")
    texts = [_text(choice, "a choice", place) for choice in choices]
    return Item(_text(value["question"], "question", place), tuple(texts), _choice(value["answer"], texts, place))


def _choice(answer: Any, choices: Sequence[str], place: str) -> str:
    """The answer among the choices, by its index from 0 or by its text."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return choices[answer]
    if isinstance(answer, str) and answer in choices:
        return answer
    raise DataError(
        f"{place}: answer must be one of the choices or its index from 0 to {len(choices) - 1}, got "
        f"{json.dumps(answer):.60}."
    )


def _text(value: Any, field: str, place: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DataError(f"{place}: {field} must be text, got {json.dumps(value):.60}.")
    if not value.strip():
        raise DataError(f"{place}: {field} is empty.")
    _check_encodable(value, field, place)
    return value


def _check_encodable(text: str, field: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place}: {field} contains an unpaired surrogate, which is not text.") from None


# Scores


def _score_choices(task: OwnTask, model: TaskModel) -> tuple[dict[str, list[float]], int]:
    """Metric -> value of each item, and how many items were truncated."""
    delimiter = " " if model.template is None else ""
    requests = []
    for number, item in enumerate(task.scored):
        context = task.context(number, model)
        for choice in item.choices:
            before, tokens = model.encode_pair(context, delimiter + choice)
            requests.append(Request(before, tokens, number))
    readable = {request.item for request in requests} - {
        request.item for request in requests if is_cut(request, model.max_length)
    }
    check_readable({task.name: len(readable)}, model.max_length)
    found = iter(log_likelihoods(model, requests))
    acc = []
    acc_norm = []
    truncated = 0
    for item in task.scored:
        likelihoods = [next(found) for _ in item.choices]
        truncated += any(each.is_truncated for each in likelihoods)
        gold = item.choices.index(item.answer)
        totals = [each.value for each in likelihoods]
        per_character = [total / len(choice) for total, choice in zip(totals, item.choices, strict=True)]
        acc.append(float(totals.index(max(totals)) == gold))
        acc_norm.append(float(per_character.index(max(per_character)) == gold))
    return {"acc": acc, "acc_norm": acc_norm}, truncated


def _score_answers(task: OwnTask, model: TaskModel) -> tuple[dict[str, list[float]], int]:
    if model.template is None and not all(item.until for item in task.scored):
        raise UsageError(
            f"Task '{task.name}' has prompts to answer, and a model without a chat template does not end its answers.",
            remedy='Add the text that ends an answer to each item, such as "until": "\\n", or use a chat model.',
        )
    # Half of a short context is for the answer.
    length = context_length(model)
    tokens = max(1, min(MAX_ANSWER_TOKENS, length // 2))
    prompts = [Prompt(task.context(number, model), item.until, tokens) for number, item in enumerate(task.scored)]
    readable = [prompt for prompt in prompts if len(model.encode(prompt.text)) <= prompt_room(model, prompt)]
    check_readable({task.name: len(readable)}, length)
    found = answers(model, prompts)
    texts = [answer.text.strip() for answer in found]
    exact = [float(text == item.answer) for text, item in zip(texts, task.scored, strict=True)]
    contains = [float(item.answer in text) for text, item in zip(texts, task.scored, strict=True)]
    return {"exact_match": exact, "contains": contains}, sum(answer.is_truncated for answer in found)
