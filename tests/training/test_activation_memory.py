"""A micro-batch that cannot fit in memory is refused before it is built, and one that fits is not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.plan.fake_model import fake_model
from llmtrain.plan.memory import estimate_memory, trace_step
from llmtrain.plan.micro_batch import MARGIN
from llmtrain.plan.plan import with_vocabulary
from llmtrain.plan.target import Target
from llmtrain.plan.trace import MemoryTracker
from llmtrain.training import memory_errors
from llmtrain.training.components import Components, build_components
from llmtrain.training.memory_errors import check_activation_memory, check_batch_memory
from llmtrain.training.model_handle import checkpoint_activations
from tiny_llama import make_examples, make_model

Cli = Callable[..., Any]
CPU = World(device=torch.device("cpu"))
GPT = ["model.name=gpt", "model.d_model=64", "model.n_layers=2"]
MODELS = {
    "modern": [*GPT, "model.architecture=modern"],
    "gpt2": [*GPT, "model.architecture=gpt2", "model.n_heads=4", "model.d_ff=128"],
    "dummy": ["model.name=dummy_gpt", "trainer.optimizer=adamw"],
    "pretrained": ["model.name=hf_causal_lm", "model.path={model}", "trainer.optimizer=adamw"],
    "lora": ["model.name=hf_causal_lm", "model.path={model}", "model.lora.rank=4", "trainer.optimizer=adamw"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    (folder / "text.txt").write_text("red green blue one two three " * 400)
    make_model(folder / "model")
    return folder


@pytest.fixture
def make(directory: Path) -> Callable[..., tuple[Config, Components]]:
    def build(name: str, *more: str) -> tuple[Config, Components]:
        data = ["data.name=text_files", f"data.files={directory}/text.txt", f"data.cache_dir={directory}/cache"]
        sets = [text.replace("{model}", str(directory / "model")) for text in MODELS[name]]
        shared = ["run.threads=1", "run.device=cpu", "trainer.micro_batch_size=4", "model.block_size=64"]
        config = load_config(None, [*sets, *data, *shared, *more], on_note=lambda _: None)
        return config, build_components(config, CPU)

    return build


def step_bytes(config: Config, components: Components) -> int:
    """What a micro-batch needs besides the weights and their gradients, in a step of several."""
    module = components.module
    batch = components.train_batches[0]
    checkpoint_activations(components.adapter, module, config.trainer)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    tracker = MemoryTracker()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for tensor in (*module.parameters(), *module.buffers(), *gradients):
        tracker.ignore(tensor)
    with tracker:
        inputs, targets = batch.inputs.clone(), batch.targets.clone()
        components.adapter.loss(module, inputs, targets, batch.positions).backward()
    return tracker.peak


def state_bytes(components: Components) -> int:
    """Weights, gradients and averages of adamw."""
    return 4 * sum(parameter.nbytes for parameter in components.module.parameters())


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
@pytest.mark.parametrize("name", MODELS)
def test_traced_step_needs_what_a_real_one_needs(make: Any, name: str, checkpointing: str) -> None:
    if (name, checkpointing) == ("dummy", "blocks"):
        pytest.skip("it has no blocks")
    config, components = make(name, f"trainer.activation_checkpointing={checkpointing}", "trainer.grad_accum_steps=2")
    model = fake_model(with_vocabulary(config, components.adapter.vocab_size), "cpu")
    traced = trace_step(config, model, Target("cpu", None)).peak_bytes - model.trained_bytes
    assert traced == pytest.approx(step_bytes(config, components), rel=0.05)


def test_crude_bound_is_above_what_a_step_needs(make: Any) -> None:
    for name in MODELS:
        config, components = make(name)
        sequences, tokens = components.train_batches.first_shape()
        bound = memory_errors._most_activation_bytes(components.module, sequences * tokens)
        assert bound > 1.5 * step_bytes(config, components), name


def check(config: Config, components: Components, sequences: int, world: World = CPU) -> None:
    shape = sequences, components.train_batches.first_shape()[1]
    check_activation_memory(config, components.adapter, components.module, shape, world)


def refusal(config: Config, components: Components, sequences: int, world: World = CPU) -> UsageError:
    with pytest.raises(UsageError, match=f"{sequences:,} sequences of 64 tokens") as refused:
        check(config, components, sequences, world)
    assert refused.value.remedy is not None
    return refused.value


def test_check_changes_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, components = make("gpt2", "model.dropout=0.1")
    module = components.module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random_state = torch.get_rng_state()
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 8 << 20)
    refusal(config, components, 128)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("raises", ["fake", "loss"])
def test_model_that_cannot_be_traced_is_not_refused(make: Any, monkeypatch: pytest.MonkeyPatch, raises: str) -> None:
    config, components = make("modern")

    def fail(*_: object) -> torch.Tensor:
        raise AssertionError("needs values")

    monkeypatch.setattr(type(components.adapter), "loss" if raises == "loss" else "build_empty", fail)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 8 << 20)
    check(config, components, 1 << 20)


def test_small_micro_batch_is_not_traced(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("llmtrain.plan.micro_batch.check_micro_batch", lambda *_, **__: calls.append(1))
    config, components = make("modern")
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 1 << 30)
    check(config, components, 4)
    assert not calls
    check(config, components, 4096)
    assert calls


@pytest.mark.parametrize(("device", "processes"), [("cpu", 1), ("cpu", 2), ("cuda", 1)])
def test_activations_that_do_not_fit_are_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch, device: str, processes: int
) -> None:
    config, components = make("modern", "trainer.optimizer=adamw", "trainer.grad_accum_steps=2")
    world = World(device=torch.device(device), world_size=processes, local_world_size=processes)
    least = state_bytes(components) + int(step_bytes(config, components) / MARGIN)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: int(1.01 * processes * least))
    check(config, components, 4, world)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: int(0.99 * processes * least))
    if device == "cuda":  # which has memory of its own
        check(config, components, 4, world)
        return
    remedy = refusal(config, components, 4, world).remedy
    assert remedy is not None
    assert remedy.startswith("Lower trainer.micro_batch_size, and raise trainer.grad_accum_steps")


@pytest.mark.parametrize("name", ["modern", "pretrained"])
def test_largest_micro_batch_that_fits_is_named(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config, components = make(name)
    memory = 2 << 30
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: memory)
    # Millions of sequences are not traced: what one needs follows from a few.
    remedy = refusal(config, components, 4_000_000).remedy
    found = re.search("micro_batch_size to ([0-9,]+), and raise", remedy or "")
    assert found
    largest = int(found[1].replace(",", ""))
    model = fake_model(with_vocabulary(config, components.adapter.vocab_size), "cpu")

    def peak(sequences: int) -> int:
        with_size = config.with_values("trainer", micro_batch_size=sequences)
        return estimate_memory(with_size, model, Target("cpu", memory)).peak or 0

    assert peak(largest) <= 1.01 * memory
    assert peak(largest + largest // 20) > memory
    check(config, components, largest)


def test_model_of_which_no_sequence_fits(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, components = make("modern")
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 1 << 20)
    remedy = refusal(config, components, 4).remedy
    assert remedy is not None
    assert "model.block_size" in remedy


def test_compiled_model_is_refused_later(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may keep no more than the inputs of the blocks."""
    config, components = make("modern", "trainer.optimizer=adamw")
    need = state_bytes(components) + step_bytes(config, components)
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: need // 2)
    refusal(config, components, 4)
    compiled = config.with_values("trainer", compile=True)
    check(compiled, components, 4)
    refusal(compiled, components, 4096)


def test_model_is_refused_when_its_activations_do_not_fit(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with memory for the weights, the optimizer and the token ids."""
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 8 << 20)
    make("modern")
    with pytest.raises(UsageError, match="128 sequences of 64 tokens"):
        make("modern", "trainer.micro_batch_size=128")


def test_token_ids_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 16 * 100 * 50 * 2)
    check_batch_memory(100, 50, processes=2)
    for sequences, tokens in ((101, 50), (100, 51)):
        with pytest.raises(UsageError, match="at least"):
            check_batch_memory(sequences, tokens, processes=2)


HUGE = 2_000_000_000
"""Sequences: their token ids need 512 GB, at 16 tokens each."""


@pytest.fixture
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_errors, "machine_memory", lambda: 16 << 30)


def assert_refused(done: Any, option: str = "trainer.micro_batch_size") -> None:
    assert (done.code, done.json["error"]) == (64, "UsageError"), done.err
    assert f"{HUGE:,} sequences" in done.json["what"]
    assert option in done.json["remedy"]
    assert "Traceback" not in done.err


@pytest.mark.usefixtures("_small_machine")
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["train", "dry-run"])
def test_huge_micro_batch_is_refused(train: Cli, workdir: Path, more: tuple[str, ...]) -> None:
    assert_refused(train(f"trainer.micro_batch_size={HUGE}", more=("--json", *more)))
    assert not (workdir / "runs").exists()


@pytest.fixture
def fine_tune(cli: Cli, directory: Path, tmp_path: Path) -> Cli:
    """`llmtrain train --dry-run` on short examples, with long ones for validation."""
    make_examples(tmp_path / "train.jsonl", 8)
    long = '{"instruction": "say red", "output": "' + "red " * 40 + '"}\n'
    (tmp_path / "val.jsonl").write_text(long * 4)

    def run(*overrides: str) -> Any:
        files = [f"data.train_file={tmp_path / 'train.jsonl'}", f"data.val_file={tmp_path / 'val.jsonl'}"]
        shared = [f"model.path={directory / 'model'}", "model.block_size=128", f"data.cache_dir={tmp_path / 'cache'}"]
        sets = [*files, *shared, "run.device=cpu", "run.threads=1", *overrides]
        words = [part for text in sets for part in ("--set", text)]
        return cli("train", "--config", "lora_instruct", *words, "--dry-run", "--json")

    return run


@pytest.mark.usefixtures("_small_machine")
@pytest.mark.parametrize("packing", ["true", "false"])
def test_huge_micro_batch_of_examples_is_refused(fine_tune: Cli, packing: str) -> None:
    assert_refused(fine_tune(f"data.packing={packing}", f"trainer.micro_batch_size={HUGE}"))


def test_shapes_of_unpacked_batches_are_checked(fine_tune: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sequences are as long as their longest example."""
    shapes = []

    def record(sequences: int, tokens: int, *_: object, **__: object) -> None:
        shapes.append((sequences, tokens))

    monkeypatch.setattr("llmtrain.training.components.check_batch_memory", record)
    done = fine_tune("data.packing=false", "trainer.micro_batch_size=2", "trainer.warmup_steps=0")
    assert done.code == 0, done.err
    _, of_training, of_validation = shapes
    assert of_training[0] == of_validation[0] == 2
    assert of_training[1] < of_validation[1] <= 128


@pytest.mark.usefixtures("_small_machine")
def test_huge_batch_of_eval_is_refused(train: Cli, cli: Cli, workdir: Path) -> None:
    run = train("output.run_id=small", "trainer.max_steps=1", more=("--json",))
    assert run.code == 0, run.err
    (workdir / "text.txt").write_text("one two three " * 50)
    done = cli("eval", "--run", "small", "--file", "text.txt", "--batch-size", HUGE, "--json")
    assert_refused(done, "--batch-size")
