"""`chat_jsonl`: conversations, one record each: {"messages": [{"role": ..., "content": ...}, ...]}, or one of
the formats in formats.py."""

from typing import Any

from llmtrain.data.examples.formats import messages_of
from llmtrain.data.examples.json_examples import JsonExamples
from llmtrain.data.examples.prompts import conversation
from llmtrain.data.records.base import BadRecord
from llmtrain.data.records.usable import text_of
from llmtrain.data.text_and_examples import Segment
from llmtrain.data.tokenizers.chat_template import ROLES, Message


class ChatJsonl(JsonExamples):
    def segments(self, record: dict[str, Any]) -> list[Segment]:
        messages = messages_of(record)
        field = "messages" if "messages" in record else "conversations"
        if not isinstance(messages, list):
            raise BadRecord(f"'{field}' must be a list, got {messages!r:.60}")
        if not messages:
            raise BadRecord(f"'{field}' is empty")
        checked = [_message(number, message) for number, message in enumerate(messages, 1)]
        if not any(message["role"] == "assistant" for message in checked):
            raise BadRecord("no answer: no message has the role 'assistant'")
        return conversation(self.template, checked)


def _message(number: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise BadRecord(f"message {number} must be an object, got {message!r:.60}")
    role = message.get("role")
    if role not in ROLES:
        raise BadRecord(f"message {number}: role must be one of {', '.join(sorted(ROLES))}, got {role!r}")
    content = text_of(message.get("content"), f"the content of message {number} ({role})")
    if role == "assistant" and not content.strip():
        raise BadRecord(f"message {number}, an answer, is empty")
    # The datasets library fills in every key that any message has, with None.
    return {key: value for key, value in message.items() if value is not None}
