"""Tests on one GPU: bf16, torch.compile, NCCL in a world of one, FSDP, LoRA, QLoRA, exact resume, memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fault_harness import free_port
from gpu_run import Train

KILL = "after_optimizer:7:0:kill"
MODERN = (
    "model.name=gpt",
    "model.architecture=modern",
    "model.block_size=128",
    "model.d_model=128",
    "model.n_layers=2",
)
MODERN += ("trainer.optimizer=muon", "trainer.compile=true")


def alone_in_a_world() -> dict[str, str]:
    """The environment of the only process that torchrun started."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def test_bf16_learns_and_reports_the_gpu(train: Train) -> None:
    result = train().json
    assert result["device"].startswith("cuda")
    assert result["precision"] == "bf16"
    assert result["final_train_loss"] < result["first_train_loss"]
    assert result["peak_memory_bytes"] > 0


def test_memory_grows_with_the_batch(train: Train) -> None:
    """peak_memory_bytes is that of the GPU."""
    sets = ("trainer.max_steps=2", "trainer.warmup_steps=0")
    small = train(*sets, folder="small").json["peak_memory_bytes"]
    large = train(*sets, "trainer.micro_batch_size=64", folder="large").json["peak_memory_bytes"]
    assert small < large < 64 * small


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nccl_in_a_world_of_one_matches(train: Train, strategy: str) -> None:
    alone = train(folder="alone").json
    done = train(f"distributed.strategy={strategy}", folder=strategy, **alone_in_a_world())
    assert "backend nccl" in done.err
    for key in ("final_train_loss", "final_val_loss"):
        assert done.json[key] == pytest.approx(alone[key], rel=1e-3)
    assert done.json["tokens"] == alone["tokens"]


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param((), id="eager"),
        pytest.param(("trainer.compile=true",), id="compile"),
        pytest.param(("data.num_workers=2",), id="workers"),
        pytest.param(("trainer.precision=fp32",), id="fp32"),
        pytest.param(("trainer.optimizer=muon",), id="muon"),
        pytest.param(MODERN, id="modern"),
    ],
)
def test_killed_and_resumed_run_is_bit_exact(train: Train, sets: tuple[str, ...]) -> None:
    whole = train(*sets, folder="whole").json
    assert train(*sets, LLMTRAIN_FAULT=KILL).code == -9
    resumed = train(*sets, resume="gpu").json
    assert resumed["resumed_from"] == 6
    assert resumed["state_sha256"] == whole["state_sha256"]


def test_muon_in_fsdp_matches(train: Train) -> None:
    sets = ("trainer.optimizer=muon", "trainer.lr=0.01")
    alone = train(*sets, folder="alone").json
    sharded = train(*sets, "distributed.strategy=fsdp", folder="fsdp", **alone_in_a_world()).json
    assert sharded["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=5e-3)


def test_batched_newton_schulz_agrees_with_torch() -> None:
    """In bfloat16, like torch's. Matrices that are much longer than wide have a form of their own; the last shape does
    not fit the tiles of our kernel."""
    import torch
    from torch.optim._muon import _zeropower_via_newtonschulz as plain

    from llmtrain.training.newton_schulz import COEFFICIENTS, orthogonalize_

    shapes = 3 * [(256, 256), (256, 1024), (1024, 256), (256, 320), (200, 520)]
    matrices = [torch.randn(shape, device="cuda") for shape in shapes]
    results = []
    for uses_kernel in (False, True):
        for batched in (True, False):
            results.append([matrix.clone() for matrix in matrices])
            orthogonalize_(results[-1], batched, uses_kernel)
    for matrix, *found in zip(matrices, *results, strict=True):
        expected = plain(matrix, COEFFICIENTS, 5, 1e-7).float()
        for each in found:
            assert (each - expected).norm() < 0.05 * expected.norm()
        assert torch.equal(*found[2:]), "bits of our kernel do not depend on how matrices are batched"


def test_squared_relu_needs_less_memory_for_the_same_gradient() -> None:
    import torch

    from llmtrain.compat.numerics import Numerics
    from llmtrain.config.model import ModernGptSection
    from llmtrain.models.gpt.modern import SquaredReLU

    section = ModernGptSection(n_layers=1, d_model=256, block_size=64)
    torch.manual_seed(0)
    x = torch.randn(64, 64, 256, device="cuda", dtype=torch.bfloat16)
    gradients, memory = [], []
    for version in (3, 4):
        torch.manual_seed(1)
        module = SquaredReLU(section, Numerics(version)).cuda().bfloat16()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        before = torch.cuda.memory_allocated()
        result = module(x)
        memory.append(torch.cuda.memory_allocated() - before)
        result.square().sum().backward()
        gradients.append(module.up.weight.grad.float())
    assert memory[1] < 0.7 * memory[0]
    assert (gradients[1] - gradients[0]).norm() < 5e-3 * gradients[0].norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_kernel_agrees_with_torch(dtype: str) -> None:
    """Also rows without loss, columns of padding, and a width that is no multiple of the kernel's."""
    import torch

    from llmtrain.core.targets import IGNORE_INDEX
    from llmtrain.models.loss_kernel import cross_entropy_

    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(512, 50304, device="cuda", generator=generator).to(getattr(torch, dtype))
    logits[:, 50257:] = float("-inf")
    targets = torch.randint(50257, (512,), device="cuda", generator=generator)
    targets[::5] = IGNORE_INDEX
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    expected.backward()
    loss, same = cross_entropy_(logits.clone(), targets, False, IGNORE_INDEX)
    assert torch.equal(same, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    again, gradient = cross_entropy_(logits, targets, True, IGNORE_INDEX)
    assert torch.equal(again, loss)
    assert exact.grad is not None
    tolerance = 1e-6 if dtype == "float32" else 4e-3  # a gradient near 1 in bfloat16
    assert (gradient - exact.grad).abs().max() < tolerance


def test_fsdp_resume_is_bit_exact(train: Train) -> None:
    sets = ("distributed.strategy=fsdp",)
    whole = train(*sets, folder="whole", **alone_in_a_world()).json
    assert train(*sets, LLMTRAIN_FAULT=KILL, **alone_in_a_world()).code == -9
    assert train(*sets, resume="gpu", **alone_in_a_world()).json["state_sha256"] == whole["state_sha256"]


def test_compile_changes_the_loss_by_rounding_only(train: Train) -> None:
    eager = train("model.dropout=0", folder="eager").json
    compiled = train("model.dropout=0", "trainer.compile=true", folder="compiled").json
    assert compiled["first_train_loss"] == pytest.approx(eager["first_train_loss"], rel=1e-3)
    assert compiled["final_val_loss"] == pytest.approx(eager["final_val_loss"], rel=2e-2)  # 12 steps amplify it


@pytest.fixture
def lora(llama: list[str]) -> list[str]:
    return [*llama, "model.lora.rank=8", "trainer.lr=1e-2"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="lora"),
        pytest.param(("trainer.compile=true",), id="compiled"),  # with the kernel of the loss
        pytest.param(("model.lora.quantize=true",), id="qlora"),
    ],
)
def test_fine_tuning_learns_and_resumes_exactly(train: Train, lora: list[str], more: tuple[str, ...]) -> None:
    if "model.lora.quantize=true" in more:
        pytest.importorskip("bitsandbytes")
    sets = (*lora, *more)
    whole = train(*sets, folder="whole").json
    assert whole["final_train_loss"] < whole["first_train_loss"]
    assert train(*sets, LLMTRAIN_FAULT=KILL).code == -9
    assert train(*sets, resume="gpu").json["state_sha256"] == whole["state_sha256"]


def test_doctor_and_smoke_pass(tmp_path: Path) -> None:
    answers = {}
    for arguments in (["doctor"], ["smoke", "--processes", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "llmtrain", *arguments, "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answers[arguments[0]] = json.loads(done.stdout)
    assert {finding["status"] for finding in answers["doctor"]["findings"] if finding["name"] == "gpu"} == {"pass"}
    assert answers["smoke"]["device"].startswith("cuda")
