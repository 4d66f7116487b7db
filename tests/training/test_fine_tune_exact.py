"""Fine-tuning on any world size: bit-exact with reproducible_reduce, equal up to rounding with fsdp, and an adapter
that peft loads in each case."""

from collections.abc import Callable
from typing import Any

import fault_harness as harness
import pytest
import torch
from fault_harness import RUN_ID
from safetensors.torch import load_file
from test_fine_tune_faults import (
    EVAL_STEPS,
    STEPS,
    FineTuned,
    Material,
    fine_tuned,
    resume_and_check,
    run_dir,
    train,
    trained,
)

from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.training.components import build_components
from slow_cases import some

pytestmark = pytest.mark.hf
MakeConfig = Callable[..., Config]
Trained = tuple[Config, FineTuned]
FSDP = {"distributed__strategy": "fsdp"}
PLAIN_DDP = {"distributed__strategy": "ddp", "distributed__reproducible_reduce": False}


def finished(config: Config, size: int = 1) -> Trained:
    return config, fine_tuned(config, trained(config, size))


@pytest.fixture(scope="module")
def alone(make_fine_tune: MakeConfig) -> Trained:
    return finished(make_fine_tune())


@pytest.fixture(scope="module")
def sharded(make_fine_tune: MakeConfig) -> Trained:
    return finished(make_fine_tune(**FSDP), 2)


@pytest.mark.parametrize("size", some([2, 4], 4))
def test_bit_exact_on_any_world_size(make_fine_tune: MakeConfig, alone: Trained, size: int) -> None:
    """Hash, loss and norm of every step, validation, epochs, answers, the adapter's files."""
    config, other = finished(make_fine_tune(), size)
    assert other == alone[1]
    newest = run_dir(config) / "checkpoints" / f"step_{STEPS}"
    assert len(list(newest.glob("model-*.safetensors"))) == size


@pytest.mark.parametrize("size", some([2, 3], 3))
def test_plain_ddp_differs_only_by_rounding(make_fine_tune: MakeConfig, alone: Trained, size: int) -> None:
    """3 processes share 4 micro-batches as 2, 1 and 1."""
    config, other = finished(make_fine_tune(**PLAIN_DDP), size)
    assert_same_course(other, alone[1])
    assert_same_adapter(config, alone[0])


@pytest.mark.slow
def test_plain_ddp_on_four_ranks_is_not_bit_exact(make_fine_tune: MakeConfig, alone: Trained) -> None:
    """Otherwise the test of the world sizes would show nothing."""
    other = finished(make_fine_tune(**PLAIN_DDP), 4)[1]
    assert other.plain.state_sha256 != alone[1].plain.state_sha256
    assert_same_course(other, alone[1])


@pytest.mark.parametrize("size", some([1, 4], 1))
@pytest.mark.parametrize("k", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
def test_interrupted_on_two_and_resumed_on_another_world_size(
    make_fine_tune: MakeConfig, alone: Trained, size: int, k: int
) -> None:
    config = make_fine_tune()
    ends = train(config, 2, fault=f"after_optimizer:{k}:1:term")
    assert [ended.code for ended in ends] == [75, 75], ends[0].output
    assert resume_and_check(config, alone[1], size) == k


@pytest.mark.slow
def test_world_size_may_change_on_every_resume(make_fine_tune: MakeConfig, alone: Trained) -> None:
    config = make_fine_tune()
    for k, size in ((2, 2), (4, 1), (6, 4)):
        ends = train(config, size, resume="auto", fault=f"after_optimizer:{k}:0:term")
        assert {ended.code for ended in ends} == {75}, ends[0].output
    assert resume_and_check(config, alone[1], 2) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"model__lora": None},
        {"data__packing": False, "trainer__micro_batch_size": 2},
        {"trainer__activation_checkpointing": "blocks"},
        {"trainer__async_save": True},
    ],
    ids=["full", "unpacked", "checkpointing", "async"],
)
def test_other_kinds_of_fine_tuning_on_1_2_and_4_processes(make_fine_tune: MakeConfig, change: dict[str, Any]) -> None:
    expected = finished(make_fine_tune(**change))[1]
    assert finished(make_fine_tune(**change), 2)[1] == expected
    assert finished(make_fine_tune(**change), 4)[1] == expected


@pytest.mark.parametrize(
    "change",
    [
        {"trainer__activation_checkpointing": "selective"},
        pytest.param({"trainer__async_save": True}, marks=pytest.mark.slow),
        pytest.param({"data__num_workers": 2}, marks=pytest.mark.slow),
        pytest.param({"output__layout": "epochs"}, marks=pytest.mark.slow),
    ],
    ids=lambda change: next(iter(change)),
)
def test_fields_that_do_not_affect_the_result(
    make_fine_tune: MakeConfig, alone: Trained, change: dict[str, Any]
) -> None:
    """Dropout is drawn again when activations are recomputed: it must be the same."""
    assert finished(make_fine_tune(**change))[1] == alone[1]


@pytest.mark.slow
def test_activation_checkpointing_does_not_affect_full_fine_tuning(make_fine_tune: MakeConfig) -> None:
    changes = ({"model__lora": None}, {"model__lora": None, "trainer__activation_checkpointing": "blocks"})
    first, second = (finished(make_fine_tune(**change))[1] for change in changes)
    assert first == second


def test_evaluation_and_saving_do_not_affect_training(make_fine_tune: MakeConfig, alone: Trained) -> None:
    """Answering prompts does not either."""
    rarely = {"trainer__eval_every_steps": None, "trainer__save_every_steps": None, "trainer__eval_prompts": []}
    other = finished(make_fine_tune(**rarely))[1]
    assert other.plain.state_sha256 == alone[1].plain.state_sha256
    assert other.train == alone[1].train
    assert other.samples == {}


def assert_same_course(one: FineTuned, other: FineTuned, tolerance: float = 1e-5) -> None:
    for name, mine, theirs in (("train/loss", one.train, other.train), ("val/loss", one.val, other.val)):
        assert [step for step, _ in mine] == [step for step, _ in theirs]
        losses = [[float.fromhex(row[name]) for _, row in rows] for rows in (mine, theirs)]
        assert losses[0] == pytest.approx(losses[1], abs=tolerance), name


def adapter_of(config: Config) -> dict[str, torch.Tensor]:
    return load_file(run_dir(config) / "adapter" / "adapter_model.safetensors")


def assert_same_adapter(one: Config, other: Config) -> None:
    mine, theirs = adapter_of(one), adapter_of(other)
    assert mine.keys() == theirs.keys()
    assert any(tensor.abs().max() > 0 for name, tensor in mine.items() if "lora_B" in name)
    for name, tensor in mine.items():
        # Adam divides by a root: what rounding changes in a tiny gradient shows in the weight.
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-3, msg=name)


def test_fsdp_differs_only_by_rounding(alone: Trained, sharded: Trained) -> None:
    assert_same_course(sharded[1], alone[1])
    assert_same_adapter(sharded[0], alone[0])


@pytest.mark.parametrize("k", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_fsdp_resumes_exactly(make_fine_tune: MakeConfig, sharded: Trained, k: int) -> None:
    config = make_fine_tune(**FSDP)
    ends = train(config, 2, fault=f"after_optimizer:{k}:0:term")
    assert [ended.code for ended in ends] == [75, 75], ends[0].output
    assert resume_and_check(config, sharded[1], 2) == k


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"model__lora": None}, {"data__packing": False, "trainer__micro_batch_size": 2}])
def test_other_kinds_of_fine_tuning_with_fsdp(make_fine_tune: MakeConfig, change: dict[str, Any]) -> None:
    assert_same_course(finished(make_fine_tune(**FSDP, **change), 2)[1], finished(make_fine_tune(**change))[1], 5e-5)


@pytest.mark.slow
def test_fsdp_run_resumes_in_one_process(make_fine_tune: MakeConfig, alone: Trained) -> None:
    config = make_fine_tune(**FSDP)
    assert {ended.code for ended in train(config, 2, fault="after_optimizer:5:0:term")} == {75}
    result = trained(config, 1, RUN_ID)
    assert result["resumed_from"] == 5
    assert_same_course(fine_tuned(config, result), alone[1])


def loss_in_peft(config: Config, material: Material) -> float:
    """Mean validation loss of the base model with the run's adapter, by transformers and peft alone, row by row."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(material.model), run_dir(config) / "adapter"
    ).eval()
    unpacked = config.with_values("data", packing=False)
    batches = build_components(unpacked, World(device=torch.device("cpu"))).eval_batches
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            assert batch.positions is None
            logits = model(input_ids=batch.inputs).logits
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).double(), batch.targets.flatten(), reduction="sum"
            ).item()
            count += batch.target_count
    return total / count


@pytest.mark.parametrize("how", ["alone", "sharded"])
def test_peft_loads_the_adapter_and_reproduces_the_loss(
    alone: Trained, sharded: Trained, material: Material, how: str
) -> None:
    """Packed examples do not attend to each other: here they are read one by one."""
    config, found = alone if how == "alone" else sharded
    best = min(float.fromhex(row["val/loss"]) for _, row in found.val)
    assert found.plain.best_step in EVAL_STEPS
    assert loss_in_peft(config, material) == pytest.approx(best, abs=1e-5)


def test_full_fine_tuning_with_muon(make_fine_tune: MakeConfig) -> None:
    """The matrices of the layers have one average per weight, all other parameters AdamW's two."""
    config = make_fine_tune(model__lora=None, trainer__max_epochs=1, trainer__optimizer="muon")
    result = trained(config)
    assert result["final_val_loss"] < result["first_train_loss"]
    (checkpoint,) = [each for each in harness.checkpoints(run_dir(config).parent) if each.step == result["steps"]]
    names = checkpoint.tensors("optimizer")
    by_muon = {name.removesuffix(".momentum_buffer") for name in names if name.endswith(".momentum_buffer")}
    by_adamw = {name.removesuffix(".exp_avg") for name in names if name.endswith(".exp_avg")}
    assert len(by_muon | by_adamw) == len(by_muon) + len(by_adamw) == len(checkpoint.tensors("model"))
    assert all(".layers." in name and "proj" in name for name in by_muon)
    assert any("embed_tokens" in name for name in by_adamw)
    assert sum("layernorm" in name for name in by_adamw) > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["after_optimizer:3:0:term", "after_optimizer:4:0:kill"])
def test_full_fine_tuning_with_muon_resumes_exactly(make_fine_tune: MakeConfig, fault: str) -> None:
    changes = {"model__lora": None, "trainer__optimizer": "muon"}
    whole = make_fine_tune(**changes)
    expected = fine_tuned(whole, trained(whole))
    config = make_fine_tune(**changes)
    (end,) = train(config, fault=fault)
    assert end.code == (75 if fault.endswith("term") else -9)
    resume_and_check(config, expected)


def test_tied_weights_are_saved_once(make_fine_tune: MakeConfig) -> None:
    """Full fine-tuning of a model whose output layer is its embedding: one tensor, one optimizer state."""
    config = make_fine_tune(model__lora=None, trainer__max_epochs=1)
    result = trained(config)
    (checkpoint,) = [each for each in harness.checkpoints(run_dir(config).parent) if each.step == result["steps"]]
    tensors = checkpoint.tensors("model")
    assert sum("embed_tokens" in name or "lm_head" in name for name in tensors) == 1
    assert sum(tensor.numel() for tensor in tensors.values()) == result["parameters"] == result["trainable_parameters"]
    assert not (checkpoint.path / "adapter").exists()
