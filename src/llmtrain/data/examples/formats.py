"""Formats of examples that are recognized without configuration, besides llmtrain's own two.

ShareGPT             {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
prompt, completion   {"prompt": ..., "completion": ...}: text, or in a chat file lists of messages

Preference pairs, {"prompt": ..., "chosen": ..., "rejected": ...}, are recognized too, to name the dataset that reads
them: preferences/pair_records.py.
"""

from typing import Any, NamedTuple

from llmtrain.data.records.base import BadRecord
from llmtrain.data.records.usable import field_names

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
_PROMPT_FIELDS = ("prompt", "instruction", "question", "input", "query")


class Recognized(NamedTuple):
    """The data section for an example."""

    kind: str
    fields: dict[str, str]
    """Fields of the section that differ from their defaults."""


def recognize(record: dict[str, Any]) -> Recognized | None:
    """The data section that reads examples such as this one; None if that is unclear."""
    has_messages = any(isinstance(record.get(name), list) for name in ("messages", "conversations"))
    if has_messages or (isinstance(record.get("prompt"), list) and "completion" in record):
        return Recognized("chat_jsonl", {})
    pair = field_pair(record)
    if pair is None:
        return None
    if pair in _FIELD_PAIRS[:2]:  # instruct_jsonl finds these automatically
        return Recognized("instruct_jsonl", {})
    return Recognized("instruct_jsonl", {"instruction_field": pair[0], "output_field": pair[1]})


def texts_of(record: dict[str, Any], found: Recognized) -> list[str]:
    """The texts that prompt and answers of an example consist of."""
    if found.kind == "chat_jsonl":
        messages = messages_of(record)
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        return [content for content in contents if isinstance(content, str)]
    names = {*(field_pair(record) or ()), "input"}
    return [record[name] for name in sorted(names) if isinstance(record.get(name), str)]


def field_pair(record: dict[str, Any]) -> tuple[str, str] | None:
    """The fields that hold instruction and answer, by the names that datasets use for them."""
    for instruction, output in _FIELD_PAIRS:
        if isinstance(record.get(instruction), str) and isinstance(record.get(output), str):
            return instruction, output
    return None


def messages_of(record: dict[str, Any]) -> Any:
    """The messages of a chat example in any of the formats; not checked yet."""
    if "messages" in record:
        return record["messages"]
    if "conversations" in record:
        turns = record["conversations"]
        if not isinstance(turns, list):
            return turns
        return [from_sharegpt(turn) for turn in turns]
    if "prompt" in record and "completion" in record:
        return [*_as_messages(record["prompt"], "user"), *_as_messages(record["completion"], "assistant")]
    refuse_preference_pair(record)
    pair = field_pair(record)
    if pair is None:
        remedy = "A chat example has messages, conversations (ShareGPT), or prompt and completion."
    elif pair in _FIELD_PAIRS[:2]:
        remedy = "Set data.name to instruct_jsonl."
    else:
        remedy = (
            f"Set data.name to instruct_jsonl, data.instruction_field to {pair[0]} and data.output_field to {pair[1]}."
        )
    raise BadRecord(f"field 'messages' is missing; the example has {field_names(record)}", remedy)


def from_sharegpt(turn: Any) -> Any:
    """A turn with `from` and `value` as a message with `role` and `content`; anything else unchanged."""
    if not isinstance(turn, dict) or "role" in turn or "from" not in turn:
        return turn
    role = turn["from"]
    if isinstance(role, str):  # else it is refused later, with its place
        role = _SHAREGPT_ROLES.get(role, role)
    return {"role": role, "content": turn.get("value")}


def _as_messages(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def refuse_preference_pair(record: dict[str, Any]) -> None:
    """Raise BadRecord, with how to train on the chosen answers, if the example has two answers to choose from."""
    if "chosen" in record and "rejected" in record:
        raise BadRecord(
            "this is a preference pair ('chosen' and 'rejected'), but supervised training needs one answer",
            "For preference tuning write a config with `llmtrain init --preferences FILE`, or set data.name to "
            f"preference_jsonl and trainer.objective.name to dpo. {_chosen_as_answer(record)}",
        )


def _chosen_as_answer(record: dict[str, Any]) -> str:
    chosen = record["chosen"]
    prompt = next((name for name in _PROMPT_FIELDS if isinstance(record.get(name), str)), None)
    if isinstance(chosen, str) and prompt:
        return (
            "To train on the chosen answers, set data.name to instruct_jsonl, "
            f"data.instruction_field to {prompt} and data.output_field to chosen."
        )
    if not isinstance(chosen, list):
        return 'To train on the chosen answers, write each as {"prompt": ..., "completion": ...}.'
    first = chosen[0] if chosen else None
    is_answer_only = isinstance(first, dict) and first.get("role") == "assistant" and "prompt" in record
    fields = "{prompt, completion: .chosen}" if is_answer_only else "{messages: .chosen}"
    return (
        "To train on the chosen answers, set data.name to chat_jsonl and rename the fields, in JSON lines with: "
        f"jq -c '{fields}' pairs.jsonl > examples.jsonl"
    )
