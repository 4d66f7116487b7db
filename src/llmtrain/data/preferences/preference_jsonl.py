"""`preference_jsonl`: pairs of a chosen and a rejected answer to a prompt, one record each."""

from collections.abc import Iterable, Iterator
from typing import Any

from llmtrain.config.data import PreferenceJsonlSection
from llmtrain.data.base import PreparedData
from llmtrain.data.examples.json_examples import JsonExamples
from llmtrain.data.examples.prompts import plain_conversation
from llmtrain.data.preferences.pair_records import read_pair
from llmtrain.data.preferences.pair_store import PairStore, pair_writer
from llmtrain.data.records.base import BadRecord, Record
from llmtrain.data.store.directory import open_or_build
from llmtrain.data.text_and_examples import SPLITS, Example, Segment
from llmtrain.data.tokenizers.chat_template import Message, template_identity
from llmtrain.data.tokenizers.load import load_tokenizer, tokenizer_dir, tokenizer_identity

_SHOWN = 60
"""Characters of a text before and after the place where it differs from another one."""


class PreferenceJsonl(JsonExamples):
    """The segments of an example are the prompt, the chosen and the rejected answer."""

    config: PreferenceJsonlSection
    noun = "pair"

    def segments(self, record: dict[str, Any]) -> list[Segment]:
        pair = read_pair(record)
        if pair.prompt is None:
            return _segments("", pair.chosen["content"], pair.rejected["content"])
        if self.format == "plain":
            answers = [_plain_answer(message) for message in (pair.chosen, pair.rejected)]
            return _segments(plain_conversation(pair.prompt), *answers)
        prompt = self.template.render(pair.prompt, add_generation_prompt=True, tools=pair.tools)
        chosen = self._rendered(pair.prompt, pair.chosen, pair.tools, prompt)
        rejected = self._rendered(pair.prompt, pair.rejected, pair.tools, prompt)
        if chosen == rejected:  # the template strips white space
            raise BadRecord("the two answers are equal")
        return _segments(prompt, chosen, rejected)

    def _rendered(self, messages: list[Message], answer: Message, tools: list[Any] | None, prompt: str) -> str:
        """What the chat template adds to the prompt for an answer."""
        whole = self.template.render([*messages, answer], add_generation_prompt=False, tools=tools)
        if not whole.startswith(prompt):
            raise BadRecord(
                f"the chat template does not begin the conversation with the prompt: {_difference(prompt, whole)}",
                "Use a chat template that adds the answer behind the prompt and changes nothing before it.",
            )
        return whole[len(prompt) :]

    def _usable(self, source: str, unit: str, records: Iterable[Record]) -> Iterator[Example]:
        for number, segments in self._records.convert(source, unit, records, self._checked_segments):
            is_text = self.format == "plain" or not segments[0].text  # a chat template writes its special tokens
            yield Example(segments, source, number, begins_special=is_text, ends_text=is_text, unit=unit)

    def prepare(self, threads: int) -> PreparedData:
        directory = open_or_build(
            self.cache_dir,
            identity={
                "pairs": self._source(),
                "tokenizer": tokenizer_identity(self.tokenizer_spec),
                "template": template_identity(tokenizer_dir(self.tokenizer_spec)),
            },
            tokenizer=lambda: load_tokenizer(self.tokenizer_spec, self._texts()),
            write=pair_writer(self._checked, threads),
        )
        train, val = (PairStore.open(directory, split) for split in SPLITS)
        return PreparedData(directory.tokenizer(), train, val, directory.fingerprint)


def _plain_answer(message: Message) -> str:
    if message.get("tool_calls"):
        raise BadRecord("an answer calls tools, which only a chat template can write")
    return str(message["content"])


def _segments(prompt: str, chosen: str, rejected: str) -> list[Segment]:
    return [Segment(prompt, False), Segment(chosen, True), Segment(rejected, True)]


def _difference(prompt: str, whole: str) -> str:
    """Both texts around the first place where they differ."""
    at = 0
    while at < min(len(prompt), len(whole)) and prompt[at] == whole[at]:
        at += 1
    parts = [repr(text[max(0, at - _SHOWN) : at + _SHOWN]) for text in (prompt, whole)]
    return f"the prompt has {parts[0]} where the conversation has {parts[1]}"
