"""The small run of the GPU tests, and its result."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TINY_MODEL = [
    "model.name=gpt",
    "model.architecture=gpt2",
    "model.block_size=128",
    "model.d_model=128",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.dropout=0.1",
]
"""A GPT of half a million weights."""
TINY = [
    "run.device=cuda",
    "run.deterministic=true",
    "output.run_id=gpu",
    "data.name=python_stdlib",
    "data.tokenizer=byte",
    "trainer.optimizer=adamw",
    "trainer.max_steps=12",
    "trainer.micro_batch_size=8",
    "trainer.grad_accum_steps=2",
    "trainer.lr=3e-3",
    "trainer.warmup_steps=2",
    "trainer.precision=bf16",
    "trainer.log_every_steps=1",
    "trainer.eval_every_steps=6",
    "trainer.eval_batches=4",
    "trainer.save_every_steps=4",
]
"""12 steps; later overrides win."""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        value: dict[str, Any] = json.loads(self.out)
        return value


Train = Callable[..., Done]
