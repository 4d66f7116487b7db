"""`chat_jsonl`: conversations, one JSON object each: {"messages": [{"role": ..., "content": ...}, ...]}."""

from typing import Any

from llmtrain.data.chat_template import ROLES, Message
from llmtrain.data.json_rows import JsonRows, text_of
from llmtrain.data.prompts import conversation
from llmtrain.data.rows import BadRow, Segment


class ChatJsonl(JsonRows):
    def segments(self, record: dict[str, Any]) -> list[Segment]:
        if "messages" not in record:
            fields = ", ".join(map(repr, sorted(record))) or "no fields"
            raise BadRow(f"there is no field 'messages'; the row has {fields}")
        messages = record["messages"]
        if not isinstance(messages, list):
            raise BadRow(f"'messages' is not a list but {messages!r:.60}")
        if not messages:
            raise BadRow("'messages' is empty")
        checked = [_message(number, message) for number, message in enumerate(messages, 1)]
        if not any(message["role"] == "assistant" for message in checked):
            raise BadRow("row without an answer: no message has the role 'assistant'")
        return conversation(self.template, checked)


def _message(number: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise BadRow(f"message {number} is not an object but {message!r:.60}")
    role = message.get("role")
    if role not in ROLES:
        raise BadRow(f"message {number} has the role {role!r}; known: {', '.join(sorted(ROLES))}")
    content = text_of(message.get("content"), f"the content of message {number} ({role})")
    if role == "assistant" and not content.strip():
        raise BadRow(f"the answer, message {number}, is empty")
    # The datasets library gives every message all the keys that any has, empty where it had none.
    return {key: value for key, value in message.items() if value is not None}
