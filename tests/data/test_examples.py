"""Rows from files and datasets, as text and as tokens: what is accepted, what is refused and how it is said."""

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
from llmtrain.config.schema import KINDS
from llmtrain.data.base import PreparedData
from llmtrain.data.examples.json_examples import JsonExamples
from llmtrain.data.examples.prompts import has_chat_template, prompt_text
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.tokenizers.tokenizer import ByteTokenizer, load_saved_tokenizer, load_tokenizer
from llmtrain.errors import DataError, LlmtrainError, UsageError

MakeTokenizer = Callable[..., Path]
Write = Callable[..., str]
ROW = {"instruction": "Say a.", "input": "", "output": "a"}
WITH_INPUT = {"instruction": "Repeat.", "input": "b c", "output": "b c"}
PLAIN = "### Instruction:\nSay a.\n\n### Response:\n"
PLAIN_WITH_INPUT = "### Instruction:\nRepeat.\n\n### Input:\nb c\n\n### Response:\n"


def module(name: str = "instruct_jsonl", **fields: Any) -> JsonExamples:
    made: JsonExamples = registry.resolve("data.name", name, registry.DATA)(KINDS["data"][name](**fields), 1)
    return made


def prepare(cache: Path, name: str = "instruct_jsonl", **fields: Any) -> PreparedData:
    return module(name, cache_dir=str(cache / "cache"), **fields).prepare(threads=2)


def texts(prepared: PreparedData, split: str = "train") -> list[tuple[str, str]]:
    """(whole row, its answers) as the tokens say it."""
    store = getattr(prepared, split)
    found = []
    for start, end, *_ in store.spans.tolist():
        ids, answers = store.tokens[start:end], store.answers[start:end] == 1
        found.append((prepared.tokenizer.decode(ids.tolist()), prepared.tokenizer.decode(ids[answers].tolist())))
    return found


def segments(data: JsonExamples, split: Any = "train") -> list[list[tuple[str, bool]]]:
    return [[tuple(segment) for segment in row.segments] for row in data.rows(split)]  # type: ignore[misc]


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


class TestPlain:
    def test_tokens_answers_and_places(self, tmp_path: Path, write_rows: Write) -> None:
        train = write_rows(ROW, "", WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train)
        assert texts(prepared) == [(f"{PLAIN}a\0", "a\0"), (f"{PLAIN_WITH_INPUT}b c\0", "b c\0")]
        store = prepared.train
        assert isinstance(store, ExampleStore)
        assert (store.example_count, len(store)) == (2, len(f"{PLAIN}a\0{PLAIN_WITH_INPUT}b c\0"))
        assert [store.place(0), store.place(1)] == [(train, 1), (train, 3)]
        assert store.tokens.dtype == np.uint8
        assert not store.tokens.flags.writeable

    @pytest.mark.parametrize("tokenizer", [None, "byte", "char"])
    def test_built_in_tokenizers(self, tmp_path: Path, write_rows: Write, tokenizer: str | None) -> None:
        train = write_rows(ROW, WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer=tokenizer)
        end = "" if tokenizer == "char" else "\0"
        assert texts(prepared)[0] == (f"{PLAIN}a{end}", f"a{end}")

    @pytest.mark.shared
    @pytest.mark.usefixtures("gpt2")
    def test_gpt2(self, tmp_path: Path, write_rows: Write) -> None:
        train = write_rows(ROW)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer="gpt2")
        assert texts(prepared) == [(f"{PLAIN}a<|endoftext|>", "a<|endoftext|>")]

    def test_a_missing_or_null_input_is_no_input(self, write_rows: Write) -> None:
        train = write_rows({"instruction": "Say a.", "output": "a"}, {**ROW, "input": None})
        assert segments(module(train_file=train, val_file=train)) == [[(PLAIN, False), ("a", True)]] * 2

    def test_fields_of_other_names(self, write_rows: Write) -> None:
        train = write_rows({"q": "Repeat.", "context": "b c", "a": "b c"})
        fields = {"instruction_field": "q", "input_field": "context", "output_field": "a"}
        data = module(train_file=train, val_file=train, **fields)
        assert segments(data) == [[(PLAIN_WITH_INPUT, False), ("b c", True)]]

    @pytest.mark.parametrize("add", [True, False])
    def test_special_tokens_in_front(
        self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer, add: bool
    ) -> None:
        folder = with_bos(make_tokenizer(None))
        train = write_rows(ROW)
        fields = {"tokenizer": str(folder), "add_special_tokens": add}
        [(whole, answer)] = texts(prepare(tmp_path, train_file=train, val_file=train, **fields))
        assert whole == ("<|im_start|>" if add else "") + f"{PLAIN}a<|im_end|>"
        assert answer == "a<|im_end|>"

    def test_the_prompt_is_tokenised_as_it_is_at_inference(
        self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer
    ) -> None:
        folder = make_tokenizer()
        train = write_rows(ROW, WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer=str(folder))
        config = InstructJsonlSection(train_file=train)
        for row, question in enumerate(("Say a.", "Repeat.\n\nb c")):
            prompt = prompt_text(config, folder, [{"role": "user", "content": question}])
            start, end = prepared.train.spans[row, :2]  # type: ignore[union-attr]
            ids = prepared.train.tokens[start:end]
            is_prompt = prepared.train.answers[start:end] == 0  # type: ignore[union-attr]
            assert ids[is_prompt].tolist() == prepared.tokenizer.encode(prompt).tolist()


def with_bos(folder: Path) -> Path:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class TestTokenizers:
    def test_what_a_tokenizer_puts_in_front(self, make_tokenizer: MakeTokenizer) -> None:
        plain = load_tokenizer(str(make_tokenizer(name="plain")))
        assert plain.prefix_ids() == ByteTokenizer().prefix_ids() == []
        bos = load_tokenizer(str(with_bos(make_tokenizer(name="bos"))))
        assert bos.decode(bos.prefix_ids()) == "<|im_start|>"

    @pytest.mark.parametrize("as_file", [True, False])
    def test_a_saved_tokenizer_has_the_same_template(
        self, make_tokenizer: MakeTokenizer, tmp_path: Path, as_file: bool
    ) -> None:
        folder = make_tokenizer(as_file=as_file)
        for name in ("special_tokens_map.json", "added_tokens.json"):
            (folder / name).write_text('{"eos_token": "<|im_end|>"}' if "map" in name else "{}")
        saved = tmp_path / "saved"
        load_tokenizer(str(folder)).save(saved)
        assert {path.name for path in folder.iterdir()} <= {path.name for path in saved.iterdir()}
        assert has_chat_template(saved)
        messages = [{"role": "user", "content": "Hi"}]
        config = ChatJsonlSection(train_file="x")
        assert prompt_text(config, saved, messages) == prompt_text(config, folder, messages)
        load_saved_tokenizer(saved).save(saved)  # onto itself
        assert has_chat_template(saved)

    def test_a_token_that_takes_the_next_space_along(self, make_tokenizer: MakeTokenizer) -> None:
        folder = make_tokenizer()
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([tokenizers.AddedToken("<|sep|>", rstrip=True)])
        tokenizer.save(str(folder / "tokenizer.json"))
        ours, text = load_tokenizer(str(folder)), "a pod<|sep|> is a<|sep|> group"
        assert [ids.tolist() for ids in ours.encode_many([text], 1)] == [ours.encode(text).tolist()]


class TestChat:
    def test_instructions_as_conversations(
        self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer
    ) -> None:
        train = write_rows(ROW, WITH_INPUT)
        prepared = prepare(tmp_path, train_file=train, val_file=train, tokenizer=str(make_tokenizer()))
        begin = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        answers = ["a<|im_end|>\n", "b c<|im_end|>\n"]
        assert texts(prepared) == [
            (begin.format("Say a.") + answers[0], answers[0]),
            (begin.format("Repeat.\n\nb c") + answers[1], answers[1]),
        ]
        store = prepared.train
        assert store.tokens[0] == prepared.tokenizer.encode("<|im_start|>")[0]  # one id, not its letters

    def test_every_answer_of_a_conversation(self, write_rows: Write, make_tokenizer: MakeTokenizer) -> None:
        turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("tool", "T"), ("assistant", "B"), ("user", "V")]
        train = write_rows(chat(*turns))
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
    def test_which_format(
        self, make_tokenizer: MakeTokenizer, fields: Any, as_file: bool, template: bool, expected: str
    ) -> None:
        folder = make_tokenizer(*([] if template else [None]), as_file=as_file)
        assert has_chat_template(folder) == template
        assert module(train_file="x", tokenizer=str(folder), **fields).format == expected
        text = prompt_text(InstructJsonlSection(train_file="x", **fields), folder, [{"role": "user", "content": "Hi"}])
        assert text.startswith("<|im_start|>" if expected == "chat" else "### Instruction:\nHi\n\n### Response:\n")

    @pytest.mark.parametrize("tokenizer", [True, False])
    @pytest.mark.parametrize("name", ["instruct_jsonl", "chat_jsonl"])
    def test_no_template(
        self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer, name: str, tokenizer: bool
    ) -> None:
        train = write_rows(ROW)
        spec = str(make_tokenizer(None)) if tokenizer else "byte"
        more = {"prompt_format": "chat"} if name == "instruct_jsonl" else {}
        with pytest.raises(UsageError, match="has no chat template") as caught:
            prepare(tmp_path, name, train_file=train, val_file=train, tokenizer=spec, **more)
        assert "data.tokenizer" in (caught.value.remedy or "")

    def test_a_prompt_of_several_turns_in_plain(self) -> None:
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
            # As those that drop the thinking of earlier answers: each answer fits its prompt, the next prompt does not.
            ("{% for m in messages %}{{ m['content'] if loop.last else m['content'][0] }}{% endfor %}", 4),
        ],
    )
    def test_a_template_that_rewrites_earlier_turns(
        self, write_rows: Write, make_tokenizer: MakeTokenizer, template: str, message: int
    ) -> None:
        train = write_rows(chat(("user", "U"), ("assistant", "long"), ("user", "V"), ("assistant", "B")))
        data = module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer(template)))
        what = rf"train\.jsonl, line 1: the chat template rewrites earlier turns when message {message} is added"
        with pytest.raises(DataError, match=what):
            segments(data)

    def test_a_template_that_refuses(self, write_rows: Write, make_tokenizer: MakeTokenizer) -> None:
        template = "{{ raise_exception('Roles must alternate.') }}"
        train = write_rows(chat(("user", "U"), ("assistant", "A")))
        fields: Any = {"train_file": train, "val_file": train, "tokenizer": str(make_tokenizer(template))}
        with pytest.raises(
            DataError, match=r"line 1: the chat template refuses the conversation: Roles must alternate"
        ):
            segments(module("chat_jsonl", **fields))
        with pytest.raises(DataError, match="No prompt can be made: the chat template refuses"):
            prompt_text(ChatJsonlSection(**fields), Path(fields["tokenizer"]), chat(("user", "U"))["messages"])

    def test_a_template_that_writes_the_date(
        self, make_tokenizer: MakeTokenizer, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = ChatJsonlSection(train_file="x")
        messages = [{"role": "user", "content": "U"}]
        asks = "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
        with caplog.at_level(logging.WARNING, "llmtrain"):
            assert prompt_text(config, make_tokenizer(asks + "{{ date_string }}"), messages) == "26 Jul 2024"
            assert not caplog.records
            prompt_text(config, make_tokenizer("{{ strftime_now('%Y') }}"), messages)
        assert ["on another day the same rows differ" in record.getMessage() for record in caplog.records] == [True]

    def test_a_tokenizer_that_transformers_cannot_open(self, write_rows: Write, make_tokenizer: MakeTokenizer) -> None:
        folder = make_tokenizer()
        (folder / "tokenizer.json").write_text("{")
        train = write_rows(ROW)
        with pytest.raises(DataError, match="cannot be opened by transformers"):
            segments(module(train_file=train, val_file=train, tokenizer=str(folder)))


BAD_LINES = [
    ("{", r"not valid JSON: Expecting property name enclosed in double quotes at character 2"),
    ('{"instruction": "x", }', "not valid JSON"),
    ("[" * 100_000, "JSON"),
    ("5", "not a JSON object but 5"),
    ('"text"', 'not a JSON object but "text"'),
    ({"output": "a", "b": 1}, "there is no field 'instruction'; the row has 'b', 'output'"),
    ({"instruction": "a", "text": "b"}, "there is no field 'output'; the row has 'instruction', 'text'"),
    ({**ROW, "instruction": " "}, "field 'instruction' is empty"),
    ({**ROW, "output": " \n"}, "the answer, field 'output', is empty"),
    ({**ROW, "output": 5}, "the answer, field 'output', is not text but 5"),
    ({**ROW, "output": None}, "the answer, field 'output', is not text but None"),
    ({**ROW, "instruction": ["a"]}, "field 'instruction' is not text but"),
    ({**ROW, "input": {"a": 1}}, "field 'input' is not text but"),
    ('{"instruction": "a", "output": "\\ud800"}', "field 'output', has half of a surrogate pair"),
    ('{"instruction": "a", "output": "b", "output": "c"}', "key 'output' is given twice"),
    ('{"instruction": "a", "output": "b", "more": [{"x": 1, "x": 1}]}', "key 'x' is given twice"),
]
BAD_CHATS = [
    ({"conversations": []}, "there is no field 'messages'; the row has 'conversations'"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": "hello"}, "'messages' is not a list but 'hello'"),
    ({"messages": ["hello"]}, "message 1 is not an object but 'hello'"),
    (chat(("human", "U")), "message 1 has the role 'human'; known: assistant, system, tool, user"),
    ({"messages": [{"role": [], "content": "x"}]}, "message 1 has the role"),
    (chat(("user", "U"), ("assistant", None)), r"content of message 2 \(assistant\) is not text but None"),
    (chat(("user", ["U"]), ("assistant", "A")), r"content of message 1 \(user\) is not text"),
    (chat(("user", "U"), ("assistant", " ")), "the answer, message 2, is empty"),
    (chat(("system", "S"), ("user", "U")), "row without an answer"),
    (chat(("assistant", "A")), "the chat template refuses the conversation"),
]


class TestBadRows:
    def test_nul_cannot_be_used_with_the_byte_tokenizer_alone(self, write_rows: Write) -> None:
        train = write_rows({**ROW, "output": "a\0b"})
        with pytest.raises(DataError, match=r"train\.jsonl, line 1: "):
            segments(module(train_file=train, val_file=train, tokenizer="byte"))
        assert segments(module(train_file=train, val_file=train, tokenizer="char"))

    @pytest.mark.parametrize(("bad", "reason"), BAD_LINES)
    def test_an_instruction_that_cannot_be_used(self, write_rows: Write, bad: Any, reason: str) -> None:
        train = write_rows(ROW, "", bad)
        with pytest.raises(DataError, match=rf"train\.jsonl, line 3: .*{reason}") as caught:
            segments(module(train_file=train, val_file=train))
        assert "data.on_bad_example" in (caught.value.remedy or "")

    @pytest.mark.parametrize(("bad", "reason"), BAD_CHATS)
    def test_a_conversation_that_cannot_be_used(
        self, write_rows: Write, make_tokenizer: MakeTokenizer, bad: Any, reason: str
    ) -> None:
        train = write_rows(chat(("user", "U"), ("assistant", "A")), bad)
        data = module("chat_jsonl", train_file=train, val_file=train, tokenizer=str(make_tokenizer()))
        with pytest.raises(DataError, match=rf"train\.jsonl, line 2: .*{reason}"):
            segments(data)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "train.jsonl"
        path.write_bytes(json.dumps(ROW).encode() + b'\n{"instruction": "\xff"}\n')
        with pytest.raises(DataError, match=r"line 2: not valid UTF-8 \(0xff\)") as caught:
            segments(module(train_file=str(path), val_file=str(path)))
        assert "iconv" in (caught.value.remedy or "")

    def test_left_out_counted_and_said_once(
        self, tmp_path: Path, write_rows: Write, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = [line for line, _ in BAD_LINES]
        train, val = write_rows(ROW, *bad, WITH_INPUT), write_rows(ROW, name="val.jsonl")
        with caplog.at_level(logging.WARNING, "llmtrain"):
            prepared = prepare(tmp_path, train_file=train, val_file=val, on_bad_example="skip", tokenizer="char")
        assert [whole for whole, _ in texts(prepared)] == [f"{PLAIN}a", f"{PLAIN_WITH_INPUT}b c"]
        assert [prepared.train.place(row)[1] for row in (0, 1)] == [1, len(bad) + 2]  # type: ignore[union-attr]
        [said] = [record.getMessage() for record in caplog.records]
        assert f"16 of 18 rows of {train} left out: first line 2: not valid JSON" in said

    def test_all_of_them(self, tmp_path: Path, write_rows: Write) -> None:
        train = write_rows("{", "{")
        with pytest.raises(DataError, match="none of the 2 rows can be used; first line 1: not valid JSON"):
            prepare(tmp_path, train_file=train, val_file=train, on_bad_example="skip")

    @pytest.mark.parametrize("content", ["", "\n \n"])
    def test_an_empty_file(self, tmp_path: Path, write_rows: Write, content: str) -> None:
        with pytest.raises(DataError, match=r"train\.jsonl is empty"):
            prepare(tmp_path, train_file=write_rows(content))

    @pytest.mark.parametrize("content", ['[{"instruction": "a"}]', '\n[\n  {"instruction": "a"}\n]'])
    def test_a_json_array(self, tmp_path: Path, write_rows: Write, content: str) -> None:
        with pytest.raises(DataError, match="is a JSON array, but one JSON object a line") as caught:
            prepare(tmp_path, train_file=write_rows(content), on_bad_example="skip")
        assert "jq -c '.[]'" in (caught.value.remedy or "")

    @pytest.mark.parametrize("field", ["train_file", "val_file"])
    def test_no_such_file(self, tmp_path: Path, write_rows: Write, field: str) -> None:
        files = {"train_file": write_rows(ROW), "val_file": write_rows(ROW), field: "nosuch.jsonl"}
        with pytest.raises(DataError, match=rf"data\.{field}: there is no file nosuch\.jsonl"):
            prepare(tmp_path, **files)

    def test_a_mark_at_the_beginning_of_the_file_is_no_content(self, tmp_path: Path) -> None:
        path = tmp_path / "train.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r\n")
        assert len(segments(module(train_file=str(path), val_file=str(path)))) == 1


class TestSplits:
    def numbered(self, write_rows: Write, count: int) -> str:
        return write_rows(*[{**ROW, "output": f"answer {i}"} for i in range(count)])

    @pytest.mark.parametrize(("count", "fraction", "held"), [(40, 0.25, 10), (3, 0.05, 1), (2, 0.9, 1), (20, 0.05, 1)])
    def test_the_last_rows_are_held_out(self, write_rows: Write, count: int, fraction: float, held: int) -> None:
        data = module(train_file=self.numbered(write_rows, count), val_fraction=fraction)
        train, val = segments(data, "train"), segments(data, "val")
        assert len(val) == held
        assert [row[1][0] for row in train + val] == [f"answer {i}" for i in range(count)]
        assert [row.line for row in data.rows("val")] == list(range(count - held + 1, count + 1))

    def test_one_row_cannot_be_split(self, tmp_path: Path, write_rows: Write) -> None:
        with pytest.raises(DataError, match="one row") as caught:
            prepare(tmp_path, train_file=write_rows(ROW))
        assert "data.val_file" in (caught.value.remedy or "")

    def test_all_rows_of_another_file(self, write_rows: Write) -> None:
        other = write_rows(ROW, ROW, name="other.jsonl")
        data = module(train_file="nosuch")
        store = ExampleStore.from_examples(data.examples_of_file(other), ByteTokenizer(), 1)
        assert (store.example_count, store.place(1)) == (2, (other, 2))
        assert bytes(store.tokens.tolist()).decode() == f"{PLAIN}a\0" * 2
        assert store.answers.sum() == 4

    @pytest.mark.parametrize("name", ["instruct_jsonl", "chat_jsonl"])
    def test_a_dataset_directory(self, tmp_path: Path, make_tokenizer: MakeTokenizer, name: str) -> None:
        folder = tmp_path / "rows"
        folder.mkdir()
        rows: list[Any] = [{**ROW, "output": f"answer {i}"} for i in range(4)]
        if name == "chat_jsonl":
            rows = [chat(("user", "U"), ("assistant", f"answer {i}")) for i in range(4)]
        for split, some in (("train", rows[:3]), ("validation", rows[3:])):
            datasets.Dataset.from_list(some).to_parquet(folder / f"{split}.parquet")
        fields = {"dataset_name": str(folder), "tokenizer": str(make_tokenizer())}
        prepared = prepare(tmp_path, name, **fields)
        assert [answer for _, answer in texts(prepared)] == [f"answer {i}<|im_end|>\n" for i in range(3)]
        assert [answer for _, answer in texts(prepared, "val")] == ["answer 3<|im_end|>\n"]
        assert prepared.train.place(1) == (f"{folder} (train)", 2)  # type: ignore[union-attr]
        with pytest.raises(DataError, match="split"):
            prepare(tmp_path, name, **fields, val_split="nosuch")

    @pytest.mark.parametrize("how", ["jsonl", "save_to_disk"])
    def test_a_dataset_path_of_a_lora_script(self, tmp_path: Path, write_rows: Write, how: str) -> None:
        """`--dataset_path DIR`: one split, none for validation."""
        folder, rows = tmp_path / "dataset", [{**ROW, "output": f"answer {i}"} for i in range(4)]
        if how == "jsonl":
            folder.mkdir()
            Path(write_rows(*rows)).rename(folder / "data.jsonl")
        else:
            datasets.Dataset.from_list(rows).save_to_disk(folder)
        prepared = prepare(tmp_path, dataset_name=str(folder), val_split=None, val_fraction=0.25)
        assert [answer for _, answer in texts(prepared)] == [f"answer {i}\0" for i in range(3)]
        assert [answer for _, answer in texts(prepared, "val")] == ["answer 3\0"]

    @pytest.mark.parametrize("field", ["train_file", "val_file"])
    def test_a_directory_where_a_file_is_meant(self, tmp_path: Path, write_rows: Write, field: str) -> None:
        with pytest.raises(DataError) as caught:
            prepare(tmp_path, **{"train_file": write_rows(ROW, ROW), field: str(tmp_path)})
        assert (caught.value.exit_code, f"data.{field}" in caught.value.what) == (65, True)
        assert "data.dataset_name" in (caught.value.remedy or "")


class TestStore:
    def test_made_once(self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer) -> None:
        fields = {"train_file": write_rows(ROW, WITH_INPUT), "tokenizer": str(make_tokenizer())}
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
    def test_made_anew_when_a_setting_changes(
        self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer, change: Any
    ) -> None:
        fields = {"train_file": write_rows(ROW, WITH_INPUT, ROW), "tokenizer": str(make_tokenizer())}
        change = {name: fields.get(value, value) for name, value in change.items()}
        first, second = prepare(tmp_path, **fields), prepare(tmp_path, **{**fields, **change})
        assert first.train.path != second.train.path

    @pytest.mark.parametrize("as_file", [True, False])
    def test_made_anew_when_the_template_changes(
        self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer, as_file: bool
    ) -> None:
        train = write_rows(chat(("user", "U"), ("assistant", "A")), chat(("user", "V"), ("assistant", "B")))
        wholes = []
        for mark in ("1", "2"):
            template = mark + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            folder = make_tokenizer(template, as_file=as_file)  # the same directory
            prepared = prepare(tmp_path, "chat_jsonl", train_file=train, tokenizer=str(folder))
            wholes.append(texts(prepared)[0][0])
        assert wholes == ["1UA", "2UA"]

    def test_made_anew_when_the_rows_change(self, tmp_path: Path, write_rows: Write) -> None:
        for answer in ("a", "bb"):
            prepared = prepare(tmp_path, train_file=write_rows({**ROW, "output": answer}, ROW))
            assert texts(prepared)[0][1] == f"{answer}\0"

    @pytest.mark.parametrize("name", ["train.bin", "val.answers.bin", "val.rows.bin", "tokenizer/tokenizer.json"])
    def test_a_damaged_one_is_made_anew(
        self, tmp_path: Path, write_rows: Write, make_tokenizer: MakeTokenizer, name: str
    ) -> None:
        fields = {"train_file": write_rows(ROW, WITH_INPUT), "tokenizer": str(make_tokenizer())}
        whole = prepare(tmp_path, **fields)
        rows = texts(whole, "val")
        path = whole.train.path.parent / name
        path.write_bytes(path.read_bytes()[:-1])
        again = prepare(tmp_path, **fields)
        assert again.fingerprint == whole.fingerprint
        assert texts(again, "val") == rows

    def test_the_fingerprint_is_of_what_is_trained_on(self, tmp_path: Path, write_rows: Write) -> None:
        def fingerprint(*rows: Any, name: str, **fields: Any) -> str:
            return prepare(tmp_path, train_file=write_rows(*rows, name=name), **fields).fingerprint

        first = fingerprint(ROW, WITH_INPUT, name="a.jsonl")
        assert fingerprint(ROW, "", "", WITH_INPUT, name="elsewhere.jsonl") == first
        assert fingerprint(WITH_INPUT, ROW, name="a.jsonl") != first
        # The same tokens, of which others are the answer.
        head = "\n\n### Response:\n"
        short = fingerprint({"instruction": f"x{head}b", "output": "c"}, ROW, name="b.jsonl")
        assert short != fingerprint({"instruction": "x", "output": f"b{head}c"}, ROW, name="b.jsonl")

    def test_pickled_by_path_or_by_value(self, tmp_path: Path, write_rows: Write) -> None:
        train = write_rows(*[{**ROW, "output": "a" * 10_000}] * 2)
        mapped = prepare(tmp_path, train_file=train).train
        in_memory = ExampleStore.from_examples(module(train_file=train).examples_of_file(train), ByteTokenizer(), 1)
        assert isinstance(mapped, ExampleStore)
        assert len(pickle.dumps(mapped)) < 2000
        for store in (mapped, in_memory):
            again = pickle.loads(pickle.dumps(store))
            assert (again.path, again.files) == (store.path, store.files)
            for name in ("tokens", "answers", "spans"):
                assert np.array_equal(getattr(again, name), getattr(store, name))

    def test_no_rows(self) -> None:
        with pytest.raises(LlmtrainError, match="no rows"):
            ExampleStore.from_examples([], ByteTokenizer(), 1)
