"""none, ddp and fsdp are the same training: same losses, same gradient norms, to rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
import torch
from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.schema import Config
from llmtrain.distributed.parallel import DDPModel, DeterministicModel, FSDPModel, ParallelModel, parallelize, unshard
from llmtrain.distributed.world import World, join_world

MakeConfig = Callable[..., Config]
COMMON: dict[str, Any] = {"trainer__grad_accum_steps": 4, "trainer__eval_batches": 4}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> MakeConfig:
    def config(**changes: Any) -> Config:
        return harness.tiny_config(tmp_path_factory.mktemp("wrap") / "runs", cache, **{**COMMON, **changes})

    return config


Curve = dict[str, list[float]]


def curve(config: Config, count: int, **options: Any) -> Curve:
    """Losses, gradient norms and validation losses of a finished run."""
    result = ranks.trained(config, count, **options)
    directory = Path(config.output.root_dir) / harness.RUN_ID
    rows = harness.train_rows(directory)
    assert [step for step, _ in rows] == list(range(1, harness.STEPS + 1))
    assert (result["world_size"], result["strategy"]) == (count, config.distributed.strategy)
    columns = [[float.fromhex(values[index]) for _, values in rows] for index in (0, 2, 3)]
    val = [float.fromhex(loss) for _, loss in harness.val_rows(directory)]
    return {"loss": columns[0], "grad_norm": columns[1], "tokens": columns[2], "val": val}


@pytest.fixture(scope="module")
def alone(make: MakeConfig) -> Curve:
    return curve(make(distributed__strategy="none"), 1)


def assert_same(actual: Curve, expected: Curve, rel: float = 2e-5) -> None:
    assert actual["tokens"] == expected["tokens"]
    for name in ("loss", "val"):
        assert actual[name] == pytest.approx(expected[name], rel=rel), name
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=50 * rel)


@pytest.mark.parametrize(
    ("strategy", "count"), [("ddp", 2), ("fsdp", 2), pytest.param("ddp", 4, marks=pytest.mark.slow)]
)
def test_parallel_training_matches_single_process(make: MakeConfig, alone: Curve, strategy: str, count: int) -> None:
    """With dropout on: what is dropped is a matter of the position too. The norm is clipped (max_grad_norm 1)."""
    assert max(alone["grad_norm"]) > 1, "the clipping does something"
    assert_same(curve(make(distributed__strategy=strategy), count), alone)


def test_comparison_detects_wrong_loss_scale(make: MakeConfig, alone: Curve) -> None:
    """The mean over ranks instead of the sum: the test above must be able to see it."""

    def forget_the_scale() -> None:
        before = DDPModel.__init__

        def without(self: DDPModel, *arguments: Any) -> None:
            before(self, *arguments)
            self.loss_scale = 1.0

        DDPModel.__init__ = without  # type: ignore[method-assign]

    wrong = curve(make(distributed__strategy="ddp"), 2, before=forget_the_scale)
    assert wrong["grad_norm"][0] == pytest.approx(alone["grad_norm"][0] / 2, rel=1e-3)


def test_fsdp_without_clipping(make: MakeConfig) -> None:
    none = curve(make(distributed__strategy="none", trainer__max_grad_norm=None), 1)
    assert_same(curve(make(distributed__strategy="fsdp", trainer__max_grad_norm=None), 2), none)


def test_bf16_with_fsdp(make: MakeConfig, alone: Curve) -> None:
    """Weights compute in bfloat16 and are kept in float32."""
    config = make(distributed__strategy="fsdp", trainer__precision="bf16")
    actual = curve(config, 2, before=harness.emulate_bf16)
    assert actual["loss"] == pytest.approx(alone["loss"], rel=0.02)
    assert actual["loss"] != pytest.approx(alone["loss"], rel=1e-6), "it was not bf16 at all"
    tensors = Checkpoint(Path(config.output.root_dir) / harness.RUN_ID / "checkpoints" / "step_8").tensors("model")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.slow
def test_bf16_ddp_matches_single_process(make: MakeConfig) -> None:
    emulated = {"before": harness.emulate_bf16}
    actual = curve(make(distributed__strategy="ddp", trainer__precision="bf16"), 2, **emulated)
    none = curve(make(distributed__strategy="none", trainer__precision="bf16"), 1, **emulated)
    assert actual["loss"] == pytest.approx(none["loss"], rel=2e-3)


@pytest.mark.parametrize(
    "change",
    [{"model__tie_embeddings": False}, {"model__name": "dummy_gpt"}],
    ids=["untied", "dummy_gpt"],
)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parallel_training_of_other_models(make: MakeConfig, strategy: str, change: dict[str, Any]) -> None:
    none = curve(make(distributed__strategy="none", **change), 1)
    assert_same(curve(make(distributed__strategy=strategy, **change), 2), none, rel=2e-4)


@pytest.mark.slow
def test_adafactor_with_ddp(make: MakeConfig) -> None:
    none = curve(make(distributed__strategy="none", trainer__optimizer="adafactor"), 1)
    assert_same(curve(make(distributed__strategy="ddp", trainer__optimizer="adafactor"), 2), none, rel=2e-4)


def test_adafactor_with_fsdp_is_refused(make: MakeConfig) -> None:
    """DTensor does not do what torch's Adafactor asks of it."""
    ended = ranks.train_ranks(make(distributed__strategy="fsdp", trainer__optimizer="adafactor"), 2)
    assert [end.code for end in ended] == [64, 64]
    assert all("adafactor" in end.output for end in ended)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_model(make: MakeConfig, strategy: str) -> None:
    changes: dict[str, Any] = {"model__dropout": 0.0}  # a compiled model draws other random numbers
    none = curve(make(distributed__strategy="none", **changes), 1)
    compiled = make(distributed__strategy=strategy, trainer__compile=True, **changes)
    assert_same(curve(compiled, 2, timeout=280), none, rel=1e-4)


# Which wrapper, and what each does, on a model of two layers.


def two_layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def wrapped_in(world: World, micro_batches: int = 2, **distributed: Any) -> ParallelModel:
    section = DistributedSection(**distributed)
    return parallelize(two_layers(), lambda module: list(module), section, world, "fp32", micro_batches)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("distributed", "kind"),
    [
        ({"strategy": "none"}, ParallelModel),
        ({"strategy": "ddp"}, ParallelModel),
        ({"strategy": "fsdp"}, ParallelModel),
        ({"strategy": "ddp", "reproducible_reduce": True}, DeterministicModel),
    ],
)
def test_single_process_model_is_not_wrapped(distributed: dict[str, Any], kind: type) -> None:
    wrapped = wrapped_in(World(), **distributed)
    assert type(wrapped) is kind
    assert isinstance(wrapped.module, nn.Sequential)
    assert (wrapped.loss_scale, wrapped.is_sharded) == (1.0, False)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    inputs = torch.arange(16.0).reshape(4, 4) / 16

    def look(world: World) -> dict[str, Any]:
        actual: dict[str, Any] = {}
        for name, section in (
            ("ddp", {"strategy": "ddp"}),
            ("fsdp", {"strategy": "fsdp"}),
            ("tree", {"strategy": "ddp", "reproducible_reduce": True}),
        ):
            wrapped = wrapped_in(world, 4, **section)
            parameters = list(wrapped.module.parameters())
            for micro in range(2):  # two micro-batches a rank, four in all
                with wrapped.micro_step(is_last=micro == 1):
                    loss = wrapped.module(inputs[world.rank * 2 + micro]).sum()
                    (loss * wrapped.loss_scale).backward()
                wrapped.after_backward()
                if micro == 0 and name == "ddp":
                    actual["ddp, before the last"] = parameters[0].grad.clone()  # type: ignore[union-attr]
            wrapped.finish_gradients()
            actual[name] = [unshard(p.grad).clone() for p in parameters]  # type: ignore[arg-type]
            actual[f"{name} kind"] = (type(wrapped).__name__, wrapped.is_sharded, wrapped.loss_scale)
            if name == "fsdp":
                actual["held"] = [tuple(p.to_local().shape) for p in parameters]  # type: ignore[attr-defined]
        return actual

    return ranks.values(ranks.run_ranks(2, look))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tree"])
def test_gradients_are_sums_over_all_ranks_and_micro_batches(two_ranks: list[dict[str, Any]], name: str) -> None:
    module = two_layers()
    for row in torch.arange(16.0).reshape(4, 4) / 16:
        module(row).sum().backward()
    for actual in two_ranks:
        for gradient, parameter in zip(actual[name], module.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_parallel_model_types(two_ranks: list[dict[str, Any]]) -> None:
    actual = two_ranks[0]
    assert actual["ddp kind"] == (DDPModel.__name__, False, 2.0)
    assert actual["fsdp kind"] == (FSDPModel.__name__, True, 2.0)
    assert actual["tree kind"] == (DeterministicModel.__name__, False, 1.0)


def test_ddp_reduces_once_per_step(two_ranks: list[dict[str, Any]]) -> None:
    """Before the last micro-batch each rank has gradients of its own."""
    first, second = (actual["ddp, before the last"] for actual in two_ranks)
    assert not torch.equal(first, second)


def test_fsdp_rank_holds_half(two_ranks: list[dict[str, Any]]) -> None:
    assert [actual["held"] for actual in two_ranks] == [[(3, 4), (3,), (1, 6), (1,)]] * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_that_are_saved_are_those_of_the_first_rank(make: MakeConfig, strategy: str) -> None:
    config = make(distributed__strategy=strategy)

    def body(rank: int) -> Any:
        with join_world(config.distributed, config.run) as world:
            module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            parallel = parallelize(module, lambda _: [], config.distributed, world, "fp32", 2)
            parallel.module(torch.full((4, 2), float(rank)) + torch.arange(4.0)[:, None]).sum().backward()
            parallel.share_buffers()
            return [module[1].running_mean.tolist(), int(module[1].num_batches_tracked)]

    first, second = ranks.values(ranks.start_ranks(2, body).wait())
    assert first == second
    assert first[1] == 1
