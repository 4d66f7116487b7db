"""How long the phases of a start take, and the compiled code that it leaves to later starts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmtrain.config.schema import Config
from llmtrain.core.logs import log
from llmtrain.core.progress import phase_seconds
from llmtrain.core.redact import redact_values
from llmtrain.data.cache_dir import token_cache_dir
from llmtrain.distributed.world import World
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import note_generation
from llmtrain.training.compile_cache import CompileCache, cache_key, compile_cache
from llmtrain.training.throughput import Timing

_COMPILED_FIELDS = {
    "precision",
    "micro_batch_size",
    "optimizer",
    "objective",
    "activation_checkpointing",
    "max_grad_norm",
}
"""Of the section trainer: what decides which code is compiled. So trials that vary others share it."""


@dataclass
class StartUp:
    began: float
    """When the training was called, by time.perf_counter."""
    compiles: bool
    """trainer.compile"""
    cache: CompileCache | None
    """On rank 0, which writes it."""
    _began_steps: float = 0.0

    def begin_steps(self) -> str:
        """Called before the first step. Returns what the user waits for."""
        self._began_steps = time.perf_counter()
        if not self.compiles:
            return "first step"
        if self.cache is None or self.cache.compile_seconds is None:
            return "compiling"
        if self.cache.is_filled:
            return f"loading compiled code (compiling took {self.cache.compile_seconds:.0f} s)"
        return f"compiling ({self.cache.compile_seconds:.0f} s last time)"

    def end_first_step(self, timing: Timing) -> None:
        """Record what the start has taken, and keep the compiled code."""
        now = time.perf_counter()
        first_step = now - self._began_steps
        timing.first_step = now - self.began
        timing.start = {**phase_seconds(), "first step": first_step}
        if self.compiles:
            is_filled = self.cache is not None and self.cache.is_filled
            what = "with the compiled code of an earlier start" if is_filled else "most of them for compiling"
            log("SETUP", f"the first step took {first_step:.1f} s, {what}")
        self.keep_compiled_code(first_step)

    def keep_compiled_code(self, compile_seconds: float | None = None) -> None:
        """Called when code may have been compiled: after the first step, and after evaluations."""
        if self.cache is not None:
            self.cache.save(compile_seconds)


@contextmanager
def starting_up(config: Config, world: World, began: float) -> Iterator[StartUp]:
    """Inside the block the compilers use the code of earlier starts."""
    if not config.trainer.compile:
        yield StartUp(began, False, None)
        return
    inputs = {
        "model": redact_values(config.model.model_dump(mode="json")),
        "trainer": config.trainer.model_dump(mode="json", include=_COMPILED_FIELDS),
        "strategy": config.distributed.strategy,
        "deterministic": config.run.deterministic,
    }
    with compile_cache(token_cache_dir(config.data) / "compiled", cache_key(inputs, world.device)) as cache:
        yield StartUp(began, True, cache if world.is_first else None)


def record_start(run: RunDirectory, generation: int, timing: Timing) -> None:
    """For `runs show`: each start has its own times."""
    note_generation(run, generation, start_seconds=timing.as_dict()["start"])
