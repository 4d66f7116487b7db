"""Too little memory is an error with a remedy, also on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.config.load import load_config
from llmtrain.distributed.world import World
from llmtrain.doctor.environment import Position
from llmtrain.doctor.memory import plan_here
from llmtrain.errors import DataError, UsageError
from llmtrain.models import device_precision
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.training import memory_errors, model_handle
from llmtrain.training.components import build_adapter, build_components
from llmtrain.training.dry_run import dry_run
from llmtrain.training.memory_errors import check_memory, out_of_memory
from llmtrain.training.model_handle import build_model
from llmtrain.training.optimizer import build_optimizer
from tiny_llama import make_model

GPT = ["model.name=gpt", "model.architecture=modern", "model.d_model=64", "model.n_layers=2"]


def pretrained(model: Path) -> list[str]:
    return ["model.name=hf_causal_lm", f"model.path={model}", "trainer.optimizer=adamw"]


BYTES = {"adamw": 16, "muon": 12, "adafactor": 8}  # per weight


@pytest.mark.parametrize("optimizer", BYTES)
@pytest.mark.parametrize(("strategy", "processes"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_model_that_cannot_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, strategy: str, processes: int
) -> None:
    config = load_config(None, [*GPT, f"trainer.optimizer={optimizer}", f"distributed.strategy={strategy}"])
    adapter = build_adapter(config.model, 256)
    count = adapter.weight_count()
    assert count
    need = BYTES[optimizer] * count * (1 if strategy == "fsdp" else processes)
    world = World(device=torch.device("cpu"), world_size=processes, local_world_size=processes)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: need)
    check_memory(config.trainer, config.distributed, adapter, world)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: need - 1)
    with pytest.raises(
        UsageError, match=rf"does not fit.*{count:,} weights, their gradients and the state of {optimizer}"
    ):
        check_memory(config.trainer, config.distributed, adapter, world)
    check_memory(
        config.trainer, config.distributed, adapter, World(device=torch.device("cuda"))
    )  # which has memory of its own


@pytest.mark.parametrize(
    "sets",
    [
        ("model.mlp=relu2",),
        ("model.mlp=swiglu", "model.n_heads=4", "model.n_kv_heads=2", "model.tie_embeddings=false"),
        ("model.architecture=gpt2", "model.n_heads=4"),
        ("model.architecture=gpt2", "model.n_heads=4", "model.d_ff=100", "model.tie_embeddings=false"),
    ],
)
def test_weights_are_counted_without_building_them(sets: tuple[str, ...]) -> None:
    adapter = build_adapter(load_config(None, [*GPT, *sets]).model, 3000)
    count = sum(parameter.numel() for parameter in adapter.build().parameters() if parameter.dim() == 2)
    positions = 0 if "model.architecture=gpt2" not in sets else 64 * adapter.config.block_size
    assert adapter.weight_count() == pytest.approx(count - positions, rel=0.01)  # the vocabulary is padded


@pytest.mark.parametrize(("lora", "factor"), [(True, 1), (False, 4)])
def test_weights_of_a_pretrained_model_are_counted_in_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lora: bool, factor: int
) -> None:
    model = make_model(tmp_path / "model", hidden_size=64)
    count = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    (model / "consolidated.safetensors").write_bytes((model / "model.safetensors").read_bytes())  # is not loaded
    config = load_config(None, [*pretrained(model), *(["model.lora.rank=4"] if lora else [])])
    adapter = build_adapter(config.model, 0)
    assert adapter.weight_count() == count
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 4 * factor * count - 1)
    with pytest.raises(UsageError, match="does not fit"):
        check_memory(config.trainer, config.distributed, adapter, World(device=torch.device("cpu")))
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 4 * factor * count)
    check_memory(config.trainer, config.distributed, adapter, World(device=torch.device("cpu")))


def test_weights_in_several_files_are_counted(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=64)
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, model / file)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = build_adapter(load_config(None, pretrained(model)).model, 0)
    assert adapter.weight_count() == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("damage", ["missing", "dangling", "garbage", "index", "shards"])
def test_damaged_weights_are_left_to_the_loader(tmp_path: Path, damage: str) -> None:
    model = make_model(tmp_path / "model", hidden_size=64)
    weights = model / "model.safetensors"
    weights.unlink()
    if damage == "dangling":
        weights.symlink_to(tmp_path / "nowhere")
    elif damage == "garbage":
        weights.write_bytes(b"x" * 100)
    elif damage in ("index", "shards"):
        index = ["a"] if damage == "index" else {"weight_map": ["a"]}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    config = load_config(None, [*pretrained(model), "data.name=python_stdlib", "run.threads=1"])
    assert build_adapter(config.model, 0).weight_count() is None
    with pytest.raises(DataError):
        build_components(config, World(device=torch.device("cpu")))


def test_dry_run_needs_the_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [*GPT, "trainer.optimizer=adamw"])
    adapter = build_adapter(config.model, 256)
    need = 4 * (adapter.weight_count() or 0)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: need)
    check_memory(config.trainer, config.distributed, adapter, World(device=torch.device("cpu")), is_dry_run=True)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: need - 1)
    with pytest.raises(UsageError, match="weights need at least"):
        check_memory(config.trainer, config.distributed, adapter, World(device=torch.device("cpu")), is_dry_run=True)


@pytest.mark.parametrize(
    "sets",
    [
        ("model.dtype=float32", "trainer.optimizer=adamw"),
        ("model.dtype=bfloat16", "trainer.optimizer=adamw"),
        ("model.dtype=bfloat16", "trainer.optimizer=muon"),
        ("model.dtype=bfloat16", "model.lora.rank=4", "trainer.optimizer=adamw"),
    ],
)
@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 instructions
def test_estimates_are_what_a_step_allocates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sets: tuple[str, ...], has_bf16: bool
) -> None:
    monkeypatch.setattr(device_precision, "has_bf16", lambda _: has_bf16)
    (tmp_path / "text.txt").write_text("red green blue one two three " * 100)
    data = ["data.name=text_files", f"data.files={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/cache"]
    model = make_model(tmp_path / "model")
    config = load_config(None, [*pretrained(model), *data, "model.block_size=16", "run.threads=1", *sets])
    config = config.with_values("run", device="cpu")
    world = World(device=torch.device("cpu"))
    components = build_components(config, world)
    module, batch = components.module, components.train_batches[0]
    model = build_model(components, config.trainer, config.distributed, world)
    optimizer = build_optimizer(model.adapter, model.module, config.trainer, world)
    components.adapter.loss(module, batch.inputs, batch.targets, batch.positions).backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    averages = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    allocated = sum(tensor.nbytes for tensor in (*module.parameters(), *gradients, *averages))
    assert dry_run(config)["state_bytes"] == allocated
    memory = plan_here(config, Position()).memory
    assert memory is not None
    assert memory.at_least == allocated


def test_dry_run_explains_that_activations_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(*_: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    monkeypatch.setattr(GPTAdapter, "loss", loss)
    config = load_config(None, [*GPT, "data.name=dummy_text", f"data.cache_dir={tmp_path}", "run.threads=1"])
    with pytest.raises(UsageError, match=r"does not fit in the memory of cpu: .*99 bytes") as raised:
        dry_run(config.with_values("run", device="cpu"))
    assert "trainer.micro_batch_size" in raised.value.remedy


def test_dry_run_predicts_the_memory_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("red green blue one two three " * 100)
    data = ["data.name=text_files", f"data.files={tmp_path}/text.txt", f"data.cache_dir={tmp_path}"]
    sets = [
        *GPT,
        *data,
        "data.tokenizer=char",
        "trainer.eval_prompts=[]",
        "run.threads=1",
        "run.device=cpu",
    ]  # the vocabulary is of the text
    report = dry_run(load_config(None, sets))
    assert report is not None
    plan = report["plan"]
    memory = plan["memory"]
    assert plan["verdict"] == "fits"
    assert report["state_bytes"] == memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert memory["peak"] > report["state_bytes"] + memory["activations"]
    json.dumps(report)


def test_dry_run_of_a_plugin_that_cannot_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [*GPT, "data.name=dummy_text", f"data.cache_dir={tmp_path}", "run.threads=1", "run.device=cpu"]
    config = load_config(None, sets)
    planned = dry_run(config)

    def fail(*_: object) -> None:
        raise RuntimeError("no meta tensors")

    monkeypatch.setattr(GPTAdapter, "build_empty", fail)
    report = dry_run(config)
    assert report is not None
    assert planned is not None
    assert (report["plan"]["verdict"], report["plan"]["memory"]) == ("unknown", None)
    assert report["state_bytes"] == planned["state_bytes"]


def test_dry_run_checkpoints_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(model_handle, "checkpoint_blocks", lambda blocks, **_: calls.append(len(blocks)))
    sets = [*GPT, "data.name=dummy_text", f"data.cache_dir={tmp_path}", "run.threads=1", "run.device=cpu"]
    dry_run(load_config(None, [*sets, "trainer.activation_checkpointing=blocks"]))
    assert calls == [2]


def test_training_checks_before_it_builds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 1000)
    config = load_config(None, [*GPT, "data.name=python_stdlib", "run.threads=1"])
    with pytest.raises(UsageError, match="does not fit"):
        build_components(config, World(device=torch.device("cpu")))


def test_failed_allocation_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert str(1 << 60) in str(out_of_memory(caught.value))


def test_failed_allocation_on_a_gpu() -> None:
    problem = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 1 GiB")
    assert out_of_memory(problem) == "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_other_errors_are_not_about_memory() -> None:
    assert out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
