"""`instruct_jsonl`: instruction, optional input, and output, one record each."""

from typing import Any

from llmtrain.config.data import InstructJsonlSection
from llmtrain.data.examples.formats import field_pair, recognize, refuse_preference_pair
from llmtrain.data.examples.json_examples import JsonExamples
from llmtrain.data.examples.prompts import conversation, plain_prompt
from llmtrain.data.records.base import BadRecord
from llmtrain.data.records.usable import field_names, text_of
from llmtrain.data.text_and_examples import Segment


class InstructJsonl(JsonExamples):
    config: InstructJsonlSection

    def identity(self) -> dict[str, Any]:
        config = self.config
        return {**super().identity(), "fields": [config.instruction_field, config.input_field, config.output_field]}

    def segments(self, record: dict[str, Any]) -> list[Segment]:
        record = self._with_configured_names(record)
        instruction = self._field(record, "instruction")
        answer = self._field(record, "output")
        value = record.get(self.config.input_field)
        context = "" if value is None else text_of(value, f"field '{self.config.input_field}'")
        if self.format == "plain":
            return [Segment(plain_prompt(instruction, context), False), Segment(answer, True)]
        question = f"{instruction}\n\n{context}" if context else instruction
        return conversation(
            self.template, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )

    def _with_configured_names(self, record: dict[str, Any]) -> dict[str, Any]:
        """An example with `prompt` and `completion` under the configured names, unless it has those."""
        config = self.config
        names = {config.instruction_field: "prompt", config.output_field: "completion"}
        if any(name in record for name in names) or not all(name in record for name in names.values()):
            return record
        return {**record, **{name: record[other] for name, other in names.items()}}

    def _field(self, record: dict[str, Any], which: str) -> str:
        name = getattr(self.config, f"{which}_field")
        if name not in record:
            refuse_preference_pair(record)
            raise BadRecord(
                f"field '{name}' is missing; the example has {field_names(record)}", _mapping(record, which)
            )
        what = f"the answer, field '{name}'," if which == "output" else f"field '{name}'"
        text = text_of(record[name], what)
        if not text.strip():
            raise BadRecord(f"{what} is empty")
        return text


def _mapping(record: dict[str, Any], which: str) -> str:
    """How to read an example with other fields."""
    found = recognize(record)
    if found and found.kind == "chat_jsonl":
        return "Set data.name to chat_jsonl."
    pair = field_pair(record)
    if pair:
        return f"Set data.instruction_field to {pair[0]} and data.output_field to {pair[1]}."
    return f"Set data.{which}_field, or fix the example."
