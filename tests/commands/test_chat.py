"""chat: what it does with standard input; test_fine_tune_inference.py has the answers of models."""

import io
import sys
from typing import Any

import pytest

from llmtrain.commands.chat import converse
from llmtrain.errors import UsageError

BAD_LINES = [b"\xff\xfe hi\n", b"\xed\xa0\x80\n"]  # no UTF-8, and an unpaired surrogate


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def talk(monkeypatch: pytest.MonkeyPatch, stdin: io.BytesIO) -> list[dict[str, Any]]:
    """The conversation with a model that repeats every message."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin, encoding="utf-8"))
    messages: list[dict[str, Any]] = []
    converse(lambda so_far: str(so_far[-1]["content"]), messages)
    return messages


@pytest.mark.parametrize("bad", BAD_LINES)
def test_invalid_utf8_in_a_terminal_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: bytes
) -> None:
    messages = talk(monkeypatch, Terminal(b"one\n" + bad + b"two\n"))
    assert [message["content"] for message in messages] == ["one", "one", "two", "two"]
    assert capsys.readouterr().err


@pytest.mark.parametrize("bad", BAD_LINES)
def test_invalid_utf8_in_a_file_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, bad: bytes) -> None:
    with pytest.raises(UsageError):
        talk(monkeypatch, io.BytesIO(b"one\n" + bad + b"two\n"))
