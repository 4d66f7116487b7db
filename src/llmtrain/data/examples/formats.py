"""Formats of examples that are recognized without configuration, besides llmtrain's own two.

ShareGPT             {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
prompt, completion   {"prompt": ..., "completion": ...}: text, or in a chat file lists of messages
"""

from typing import Any, NamedTuple

from llmtrain.data.types import BadExample

_SHAREGPT_ROLES = {
    "assistant": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "gpt": "assistant",
    "human": "user",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
# (instruction, output) that other datasets use, in the order in which they are looked for.
_FIELD_PAIRS = (
    ("instruction", "output"),
    ("prompt", "completion"),
    ("instruction", "response"),
    ("question", "answer"),
    ("prompt", "response"),
    ("input", "output"),
    ("query", "response"),
)


class Recognized(NamedTuple):
    """The data section for an example."""

    kind: str
    fields: dict[str, str]
    """Fields of the section that differ from their defaults."""


def recognize(record: dict[str, Any]) -> Recognized | None:
    """The data section that reads examples such as this one; None if that is unclear."""
    if any(isinstance(record.get(name), list) for name in ("messages", "conversations", "prompt")):
        return Recognized("chat_jsonl", {})
    pair = field_pair(record)
    if pair is None:
        return None
    is_automatic = pair in _FIELD_PAIRS[:2]
    return Recognized("instruct_jsonl", {} if is_automatic else {"instruction_field": pair[0], "output_field": pair[1]})


def field_pair(record: dict[str, Any]) -> tuple[str, str] | None:
    """The fields that hold instruction and answer, by the names that datasets use for them."""
    return next((pair for pair in _FIELD_PAIRS if all(isinstance(record.get(name), str) for name in pair)), None)


def messages_of(record: dict[str, Any]) -> Any:
    """The messages of a chat example in any of the formats; not checked yet."""
    if "messages" in record:
        return record["messages"]
    if "conversations" in record:
        turns = record["conversations"]
        return [_from_sharegpt(turn) for turn in turns] if isinstance(turns, list) else turns
    if "prompt" in record and "completion" in record:
        return [*_as_messages(record["prompt"], "user"), *_as_messages(record["completion"], "assistant")]
    fields = ", ".join(map(repr, sorted(record))) or "no fields"
    pair = field_pair(record)
    raise BadExample(
        f"field 'messages' is missing; the example has {fields}",
        "Set data.name to instruct_jsonl"
        + (
            f", data.instruction_field to {pair[0]} and data.output_field to {pair[1]}."
            if pair not in _FIELD_PAIRS[:2]
            else "."
        )
        if pair
        else "A chat example has messages, conversations (ShareGPT), or prompt and completion.",
    )


def _from_sharegpt(turn: Any) -> Any:
    """A turn with `from` and `value` as a message with `role` and `content`; anything else unchanged."""
    if not isinstance(turn, dict) or "role" in turn or "from" not in turn:
        return turn
    role = turn["from"]
    return {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": turn.get("value")}


def _as_messages(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]
