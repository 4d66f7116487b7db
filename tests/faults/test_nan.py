"""A NaN loss ends the run, is named, and is never saved."""

from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
import torch
from fault_harness import RUN_ID, Outcome

from llmtrain.config.schema import Config
from slow_cases import some

NAN_STEPS = [(log_every, k) for log_every in (1, 100) for k in (1, 2, 4, 5, 8)]


# The first step, a step in the middle that is logged, one that is not, and the last.
@pytest.mark.parametrize("case", some(NAN_STEPS, (1, 1), (1, 4), (100, 5), (100, 8)), ids=lambda c: f"{c[0]}-{c[1]}")
def test_nan_ends_the_run_and_names_step_and_samples(
    make_config: Callable[..., Config], root: Path, golden: Outcome, case: tuple[int, int]
) -> None:
    log_every, k = case
    config = make_config(trainer__log_every_steps=log_every)
    ended = harness.run(config, fault=f"loss:{k}:0:nan")
    assert ended.code == 65, ended.output
    assert ended.error["reason"] == "not_finite"
    assert f"samples {(k - 1) * 4} to {k * 4 - 1}" in ended.error["what"]
    assert all(step < k for step in harness.steps_saved(root))
    assert not (root / RUN_ID / "finished.json").exists()
    assert "NaN" not in (root / RUN_ID / "metrics.jsonl").read_text()

    ended = harness.run(config, RUN_ID)  # the fault was transient: the run resumes before it
    assert ended.code == 0, ended.output
    assert ended.result["state_sha256"] == golden.state_sha256


def test_nan_is_not_saved_after_sigterm(make_config: Callable[..., Config], root: Path) -> None:
    def send_sigterm() -> None:
        import os
        import signal

        from llmtrain.training import step as step_module

        fault = step_module.inject_fault

        def both(point: str, step: int) -> str | None:
            if (point, step) == ("loss", 5):
                os.kill(os.getpid(), signal.SIGTERM)
            return fault(point, step)

        step_module.inject_fault = both

    ended = harness.run(make_config(trainer__log_every_steps=100), fault="loss:5:0:nan", before=send_sigterm)
    assert ended.code == 65, ended.output
    assert harness.steps_saved(root) == [2, 4]


def test_nan_parameters_are_never_saved(make_config: Callable[..., Config], root: Path) -> None:
    """The loss of a step can be finite while its gradient is not: the damage to the parameters shows only in the next
    loss, so a save in between would keep an unusable model."""

    def spoil_a_gradient() -> None:
        from llmtrain.training import step as step_module

        fault = step_module.inject_fault

        def spoil(point: str, step: int) -> str | None:
            if (point, step) == ("after_backward", 6):
                import gc

                for thing in gc.get_objects():
                    if isinstance(thing, torch.nn.Embedding) and thing.weight.grad is not None:
                        thing.weight.grad[0, 0] = float("inf")
            return fault(point, step)

        step_module.inject_fault = spoil

    ended = harness.run(make_config(trainer__eval_every_steps=None), before=spoil_a_gradient)
    assert ended.code == 65, ended.output
    for checkpoint in harness.checkpoints(root):
        assert all(t.isfinite().all() for t in checkpoint.tensors("model").values()), f"step {checkpoint.step}"
