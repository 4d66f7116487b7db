"""Examples from files and datasets, as text and as tokens: what is accepted, and what is refused with which message."""

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers

from llmtrain import registry
from llmtrain.config.data import ChatJsonlSection, InstructJsonlSection
from llmtrain.config.schema import SECTIONS_BY_NAME
from llmtrain.data.base import PreparedData
from llmtrain.data.examples.json_examples import JsonExamples
from llmtrain.data.examples.prompts import has_chat_template, prompt_text
from llmtrain.data.examples.selection import select_examples
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.data.tokenizers.load import load_saved_tokenizer, load_tokenizer
from llmtrain.errors import DataError, UsageError
from record_files import write_rows

MakeTokenizer = Callable[..., Path]
Write = Callable[..., str]
EXAMPLE = {"instruction": "Say a.", "input": "", "output": "a"}
WITH_INPUT = {"instruction": "Repeat.", "input": "b c", "output": "b c"}
PLAIN = "### Instruction:\nSay a.\n\n### Response:\n"
PLAIN_WITH_INPUT = "### Instruction:\nRepeat.\n\n### Input:\nb c\n\n### Response:\n"


def module(name: str = "instruct_jsonl", **fields: Any) -> JsonExamples:
    data: JsonExamples = registry.resolve("data.name", name, registry.DATA)(SECTIONS_BY_NAME["data"][name](**fields), 1)
    return data


def prepare(cache: Path, name: str = "instruct_jsonl", **fields: Any) -> PreparedData:
    return module(name, cache_dir=str(cache / "cache"), **fields).prepare(threads=2)


def texts(prepared: PreparedData, split: str = "train") -> list[tuple[str, str]]:
    """(whole example, its answers), decoded from the tokens."""
    store = getattr(prepared, split)
    decoded = []
    for start, end, *_ in store.spans.tolist():
        ids, answers = store.tokens[start:end], store.answers[start:end] == 1
        decoded.append((prepared.tokenizer.decode(ids.tolist()), prepared.tokenizer.decode(ids[answers].tolist())))
    return decoded


def segments(data: JsonExamples, split: Any = "train") -> list[list[tuple[str, bool]]]:
    return [[tuple(segment) for segment in example.segments] for example in data.examples(split)]  # type: ignore[misc]


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("split", ["train", "val"])
def test_single_example_that_cannot_be_used_is_reported_first(tmp_path: Path, split: Any) -> None:
    (tmp_path / "one.jsonl").write_text('{"question": "a", "reply": "b"}\n')
    data = module("instruct_jsonl", cache_dir=str(tmp_path / "cache"), train_file=str(tmp_path / "one.jsonl"))
    with pytest.raises(DataError, match="line 1"):
        list(data.examples(split))


class TestPlain:
    def test_tokens_answers_and_locations(self, tmp_path: Path, write_jsonl: Write) -> None:
        train = write_jsonl(EXAMPLE, "", WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train)
        assert texts(prepared) == [(f"{PLAIN}a\0", "a\0"), (f"{PLAIN_WITH_INPUT}b c\0", "b c\0")]
        store = prepared.train
        assert isinstance(store, ExampleStore)
        assert (store.example_count, len(store)) == (2, len(f"{PLAIN}a\0{PLAIN_WITH_INPUT}b c\0"))
        assert [store.location(0), store.location(1)] == [((train, "line"), 1), ((train, "line"), 3)]
        assert store.tokens.dtype == np.uint8
        assert not store.tokens.flags.writeable

    @pytest.mark.parametrize("tokenizer", [None, "byte", "char"])
    def test_built_in_tokenizers(self, tmp_path: Path, write_jsonl: Write, tokenizer: str | None) -> None:
        train = write_jsonl(EXAMPLE, WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer=tokenizer)
        end = "" if tokenizer == "char" else "\0"
        assert texts(prepared)[0] == (f"{PLAIN}a{end}", f"a{end}")

    @pytest.mark.shared
    @pytest.mark.usefixtures("gpt2")
    def test_gpt2(self, tmp_path: Path, write_jsonl: Write) -> None:
        train = write_jsonl(EXAMPLE)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer="gpt2")
        assert texts(prepared) == [(f"{PLAIN}a<|endoftext|>", "a<|endoftext|>")]

    def test_missing_or_null_input_is_optional(self, write_jsonl: Write) -> None:
        train = write_jsonl({"instruction": "Say a.", "output": "a"}, {**EXAMPLE, "input": None})
        assert segments(module(train_file=train, val_file=train)) == [[(PLAIN, False), ("a", True)]] * 2

    def test_custom_field_names(self, write_jsonl: Write) -> None:
        train = write_jsonl({"q": "Repeat.", "context": "b c", "a": "b c"})
        fields = {"instruction_field": "q", "input_field": "context", "output_field": "a"}
        data = module(train_file=train, val_file=train, **fields)
        assert segments(data) == [[(PLAIN_WITH_INPUT, False), ("b c", True)]]

    @pytest.mark.parametrize("add", [True, False])
    def test_special_tokens_are_prepended(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer, add: bool
    ) -> None:
        directory = with_bos(make_tokenizer(None))
        train = write_jsonl(EXAMPLE)
        fields = {"tokenizer": str(directory), "add_special_tokens": add}
        [(whole, answer)] = texts(prepare(tmp_path, train_file=train, val_file=train, **fields))
        assert whole == ("<|im_start|>" if add else "") + f"{PLAIN}a<|im_end|>"
        assert answer == "a<|im_end|>"

    def test_prompt_is_tokenized_as_at_inference(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer
    ) -> None:
        directory = make_tokenizer()
        train = write_jsonl(EXAMPLE, WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer=str(directory))
        config = InstructJsonlSection(train_file=train)
        for index, question in enumerate(("Say a.", "Repeat.\n\nb c")):
            prompt = prompt_text(config, directory, [{"role": "user", "content": question}])
            start, end = prepared.train.spans[index, :2]  # type: ignore[union-attr]
            ids = prepared.train.tokens[start:end]
            is_prompt = prepared.train.answers[start:end] == 0  # type: ignore[union-attr]
            assert ids[is_prompt].tolist() == prepared.tokenizer.encode(prompt).tolist()


def with_bos(directory: Path) -> Path:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


class TestTokenizers:
    def test_prefix_ids_are_what_the_tokenizer_prepends(self, make_tokenizer: MakeTokenizer) -> None:
        plain = load_tokenizer(str(make_tokenizer(name="plain")))
        assert plain.prefix_ids() == ByteTokenizer().prefix_ids() == []
        bos = load_tokenizer(str(with_bos(make_tokenizer(name="bos"))))
        assert bos.decode(bos.prefix_ids()) == "<|im_start|>"

    @pytest.mark.parametrize("as_file", [True, False])
    def test_saved_tokenizer_keeps_its_template(
        self, make_tokenizer: MakeTokenizer, tmp_path: Path, as_file: bool
    ) -> None:
        directory = make_tokenizer(as_file=as_file)
        for name in ("special_tokens_map.json", "added_tokens.json"):
            (directory / name).write_text('{"eos_token": "<|im_end|>"}' if "map" in name else "{}")
        saved = tmp_path / "saved"
        load_tokenizer(str(directory)).save(saved)
        assert {path.name for path in directory.iterdir()} <= {path.name for path in saved.iterdir()}
        assert has_chat_template(saved)
        messages = [{"role": "user", "content": "Hi"}]
        config = ChatJsonlSection(train_file="x")
        assert prompt_text(config, saved, messages) == prompt_text(config, directory, messages)
        load_saved_tokenizer(saved).save(saved)  # onto itself
        assert has_chat_template(saved)

    def test_added_token_that_strips_the_next_space(self, make_tokenizer: MakeTokenizer) -> None:
        directory = make_tokenizer()
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([tokenizers.AddedToken("<|sep|>", rstrip=True)])
        tokenizer.save(str(directory / "tokenizer.json"))
        loaded, text = load_tokenizer(str(directory)), "a pod<|sep|> is a<|sep|> group"
        assert [ids.tolist() for ids in loaded.encode_many([text], 1)] == [loaded.encode(text).tolist()]


class TestChat:
    def test_instructions_as_conversations(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer
    ) -> None:
        train = write_jsonl(EXAMPLE, WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer=str(make_tokenizer()))
        begin = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        answers = ["a<|im_end|>\n", "b c<|im_end|>\n"]
        assert texts(prepared) == [
            (begin.format("Say a.") + answers[0], answers[0]),
            (begin.format("Repeat.\n\nb c") + answers[1], answers[1]),
        ]
        store = prepared.train
        assert store.tokens[0] == prepared.tokenizer.encode("<|im_start|>")[0]  # a single special token

    def test_conversation_with_several_answers(self, write_jsonl: Write, make_tokenizer: MakeTokenizer) -> None:
        turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("tool", "T"), ("assistant", "B"), ("user", "V")]
        train = write_jsonl(chat(*turns))
        data = module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer()))
        assert segments(data) == [
            [
                ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n", False),
                ("A<|im_end|>\n", True),
                ("<|im_start|>tool\nT<|im_end|>\n<|im_start|>assistant\n", False),
                ("B<|im_end|>\n", True),
            ]
        ]

    @pytest.mark.parametrize(
        ("fields", "as_file", "template", "expected"),
        [
            ({}, False, True, "chat"),
            ({}, True, True, "chat"),
            ({}, False, False, "plain"),
            ({"prompt_format": "plain"}, False, True, "plain"),
            ({"prompt_format": "chat"}, True, True, "chat"),
        ],
    )
    def test_prompt_format(
        self, make_tokenizer: MakeTokenizer, fields: Any, as_file: bool, template: bool, expected: str
    ) -> None:
        directory = make_tokenizer(*([] if template else [None]), as_file=as_file)
        assert has_chat_template(directory) == template
        assert module(train_file="x", tokenizer=str(directory), **fields).format == expected
        text = prompt_text(
            InstructJsonlSection(train_file="x", **fields), directory, [{"role": "user", "content": "Hi"}]
        )
        assert text.startswith("<|im_start|>" if expected == "chat" else "### Instruction:\nHi\n\n### Response:\n")

    @pytest.mark.parametrize("tokenizer", [True, False])
    @pytest.mark.parametrize("name", ["instruct_jsonl", "chat_jsonl"])
    def test_missing_chat_template_is_refused(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer, name: str, tokenizer: bool
    ) -> None:
        train = write_jsonl(EXAMPLE)
        spec = str(make_tokenizer(None)) if tokenizer else "byte"
        fields = {"prompt_format": "chat"} if name == "instruct_jsonl" else {}
        with pytest.raises(UsageError, match="chat template") as caught:
            prepare(tmp_path, name, train_file=train, val_file=train, tokenizer=spec, **fields)
        assert "data.tokenizer" in (caught.value.remedy or "")

    def test_plain_prompt_of_several_turns(self) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Say a."},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "Again."},
        ]
        text = prompt_text(InstructJsonlSection(), None, messages)
        assert text == f"Be brief.\n\n{PLAIN}a\n\n### Instruction:\nAgain.\n\n### Response:\n"

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}{% endfor %}", 2),
            # Like templates that drop the reasoning of earlier answers: the next prompt differs from the text so far.
            ("{% for m in messages %}{{ m['content'] if loop.last else m['content'][0] }}{% endfor %}", 4),
        ],
    )
    def test_template_that_rewrites_earlier_turns_is_refused(
        self, write_jsonl: Write, make_tokenizer: MakeTokenizer, template: str, message: int
    ) -> None:
        train = write_jsonl(chat(("user", "U"), ("assistant", "long"), ("user", "V"), ("assistant", "B")))
        data = module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer(template)))
        with pytest.raises(DataError, match=rf"train\.jsonl, line 1: .*message {message} "):
            segments(data)

    def test_exception_of_the_template_is_reported(self, write_jsonl: Write, make_tokenizer: MakeTokenizer) -> None:
        template = "{{ raise_exception('Roles must alternate.') }}"
        train = write_jsonl(chat(("user", "U"), ("assistant", "A")))
        fields: Any = {"train_file": train, "val_file": train, "tokenizer": str(make_tokenizer(template))}
        with pytest.raises(DataError, match=r"train\.jsonl, line 1: .*Roles must alternate"):
            segments(module("chat_jsonl", **fields))
        with pytest.raises(DataError, match="Roles must alternate"):
            prompt_text(ChatJsonlSection(**fields), Path(fields["tokenizer"]), chat(("user", "U"))["messages"])

    def test_template_that_inserts_the_date(
        self, make_tokenizer: MakeTokenizer, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = ChatJsonlSection(train_file="x")
        messages = [{"role": "user", "content": "U"}]
        with_default = "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
        with caplog.at_level(logging.WARNING, "llmtrain"):
            assert prompt_text(config, make_tokenizer(with_default + "{{ date_string }}"), messages) == "26 Jul 2024"
            assert not caplog.records
            prompt_text(config, make_tokenizer("{{ strftime_now('%Y') }}"), messages)
        assert len(caplog.records) == 1

    def test_tokenizer_that_transformers_cannot_load_is_refused(
        self, write_jsonl: Write, make_tokenizer: MakeTokenizer
    ) -> None:
        directory = make_tokenizer()
        (directory / "tokenizer.json").write_text("{")
        train = write_jsonl(EXAMPLE)
        with pytest.raises(DataError, match="transformers"):
            segments(module(train_file=train, val_file=train, tokenizer=str(directory)))


class TestFormats:
    """Examples in other formats than llmtrain's own."""

    @pytest.mark.parametrize(
        "record",
        [
            {"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]},
            {"conversations": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]},
            {"prompt": "U", "completion": "A"},
            {"prompt": [{"role": "user", "content": "U"}], "completion": [{"role": "assistant", "content": "A"}]},
        ],
    )
    def test_conversation_is_recognized(self, write_jsonl: Write, make_tokenizer: MakeTokenizer, record: Any) -> None:
        expected = chat(("user", "U"), ("assistant", "A"))
        train = write_jsonl(expected, record)
        own, other = segments(module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer())))
        assert own == other

    def test_system_message_of_sharegpt_is_kept(self, write_jsonl: Write, make_tokenizer: MakeTokenizer) -> None:
        turns = [("system", "S"), ("human", "U"), ("gpt", "A")]
        record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
        train = write_jsonl(record, chat(("system", "S"), ("user", "U"), ("assistant", "A")))
        own, other = segments(module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer())))
        assert own == other

    def test_prompt_and_completion_is_an_instruction(self, write_jsonl: Write) -> None:
        train = write_jsonl(
            {"prompt": "Say a.", "completion": "a"}, {"prompt": "not this", "completion": "", **EXAMPLE}
        )
        assert segments(module(train_file=train, val_file=train)) == [[(PLAIN, False), ("a", True)]] * 2

    @pytest.mark.parametrize(
        ("record", "remedy"),
        [
            ({"question": "U", "answer": "A"}, "data.instruction_field to question and data.output_field to answer"),
            ({"messages": [{"role": "user", "content": "U"}]}, "data.name to chat_jsonl"),
            ({"conversations": [{"from": "human", "value": "U"}]}, "data.name to chat_jsonl"),
        ],
    )
    def test_other_instruction_fields_are_explained(self, write_jsonl: Write, record: Any, remedy: str) -> None:
        train = write_jsonl(record)
        with pytest.raises(DataError) as caught:
            segments(module(train_file=train, val_file=train))
        assert remedy in (caught.value.remedy or "")

    def test_instruction_in_a_chat_file_is_explained(self, write_jsonl: Write, make_tokenizer: MakeTokenizer) -> None:
        train = write_jsonl(EXAMPLE)
        with pytest.raises(DataError) as caught:
            segments(module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer())))
        assert "instruct_jsonl" in (caught.value.remedy or "")


class TestFiles:
    """The same examples in every format of files."""

    @pytest.mark.parametrize("name", ["a.json", "array.jsonl", "a.csv", "a.tsv", "a.parquet"])
    def test_same_data_as_from_json_lines(self, tmp_path: Path, write_jsonl: Write, name: str) -> None:
        rows = [{"instruction": f"Say {i}.", "input": "", "output": f"{i},\n{i}"} for i in range(8)]
        kind = ".json" if name == "array.jsonl" else Path(name).suffix
        other = write_rows(tmp_path / f"a{kind}", rows).rename(tmp_path / name)
        expected = prepare(tmp_path, train_file=write_jsonl(*rows))
        assert prepare(tmp_path, train_file=str(other)).fingerprint == expected.fingerprint

    def test_conversations_from_parquet(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer
    ) -> None:
        rows = [chat(("user", f"U{i}"), ("assistant", f"A{i}")) for i in range(4)]
        tokenizer = str(make_tokenizer())
        parquet = str(write_rows(tmp_path / "a.parquet", rows))
        first, second = (
            prepare(tmp_path, "chat_jsonl", train_file=file, tokenizer=tokenizer)
            for file in (write_jsonl(*rows), parquet)
        )
        assert first.fingerprint == second.fingerprint

    @pytest.mark.parametrize(
        ("name", "place"), [("a.json", "record 2"), ("a.csv", "line 3"), ("a.parquet", "row 2"), ("a.jsonl", "line 2")]
    )
    def test_bad_example_is_named_by_its_place(self, tmp_path: Path, name: str, place: str) -> None:
        file = str(write_rows(tmp_path / name, [EXAMPLE, {**EXAMPLE, "output": ""}, EXAMPLE]))
        with pytest.raises(DataError, match=rf"{name}, {place}: .*'output'.* empty"):
            segments(module(train_file=file, val_file=file))

    def test_long_example_is_named_by_its_place(self, tmp_path: Path) -> None:
        file = str(write_rows(tmp_path / "a.parquet", [EXAMPLE, {**EXAMPLE, "output": "a" * 99}]))
        store = prepare(tmp_path, train_file=file, val_file=file).train
        assert isinstance(store, ExampleStore)
        assert store.location(1) == ((file, "row"), 2)
        with pytest.raises(DataError, match=r"a\.parquet, row 2: "):
            select_examples(store, InstructJsonlSection(truncation="error"), 64, "training")


PAIRS = [
    {"prompt": "U", "chosen": "A", "rejected": "B"},
    {"question": "U", "chosen": "A", "rejected": "B"},
    {"chosen": "U A", "rejected": "U B"},
    {"prompt": "U", "chosen": [{"role": "assistant", "content": "A"}], "rejected": []},
    {"prompt": [{"role": "user", "content": "U"}], "chosen": [{"role": "assistant", "content": "A"}], "rejected": []},
    {"prompt": "U", **{key: chat(("user", "U"), ("assistant", key))["messages"] for key in ("chosen", "rejected")}},
]


class TestPreferencePairs:
    @pytest.mark.parametrize("on_bad_example", ["error", "skip"])
    @pytest.mark.parametrize("name", ["instruct_jsonl", "chat_jsonl"])
    @pytest.mark.parametrize("pair", PAIRS)
    def test_pair_is_refused_with_what_to_do(
        self, write_jsonl: Write, make_tokenizer: MakeTokenizer, pair: Any, name: str, on_bad_example: str
    ) -> None:
        train = write_jsonl(pair, pair)
        fields = {"train_file": train, "val_file": train, "tokenizer": str(make_tokenizer())}
        with pytest.raises(DataError, match=r"line 1: .*'chosen' and 'rejected'") as caught:
            segments(module(name, **fields, on_bad_example=on_bad_example))
        assert "To train on the chosen answers" in (caught.value.remedy or "")

    def test_remedies_work(self, write_jsonl: Write, make_tokenizer: MakeTokenizer) -> None:
        """Each as the message says: by fields of the config, or with renamed fields."""
        train = write_jsonl(PAIRS[0])
        fields = {"instruction_field": "prompt", "output_field": "chosen"}
        assert segments(module(train_file=train, val_file=train, **fields))[0][1] == ("A", True)
        renamed = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS[3:5]]
        train = write_jsonl(*renamed, {"messages": PAIRS[5]["chosen"]})
        data = module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer()))
        assert [example[1][0] for example in segments(data)] == [f"{a}<|im_end|>\n" for a in ("A", "A", "chosen")]

    def test_pair_with_an_answer_of_its_own_is_an_example(
        self, write_jsonl: Write, make_tokenizer: MakeTokenizer
    ) -> None:
        """As in UltraFeedback, which has `messages` too."""
        train = write_jsonl({**PAIRS[5], **chat(("user", "U"), ("assistant", "A"))})
        data = module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer()))
        assert segments(data)[0][1] == ("A<|im_end|>\n", True)


BAD_LINES = [
    ("{", r"not valid JSON: Expecting property name enclosed in double quotes at character 2"),
    ('{"instruction": "x", }', "not valid JSON"),
    ("[" * 100_000, "JSON"),
    ("5", "JSON object, got 5"),
    ('"text"', 'JSON object, got "text"'),
    ({"output": "a", "b": 1}, "'instruction'.* 'b', 'output'"),
    ({"instruction": "a", "text": "b"}, "'output'.* 'instruction', 'text'"),
    ({**EXAMPLE, "instruction": " "}, "'instruction'.* empty"),
    ({**EXAMPLE, "output": " \n"}, "'output'.* empty"),
    ({**EXAMPLE, "output": 5}, "'output'.* got 5"),
    ({**EXAMPLE, "output": None}, "'output'.* got None"),
    ({**EXAMPLE, "instruction": ["a"]}, "'instruction'.* got \\['a'\\]"),
    ({**EXAMPLE, "input": {"a": 1}}, "'input'.* got {'a': 1}"),
    ('{"instruction": "a", "output": "\\ud800"}', "'output'.* surrogate"),
    ('{"instruction": "a", "output": "b", "output": "c"}', "duplicate key 'output'"),
    ('{"instruction": "a", "output": "b", "more": [{"x": 1, "x": 1}]}', "duplicate key 'x'"),
]
BAD_CHATS = [
    ({"conversations": []}, "'conversations' is empty"),
    ({"conversations": "hello"}, "'conversations'.* got 'hello'"),
    ({"conversations": [{"from": "narrator", "value": "x"}]}, "message 1.* 'narrator'"),
    ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "A"}]}, r"message 1 \(user\).* got None"),
    ({"text": "x"}, "'messages' is missing.* 'text'"),
    ({"prompt": 5, "completion": "A"}, r"message 1 \(user\).* got 5"),
    ({"messages": []}, "'messages'.* empty"),
    ({"messages": "hello"}, "'messages'.* got 'hello'"),
    ({"messages": ["hello"]}, "message 1 .*got 'hello'"),
    (chat(("human", "U")), "message 1.* assistant, system, tool, user.* 'human'"),
    ({"messages": [{"role": [], "content": "x"}]}, "message 1.* role"),
    (chat(("user", "U"), ("assistant", None)), r"message 2 \(assistant\).* got None"),
    (chat(("user", ["U"]), ("assistant", "A")), r"message 1 \(user\).* got"),
    (chat(("user", "U"), ("assistant", " ")), "message 2.* empty"),
    (chat(("system", "S"), ("user", "U")), "no message has the role 'assistant'"),
    (chat(("assistant", "A")), "chat template"),
]


class TestBadExamples:
    def test_nul_is_refused_with_the_byte_tokenizer_only(self, write_jsonl: Write) -> None:
        train = write_jsonl({**EXAMPLE, "output": "a\0b"})
        with pytest.raises(DataError, match=r"train\.jsonl, line 1: "):
            segments(module(train_file=train, val_file=train, tokenizer="byte"))
        assert segments(module(train_file=train, val_file=train, tokenizer="char"))

    @pytest.mark.parametrize(("bad", "reason"), BAD_LINES)
    def test_bad_instruction_is_refused(self, write_jsonl: Write, bad: Any, reason: str) -> None:
        train = write_jsonl(EXAMPLE, "", bad)
        with pytest.raises(DataError, match=rf"train\.jsonl, line 3: .*{reason}") as caught:
            segments(module(train_file=train, val_file=train))
        assert "data.on_bad_example" in (caught.value.remedy or "")

    @pytest.mark.parametrize(("bad", "reason"), BAD_CHATS)
    def test_bad_conversation_is_refused(
        self, write_jsonl: Write, make_tokenizer: MakeTokenizer, bad: Any, reason: str
    ) -> None:
        train = write_jsonl(chat(("user", "U"), ("assistant", "A")), bad)
        data = module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer()))
        with pytest.raises(DataError, match=rf"train\.jsonl, line 2: .*{reason}"):
            segments(data)

    def test_invalid_utf8_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "train.jsonl"
        path.write_bytes(json.dumps(EXAMPLE).encode() + b'\n{"instruction": "\xff"}\n')
        with pytest.raises(DataError, match=r"line 2: not valid UTF-8 \(0xff\)") as caught:
            segments(module(train_file=str(path), val_file=str(path)))
        assert "iconv" in (caught.value.remedy or "")

    def test_skipped_examples_are_counted_in_one_warning(
        self, tmp_path: Path, write_jsonl: Write, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = [line for line, _ in BAD_LINES]
        train, val = write_jsonl(EXAMPLE, *bad, WITH_INPUT), write_jsonl(EXAMPLE, name="val.jsonl")
        with caplog.at_level(logging.WARNING, "llmtrain"):
            prepared = prepare(tmp_path, train_file=train, val_file=val, on_bad_example="skip", tokenizer="char")
        assert [whole for whole, _ in texts(prepared)] == [f"{PLAIN}a", f"{PLAIN_WITH_INPUT}b c"]
        assert [prepared.train.location(index)[1] for index in (0, 1)] == [1, len(bad) + 2]  # type: ignore[union-attr]
        [warning] = [record.getMessage() for record in caplog.records]
        assert "16 of 18 " in warning
        assert train in warning
        assert "line 2: not valid JSON" in warning

    def test_file_without_usable_examples_is_refused(self, tmp_path: Path, write_jsonl: Write) -> None:
        train = write_jsonl("{", "{")
        with pytest.raises(DataError, match=r"none of the 2 .*line 1: not valid JSON"):
            prepare(tmp_path, train_file=train, val_file=train, on_bad_example="skip")

    @pytest.mark.parametrize("content", ["", "\n \n"])
    def test_empty_file_is_refused(self, tmp_path: Path, write_jsonl: Write, content: str) -> None:
        with pytest.raises(DataError, match=r"train\.jsonl"):
            prepare(tmp_path, train_file=write_jsonl(content))

    @pytest.mark.parametrize("field", ["train_file", "val_file"])
    def test_missing_file_is_refused(self, tmp_path: Path, write_jsonl: Write, field: str) -> None:
        files = {"train_file": write_jsonl(EXAMPLE), "val_file": write_jsonl(EXAMPLE), field: "nosuch.jsonl"}
        with pytest.raises(DataError, match=rf"data\.{field}.* nosuch\.jsonl"):
            prepare(tmp_path, **files)

    def test_byte_order_mark_is_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "train.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(EXAMPLE).encode() + b"\r\n")
        assert len(segments(module(train_file=str(path), val_file=str(path)))) == 1


class TestSplits:
    def numbered(self, write_jsonl: Write, count: int) -> str:
        return write_jsonl(*[{**EXAMPLE, "output": f"answer {i}"} for i in range(count)])

    @pytest.mark.parametrize(("count", "fraction", "held"), [(40, 0.25, 10), (3, 0.05, 1), (2, 0.9, 1), (20, 0.05, 1)])
    def test_last_examples_are_held_out(self, write_jsonl: Write, count: int, fraction: float, held: int) -> None:
        data = module(train_file=self.numbered(write_jsonl, count), val_fraction=fraction)
        train, val = segments(data, "train"), segments(data, "val")
        assert len(val) == held
        assert [example[1][0] for example in train + val] == [f"answer {i}" for i in range(count)]
        assert [example.line for example in data.examples("val")] == list(range(count - held + 1, count + 1))

    def test_single_example_cannot_be_split(self, tmp_path: Path, write_jsonl: Write) -> None:
        with pytest.raises(DataError, match=r"train\.jsonl") as caught:
            prepare(tmp_path, train_file=write_jsonl(EXAMPLE))
        assert "data.val_file" in (caught.value.remedy or "")

    def test_examples_of_another_file(self, write_jsonl: Write) -> None:
        other = write_jsonl(EXAMPLE, EXAMPLE, name="other.jsonl")
        data = module(train_file="nosuch")
        store = ExampleStore.from_examples(data.examples_of_file(other), ByteTokenizer(), 1)
        assert (store.example_count, store.location(1)) == (2, ((other, "line"), 2))
        assert bytes(store.tokens.tolist()).decode() == f"{PLAIN}a\0" * 2
        assert store.answers.sum() == 4

    @pytest.mark.parametrize("name", ["instruct_jsonl", "chat_jsonl"])
    def test_dataset_directory(self, tmp_path: Path, make_tokenizer: MakeTokenizer, name: str) -> None:
        directory = tmp_path / "dataset"
        directory.mkdir()
        records: list[Any] = [{**EXAMPLE, "output": f"answer {i}"} for i in range(4)]
        if name == "chat_jsonl":
            records = [chat(("user", "U"), ("assistant", f"answer {i}")) for i in range(4)]
        for split, some in (("train", records[:3]), ("validation", records[3:])):
            datasets.Dataset.from_list(some).to_parquet(directory / f"{split}.parquet")
        fields = {"dataset_name": str(directory), "tokenizer": str(make_tokenizer())}
        prepared = prepare(tmp_path, name, **fields)
        assert [answer for _, answer in texts(prepared)] == [f"answer {i}<|im_end|>\n" for i in range(3)]
        assert [answer for _, answer in texts(prepared, "val")] == ["answer 3<|im_end|>\n"]
        assert prepared.train.location(1) == ((f"{directory} (train)", "row"), 2)  # type: ignore[union-attr]
        with pytest.raises(DataError, match="split"):
            prepare(tmp_path, name, **fields, val_split="nosuch")

    @pytest.mark.parametrize("how", ["jsonl", "save_to_disk"])
    def test_dataset_directory_without_validation_split(self, tmp_path: Path, write_jsonl: Write, how: str) -> None:
        """As passed to LoRA scripts by `--dataset_path DIR`."""
        directory, records = tmp_path / "dataset", [{**EXAMPLE, "output": f"answer {i}"} for i in range(4)]
        if how == "jsonl":
            directory.mkdir()
            Path(write_jsonl(*records)).rename(directory / "data.jsonl")
        else:
            datasets.Dataset.from_list(records).save_to_disk(directory)
        prepared = prepare(tmp_path, dataset_name=str(directory), val_split=None, val_fraction=0.25)
        assert [answer for _, answer in texts(prepared)] == [f"answer {i}\0" for i in range(3)]
        assert [answer for _, answer in texts(prepared, "val")] == ["answer 3\0"]

    @pytest.mark.parametrize("field", ["train_file", "val_file"])
    def test_directory_instead_of_a_file_is_refused(self, tmp_path: Path, write_jsonl: Write, field: str) -> None:
        with pytest.raises(DataError) as caught:
            prepare(tmp_path, **{"train_file": write_jsonl(EXAMPLE, EXAMPLE), field: str(tmp_path)})
        assert (caught.value.exit_code, f"data.{field}" in caught.value.what) == (65, True)
        assert "data.dataset_name" in (caught.value.remedy or "")


class TestStore:
    def test_store_is_built_once(self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer) -> None:
        fields = {"train_file": write_jsonl(EXAMPLE, WITH_INPUT), "tokenizer": str(make_tokenizer())}
        first, second = (prepare(tmp_path, **fields) for _ in range(2))
        assert first.train.path == second.train.path
        assert first.fingerprint == second.fingerprint

    @pytest.mark.parametrize(
        "change",
        [
            {"prompt_format": "plain"},
            {"on_bad_example": "skip"},
            {"add_special_tokens": False},
            {"instruction_field": "output"},
            {"input_field": "other"},
            {"output_field": "instruction"},
            {"val_fraction": 0.9},
            {"val_file": "train_file"},
            {"tokenizer": "byte"},
        ],
    )
    def test_store_is_rebuilt_when_a_setting_changes(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer, change: Any
    ) -> None:
        fields = {"train_file": write_jsonl(EXAMPLE, WITH_INPUT, EXAMPLE), "tokenizer": str(make_tokenizer())}
        change = {name: fields.get(value, value) for name, value in change.items()}
        first, second = prepare(tmp_path, **fields), prepare(tmp_path, **{**fields, **change})
        assert first.train.path != second.train.path

    @pytest.mark.parametrize("as_file", [True, False])
    def test_store_is_rebuilt_when_the_template_changes(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer, as_file: bool
    ) -> None:
        train = write_jsonl(chat(("user", "U"), ("assistant", "A")), chat(("user", "V"), ("assistant", "B")))
        contents = []
        for mark in ("1", "2"):
            template = mark + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            directory = make_tokenizer(template, as_file=as_file)  # the same directory
            prepared = prepare(tmp_path, "chat_jsonl", train_file=train, tokenizer=str(directory))
            contents.append(texts(prepared)[0][0])
        assert contents == ["1UA", "2UA"]

    def test_store_is_rebuilt_when_the_examples_change(self, tmp_path: Path, write_jsonl: Write) -> None:
        for answer in ("a", "bb"):
            prepared = prepare(tmp_path, train_file=write_jsonl({**EXAMPLE, "output": answer}, EXAMPLE))
            assert texts(prepared)[0][1] == f"{answer}\0"

    @pytest.mark.parametrize("name", ["train.bin", "val.answers.bin", "val.rows.bin", "tokenizer/tokenizer.json"])
    def test_damaged_store_is_rebuilt(
        self, tmp_path: Path, write_jsonl: Write, make_tokenizer: MakeTokenizer, name: str
    ) -> None:
        fields = {"train_file": write_jsonl(EXAMPLE, WITH_INPUT), "tokenizer": str(make_tokenizer())}
        first = prepare(tmp_path, **fields)
        examples = texts(first, "val")
        path = first.train.path.parent / name
        path.write_bytes(path.read_bytes()[:-1])
        again = prepare(tmp_path, **fields)
        assert again.fingerprint == first.fingerprint
        assert texts(again, "val") == examples

    def test_fingerprint_is_of_tokens_and_answers(self, tmp_path: Path, write_jsonl: Write) -> None:
        def fingerprint(*lines: Any, name: str, **fields: Any) -> str:
            return prepare(tmp_path, train_file=write_jsonl(*lines, name=name), **fields).fingerprint

        first = fingerprint(EXAMPLE, WITH_INPUT, name="a.jsonl")
        assert fingerprint(EXAMPLE, "", "", WITH_INPUT, name="elsewhere.jsonl") == first
        assert fingerprint(WITH_INPUT, EXAMPLE, name="a.jsonl") != first
        # The same tokens, with other tokens as the answer.
        head = "\n\n### Response:\n"
        short = fingerprint({"instruction": f"x{head}b", "output": "c"}, EXAMPLE, name="b.jsonl")
        assert short != fingerprint({"instruction": "x", "output": f"b{head}c"}, EXAMPLE, name="b.jsonl")

    def test_pickled_by_path_or_by_value(self, tmp_path: Path, write_jsonl: Write) -> None:
        train = write_jsonl(*[{**EXAMPLE, "output": "a" * 10_000}] * 2)
        mapped = prepare(tmp_path, train_file=train).train
        in_memory = ExampleStore.from_examples(module(train_file=train).examples_of_file(train), ByteTokenizer(), 1)
        assert isinstance(mapped, ExampleStore)
        assert len(pickle.dumps(mapped)) < 2000
        for store in (mapped, in_memory):
            again = pickle.loads(pickle.dumps(store))
            assert (again.path, again.files) == (store.path, store.files)
            for name in ("tokens", "answers", "spans"):
                assert np.array_equal(getattr(again, name), getattr(store, name))

    def test_store_without_examples_is_refused(self) -> None:
        with pytest.raises(DataError):
            ExampleStore.from_examples([], ByteTokenizer(), 1)
