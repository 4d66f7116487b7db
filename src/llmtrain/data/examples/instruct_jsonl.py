"""`instruct_jsonl`: instruction, optional input, and output, one JSON object each."""

from typing import Any

from llmtrain.config.data import InstructJsonlSection
from llmtrain.data.examples.json_examples import JsonExamples, text_of
from llmtrain.data.examples.prompts import conversation, plain_prompt
from llmtrain.data.types import BadExample, Segment


class InstructJsonl(JsonExamples):
    config: InstructJsonlSection

    def identity(self) -> dict[str, Any]:
        config = self.config
        return {**super().identity(), "fields": [config.instruction_field, config.input_field, config.output_field]}

    def segments(self, record: dict[str, Any]) -> list[Segment]:
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

    def _field(self, record: dict[str, Any], which: str) -> str:
        name = getattr(self.config, f"{which}_field")
        if name not in record:
            fields = ", ".join(map(repr, sorted(record))) or "no fields"
            raise BadExample(
                f"field '{name}' is missing; the example has {fields}",
                f"Set data.{which}_field, or fix the example.",
            )
        what = f"the answer, field '{name}'," if which == "output" else f"field '{name}'"
        text = text_of(record[name], what)
        if not text.strip():
            raise BadExample(f"{what} is empty")
        return text
