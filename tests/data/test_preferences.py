"""Preference pairs: the spellings that are recognized, tokens and masks, what is refused, and batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.config.data import PreferenceJsonlSection
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.preferences.pair_batches import PairBatches, PairEvalBatches, PairSamples, select_pairs
from llmtrain.data.preferences.pair_records import read_pair
from llmtrain.data.preferences.pair_store import PairStore
from llmtrain.data.preferences.preference_jsonl import PreferenceJsonl
from llmtrain.data.records.base import BadRecord
from llmtrain.errors import DataError
from preference_data import make_pairs
from tiny_llama import make_tokenizer

USER = {"role": "user", "content": "U"}
GOOD = {"role": "assistant", "content": "A"}
BAD = {"role": "assistant", "content": "B"}
SYSTEM = {"role": "system", "content": "S"}
Load = Callable[..., PreferenceJsonl]

SPELLINGS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "U", "chosen": "A", "rejected": "B"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "prompt and messages": {"prompt": "U", "chosen": [GOOD], "rejected": [BAD]},
    "conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "UltraFeedback": {"prompt": "U", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]},
    "axolotl intel": {"question": "U", "chosen": "A", "rejected": "B"},
    "axolotl icr": {"input": "U", "chosen": "A", "rejected": "B"},
    "axolotl argilla": {"instruction": "U", "chosen_response": "A", "rejected_response": "B"},
    "axolotl chat_template": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "LLaMA-Factory alpaca": {"instruction": "U", "input": "", "chosen": "A", "rejected": "B"},
    "LLaMA-Factory, earlier": {"instruction": "U", "output": ["A", "B"]},
    "LLaMA-Factory sharegpt": {
        "conversations": [{"from": "human", "value": "U"}],
        "chosen": {"from": "gpt", "value": "A"},
        "rejected": {"from": "gpt", "value": "B"},
    },
    "nulls of the datasets library": {
        "prompt": [{**USER, "name": None}],
        "chosen": [{**GOOD, "name": None}],
        "rejected": [{**BAD, "name": None}],
    },
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_recognized(name: str) -> None:
    found = read_pair(SPELLINGS[name])
    assert found.prompt == [USER]
    assert [found.chosen, found.rejected] == [GOOD, BAD]


def test_system_history_and_input_are_part_of_the_prompt() -> None:
    answers = {"chosen": "A", "rejected": "B"}
    assert read_pair({"system": "S", "prompt": "U", **answers}).prompt == [SYSTEM, USER]
    earlier = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert read_pair({"history": [["q", "a"]], "instruction": "U", **answers}).prompt == [*earlier, USER]
    assert read_pair({"system": "S", "input": "U", **answers}).prompt == [SYSTEM, USER]
    together = read_pair({"instruction": "U", "input": "I", **answers}).prompt
    assert together == [{"role": "user", "content": "U\n\nI"}]
    assert read_pair({"instruction": "", "input": "U", **answers}).prompt == [USER]
    assert read_pair({"chosen": "U A", "rejected": "U B"}).prompt is None


def test_tool_calls_belong_to_prompt_and_answers() -> None:
    """Of TRL, where the content of a call is null, and LLaMA-Factory's turns."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "content": "3"}
    prompt = [USER, {**call, "content": None}, result]
    assert read_pair({"prompt": prompt, "chosen": [GOOD], "rejected": [BAD]}).prompt == [USER, call, result]
    turns = [
        {"from": "human", "value": "U"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "3"},
    ]
    answers = {"chosen": {"from": "gpt", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}}
    assert read_pair({"conversations": turns, **answers}).prompt == [USER, call, result]
    found = read_pair({"prompt": [USER], "chosen": [{**call, "content": None}], "rejected": [BAD]})
    assert [found.chosen, found.rejected] == [call, BAD]


BAD_PAIRS = [
    ({"prompt": "U", "chosen": "A"}, "'chosen' and 'rejected' are missing; .*'chosen', 'prompt'"),
    ({"prompt": "U", "chosen": "A", "rejected": "A"}, "answers are equal"),
    ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "answers are equal"),
    ({"prompt": "U", "chosen": " ", "rejected": "A"}, "chosen answer is empty"),
    ({"prompt": "U", "chosen": "A", "rejected": ""}, "rejected answer is empty"),
    ({"prompt": "U", "chosen": 5, "rejected": "A"}, "must be text, got 5"),
    ({"prompt": "U", "chosen": [GOOD], "rejected": "A"}, "one answer is text"),
    ({"prompt": "U", "chosen": [], "rejected": []}, "empty"),
    ({"chosen": [GOOD], "rejected": [BAD]}, "no message in common"),
    ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD]}, "differs before its last message"),
    ({"prompt": "U", "chosen": [{"role": "x", "content": "A"}], "rejected": [BAD]}, "role must be one of"),
    ({"prompt": "U", "chosen": "\ud800", "rejected": "A"}, "surrogate"),
    ({"prompt": 5, "chosen": "A", "rejected": "B"}, "'prompt' must be text"),
    ({"prompt": "U", "chosen": "A", "rejected": "B", "tools": "{"}, "'tools' must be"),
    ({"question_text": "U", "chosen": "A", "rejected": "B"}, "no prompt, .* begin differently; .*'question_text'"),
    ({"conversations": [{"from": "function_call", "value": "{"}], "chosen": "A", "rejected": "B"}, "'function_call'"),
    ({"history": [["q"]], "prompt": "U", "chosen": "A", "rejected": "B"}, "'history' must be"),
]


@pytest.mark.parametrize(("record", "message"), BAD_PAIRS)
def test_pair_that_cannot_be_used_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        read_pair(record)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def dataset(records: list[Any] | None = None, tokenizer: str = "tokenizer", **changes: Any) -> PreferenceJsonl:
        directory = tmp_path / "tokenizer"
        if not directory.exists():
            make_tokenizer(directory)
        if records is None:
            make_pairs(tmp_path / "train.jsonl", 12)
        else:
            lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
            (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
        make_pairs(tmp_path / "val.jsonl", 4, first=100)
        section = PreferenceJsonlSection(
            train_file=str(tmp_path / "train.jsonl"),
            val_file=str(tmp_path / "val.jsonl"),
            cache_dir=str(tmp_path / "cache"),
            tokenizer=str(directory) if tokenizer == "tokenizer" else tokenizer,
            **changes,
        )
        return PreferenceJsonl(section, 1)

    return dataset


def texts(dataset: PreferenceJsonl) -> list[tuple[str, str, str]]:
    """Prompt, answer and whole text of each answer, decoded from the tokens."""
    prepared = dataset.prepare(1)
    assert isinstance(prepared.train, PairStore)
    answers = prepared.train.answers
    decode = prepared.tokenizer.decode
    found = []
    for start, end, *_ in answers.spans.tolist():
        ids = answers.tokens[start:end].tolist()
        first = answers.answers[start:end].tolist().index(1)
        assert all(answers.answers[start + first : end])
        found.append((decode(ids[:first]), decode(ids[first:]), decode(ids)))
    return found


def test_chat_template_renders_prompt_and_answers(load: Load) -> None:
    chosen, rejected = texts(load([SPELLINGS["text"]]))
    prompt = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert chosen[:2] == (prompt, "A<|im_end|>\n")
    assert rejected[:2] == (prompt, "B<|im_end|>\n")


def test_plain_format_has_headings_and_ends_with_the_end_of_text(load: Load) -> None:
    (prompt, answer, _), _ = texts(load([SPELLINGS["text"]], prompt_format="plain"))
    assert prompt == "### Instruction:\nU\n\n### Response:\n"
    assert answer == "A<|im_end|>"


def test_prompt_of_plain_texts_is_what_they_have_in_common(load: Load) -> None:
    record = {"chosen": "one two cat", "rejected": "one two dog"}
    (prompt, answer, whole), (other_prompt, *_) = texts(load([record]))
    assert prompt == other_prompt == "one two"
    assert answer == " cat<|im_end|>"
    assert whole == "one two cat<|im_end|>"


def test_prompt_and_answer_are_tokenized_as_one_text(load: Load, tmp_path: Path) -> None:
    """A token across the border belongs to the answer, and ids are those of the whole text."""
    template = "{{ messages[0]['content'] }}{% for m in messages[1:] %}{{ m['content'] }}{% endfor %}"
    dataset = load([{"prompt": "say re", "chosen": "d", "rejected": "en"}])
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    (prompt, answer, whole), _ = texts(dataset)
    assert whole == "say red"
    assert answer == "red"
    assert prompt == "say "


def test_template_that_changes_the_prompt_is_refused_with_both_texts(load: Load, tmp_path: Path) -> None:
    template = (
        "{% if add_generation_prompt %}think: {% else %}done: {% endif %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    dataset = load([SPELLINGS["text"]])
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=r"line 1: .*'think: U' .*'done: UA'"):
        dataset.prepare(1)


def test_tools_are_passed_to_the_template(load: Load, tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools[0]['name'] }}: {% endif %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    record = {**SPELLINGS["text"], "tools": json.dumps([{"name": "cat"}])}
    dataset = load([record])
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    assert texts(dataset)[0][0] == "cat: U"


def test_called_tools_are_written_by_the_template(load: Load, tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% for call in message['tool_calls'] or [] %}<{{ call['function']['name'] }}>{% endfor %}{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "cat"}}]}
    dataset = load([{"prompt": [USER], "chosen": [call], "rejected": [{**call, "tool_calls": None, "content": "B"}]}])
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    assert [found[2] for found in texts(dataset)] == ["U<cat>", "UB"]
    with pytest.raises(DataError, match="calls tools"):
        load([{"prompt": [USER], "chosen": [call], "rejected": [BAD]}], prompt_format="plain").prepare(1)


@pytest.mark.parametrize("bad", [{"prompt": "U", "chosen": "A", "rejected": "A"}, "{", {"prompt": "x"}])
def test_bad_pair_is_an_error_or_skipped(load: Load, bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: ") as caught:
        load([SPELLINGS["text"], bad]).prepare(1)
    assert "data.on_bad_example" in (caught.value.remedy or "")
    prepared = load([SPELLINGS["text"], bad, SPELLINGS["text"]], on_bad_example="skip").prepare(1)
    assert isinstance(prepared.train, PairStore)
    assert prepared.train.pair_count == 2
    assert prepared.train.location(1)[1] == 3
    assert "train.jsonl was dropped; the first is line 2: " in caplog.text
    assert "1 of 3 pairs of " in caplog.text


def test_pair_longer_than_the_context_is_an_error_or_skipped(load: Load) -> None:
    long = {"prompt": "U", "chosen": "one " * 50, "rejected": "B"}
    prepared = load([SPELLINGS["text"], long, long]).prepare(1)
    assert isinstance(prepared.train, PairStore)
    needed = int(prepared.train.lengths.max())
    with pytest.raises(DataError, match=rf"line 2: .* {needed} tokens .*block_size 40; 1 more") as caught:
        select_pairs(prepared.train, PreferenceJsonlSection(train_file="x"), 40, "training")
    assert "data.on_bad_example" in (caught.value.remedy or "")
    skipping = PreferenceJsonlSection(train_file="x", on_bad_example="skip")
    assert select_pairs(prepared.train, skipping, 40, "training").tolist() == [0]
    with pytest.raises(DataError, match=r"None of the 3 training pairs .*: they need \d+ to \d+"):
        select_pairs(prepared.train, skipping, 4, "training")


def samples_of(load: Load, packed: bool, block_size: int = 64) -> PairSamples:
    store = load().prepare(1).train
    assert isinstance(store, PairStore)
    return PairSamples(store, np.arange(store.pair_count), block_size, packed, 300)


@pytest.mark.parametrize("packed", [True, False])
def test_epoch_has_every_pair_once(load: Load, packed: bool) -> None:
    samples = samples_of(load, packed)
    batches = PairBatches(samples, 2, 2, seed=1)
    for epoch in (0, 1):
        seen: list[int] = []
        tokens = 0
        steps = range(batches.steps_in(epoch), batches.steps_in(epoch + 1))
        for number in range(steps.start * 2, steps.stop * 2):
            batch = batches[number]
            assert batch.pairs is not None
            seen += samples.pairs_of(batches._samples_of(number))
            tokens += batch.token_count
            lengths = [int((batch.targets[batch.pairs.answers == i] != IGNORE_INDEX).sum()) for i in range(2)]
            if batch.pairs.total:
                assert lengths == batch.pairs.lengths[:2].tolist()
        assert sorted(seen) == list(range(12))
        assert tokens == batches.tokens


def test_packed_pair_is_in_one_sequence_and_positions_restart(load: Load) -> None:
    samples = samples_of(load, packed=True)
    batch = max(PairEvalBatches(samples, 1), key=lambda each: each.pairs.total if each.pairs else 0)
    assert batch.pairs is not None
    assert batch.positions is not None
    assert batch.inputs.shape == (1, 128)
    assert batch.pairs.total > 1
    starts = (batch.positions[0] == 0).nonzero().squeeze(1).tolist()
    assert len(starts) in (2 * batch.pairs.total, 2 * batch.pairs.total + 1)  # one more for the padding
    assert int(batch.positions.max()) < 64


@pytest.mark.parametrize("packed", [True, False])
def test_pairs_of_a_step_do_not_depend_on_its_micro_batches(load: Load, packed: bool) -> None:
    samples = samples_of(load, packed)
    by_layout = []
    for size, count in ((1, 4), (2, 2), (4, 1)):
        batches = PairBatches(samples, size, count, seed=5)
        steps = []
        for step in range(batches.steps_in(2)):
            numbers = range(step * count, (step + 1) * count)
            steps.append(sorted(pair for number in numbers for pair in samples.pairs_of(batches._samples_of(number))))
        by_layout.append(steps)
    assert by_layout[0] == by_layout[1] == by_layout[2]


@pytest.mark.parametrize("packed", [True, False])
def test_step_with_more_micro_batches_than_pairs(load: Load, packed: bool) -> None:
    """The order of the samples takes memory for the pairs only."""
    batches = PairBatches(samples_of(load, packed), 2, 10**12, seed=1)
    assert batches.steps_in(1) == 1
    first = batches[0]
    last = batches[10**12 - 1]
    assert first.pairs is not None
    assert last.pairs is not None
    assert first.pairs.total > 0
    assert (last.pairs.total, last.target_count) == (0, 0)


def test_references_follow_their_pairs(load: Load) -> None:
    samples = samples_of(load, packed=True)
    references = np.arange(24, dtype=np.float32).reshape(12, 2)
    batches = PairBatches(samples, 2, 1, seed=1).with_references(references)
    batch = batches[0]
    assert batch.pairs is not None
    assert batch.pairs.reference is not None
    pairs = samples.pairs_of(batches._samples_of(0))
    assert batch.pairs.reference.tolist() == references[pairs].reshape(-1).tolist()


def test_store_is_reused_until_the_data_changes(load: Load, tmp_path: Path) -> None:
    first = load().prepare(1)
    assert load().prepare(1).fingerprint == first.fingerprint
    assert len(list((tmp_path / "cache" / "tokens").glob("*/meta.json"))) == 1
    assert load([SPELLINGS["text"], SPELLINGS["axolotl intel"]]).prepare(1).fingerprint != first.fingerprint


def test_pairs_of_a_dataset_directory(tmp_path: Path) -> None:
    make_pairs(tmp_path / "pairs" / "train.jsonl", 5)
    make_pairs(tmp_path / "pairs" / "test.jsonl", 2, first=100)
    section = PreferenceJsonlSection(
        dataset_name=str(tmp_path / "pairs"), val_split="test", cache_dir=str(tmp_path / "cache"), tokenizer="byte"
    )
    prepared = PreferenceJsonl(section, 1).prepare(1)
    found = [split.pair_count for split in (prepared.train, prepared.val) if isinstance(split, PairStore)]
    assert found == [5, 2]


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_built_in_tokenizers_read_pairs(load: Load, tokenizer: str) -> None:
    (prompt, answer, _), _ = texts(load([SPELLINGS["messages"]], tokenizer=tokenizer))
    assert prompt.endswith("### Response:\n")
    assert answer.startswith("A")
