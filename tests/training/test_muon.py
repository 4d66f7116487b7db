"""The muon optimizer: its orthogonalization, its update, its state, and how matrices are shared out."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import fault_harness as harness
import pytest
import torch
from fault_harness import RUN_ID
from torch import nn

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.state import load_tensors, optimizer_tensors
from llmtrain.config.schema import Config
from llmtrain.config.trainer import TrainerSection
from llmtrain.distributed.world import World
from llmtrain.models.base import block_matrices
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.training.muon import Muon, _pack_, _unpack_, plan_matrices
from llmtrain.training.newton_schulz import (
    COEFFICIENTS,
    ITERATIONS,
    newton_schulz,
    newton_schulz_by_kernel,
    orthogonalize_,
)
from llmtrain.training.optimizer import build_muon
from llmtrain.training.schedule import LR_RATIO, Group, momentum_at, set_schedule

MakeConfig = Callable[..., Config]
SHAPES = [(24, 24), (24, 30), (16, 64), (64, 16), (7, 19), (33, 1), (1, 5)]


def reference(matrix: torch.Tensor) -> torch.Tensor:
    """The iteration as it is defined, in float64."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.double().T if is_tall else matrix.double()
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def random_matrix(rows: int, columns: int, spectrum: str = "random") -> torch.Tensor:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
    if spectrum == "decaying":
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        matrix = u @ torch.diag(torch.logspace(0, -6, len(s))) @ v
    return matrix


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def torch_product(
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scales: torch.Tensor | None = None,
    is_symmetric: bool = False,
) -> torch.Tensor:
    """What the kernel computes, which needs a GPU; tests/gpu has the kernel itself."""
    result = alpha * (a.double() @ b.double()) + diagonal * torch.eye(a.shape[1], b.shape[2])
    result = result if addend is None else result + beta * addend
    result = result if scales is None else result * scales.double()[:, None, None]
    result = (result.tril() + result.tril(-1).mT) if is_symmetric else result
    return result.to(a.dtype)


Iteration = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[newton_schulz, newton_schulz_by_kernel], ids=["torch", "kernel"])
def iteration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iteration:
    kernel = SimpleNamespace(product=torch_product)
    monkeypatch.setitem(sys.modules, "llmtrain.training.product_kernel", cast(ModuleType, kernel))
    function: Iteration = request.param
    return function


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spectrum", ["random", "decaying"])
def test_newton_schulz_in_float32_equals_its_definition(
    iteration: Iteration, shape: tuple[int, int], spectrum: str
) -> None:
    matrix = random_matrix(*shape, spectrum)
    assert distance(iteration(matrix[None])[0], reference(matrix)) < 2e-3


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_newton_schulz_in_bfloat16_is_as_good_as_the_plain_iteration(
    iteration: Iteration, shape: tuple[int, int]
) -> None:
    """Also for singular values over six orders of magnitude, where rounding errors of the Gram matrix grow."""
    from torch.optim._muon import _zeropower_via_newtonschulz as plain

    for spectrum, limit in (("random", 0.06), ("decaying", 0.25)):
        matrix = random_matrix(*shape, spectrum)
        ours = iteration(matrix[None].bfloat16())[0]
        assert distance(ours, reference(matrix)) < limit
        assert distance(ours, reference(matrix)) < 4 * distance(plain(matrix, COEFFICIENTS, 5, 1e-7), reference(matrix))
        assert torch.linalg.svdvals(ours.double()).max() < 1.3


def test_newton_schulz_of_zero_is_zero(iteration: Iteration) -> None:
    assert torch.equal(iteration(torch.zeros(2, 8, 32)), torch.zeros(2, 8, 32))


def test_results_do_not_depend_on_the_other_matrices() -> None:
    """What lets each rank compute its share with the bits of one process."""
    matrices = [random_matrix(rows, columns) * (1 + i) for i, (rows, columns) in enumerate(3 * SHAPES)]
    together = [matrix.clone() for matrix in matrices]
    orthogonalize_(together, batched=False)
    for matrix, result in zip(matrices, together, strict=True):
        alone = matrix.clone()
        orthogonalize_([alone], batched=False)
        assert torch.equal(alone, result)


def test_batches_give_the_same_results_to_rounding() -> None:
    matrices = [random_matrix(rows, columns) * (1 + i) for i, (rows, columns) in enumerate(3 * SHAPES)]
    results = [[matrix.clone() for matrix in matrices] for _ in range(2)]
    orthogonalize_(results[0], batched=False)
    orthogonalize_(results[1], batched=True)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def muon(parameters: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.9) -> Muon:
    group = {"params": parameters, "lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    return Muon([group], [[] for _ in parameters], rank=0, world_size=1, batched=False)


def test_steps_agree_with_torch() -> None:
    """torch computes in bfloat16: an update of length 1 per direction, to 2 %, over several steps."""
    start = [random_matrix(32, 32), random_matrix(16, 64), random_matrix(64, 16)]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizers = [
        muon(ours, 0.1, 0.2),
        torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="original"),
    ]
    for step in range(5):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            gradient = random_matrix(*pair[0].shape).roll(step * 7 + index, dims=0) * (1 + step)
            for parameter in pair:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, other, before in zip(ours, theirs, start, strict=True):
        assert distance(parameter.detach() - before, other.detach() - before) < 0.02


def test_update_without_momentum_is_the_orthogonalized_gradient() -> None:
    parameter = nn.Parameter(random_matrix(64, 16))
    gradient = random_matrix(64, 16).flip(0)
    before = parameter.detach().clone()
    parameter.grad = gradient.clone()
    muon([parameter], 0.1, 0.5, momentum=0.0).step()
    expected = before * (1 - 0.1 * 0.5) - 0.1 * math.sqrt(64 / 16) * reference(gradient).float()
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-4)


def test_fused_matrices_are_orthogonalized_separately() -> None:
    gradients = [random_matrix(16, 16), 100 * random_matrix(16, 16).flip(0), random_matrix(8, 16)]
    parameter = nn.Parameter(torch.zeros(40, 16))
    group = {"params": [parameter], "lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}
    parameter.grad = torch.cat(gradients)
    Muon([group], [[16, 16, 8]], rank=0, world_size=1, batched=False).step()
    expected = torch.cat([-reference(gradient).float() for gradient in gradients])
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_matrices_are_shared_out_evenly(world_size: int) -> None:
    shapes = 6 * [(96, 32), (32, 32), (128, 32), (32, 128)]
    sections: list[list[int]] = 6 * [[32, 32, 32], [], [], []]
    plan = plan_matrices(shapes, sections, world_size)
    assert plan == plan_matrices(shapes, sections, world_size)
    assert [(m.parameter, m.start, m.rows) for m in plan[:4]] == [(0, 0, 32), (0, 32, 32), (0, 64, 32), (1, 0, 32)]
    counts = [sum(m.rows * m.columns for m in plan if m.owner == rank) for rank in range(world_size)]
    assert max(counts) - min(counts) <= 2 * 32 * 128


def tiny(**changes: Any) -> tuple[GPTAdapter, nn.Module]:
    from llmtrain.config.model import GptSection

    torch.manual_seed(1)
    adapter = GPTAdapter(GptSection(block_size=8, d_model=16, n_layers=2, n_heads=2, **changes), 32)
    return adapter, adapter.build()


def muon_section(**fields: Any) -> TrainerSection:
    return TrainerSection(optimizer="muon", **{"schedule": "constant", **fields})


def build(adapter: GPTAdapter, module: nn.Module, **fields: Any) -> Muon:
    return build_muon(adapter, module, TrainerSection(optimizer="muon", **fields), World(), batched=False)


def test_every_parameter_is_in_one_group() -> None:
    adapter, module = tiny(tie_embeddings=False)
    optimizer = build(adapter, module, weight_decay=0.3, lr=0.02)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    matrices, tables, vectors = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert sorted(matrices + tables + vectors) == sorted(names.values())
    assert matrices == list(block_matrices(adapter, module))
    assert {name.split(".", 2)[2] for name in matrices} == {
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    }
    assert sorted(tables) == ["lm_head.weight", "wpe.weight", "wte.weight"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [0.02, 0.02 * LR_RATIO[Group.EMBEDDINGS], 0.02 * LR_RATIO[Group.VECTORS]]
    )


def test_frozen_matrices_are_left_out() -> None:
    adapter, module = tiny()
    module.get_submodule("h.0").requires_grad_(False)
    optimizer = build(adapter, module)
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_schedule_sets_rates_and_momentum() -> None:
    optimizer = build(*tiny(), momentum_warmup_steps=10)
    set_schedule(optimizer, 4, muon_section(lr=0.5, momentum_warmup_steps=10))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.3, 0.15])
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.9)


def test_matrices_have_no_warmup() -> None:
    config = muon_section(lr=0.5, warmup_steps=10)
    optimizer = build(*tiny(), lr=0.5, warmup_steps=10)
    set_schedule(optimizer, 4, config)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.15, 0.075])
    set_schedule(optimizer, 10, config)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.3, 0.15])


def test_momentum_rises_to_its_peak() -> None:
    rising = muon_section(momentum=0.95, momentum_warmup_steps=10)
    assert [momentum_at(step, rising) for step in (0, 4, 9, 10, 500)] == pytest.approx([0.86, 0.9, 0.95, 0.95, 0.95])
    assert momentum_at(0, muon_section(momentum=0.95, momentum_warmup_steps=0)) == pytest.approx(0.95)
    low = muon_section(momentum=0.5, momentum_warmup_steps=10)
    assert {momentum_at(step, low) for step in range(20)} == {0.5}


def train_steps(module: nn.Module, optimizer: Muon, first: int, last: int) -> None:
    for step in range(first, last):
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(module(tokens).view(-1, module(tokens).shape[-1]), tokens.view(-1)).backward()
        set_schedule(optimizer, step, muon_section(lr=0.02))
        optimizer.step()
        optimizer.zero_grad()


def test_state_is_saved_by_name_and_loaded_exactly() -> None:
    adapter, module = tiny()
    optimizer = build(adapter, module, momentum_warmup_steps=5)
    train_steps(module, optimizer, 0, 3)
    state = {name: tensor.clone() for name, tensor in optimizer_tensors(module, optimizer).items()}
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert {name.rpartition(".")[2] for name in state if ".c_attn.weight." in name} == {"momentum_buffer"}
    assert {name.rpartition(".")[2] for name in state if ".wte.weight." in name} == {"step", "exp_avg", "exp_avg_sq"}
    train_steps(module, optimizer, 3, 5)

    _, other = tiny()
    resumed = build(adapter, other, momentum_warmup_steps=5)
    saved = {"model": weights, "optimizer": state}
    load_tensors(
        other, resumed, set(state), lambda group, into: [into[name].copy_(saved[group][name]) for name in into]
    )
    train_steps(other, resumed, 3, 5)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


MUON: dict[str, Any] = {"trainer__optimizer": "muon", "trainer__lr": 0.02, "trainer__momentum_warmup_steps": 4}


def trained(config: Config, **options: Any) -> dict[str, Any]:
    ended = harness.run(config, **options)
    assert ended.code == 0, ended.output
    assert ended.result is not None
    return ended.result


def test_muon_run_resumes_exactly(make_config: MakeConfig) -> None:
    uninterrupted = make_config(**MUON)
    expected = harness.outcome(Path(uninterrupted.output.root_dir), trained(uninterrupted))
    config = make_config(**MUON)
    assert harness.run(config, fault="after_optimizer:5:0:kill").code == -9
    root = Path(config.output.root_dir)
    assert harness.outcome(root, trained(config, resume=RUN_ID)) == expected
    recorded = Checkpoint(root / RUN_ID / "checkpoints" / "step_8").state()["config"]["trainer"]
    assert (recorded["schedule"], recorded["decay_fraction"], recorded["momentum"]) == ("wsd", 0.5, 0.95)


MODERN: dict[str, Any] = {"model__architecture": "modern", "model__n_kv_heads": 1}


@pytest.mark.slow
@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_modern_muon_run_resumes_exactly_from_any_step(make_config: MakeConfig, mlp: str) -> None:
    fields = {**MUON, **MODERN, "model__mlp": mlp}
    uninterrupted = make_config(**fields)
    expected = harness.outcome(Path(uninterrupted.output.root_dir), trained(uninterrupted))
    for fault, code in (
        ("forward:1:0:kill", -9),
        ("after_optimizer:3:0:term", 75),
        ("after_optimizer:6:0:kill", -9),
        ("forward:7:0:term", 75),
    ):
        config = make_config(**fields)
        assert harness.run(config, fault=fault).code == code
        resumed = trained(config, resume=RUN_ID)
        assert harness.outcome(Path(config.output.root_dir), resumed) == expected, fault


@pytest.mark.slow
def test_muon_learns_faster_than_adamw(make_config: MakeConfig) -> None:
    changes = {"trainer__max_steps": 40, "trainer__save_every_steps": None, "trainer__schedule": "wsd"}
    losses = [
        trained(make_config(**changes, **other))["final_val_loss"]
        for other in ({**MUON}, {"trainer__lr": 3e-3}, {"trainer__lr": 1e-2})
    ]
    assert losses[0] < min(losses[1:])


def test_rank_without_a_matrix_sends_and_receives_nothing() -> None:
    flat = torch.empty(0)
    _pack_(flat, [])
    _unpack_([], flat)
