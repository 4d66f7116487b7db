"""Tasks in files: what they may contain, how they are scored, and the errors of files that are none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundled_tasks
import pytest
from task_models import choice_items, gpt_model, llama_model, write_items

from llmtrain.config.task_specs import BUNDLED, TaskSpec, parse_tasks
from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.training.tasks.answers import Prompt, answers
from llmtrain.training.tasks.own_tasks import read_task
from llmtrain.training.tasks.task_model import ChatTemplate
from llmtrain.training.tasks.task_set import load_tasks

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda *items: write_items(tmp_path / "own.jsonl", list(items))


def test_choices_are_scored_as_lm_eval_scores_them(tmp_path: Path) -> None:
    """acc by the sum of log-probabilities, acc_norm by that sum per character of the choice."""
    items = choice_items(40)
    task = read_task(write_items(tmp_path / "own.jsonl", items), "own", 0, None)
    model = gpt_model()
    score = task.score(model)
    right = []
    right_per_character = []
    for item in items:
        totals = []
        for choice in item["choices"]:
            from llmtrain.training.tasks.likelihoods import Request, log_likelihoods

            pair = model.encode_pair(item["question"], " " + choice)
            totals.append(log_likelihoods(model, [Request(*pair, 0)])[0].value)
        lengths = [len(choice) for choice in item["choices"]]
        per_character = [total / length for total, length in zip(totals, lengths, strict=True)]
        right.append(float(totals.index(max(totals)) == item["answer"]))
        right_per_character.append(float(per_character.index(max(per_character)) == item["answer"]))
    assert score.values == {"acc": right, "acc_norm": right_per_character}
    assert score.metrics["acc"] == sum(right) / 40
    assert 0 < score.metrics["acc"] < 1
    assert (score.items, score.few_shot, score.truncated, score.chat_template) == (40, 0, 0, False)


def test_an_answer_may_be_an_index_or_the_text(write: Write) -> None:
    item = {"question": "One plus one is", "choices": ["two", "three"]}
    tasks = [read_task(write({**item, "answer": answer}), "own", 0, None) for answer in (0, "two")]
    assert tasks[0].items == tasks[1].items


def test_the_limit_takes_the_first_items_and_changes_the_hash(tmp_path: Path) -> None:
    path = write_items(tmp_path / "own.jsonl", choice_items(9))
    model = gpt_model()
    whole = read_task(path, "own", 0, None).score(model)
    part = read_task(path, "own", 0, 4).score(model)
    assert part.values["acc"] == whole.values["acc"][:4]
    assert part.sha256 != whole.sha256
    assert read_task(path, "own", 0, 4).score(model) == part


def test_examples_are_other_items_and_always_the_same(tmp_path: Path) -> None:
    path = write_items(tmp_path / "own.jsonl", choice_items(9))
    model = gpt_model()
    task = read_task(path, "own", 3, None)
    again = read_task(path, "own", 3, 2)
    for number, item in enumerate(task.items):
        context = task.context(number, model)
        assert context.endswith("\n\n" + item.question)
        assert context.count("\n\n") == 3
        examples = context.split("\n\n")[:-1]
        assert all(any(example == f"{other.question} {other.answer}" for other in task.items) for example in examples)
        assert f"{item.question} {item.answer}" not in examples
    assert again.context(1, model) == task.context(1, model)


def test_a_chat_model_gets_conversations(tmp_path: Path) -> None:
    base = tmp_path / "base"
    llama_model(base)
    model = llama_model(base, template=ChatTemplate(base))
    task = read_task(write_items(tmp_path / "own.jsonl", choice_items(4)), "own", 1, None)
    context = task.context(0, model)
    assert context.count("<|im_start|>user") == 2
    assert context.endswith("<|im_start|>assistant\n")
    assert task.score(model).chat_template


def test_answers_are_compared_exactly_and_by_what_they_contain(write: Write) -> None:
    """With the answer that the model gives, without it, and with a part of it."""
    model = gpt_model()
    (given,) = answers(model, [Prompt("a question", ("zzz",), 256)])
    text = given.text.strip()
    assert len(text) > 10
    rows: list[dict[str, Any]] = [
        {"prompt": "a question", "answer": answer, "until": "zzz"} for answer in (text, text[2:8].strip(), "nothing")
    ]
    score = read_task(write(*rows), "own", 0, None).score(model)
    assert score.values == {"exact_match": [1.0, 0.0, 0.0], "contains": [1.0, 1.0, 0.0]}


def test_an_answer_ends_before_the_text_to_stop_at() -> None:
    model = gpt_model()
    (whole,) = answers(model, [Prompt("a question", (), 60)])
    stop = whole.text[10:13]
    (cut,) = answers(model, [Prompt("a question", (stop,), 60)])
    assert cut.text == whole.text.split(stop)[0]


def test_bundled_tasks_are_what_the_tool_writes() -> None:
    for name, make in bundled_tasks.TASKS.items():
        assert (bundled_tasks.FOLDER / f"{name}.jsonl").read_text() == bundled_tasks.text_of(make())
    assert set(bundled_tasks.TASKS) == set(BUNDLED)
    assert [task.name for task in load_tasks(parse_tasks([",".join(BUNDLED)], "--tasks"), Path("nowhere"), None).own]


GOOD = {"question": "q", "choices": ["a", "b"], "answer": 0}
BAD_ITEMS: dict[str, list[Any]] = {
    "no fields": [{"text": "a"}],
    "answer out of range": [{**GOOD, "answer": 2}],
    "answer not a choice": [{**GOOD, "answer": "c"}],
    "answer a flag": [{**GOOD, "answer": True}],
    "one choice": [{**GOOD, "choices": ["a"]}],
    "choices no list": [{**GOOD, "choices": "ab"}],
    "empty choice": [{**GOOD, "choices": ["a", " "]}],
    "empty question": [{**GOOD, "question": ""}],
    "question no text": [{**GOOD, "question": ["q"]}],
    "two kinds": [GOOD, {"prompt": "p", "answer": "a"}],
    "until no text": [{"prompt": "p", "answer": "a", "until": 3}],
    "no object": [["a"]],
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_a_bad_item_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in BAD_ITEMS[name]))
    with pytest.raises(DataError) as error:
        read_task(path, "own", 0, None)
    assert "own.jsonl" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"question": ', b"\xff\xfe"])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError):
        read_task(path, "own", 0, None)


def test_answers_without_an_end_are_refused_for_a_base_model(write: Write) -> None:
    task = read_task(write({"prompt": "p", "answer": "a"}), "own", 0, None)
    with pytest.raises(UsageError) as error:
        task.score(gpt_model())
    assert "until" in str(error.value.remedy)


def test_items_that_are_all_too_long_are_refused(write: Write) -> None:
    path = write({"question": "long " * 200, "choices": ["a", "b"], "answer": 0})
    with pytest.raises(DataError):
        load_tasks([TaskSpec("own", file=path)], Path("nowhere"), None).score(gpt_model())


def test_names_of_tasks() -> None:
    specs = parse_tasks(["hellaswag, arc_easy:5", "some/my tasks.jsonl:2"], "--tasks")
    assert specs == [
        TaskSpec("hellaswag"),
        TaskSpec("arc_easy", 5),
        TaskSpec("my-tasks", 2, Path("some/my tasks.jsonl")),
    ]
    for wrong in ("", ",", "a,a", "a:1,a:2", "two words", "?"):
        with pytest.raises(UsageError):
            parse_tasks([wrong], "--tasks")


def test_too_many_examples_and_a_missing_file(write: Write) -> None:
    path = write(GOOD, GOOD)
    for spec in (TaskSpec("own", 2, path), TaskSpec("own", None, path.with_name("no.jsonl"))):
        with pytest.raises(LlmtrainError):
            load_tasks([spec], Path("nowhere"), None)


LONG = "x" * 600
SHORT_CHOICES = {"choices": ["a", "b"], "answer": 0}


def test_an_item_longer_than_the_context_loses_its_beginning_and_is_counted(write: Write) -> None:
    model = gpt_model()
    end = LONG[-(model.max_length - 1) :]  # what the model reads before " a" or " b"
    cut = read_task(write({"question": "y" + LONG, **SHORT_CHOICES}, GOOD), "own", 0, None).score(model)
    same = read_task(write({"question": end, **SHORT_CHOICES}, GOOD), "own", 0, None).score(model)
    assert (cut.truncated, same.truncated) == (1, 0)
    assert cut.values == same.values


def test_answers_to_prompts_longer_than_the_context_are_counted(write: Write) -> None:
    """Half of a short context is for the answer."""
    model = gpt_model(block_size=64)
    rows = [{"prompt": prompt, "answer": "a", "until": list("abcdefgh")} for prompt in ("x" * 33, "x" * 32, "x")]
    assert read_task(write(*rows), "own", 0, None).score(model).truncated == 1


@pytest.mark.parametrize("item", [{"question": LONG, **SHORT_CHOICES}, {"prompt": LONG, "answer": "a", "until": "b"}])
def test_a_context_shorter_than_every_item_is_found_before_scoring(write: Write, item: dict[str, Any]) -> None:
    calls: list[Any] = []
    model = gpt_model(on_progress=lambda *call: calls.append(call))
    with pytest.raises(DataError, match="own"):
        read_task(write(item, item), "own", 0, None).score(model)
    assert calls == []


@pytest.mark.parametrize(
    "item",
    [
        {"question": "\ud800", "choices": ["a", "b"], "answer": 0},
        {"prompt": "a", "answer": "b", "until": ["\n", "\ud800"]},
    ],
)
def test_text_that_cannot_be_encoded_is_found_when_it_is_read(tmp_path: Path, item: dict[str, Any]) -> None:
    path = tmp_path / "surrogate.jsonl"
    path.write_text(json.dumps(item) + "\n")
    with pytest.raises(DataError) as error:
        read_task(path, "surrogate", 0, None)
    assert f"{path}:1" in error.value.what
