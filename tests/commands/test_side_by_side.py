"""Several models beside each other: generate A B, chat --compare."""

import io
import json
from pathlib import Path

import pytest

from llmtrain.commands.side_by_side import columns

FEW = ["--prompt", "the ", "--max-new-tokens", 12]


class TestGenerate:
    def test_texts_are_those_of_each_model_alone(self, cli, root: Path) -> None:
        options = ["--root", root, *FEW, "--seed", 3, "--num-samples", 2, "--json"]
        both = cli("generate", "one", "other", *options)
        assert both.code == 0, both.err
        assert both.json["prompt"] == "the "
        for name, found in zip(("one", "other"), both.json["models"], strict=True):
            alone = cli("generate", name, *options).json
            assert found == {key: alone[key] for key in ("run", "step", "text", "samples")}
        assert both.json["models"][0]["samples"] != both.json["models"][1]["samples"]

    def test_texts_are_shown_beside_each_other(self, cli, root: Path) -> None:
        done = cli("generate", "one", "other", "--root", root, *FEW)
        head = done.out.splitlines()[0]
        assert "one at step 4" in head
        assert "other at step 4" in head
        assert done.out.count("the ") >= 2

    def test_model_directories_and_runs_can_be_mixed(self, cli, root: Path) -> None:
        pytest.importorskip("transformers")
        assert cli("export", "one", "--root", root, "--no-check", "--to", "exported").code == 0
        done = cli("generate", "one", "exported", "--root", root, *FEW, "--temperature", 0, "--json")
        assert done.code == 0, done.err
        run, exported = done.json["models"]
        assert run["text"] == exported["text"]
        assert (run["run"], exported["run"]) == ("one", "exported")

    @pytest.mark.parametrize(
        "words", [["one", "nowhere"], ["one", "other", "--run", "twin"], ["one", "other", "--adapter", "x"]]
    )
    def test_a_model_that_is_not_there_is_refused_first(self, cli, root: Path, words: list[str]) -> None:
        done = cli("generate", *words, "--root", root, "--json")
        assert (done.code, done.json["error"]) == (64, "UsageError")
        assert done.json["remedy"]


class TestChat:
    def test_both_models_get_the_messages(self, cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        options = ["--root", root, "--max-new-tokens", 8, "--temperature", 5]
        monkeypatch.setattr("sys.stdin", io.StringIO("first\n/reset\nsecond\nthird\n"))
        done = cli("chat", "one", "--compare", "other", *options, "--json")
        assert done.code == 0, done.err
        ours = done.json["messages"]
        theirs = done.json["compared"]["messages"]
        assert done.json["compared"]["run"] == "other"
        for messages in (ours, theirs):
            assert [each["content"] for each in messages if each["role"] == "user"] == ["second", "third"]
            assert [each["role"] for each in messages] == ["user", "assistant"] * 2
        assert ours != theirs
        monkeypatch.setattr("sys.stdin", io.StringIO("second\nthird\n"))
        assert cli("chat", "other", *options, "--json").json["messages"] == theirs

    def test_answers_are_shown_beside_each_other(self, cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        done = cli("chat", "one", "--compare", "other", "--root", root, "--max-new-tokens", 8)
        assert done.code == 0, done.err
        assert "one" in done.out
        assert "other" in done.out
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert cli("chat", "one", "--compare", "nowhere", "--root", root).code == 64


class TestColumns:
    def test_long_texts_are_wrapped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmtrain.commands.side_by_side.stream_width", lambda stream: 60)  # noqa: ARG005
        lines = columns(["left", "right"], ["word " * 20, "a\n\nb"]).splitlines()
        assert max(map(len, lines)) <= 60
        assert lines[0].split() == ["left", "right"]
        assert [line[31:].strip() for line in lines[2:5]] == ["a", "", "b"]
        assert json.dumps(lines).count("word") == 20

    def test_narrow_terminals_show_one_below_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmtrain.commands.side_by_side.stream_width", lambda stream: 40)  # noqa: ARG005
        assert columns(["a", "b"], ["one", "two"]) == "a:\none\n\nb:\ntwo"
