"""Records with a chosen and a rejected answer, in the spellings of TRL, axolotl and LLaMA-Factory.

prompt      `prompt`, `instruction` (with `input`), `question`, `query` or `input` as text; `prompt`, `messages` or
            `conversations` as messages; `system` and `history` in front of it; or nothing: what both answers
            begin with
answers     `chosen` and `rejected`, `chosen_response` and `rejected_response`, or `output` with both: text, one
            message, a list of messages, or whole conversations that contain the prompt
tools       `tools`; calls as `tool_calls` of a message, or as turns from `function_call` and `observation`
"""

import json
from typing import Any, NamedTuple

from llmtrain.data.examples.formats import from_sharegpt
from llmtrain.data.records.base import BadRecord
from llmtrain.data.records.usable import field_names, text_of
from llmtrain.data.tokenizers.chat_template import ROLES, Message

_ANSWER_FIELDS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
_TEXT_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_MESSAGE_PROMPTS = ("messages", "conversations", "prompt")


class PairRecord(NamedTuple):
    """A prompt and two answers to it."""

    prompt: list[Message] | None
    """None: the answers are plain texts, which begin with the prompt."""
    chosen: Message
    rejected: Message
    tools: list[Any] | None = None
    """Tools that the chat template describes in the prompt."""


def is_pair(record: dict[str, Any]) -> bool:
    """Whether a record has two answers."""
    return _answers(record) is not None


def read_pair(record: dict[str, Any]) -> PairRecord:
    """The pair of a record; raises BadRecord if it cannot be used."""
    answers = _answers(record)
    if answers is None:
        raise BadRecord(
            f"fields 'chosen' and 'rejected' are missing; the example has {field_names(record)}",
            "A pair has prompt, chosen and rejected. For examples with one answer set data.name to instruct_jsonl or "
            "chat_jsonl, and trainer.objective.name to next_token.",
        )
    chosen, rejected = map(_as_messages, answers)
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise BadRecord("one answer is text and the other one a list of messages")
    prompt = _prompt(record)
    if prompt is None and isinstance(answers[0], str):
        _check_common_prompt(record, *answers)
    else:
        prompt, chosen, rejected = _split(prompt, chosen, rejected)
    for which, messages in (("chosen", chosen), ("rejected", rejected)):
        if not messages[0]["content"].strip() and not messages[0].get("tool_calls"):
            raise BadRecord(f"the {which} answer is empty")
    if chosen == rejected:
        raise BadRecord("the two answers are equal")
    return PairRecord(prompt, chosen[0], rejected[0], _tools(record))


def _check_common_prompt(record: dict[str, Any], chosen: str, rejected: str) -> None:
    """Refuse plain texts that do not begin with the same prompt."""
    if chosen[:1] != rejected[:1] and chosen.strip() and rejected.strip():
        raise BadRecord(
            f"there is no prompt, and the two texts begin differently; the example has {field_names(record)}",
            "Name the field of the prompt `prompt`, or begin both texts with the prompt.",
        )


def _answers(record: dict[str, Any]) -> tuple[Any, Any] | None:
    for chosen, rejected in _ANSWER_FIELDS:
        if chosen in record and rejected in record:
            return record[chosen], record[rejected]
    output = record.get("output")
    if isinstance(output, list) and len(output) == 2:  # LLaMA-Factory's earlier format
        return output[0], output[1]
    return None


def _as_messages(value: Any) -> list[Message]:
    """An answer as messages."""
    if isinstance(value, list):
        return _checked_messages(value)
    if isinstance(value, dict):
        return _checked_messages([value])
    return [{"role": "assistant", "content": text_of(value, "an answer")}]


def _prompt(record: dict[str, Any]) -> list[Message] | None:
    """The messages before the answer; None if the record has no prompt."""
    messages: list[Message] | None = None
    for name in _MESSAGE_PROMPTS:
        if isinstance(record.get(name), list):
            messages = _checked_messages(record[name])
            break
    else:
        text = _prompt_text(record)
        if text is not None:
            messages = [*_history(record), {"role": "user", "content": text}]
    system = record.get("system")
    if messages is not None and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": text_of(system, "field 'system'")}, *messages]
    return messages


def _prompt_text(record: dict[str, Any]) -> str | None:
    for name in _TEXT_PROMPTS:
        if record.get(name) is None:
            continue
        text = text_of(record[name], f"field '{name}'")
        if name != "instruction":
            return text
        context = text_of(record.get("input") or "", "field 'input'")
        return "\n\n".join(part for part in (text, context) if part)
    return None


def _history(record: dict[str, Any]) -> list[Message]:
    """LLaMA-Factory's earlier turns: pairs of question and answer."""
    messages: list[Message] = []
    for turn in record.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRecord(f"'history' must be a list of [question, answer], got {turn!r:.60}")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": text_of(text, "a turn of 'history'")})
    return messages


def _split(
    prompt: list[Message] | None, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt and answers, one message each, of two lists of messages, which are the answers alone or contain the
    prompt."""
    if chosen == rejected:
        raise BadRecord("the two answers are equal")
    if chosen[0]["role"] != "assistant" or prompt is None:
        count = 0  # of the messages that both have
        while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
            count += 1
        prompt = chosen[:count]
        chosen = chosen[count:]
        rejected = rejected[count:]
    if not prompt:
        raise BadRecord("the two conversations have no message in common, so there is no prompt")
    for which, rest in (("chosen", chosen), ("rejected", rejected)):
        if len(rest) != 1 or rest[0]["role"] != "assistant":
            raise BadRecord(
                f"the {which} conversation differs before its last message; both must have the same messages up to one "
                "answer each"
            )
    return prompt, chosen, rejected


def _checked_messages(values: list[Any]) -> list[Message]:
    if not values:
        raise BadRecord("a list of messages is empty")
    messages = []
    for number, value in enumerate(values, 1):
        message = _with_tool_calls(from_sharegpt(value))
        if not isinstance(message, dict):
            raise BadRecord(f"message {number} must be an object, got {message!r:.60}")
        role = message.get("role")
        if role not in ROLES:
            raise BadRecord(f"message {number}: role must be one of {', '.join(sorted(ROLES))}, got {role!r}")
        if message.get("tool_calls") and message.get("content") is None:
            message = {**message, "content": ""}
        text_of(message.get("content"), f"the content of message {number} ({role})")
        # The datasets library fills in every key that any message has, with None.
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def _with_tool_calls(message: Any) -> Any:
    """LLaMA-Factory's turns of an agent, whose text is JSON, as messages; anything else unchanged."""
    role = message.get("role") if isinstance(message, dict) else None
    if role == "observation":
        return {**message, "role": "tool"}
    if role != "function_call":
        return message
    calls = _from_json(message.get("content"), "the turn 'function_call'")
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _from_json(value: Any, what: str) -> Any:
    """Tables hold JSON as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise BadRecord(f"{what} must be a list or JSON, got {value!r:.60}") from None


def _tools(record: dict[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _from_json(tools, "'tools'") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRecord(f"'tools' must be a list, got {tools!r:.60}")
    return tools
