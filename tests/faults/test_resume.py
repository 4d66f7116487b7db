"""A run that is interrupted or killed anywhere and resumed matches the uninterrupted run bit for bit."""

import random
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import EVAL_STEPS, RUN_ID, SAVE_EVERY, SAVE_STEPS, STEPS, Outcome

from llmtrain.config.schema import Config
from llmtrain.core import fault_injection as faults
from slow_cases import some

REPLACING = "save_while_replacing"  # only reached when a step is saved a second time: tested separately
SAVE_POINTS = [point for point in faults.POINTS if point.startswith("save_") and point != REPLACING]
STEP_POINTS = ["forward", "after_backward", "after_optimizer"]
# Every point at a step in the middle; at the first save, before which there is no checkpoint, and at the last one, one
# point each.
EVERY_SAVE = [(point, step) for point in SAVE_POINTS for step in SAVE_STEPS]
A_FEW_SAVES = [(point, 4) for point in SAVE_POINTS] + [("save_before_rename", 2), ("save_after_rename", 8)]


def resume_and_check(config: Config, golden: Outcome, resume: str = RUN_ID) -> int:
    """Resume to the end; must match the uninterrupted run. Returns the step it resumed from."""
    root = Path(config.output.root_dir)
    ended = harness.run(config, resume)
    assert ended.code == 0, ended.output
    assert ended.result is not None
    assert harness.outcome(root, ended.result) == golden
    harness.verify_all(root)
    leftovers = [path.name for path in (root / RUN_ID / "checkpoints").iterdir() if path.name.startswith(".")]
    assert leftovers == []
    assert not (root / RUN_ID / "lock").exists()
    return ended.result["resumed_from"] or 0


def test_sweep_has_every_save_point() -> None:
    assert SAVE_POINTS == [
        "save_begin",
        "save_model_written",
        "save_before_manifest",
        "save_before_rename",
        "save_published",
        "save_after_rename",
        "save_before_prune",
    ]


@pytest.mark.parametrize("k", some(range(1, STEPS + 1), 3, 4, 8))
def test_sigterm_at_every_step_loses_nothing(config: Config, golden: Outcome, k: int) -> None:
    ended = harness.run(config, fault=f"after_optimizer:{k}:0:term")
    assert ended.code == 75, ended.output
    assert f"--resume {config.output.root_dir}/{RUN_ID}" in ended.output
    assert resume_and_check(config, golden) == k


@pytest.mark.parametrize("k", some(range(1, STEPS + 1), 1, 4, 7))
def test_sigkill_at_every_step_loses_at_most_a_save_interval(config: Config, golden: Outcome, k: int) -> None:
    ended = harness.run(config, fault=f"after_optimizer:{k}:0:kill")
    assert ended.code == -9, ended.output
    resumed_from = resume_and_check(config, golden)
    assert k - resumed_from <= SAVE_EVERY


@pytest.mark.parametrize("save", some(EVERY_SAVE, *A_FEW_SAVES), ids=lambda save: f"{save[0]}-{save[1]}")
def test_sigkill_at_every_point_of_every_save(config: Config, golden: Outcome, save: tuple[str, int]) -> None:
    point, step = save
    ended = harness.run(config, fault=f"{point}:{step}:0:kill")
    assert ended.code == -9, ended.output
    resumed_from = resume_and_check(config, golden)
    renamed = point in ("save_after_rename", "save_before_prune")
    assert resumed_from == (step if renamed else step - SAVE_EVERY)


@pytest.mark.parametrize("point", some(["forward", "loss", "after_backward"], "after_backward"))
def test_sigkill_inside_a_step(config: Config, golden: Outcome, point: str) -> None:
    assert harness.run(config, fault=f"{point}:5:0:kill").code == -9
    assert resume_and_check(config, golden) == 4


@pytest.mark.parametrize("step", some(EVAL_STEPS, 8))
def test_sigkill_during_evaluation(config: Config, golden: Outcome, step: int) -> None:
    assert harness.run(config, fault=f"evaluate:{step}:0:kill").code == -9
    assert resume_and_check(config, golden) == step - SAVE_EVERY


def test_sigkill_after_the_final_save(config: Config, golden: Outcome, root: Path) -> None:
    assert harness.run(config, fault=f"after_final_save:{STEPS}:0:kill").code == -9
    assert not (root / RUN_ID / "finished.json").exists()
    assert resume_and_check(config, golden) == STEPS
    assert (root / RUN_ID / "finished.json").exists()


def test_finished_run_resumes_as_a_no_op(config: Config, golden: Outcome, finished_root: Path) -> None:
    before = harness.tree(finished_root)
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result == harness.read_result(finished_root)
    assert ended.result["state_sha256"] == golden.state_sha256
    assert harness.tree(finished_root) == before


@pytest.mark.parametrize("step", some(EVAL_STEPS, 4))
def test_sigterm_during_evaluation(config: Config, golden: Outcome, step: int) -> None:
    ended = harness.run(config, fault=f"evaluate:{step}:0:term")
    assert ended.code == 75, ended.output
    assert resume_and_check(config, golden) == step


@pytest.mark.parametrize("point", some(SAVE_POINTS, "save_begin", "save_before_rename", "save_before_prune"))
def test_sigterm_during_a_save(config: Config, golden: Outcome, point: str) -> None:
    ended = harness.run(config, fault=f"{point}:4:0:term")
    assert ended.code == 75, ended.output
    assert resume_and_check(config, golden) == 4


def test_sigterm_during_setup(config: Config, golden: Outcome) -> None:
    """Before the first step there is nothing to save."""

    def sigterm_while_the_model_is_built() -> None:
        import os
        import signal

        from llmtrain.training import components

        build_module = components.build_module

        def build_with_sigterm(*arguments: object) -> object:
            os.kill(os.getpid(), signal.SIGTERM)
            return build_module(*arguments)

        components.build_module = build_with_sigterm

    ended = harness.run(config, before=sigterm_while_the_model_is_built)
    assert ended.code == 75, ended.output
    assert not (Path(config.output.root_dir) / RUN_ID).exists()
    assert resume_and_check(config, golden, "auto") == 0


def test_sigkill_while_a_checkpoint_is_replaced(config: Config, golden: Outcome) -> None:
    """Interrupted in the first evaluation: the step is saved, and saved again after the evaluation of the resumed run.
    A kill between the two renames leaves no directory of that name; the previous one is restored."""
    only = config.with_values("trainer", save_every_steps=4)
    ended = harness.run(only, fault="evaluate:4:0:term")
    assert ended.code == 75, ended.output
    ended = harness.run(only, RUN_ID, fault=f"{REPLACING}:4:0:kill")
    assert ended.code == -9, ended.output
    assert not (Path(config.output.root_dir) / RUN_ID / "checkpoints" / "step_4").exists()
    ended = harness.run(only, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 4
    assert ended.result["state_sha256"] == golden.state_sha256


def test_sigterm_in_the_first_step(config: Config, golden: Outcome) -> None:
    ended = harness.run(config, fault="forward:1:0:term")
    assert ended.code == 75, ended.output
    assert resume_and_check(config, golden) == 1


def test_sigterm_at_the_start_of_a_resumed_run(config: Config, golden: Outcome, killed_root: Path) -> None:
    ended = harness.run(config, RUN_ID, fault="forward:7:0:term")
    assert ended.code == 75, ended.output
    assert resume_and_check(config, golden) == 7
    assert killed_root.exists()


@pytest.mark.parametrize("k", some(EVAL_STEPS, 8))
def test_sigterm_before_an_evaluation_and_sigkill_after_it(config: Config, golden: Outcome, k: int) -> None:
    """The step of the checkpoint is evaluated after it: the repeated evaluation must not be logged twice."""
    assert harness.run(config, fault=f"after_optimizer:{k}:0:term").code == 75
    second = f"forward:{k + 1}:0:kill" if k < STEPS else f"after_final_save:{k}:0:kill"
    ended = harness.run(config, RUN_ID, fault=second)
    assert ended.code == -9, ended.output
    resume_and_check(config, golden)


def test_resume_removes_a_partial_line_of_metrics(config: Config, golden: Outcome, killed_root: Path) -> None:
    metrics = killed_root / RUN_ID / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-25])
    resume_and_check(config, golden)


@pytest.mark.parametrize("seed", some(range(5), 0, 1))
def test_sequence_of_faults(config: Config, golden: Outcome, seed: int) -> None:
    chain_of_kills(config, golden, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_sequences_of_faults(config: Config, golden: Outcome, seed: int) -> None:
    chain_of_kills(config, golden, seed)


def chain_of_kills(config: Config, golden: Outcome, seed: int) -> None:
    """Up to five faults, each in the run that was resumed after the previous one."""
    rng = random.Random(seed)
    resume = None
    step = 1
    for _ in range(5):
        step = rng.randint(step, STEPS)
        point = rng.choice([*STEP_POINTS, *SAVE_POINTS, "evaluate"])
        action = rng.choice(["kill", "kill", "term"])
        ended = harness.run(config, resume, fault=f"{point}:{step}:0:{action}")
        assert ended.code in (0, -9, 75), ended.output
        resume = RUN_ID
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    root = Path(config.output.root_dir)
    assert harness.outcome(root, harness.read_result(root)) == golden
    harness.verify_all(root)


def test_sigterm_and_sigkill_with_data_workers(make_config: Callable[..., Config], golden: Outcome) -> None:
    """Resumed without workers in the end: the batches do not depend on them."""
    config = make_config(data__num_workers=1)
    ended = harness.run(config, fault="after_optimizer:3:0:term")
    assert ended.code == 75, ended.output
    ended = harness.run(config, RUN_ID, fault="after_optimizer:5:0:kill")
    assert ended.code == -9, ended.output
    assert resume_and_check(make_config(), golden) == 4


def test_extended_run_is_not_finished_until_its_last_step(make_config: Callable[..., Config], root: Path) -> None:
    """A run that is resumed with more steps is not finished until it has trained them."""
    assert harness.run(make_config(trainer__max_steps=4, trainer__schedule="constant")).code == 0
    longer = make_config(trainer__max_steps=8, trainer__schedule="constant")
    ended = harness.run(longer, RUN_ID, fault="after_optimizer:5:0:term")
    assert ended.code == 75, ended.output
    assert not (root / RUN_ID / "finished.json").exists()
    assert harness.run(longer.with_values("output", run_id=None), "auto").code == 0
    assert [path.name for path in root.iterdir()] == [RUN_ID]
    assert harness.read_result(root)["steps"] == 8
