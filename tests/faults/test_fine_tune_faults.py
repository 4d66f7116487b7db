"""Fine-tuning that is interrupted or killed anywhere and resumed matches the uninterrupted run bit for bit.

The first part (a run of two epochs on a tiny Llama, and its files in a form that can be compared) is also used by
tests/training.
"""

import functools
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, ChildExit, Outcome

import tiny_llama
from limits import limit
from llmtrain.config.schema import Config
from llmtrain.core import fault_injection as faults
from llmtrain.runs.metrics import read_metrics
from llmtrain.training import loop as trainer_module
from llmtrain.training.evaluate import EvalResult
from llmtrain.training.loop import Trainer
from slow_cases import some

pytestmark = pytest.mark.hf

# 30 examples make 13 packed sequences: 4 steps per epoch, the last with one sequence and three empty ones.
STEPS_IN_EPOCH, STEPS = 4, 8
EVAL_STEPS = [3, 4, 6, 8]
SAVE_STEPS = EVAL_STEPS
SAVED_BEFORE = {3: 0, 4: 3, 6: 4, 8: 6}
REPLACING = "save_while_replacing"  # only reached when a step is saved a second time: tested separately
SAVE_POINTS = [point for point in faults.POINTS if point.startswith("save_") and point != REPLACING]
TIMINGS = ("time", "train/tokens_per_second", "train/seconds_left", "train/mfu")
Before = Callable[[], None]
MakeConfig = Callable[..., Config]


@dataclass(frozen=True)
class Material:
    """A model directory and examples."""

    model: Path
    train: Path
    val: Path
    chats: Path
    val_chats: Path


@functools.cache
def make_material(base: Path) -> Material:
    """Created once per session (`base` is its directory)."""
    folder = Path(mkdtemp(prefix="material-", dir=base))
    return Material(
        tiny_llama.make_model(folder / "model"),
        tiny_llama.make_examples(folder / "train.jsonl", 30),
        tiny_llama.make_examples(folder / "val.jsonl", 6, first=100),
        tiny_llama.make_chats(folder / "chats.jsonl", 24),
        tiny_llama.make_chats(folder / "val_chats.jsonl", 5),
    )


def fine_tune_config(root: Path, cache: Path, material: Material, **changes: Any) -> Config:
    """LoRA with dropout, packed examples, 4 micro-batches per step, two epochs; changes are `section__field=value`."""
    values: dict[str, Any] = {
        "model__name": "hf_causal_lm",
        "model__path": str(material.model),
        "model__block_size": 96,
        "model__lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
        "data__name": "instruct_jsonl",
        "data__train_file": str(material.train),
        "data__val_file": str(material.val),
        "trainer__max_steps": None,
        "trainer__max_epochs": 2,
        "trainer__micro_batch_size": 1,
        "trainer__grad_accum_steps": 4,
        "trainer__lr": 3e-2,
        "trainer__warmup_steps": 1,
        "trainer__eval_every_steps": 3,
        "trainer__eval_batches": None,
        "trainer__save_every_steps": 3,
        "trainer__eval_prompts": ["say red", "say cat dog"],
        "trainer__eval_prompt_tokens": 4,
        "distributed__reproducible_reduce": changes.get("distributed__strategy") != "fsdp",
        "distributed__timeout_sec": round(limit(20)),
        "distributed__join_timeout_sec": round(limit(30)),
        **changes,
    }
    return harness.tiny_config(root, cache, **values)


CHATS: dict[str, Any] = {"data__name": "chat_jsonl"}


def chat_changes(material: Material) -> dict[str, Any]:
    return {**CHATS, "data__train_file": str(material.chats), "data__val_file": str(material.val_chats)}


def run_dir(config: Config) -> Path:
    return Path(config.output.root_dir) / RUN_ID


def train(
    config: Config, size: int = 1, resume: str | None = None, before: Before | None = None, **options: Any
) -> list[ChildExit]:
    """Train with `size` processes; returns one ChildExit per process."""

    if size == 1:
        return [harness.run(config, resume, before=before, **options)]
    return harness.run_world(config, size, resume, before=before and (lambda _: before()), **options)


def trained(config: Config, size: int = 1, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """The result of a run that must finish."""
    ends = train(config, size, resume, **options)
    assert [ended.code for ended in ends] == [0] * size, "\n".join(ended.output for ended in ends)
    assert ends[0].result is not None
    return ends[0].result


def val_losses(*losses: float) -> Before:
    """Replace the validation losses: those after step 1, 2, ... are given, and the last one is repeated. Whether a run
    improves then does not depend on rounding."""

    def before() -> None:
        evaluate, evaluate_and_log = trainer_module.evaluate, Trainer._evaluate

        def scripted(self: Trainer) -> None:
            loss = losses[min(self.state.step, len(losses)) - 1]

            def replaced(*arguments: Any, **options: Any) -> EvalResult | None:
                found = evaluate(*arguments, **options)
                return found and replace(found, loss=loss)

            trainer_module.evaluate = replaced
            evaluate_and_log(self)

        Trainer._evaluate = scripted  # type: ignore[method-assign]

    return before


def rows(folder: Path, name: str) -> list[tuple[int, dict[str, str]]]:
    """The rows of metrics.jsonl that have this metric: step and every steady value as float.hex."""
    return [
        (row["step"], {k: float(v).hex() for k, v in row.items() if k not in ("step", *TIMINGS)})
        for row in read_metrics(folder / "metrics.jsonl")
        if name in row
    ]


def epoch_lines(folder: Path) -> list[str]:
    """The epoch lines of the log; a line that was repeated after a kill counts once."""
    lines = (folder / "logs" / "train.log").read_text().splitlines()
    return list(dict.fromkeys(line.partition("[EPOCH]")[2].strip() for line in lines if "[EPOCH]" in line))


@dataclass(frozen=True)
class FineTuned:
    """Everything that must be equal between an uninterrupted run and one that was interrupted and resumed."""

    plain: Outcome
    train: list[tuple[int, dict[str, str]]]
    val: list[tuple[int, dict[str, str]]]
    """With perplexity, and at the end of an epoch its number and mean training loss."""
    epoch_lines: list[str]
    samples: dict[str, bytes]
    adapter: dict[str, bytes]
    """The best adapter, in the run directory."""
    sample: str
    epochs: int
    stopped_early: bool


def fine_tuned(config: Config, result: dict[str, Any]) -> FineTuned:
    folder = run_dir(config)
    return FineTuned(
        harness.outcome(folder.parent, result),
        rows(folder, "train/loss"),
        rows(folder, "val/loss"),
        epoch_lines(folder),
        harness.tree(folder / "samples"),
        harness.tree(folder / "adapter"),
        result["sample"],
        result["epochs"],
        result["stopped_early"],
    )


def resume_and_check(
    config: Config, golden: FineTuned, size: int = 1, resume: str = RUN_ID, before: Before | None = None
) -> int:
    """Resume to the end; must match the uninterrupted run. Returns the step it resumed from."""
    result = trained(config, size, resume, before=before)
    assert fine_tuned(config, result) == golden
    harness.verify_all(Path(config.output.root_dir))
    leftovers = [path.name for path in (run_dir(config) / "checkpoints").iterdir() if path.name.startswith(".")]
    assert leftovers == []
    assert not (run_dir(config) / "lock").exists()
    return result["resumed_from"] or 0


# One process


@pytest.fixture
def make(root: Path, cache: Path, material: Material) -> MakeConfig:
    return lambda **changes: fine_tune_config(root, cache, material, **changes)


@pytest.fixture
def config(make: MakeConfig) -> Config:
    return make()


def uninterrupted(folder: Path, cache: Path, material: Material, size: int = 1, **changes: Any) -> FineTuned:
    config = fine_tune_config(folder / "runs", cache, material, **changes)
    return fine_tuned(config, trained(config, size))


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory, cache: Path, material: Material) -> FineTuned:
    return uninterrupted(tmp_path_factory.mktemp("golden-fine-tune"), cache, material)


def test_uninterrupted_run_has_everything_that_is_compared(golden: FineTuned) -> None:
    assert [step for step, _ in golden.train] == list(range(1, STEPS + 1))
    assert [step for step, _ in golden.val] == EVAL_STEPS
    assert [step for step, row in golden.val if "epoch/train_loss" in row] == [STEPS_IN_EPOCH, STEPS]
    assert len(golden.epoch_lines) == 2
    assert sorted(golden.samples) == [f"step_{step}.json" for step in EVAL_STEPS]
    assert len(set(golden.samples.values())) > 1, "the answers change during the run"
    assert sorted(golden.adapter) == ["README.md", "adapter_config.json", "adapter_model.safetensors", "llmtrain.json"]
    assert (golden.plain.steps, golden.epochs, golden.stopped_early) == (STEPS, 2, False)


def test_dropout_and_positions_affect_the_result(make: MakeConfig, golden: FineTuned) -> None:
    """Otherwise the tests below would not cover them."""
    without = {
        "dropout": make(model__lora={"rank": 4, "alpha": 8.0, "dropout": 0.0}),
        "positions": make(),
    }

    def forget_positions() -> None:
        from llmtrain.models.hf.causal_lm import HFCausalLMAdapter

        loss = HFCausalLMAdapter.loss
        HFCausalLMAdapter.loss = lambda self, module, inputs, targets, _=None: loss(self, module, inputs, targets)  # type: ignore[method-assign]

    for name, before in (("dropout", None), ("positions", forget_positions)):
        config = without[name].with_values("output", run_id=f"no-{name}")
        assert trained(config, before=before)["state_sha256"] != golden.plain.state_sha256, name


@pytest.mark.parametrize("k", some(range(1, STEPS + 1), 4, 5))
def test_sigterm_at_every_step_loses_nothing(config: Config, golden: FineTuned, k: int) -> None:
    (ended,) = train(config, fault=f"after_optimizer:{k}:0:term")
    assert ended.code == 75, ended.output
    assert resume_and_check(config, golden) == k


@pytest.mark.parametrize("step", some(EVAL_STEPS, 8))
def test_sigterm_during_evaluation(config: Config, golden: FineTuned, step: int) -> None:
    (ended,) = train(config, fault=f"evaluate:{step}:0:term")
    assert ended.code == 75, ended.output
    assert not (run_dir(config) / "samples" / f"step_{step}.json").exists()
    assert resume_and_check(config, golden) == step


def signal_in_answer(number: int, which: signal.Signals) -> Before:
    """Send a signal during this answer of the run; there are two answers per evaluation."""

    def before() -> None:
        from llmtrain.training import eval_prompts

        real, calls = eval_prompts.sample_text, []

        def answering(adapter: Any, module: Any, *arguments: Any, **options: Any) -> str:
            calls.append(None)
            if len(calls) == number:
                module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), which))
            return real(adapter, module, *arguments, **options)

        eval_prompts.sample_text = answering  # type: ignore[assignment]

    return before


@pytest.mark.parametrize("answer", some(range(1, 9), 4))
def test_sigterm_during_an_eval_prompt(config: Config, golden: FineTuned, answer: int) -> None:
    step = EVAL_STEPS[(answer - 1) // 2]
    (ended,) = train(config, before=signal_in_answer(answer, signal.SIGTERM))
    assert ended.code == 75, ended.output
    assert not (run_dir(config) / "samples" / f"step_{step}.json").exists(), "incomplete answers are not saved"
    assert resume_and_check(config, golden) == step


def test_sigkill_during_an_eval_prompt(config: Config, golden: FineTuned) -> None:
    (ended,) = train(config, before=signal_in_answer(4, signal.SIGKILL))
    assert ended.code == -9, ended.output
    assert resume_and_check(config, golden) == 3


def test_sigkill_between_evaluation_and_save_of_an_epoch(config: Config, golden: FineTuned) -> None:
    """The epoch's log line and answers exist already and are written again."""

    def killed_once_answers_are_kept() -> None:
        from llmtrain.training.eval_prompts import EvalPrompts

        keep = EvalPrompts.save

        def keep_and_die(self: EvalPrompts, step: int, answers: Any) -> Path:
            path = keep(self, step, answers)
            if step == STEPS_IN_EPOCH:
                os.kill(os.getpid(), signal.SIGKILL)
            return path

        EvalPrompts.save = keep_and_die  # type: ignore[method-assign]

    (ended,) = train(config, before=killed_once_answers_are_kept)
    assert ended.code == -9, ended.output
    assert len(epoch_lines(run_dir(config))) == 1
    assert resume_and_check(config, golden) == 3


def kill_in_save(config: Config, golden: FineTuned, point: str, step: int) -> None:
    (ended,) = train(config, fault=f"{point}:{step}:0:kill")
    assert ended.code == -9, ended.output
    is_renamed = point in ("save_after_rename", "save_before_prune")
    assert resume_and_check(config, golden) == (step if is_renamed else SAVED_BEFORE[step])


@pytest.mark.parametrize("point", some(SAVE_POINTS, "save_before_manifest", "save_after_rename"))
def test_sigkill_during_the_save_of_an_epoch(config: Config, golden: FineTuned, point: str) -> None:
    kill_in_save(config, golden, point, STEPS_IN_EPOCH)


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step in SAVE_STEPS if step != STEPS_IN_EPOCH])
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_sigkill_during_every_save(config: Config, golden: FineTuned, point: str, step: int) -> None:
    kill_in_save(config, golden, point, step)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forward", "after_backward", "after_optimizer"])
@pytest.mark.parametrize("k", range(1, STEPS + 1))
def test_sigkill_at_every_step(config: Config, golden: FineTuned, point: str, k: int) -> None:
    (ended,) = train(config, fault=f"{point}:{k}:0:kill")
    assert ended.code == -9, ended.output
    assert resume_and_check(config, golden) == max(step for step in (0, *SAVE_STEPS) if step < k)


def test_sigkill_while_the_checkpoint_of_an_epoch_is_replaced(config: Config, golden: FineTuned) -> None:
    """Interrupted before the evaluation at the end of the epoch: the step is saved twice."""
    assert train(config, fault=f"after_optimizer:{STEPS_IN_EPOCH}:0:term")[0].code == 75
    (ended,) = train(config, resume=RUN_ID, fault=f"{REPLACING}:{STEPS_IN_EPOCH}:0:kill")
    assert ended.code == -9, ended.output
    assert resume_and_check(config, golden) == STEPS_IN_EPOCH


def test_sigkill_after_the_last_save(config: Config, golden: FineTuned) -> None:
    assert train(config, fault=f"after_final_save:{STEPS}:0:kill")[0].code == -9
    assert not (run_dir(config) / "finished.json").exists()
    assert resume_and_check(config, golden) == STEPS


def chain_of_faults(config: Config, golden: FineTuned, seed: int) -> None:
    rng = random.Random(seed)
    step, resume = 1, None
    for _ in range(4):
        step = rng.randint(step, STEPS)
        point = rng.choice(["forward", "after_optimizer", "evaluate", *SAVE_POINTS])
        (ended,) = train(config, resume=resume, fault=f"{point}:{step}:0:{rng.choice(['kill', 'term'])}")
        assert ended.code in (0, -9, 75), ended.output
        resume = RUN_ID
    resume_and_check(config, golden)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_sequence_of_faults(config: Config, seed: int, golden: FineTuned) -> None:
    chain_of_faults(config, golden, seed)


def test_resume_refuses_another_base_model(make: MakeConfig, material: Material, tmp_path: Path) -> None:
    """Its checkpoints contain only adapters, which are useless on another base model."""
    folder = tmp_path / "model"
    shutil.copytree(material.model, folder)
    config = make(model__path=str(folder))
    assert train(config, fault="after_optimizer:3:0:term")[0].code == 75
    before = harness.tree(run_dir(config) / "checkpoints")
    tiny_llama.make_model(folder, seed=1)
    (ended,) = train(config, resume=RUN_ID)
    assert ended.code == 64, ended.output
    assert "base_sha256" in ended.output
    assert harness.tree(run_dir(config) / "checkpoints") == before


def test_resume_accepts_a_moved_base_model(
    make: MakeConfig, material: Material, golden: FineTuned, tmp_path: Path
) -> None:
    moved = shutil.copytree(material.model, tmp_path / "model")
    assert train(make(), fault="after_optimizer:6:0:term")[0].code == 75
    result = trained(make(model__path=str(moved)), resume=RUN_ID)
    assert result["state_sha256"] == golden.plain.state_sha256


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"model__lora": None},
    "unpacked": {"data__packing": False, "trainer__micro_batch_size": 2},
}
SLOW_VARIANTS: dict[str, dict[str, Any]] = {
    "async": {"trainer__async_save": True},
    "chats": CHATS,
    "checkpointing": {"trainer__activation_checkpointing": "blocks"},
    "full-unpacked": {"model__lora": None, "data__packing": False, "trainer__micro_batch_size": 2},
    "dora": {"model__lora": {"rank": 4, "dropout": 0.1, "dora": True}},
    "on-prompt": {"data__train_on_prompt": True},
    "workers": {"data__num_workers": 2},
    "adafactor": {"trainer__optimizer": "adafactor", "model__lora": None},
    "bf16": {"trainer__precision": "bf16", "model__dtype": "bfloat16"},
    "plain-sum": {"distributed__reproducible_reduce": False},
    "seldom": {"trainer__eval_every_steps": None, "trainer__save_every_steps": None, "trainer__log_every_steps": 3},
    "tied-async": {"model__lora": None, "trainer__async_save": True},
}


@pytest.mark.parametrize("variant", some([*VARIANTS, *SLOW_VARIANTS], *VARIANTS))
def test_every_kind_of_fine_tuning_resumes_exactly(
    make: MakeConfig, tmp_path: Path, cache: Path, material: Material, variant: str
) -> None:
    """Interrupted in the first epoch, killed in the second."""
    change = {**VARIANTS, **SLOW_VARIANTS}[variant]
    change = chat_changes(material) if change is CHATS else change
    expected = uninterrupted(tmp_path / "uninterrupted", cache, material, **change)
    config = make(**change)
    assert expected.epochs == 2
    steps = expected.plain.steps
    assert steps // 2 > 2
    assert train(config, fault="after_optimizer:2:0:term")[0].code == 75
    (ended,) = train(config, resume=RUN_ID, fault=f"after_optimizer:{steps // 2 + 2}:0:kill")
    assert ended.code == -9, ended.output
    assert resume_and_check(config, expected) >= 2
    assert (run_dir(config) / "adapter").is_dir() == (config.model.lora is not None)


@pytest.mark.slow
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_sigkill_during_a_background_save(make: MakeConfig, golden: FineTuned, point: str) -> None:
    config = make(trainer__async_save=True)
    (ended,) = train(config, fault=f"{point}:{STEPS_IN_EPOCH}:0:kill")
    assert ended.code == -9, ended.output
    resume_and_check(config, golden)


# Two ranks with fsdp


@pytest.fixture(scope="session")
def fsdp_golden(tmp_path_factory: pytest.TempPathFactory, cache: Path, material: Material) -> FineTuned:
    return uninterrupted(tmp_path_factory.mktemp("fsdp-tune"), cache, material, 2, distributed__strategy="fsdp")


def kill_rank(config: Config, golden: FineTuned, point: str, step: int, rank: int) -> None:
    ends = train(config, 2, fault=f"{point}:{step}:{rank}:kill")
    assert ends[rank].code == -signal.SIGKILL, ends[rank].output
    assert ends[1 - rank].code == 75, ends[1 - rank].output
    resumed_from = resume_and_check(config, golden, 2)
    assert resumed_from in (SAVED_BEFORE[step], step)


# Without: a killed rank in tests/faults/test_world_kill.py, fsdp in test_fsdp_resumes_exactly of tests/training.
@pytest.mark.slow
@pytest.mark.parametrize(("point", "step", "rank"), [("save_model_written", 4, 1), ("save_before_rename", 8, 0)])
def test_sigkill_of_one_rank_with_fsdp(
    make: MakeConfig, fsdp_golden: FineTuned, point: str, step: int, rank: int
) -> None:
    kill_rank(make(distributed__strategy="fsdp"), fsdp_golden, point, step, rank)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("point", "rank"), [*((point, 0) for point in SAVE_POINTS), ("save_model_written", 1), ("evaluate", 1)]
)
def test_sigkill_of_one_rank_during_the_save_of_an_epoch(
    make: MakeConfig, golden: FineTuned, fsdp_golden: FineTuned, strategy: str, point: str, rank: int
) -> None:
    expected = fsdp_golden if strategy == "fsdp" else golden
    kill_rank(make(distributed__strategy=strategy), expected, point, STEPS_IN_EPOCH, rank)
