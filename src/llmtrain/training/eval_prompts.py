"""Text the model generates during training: answers to trainer.eval_prompts, and a sample at the end of the run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.mixture import has_examples
from llmtrain.config.schema import Config
from llmtrain.core.arguments import Sampling
from llmtrain.core.files import write_json
from llmtrain.core.logs import log
from llmtrain.core.redact import redact_values
from llmtrain.core.text import one_line
from llmtrain.data.base import PreparedData, PreparedMixture
from llmtrain.data.examples.prompts import prompt_prefix, prompt_text
from llmtrain.distributed.world import World
from llmtrain.errors import DataError
from llmtrain.runs.directory import RunDirectory
from llmtrain.training.model_handle import ModelHandle
from llmtrain.training.text_generation import Confirm, sample_text

SAMPLE_TOKENS = 300
SAMPLE_SEC = 10.0
SHOWN_CHARS = 100


@dataclass(frozen=True)
class EvalPrompts:
    """Every rank calls the same methods: a sharded model needs all of them in every forward pass."""

    config: Config
    run: RunDirectory
    model: ModelHandle
    prepared: PreparedData | PreparedMixture
    world: World

    def answer(self, is_interrupted: Callable[[], bool]) -> list[dict[str, str]] | None:
        """The model's answer to each of trainer.eval_prompts, decoded greedily; None if a rank was interrupted.
        `is_interrupted` covers this rank only."""
        is_stopped = False

        def confirm(token: int) -> int | None:
            nonlocal is_stopped
            agreed = self._agree(token, is_interrupted())
            is_stopped = agreed is None
            return agreed

        trainer = self.config.trainer
        sampling = Sampling(trainer.eval_prompt_tokens, temperature=0, top_k=None, seed=self.config.run.seed)
        answers = []
        for prompt in trainer.eval_prompts:
            text = self._generate(prompt, sampling, confirm)
            if is_stopped:
                return None
            answers.append({"prompt": prompt, "answer": text})
        return answers

    def save(self, step: int, answers: list[dict[str, str]]) -> Path:
        """Write the answers to a file of the run, and show them in the log."""
        self.run.samples.mkdir(exist_ok=True)
        path = self.run.samples / f"step_{step}.json"
        shown = redact_values(answers)
        write_json(path, shown)
        for row in shown:
            # A tag of its own, because `status` reads numbers from [EVAL] lines, and a model may write anything.
            log("SAMPLE", f"{one_line(row['prompt'])} -> {one_line(row['answer'], SHOWN_CHARS)}")
        return path

    def sample(self, is_interrupted: Callable[[], bool]) -> tuple[str, str]:
        """A prompt, and a short text from it that shows what the model has learned. `is_interrupted` covers this
        rank only."""
        prompts = self.config.trainer.eval_prompts
        if self._has_examples() and not prompts:
            return "", ""
        prompt = prompts[0] if prompts else ""
        deadline = time.monotonic() + SAMPLE_SEC
        sampling = Sampling(SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=self.config.run.seed)
        try:
            return prompt, self._generate(
                prompt,
                sampling,
                lambda token: self._agree(token, is_interrupted() or time.monotonic() > deadline),
            )
        except DataError:  # a char tokenizer whose training text has no line break
            return "", ""

    def _generate(self, prompt: str, sampling: Sampling, confirm: Confirm) -> str:
        prefix: list[int] = []
        if self._has_examples():
            tokenizer_dir = self.run.tokenizer
            prefix = prompt_prefix(self.config.data, tokenizer_dir, self.prepared.tokenizer)
            prompt = prompt_text(self.config.data, tokenizer_dir, [{"role": "user", "content": prompt}])
        with self.model.autocast():
            return sample_text(
                self.model.adapter,
                self.model.module,
                self.prepared.tokenizer,
                prompt,
                sampling,
                self.config.model.block_size,
                prefix=prefix,
                confirm=confirm,
            )

    def _has_examples(self) -> bool:
        """Whether prompts are formatted like the examples. The format of a user's own dataset is unknown, so there a
        prompt is the text itself."""
        return has_examples(self.config.data)

    def _agree(self, token: int, is_stopped: bool) -> int | None:
        """Rank 0's token, or None if any rank stops: one collective per token. Logits may differ between ranks in the
        last bit; without this the ranks would generate texts of different lengths and deadlock."""
        chosen, stopped = self.world.control.sums([token if self.world.is_first else 0, int(is_stopped)])
        return None if stopped else chosen
