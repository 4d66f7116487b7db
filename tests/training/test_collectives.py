"""How often the processes of a run wait for each other: once per step, and once per generated token."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import fault_harness as harness
import rank_harness as ranks

from llmtrain.distributed.control_group import ControlGroup
from llmtrain.training import text_generation
from llmtrain.training.step import Stepper

_events: list[str] = []
COLLECTIVES = ("sums", "gather", "gather_tensors")


def watch() -> None:
    """In a rank: note collectives, optimizer steps and chosen tokens, in order."""
    collectives = [(ControlGroup, name) for name in COLLECTIVES]
    for owner, name in [*collectives, (Stepper, "train_step"), (text_generation, "_choose")]:
        before: Any = getattr(owner, name)

        def noting(*args: Any, name: str = name, before: Any = before, **kwargs: Any) -> Any:
            _events.append(name)
            return before(*args, **kwargs)

        setattr(owner, name, noting)


def between(events: list[str], mark: str) -> list[list[str]]:
    """Events between each two marks."""
    places = [index for index, event in enumerate(events) if event == mark]
    return [events[first + 1 : second] for first, second in pairwise(places)]


def test_one_collective_per_step_and_per_token(tmp_path: Path, cache: Path) -> None:
    every = {"trainer__log_every_steps": harness.STEPS, "trainer__save_every_steps": None}
    prompts = {"trainer__eval_prompts": ["a"], "trainer__eval_prompt_tokens": 4, "trainer__eval_every_steps": None}
    config = harness.tiny_config(
        tmp_path / "runs", cache, **every, **prompts, trainer__grad_accum_steps=2, distributed__strategy="ddp"
    )
    for events in ranks.values(ranks.train_ranks(config, 2, before=watch, after=lambda: list(_events))):
        steps = between(events, "train_step")
        assert len(steps) == harness.STEPS - 1
        assert steps[0] == ["gather_tensors", "sums"], "the first step's loss is read at once"
        assert steps[1:] == [["sums"]] * (harness.STEPS - 2)
        answer = between(events, "_choose")[:3]  # of four tokens
        assert answer == [["sums"]] * 3
