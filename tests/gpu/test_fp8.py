"""trainer.precision fp8 on a GPU that has FP8: close to bf16, exact resume, LoRA, parallelism, refusals."""

import copy
from pathlib import Path
from typing import Any

import pytest
from gpu_run import Train
from test_one_gpu import KILL, MODERN, alone_in_a_world

FP8 = ("trainer.precision=fp8",)
CLOSE = 0.5
"""Distance of a gradient from bf16's, relative to its norm. Seen: up to 0.34, of the queries' weights of small random
models. A wrong scale or a transposed matrix gives more than 1."""


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")


@pytest.fixture
def llama(llama: list[str]) -> list[str]:
    return [*llama, "trainer.lr=3e-3"]


def loss_and_gradients(module: Any, adapter: Any, tokens: Any) -> tuple[float, dict[str, Any]]:
    loss = adapter.loss(module, tokens, tokens.roll(1))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["swiglu", "relu2", "gpt2"])
def test_loss_and_gradients_are_close_to_bf16(kind: str, compiles: bool) -> None:
    import torch

    from llmtrain.config.model import GptSection, ModernGptSection
    from llmtrain.models.compute_dtype import compute_in
    from llmtrain.models.fp8 import use_fp8
    from llmtrain.models.gpt.adapter import GPTAdapter

    section: Any = GptSection(n_layers=2, d_model=256, block_size=128)
    if kind != "gpt2":
        section = ModernGptSection(n_layers=2, d_model=256, block_size=128, mlp=kind)
    adapter = GPTAdapter(section, 1000)
    torch.manual_seed(0)
    module = adapter.build().cuda()
    for parameter in module.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.06)
    tokens = torch.randint(0, 1000, (4, 127), device="cuda")  # 508 tokens: not a multiple of 16
    results = []
    for is_fp8 in (False, True, True):
        each = copy.deepcopy(module)
        if is_fp8:
            use_fp8(adapter.blocks(each))
        compute_in(each, torch.bfloat16)
        if compiles:
            adapter.compiled_loss(each, by_block=True)
        results.append(loss_and_gradients(each, adapter, tokens))
    (plain_loss, plain), (loss, gradients), (again_loss, again) = results
    assert loss != plain_loss
    assert loss == pytest.approx(plain_loss, rel=0.01)
    assert loss == again_loss
    for name, expected in plain.items():
        assert gradients[name].dtype == torch.float32
        assert (gradients[name] - expected).norm() < CLOSE * expected.norm(), name
        if "wte" not in name and "wpe" not in name:  # embeddings add up in any order without run.deterministic
            assert torch.equal(gradients[name], again[name]), name


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("lora", [{}, {"dropout": 0.1}, None], ids=["grouped", "dropout", "full"])
def test_fine_tuning_is_close_to_bf16(tmp_path: Path, lora: dict[str, Any] | None, compiles: bool) -> None:
    import torch

    pytest.importorskip("peft")
    from llmtrain.config.model import HfCausalLmSection, LoraSection
    from llmtrain.models.compute_dtype import compute_in
    from llmtrain.models.fp8 import use_fp8
    from llmtrain.models.hf.causal_lm import HFCausalLMAdapter
    from tiny_llama import make_model

    directory = make_model(tmp_path / "model", hidden_size=256, intermediate_size=512, attention_bias=True)
    adapted = None if lora is None else LoraSection(**lora)
    section = HfCausalLmSection(path=str(directory), block_size=64, lora=adapted, attention="sdpa")
    adapter = HFCausalLMAdapter(section, 90)
    tokens = torch.randint(3, 90, (4, 32), device="cuda")
    results = []
    for is_fp8 in (False, True):
        torch.manual_seed(0)
        module = adapter.build().cuda()
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        if is_fp8:
            use_fp8(adapter.blocks(module))
        compute_in(module, torch.bfloat16)
        if compiles:
            adapter.compiled_loss(module, by_block=True)
        torch.manual_seed(1)  # dropout
        results.append(loss_and_gradients(module, adapter, tokens))
    (plain_loss, plain), (loss, gradients) = results
    assert loss != plain_loss
    assert loss == pytest.approx(plain_loss, rel=0.02)
    assert gradients.keys() == plain.keys()
    if lora and compiles:
        return  # dropout draws other masks in other graphs
    for name, expected in plain.items():
        assert (gradients[name] - expected).norm() < CLOSE * expected.norm(), name


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param((), id="gpt2-eager"),
        pytest.param((*MODERN, "trainer.activation_checkpointing=selective"), id="modern"),
    ],
)
def test_killed_and_resumed_run_is_bit_exact(train: Train, sets: tuple[str, ...]) -> None:
    bf16 = train(*sets, folder="bf16").json
    whole = train(*sets, *FP8, folder="whole").json
    assert whole["precision"] == "fp8"
    assert whole["final_train_loss"] < whole["first_train_loss"]
    assert whole["final_val_loss"] == pytest.approx(bf16["final_val_loss"], rel=0.02)
    assert whole["state_sha256"] != bf16["state_sha256"]
    assert train(*sets, *FP8, LLMTRAIN_FAULT=KILL).code == -9
    resumed = train(*sets, *FP8, resume="gpu").json
    assert resumed["resumed_from"] == 6
    assert resumed["state_sha256"] == whole["state_sha256"]


@pytest.mark.parametrize("more", [(), ("model.lora.rank=8",)], ids=["full", "lora"])
def test_fine_tuning_resumes_exactly(train: Train, llama: list[str], more: tuple[str, ...]) -> None:
    sets = (*llama, *more, *FP8, "trainer.compile=true")
    whole = train(*sets, folder="whole").json
    assert whole["final_train_loss"] < whole["first_train_loss"]
    assert train(*sets, LLMTRAIN_FAULT=KILL).code == -9
    assert train(*sets, resume="gpu").json["state_sha256"] == whole["state_sha256"]


@pytest.mark.parametrize(("kind", "strategy"), [("modern", "fsdp"), ("lora", "fsdp"), ("lora", "ddp")])
def test_nccl_in_a_world_of_one_matches(train: Train, llama: list[str], kind: str, strategy: str) -> None:
    sets = MODERN if kind == "modern" else (*llama, "model.lora.rank=8", "trainer.compile=true")
    alone = train(*sets, *FP8, folder="alone").json
    done = train(*sets, *FP8, f"distributed.strategy={strategy}", folder=strategy, **alone_in_a_world())
    assert done.json["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=5e-3)


def test_machine_without_a_gpu_is_refused(train: Train) -> None:
    done = train(*FP8, "run.device=auto", CUDA_VISIBLE_DEVICES="")
    assert done.code == 64
    assert "needs a GPU with FP8" in done.err
