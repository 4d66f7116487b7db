"""Preference tuning that is killed, resumed or computed by several processes has the bits of an uninterrupted run."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import fault_harness as harness
import numpy as np
import pytest
from fault_harness import RUN_ID
from safetensors import safe_open
from safetensors.numpy import load_file, save
from test_fine_tune_faults import (
    FineTuned,
    Material,
    fine_tune_config,
    fine_tuned,
    resume_and_check,
    rows,
    run_dir,
    some,
    train,
    trained,
)

from llmtrain.config.load import load_config
from llmtrain.config.mixture import MixtureSection, SourceSection
from llmtrain.config.schema import Config
from llmtrain.errors import ExitCode
from llmtrain.runs.metrics import read_metrics
from llmtrain.training.objectives import references
from preference_data import make_pairs

pytestmark = pytest.mark.hf
MakeConfig = Callable[..., Config]
METRICS = ("accuracy", "margin", "rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected", "kl")
SOURCES = ("one", "other")
LAST = 10
"""24 pairs make 20 packed sequences or fewer: 5 steps per epoch."""
GPT: dict[str, Any] = {
    "model__name": "gpt",
    "model__block_size": 128,
    "model__d_model": 32,
    "model__n_layers": 2,
    "model__n_heads": 2,
    "data__packing": False,
}


@functools.cache
def make_files(base: Path) -> tuple[Path, Path]:
    folder = Path(mkdtemp(prefix="pairs-", dir=base))
    return make_pairs(folder / "train.jsonl", 24), make_pairs(folder / "val.jsonl", 5, first=100)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, cache: Path, material: Material) -> MakeConfig:
    train_file, val_file = make_files(tmp_path_factory.getbasetemp())

    def config(**changes: Any) -> Config:
        values: dict[str, Any] = {
            "model__block_size": 64,
            "data__name": "preference_jsonl",
            "data__train_file": str(train_file),
            "data__val_file": str(val_file),
            "trainer__objective": {"name": "dpo"},
            "trainer__lr": 1e-2,
            "trainer__eval_prompts": ["say red"],
            **changes,
        }
        if values.get("model__name") == "gpt":
            return gpt_config(tmp_path_factory.mktemp("run") / "runs", cache, values)
        return fine_tune_config(tmp_path_factory.mktemp("run") / "runs", cache, material, **values)

    return config


def gpt_config(root: Path, cache: Path, values: dict[str, Any]) -> Config:
    """Our own model, from scratch, with the byte tokenizer."""
    return harness.world_config(root, cache, trainer__eval_batches=None, **values)


@pytest.fixture(scope="module")
def alone(make: MakeConfig) -> tuple[Config, FineTuned]:
    config = make()
    return config, fine_tuned(config, trained(config))


def test_metrics_show_both_answers(alone: tuple[Config, FineTuned]) -> None:
    config, found = alone
    assert len(found.train) == LAST
    for _, row in found.train:
        assert {f"train/{name}" for name in METRICS} < row.keys()
    for _, row in found.val:
        assert {f"val/{name}" for name in METRICS} < row.keys()
        assert "val/perplexity" not in row
    first = next(read_metrics(run_dir(config) / "metrics.jsonl"))
    assert first["train/loss"] == pytest.approx(0.6931471805599453, abs=1e-6)
    last = found.val[-1][1]
    assert float.fromhex(last["val/loss"]) < float.fromhex(found.val[0][1]["val/loss"])
    assert float.fromhex(last["val/margin"]) > 0
    assert float.fromhex(last["val/accuracy"]) > 0.5


@pytest.mark.parametrize("size", some([2, 4], 2))
def test_bit_exact_on_any_world_size(make: MakeConfig, alone: tuple[Config, FineTuned], size: int) -> None:
    config = make()
    assert fine_tuned(config, trained(config, size)) == alone[1]


@pytest.mark.parametrize("step", some(range(1, LAST + 1), 4))
def test_killed_at_any_step(make: MakeConfig, alone: tuple[Config, FineTuned], step: int) -> None:
    config = make()
    (ended,) = train(config, fault=f"after_optimizer:{step}:0:kill")
    assert ended.code == -9, ended.output
    resume_and_check(config, alone[1])


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, LAST + 1))
def test_interrupted_on_two_and_resumed_on_four(make: MakeConfig, alone: tuple[Config, FineTuned], step: int) -> None:
    config = make()
    ends = train(config, 2, fault=f"after_backward:{step}:0:term")
    assert {ended.code for ended in ends} == {ExitCode.INTERRUPTED}, ends[0].output
    resume_and_check(config, alone[1], 4)


def mixed(config: Config, tmp_path: Path, weights: tuple[float, float] = (1, 2)) -> Config:
    """The same run on two sources of pairs."""
    sources = []
    for number, (name, weight) in enumerate(zip(SOURCES, weights, strict=True)):
        folder = tmp_path / name
        values: dict[str, Any] = {"name": "preference_jsonl", "label": name, "weight": weight}
        values["train_file"] = str(make_pairs(folder / "train.jsonl", 14 + 4 * number, first=20 * number))
        values["val_file"] = str(make_pairs(folder / "val.jsonl", 4, first=100 + 10 * number))
        sources.append(SourceSection(**values))
    return config.model_copy(update={"data": MixtureSection(sources=sources, cache_dir=config.data.cache_dir)})


def test_mixture_of_pairs_is_bit_exact(make: MakeConfig, tmp_path: Path) -> None:
    """Killed on two processes, and resumed on one that has lost the reference log-probabilities."""
    config = mixed(make(), tmp_path)
    expected = fine_tuned(config, trained(config))
    for _, row in expected.val:
        assert {f"val/{name}/{label}" for name in METRICS for label in SOURCES} < row.keys()
        by_source = [float.fromhex(row[f"val/accuracy/{label}"]) for label in SOURCES]
        assert float.fromhex(row["val/accuracy"]) == pytest.approx((by_source[0] + 2 * by_source[1]) / 3)
    config = mixed(make(data__cache_dir=str(tmp_path / "cache")), tmp_path)
    ends = train(config, 2, fault="after_optimizer:3:0:kill")
    assert -9 in {ended.code for ended in ends}, ends[0].output
    (file,) = reference_files(config)
    values = {split: found.tobytes() for split, found in load_file(file).items()}
    file.unlink()
    resume_and_check(config, expected)
    assert {split: found.tobytes() for split, found in load_file(file).items()} == values


def test_other_weights_need_no_other_references(make: MakeConfig, tmp_path: Path) -> None:
    cache = {"data__cache_dir": str(tmp_path / "cache"), "trainer__max_epochs": 1}
    trained(mixed(make(**cache), tmp_path))
    (ended,) = train(mixed(make(**cache), tmp_path, (5, 1)))
    assert ended.code == 0, ended.output
    assert "reference log-probabilities of 40 pairs from " in ended.output


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="numpy") as opened:
        return dict(opened.metadata())


def reference_files(config: Config) -> list[Path]:
    return sorted((Path(config.data.cache_dir) / "references").glob("*.safetensors"))


@pytest.mark.slow
def test_references_are_computed_once_and_rebuilt_when_damaged(
    make: MakeConfig, alone: tuple[Config, FineTuned], tmp_path: Path
) -> None:
    """Lost, truncated, with one bit flipped, or those of another model: a resumed run rebuilds them from the weights of
    step 0, and says so once."""
    config = make(data__cache_dir=str(tmp_path / "cache"))
    (ended,) = train(config, fault="after_optimizer:4:0:term")
    assert ended.code == ExitCode.INTERRUPTED
    (file,) = reference_files(config)
    whole = file.read_bytes()
    values = load_file(file)
    for name, damage in (
        ("lost", None),
        ("truncated", whole[: len(whole) // 2]),
        ("flipped", whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]),
        ("empty", b""),
        ("foreign", save(values, {"key": "another model", "sha256": metadata_of(file)["sha256"]})),
    ):
        copy = config.with_values("output", root_dir=str(tmp_path / name))
        shutil.copytree(config.output.root_dir, copy.output.root_dir)
        file.unlink()
        if damage is not None:
            file.write_bytes(damage)
        (ended,) = train(copy, resume="tiny")
        assert ended.code == 0, ended.output
        assert fine_tuned(copy, ended.result or {}) == alone[1]
        assert ended.output.count("computed again") == (damage is not None)
        assert load_file(file)["train"].tobytes() == values["train"].tobytes()
    again = config.with_values("output", root_dir=str(tmp_path / "again"))
    (ended,) = train(again)
    assert "reference log-probabilities of 29 pairs from " in ended.output


def save_each_part() -> None:
    references.SAVE_SEC = -1.0


def names_in_store(config: Config) -> list[str]:
    return [file.name.split(".", 1)[1] for file in reference_files(config)]


@pytest.mark.parametrize("end", ["kill", "term"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_references_continue_after_a_kill(
    make: MakeConfig, alone: tuple[Config, FineTuned], tmp_path: Path, end: str, size: int
) -> None:
    """What was stored is not computed again, on another number of processes either. SIGTERM stores what is not yet."""
    config = make(data__cache_dir=str(tmp_path / "cache"))
    before = save_each_part if end == "kill" else None
    first = train(config, size, before=before, fault=f"reference:4:0:{end}")[0]
    assert first.code == (-9 if end == "kill" else ExitCode.INTERRUPTED), first.output
    assert "set model.lora.dropout to 0" in first.output
    assert load_config(str(run_dir(config) / "config.yaml")).output.run_id == RUN_ID, "resumed without --config"
    if end == "term":
        assert "--resume" in first.error["remedy"]
    assert names_in_store(config) == ["partial.safetensors"]
    values = load_file(reference_files(config)[0])
    known = int(np.isfinite(values["train"]).all(axis=1).sum())
    assert 0 < known < 24
    assert not np.isfinite(values["val"]).any()

    (ended,) = train(config, resume="tiny")
    assert ended.code == 0, ended.output
    assert f"reference log-probabilities of {known} pairs from " in ended.output
    assert f"reference log-probabilities of {29 - known} pairs in " in ended.output
    assert fine_tuned(config, ended.result or {}) == alone[1]
    assert names_in_store(config) == ["safetensors"]


def test_damaged_partial_references_are_computed_again(
    make: MakeConfig, alone: tuple[Config, FineTuned], tmp_path: Path
) -> None:
    config = make(data__cache_dir=str(tmp_path / "cache"))
    train(config, fault="reference:4:0:term")
    (file,) = reference_files(config)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    (ended,) = train(config, resume="tiny")
    assert ended.code == 0, ended.output
    assert ended.output.count("computed again") == 1
    assert "reference log-probabilities of 29 pairs in " in ended.output
    assert fine_tuned(config, ended.result or {}) == alone[1]
    assert names_in_store(config) == ["safetensors"]


def test_changed_objective_is_refused_on_resume(make: MakeConfig) -> None:
    config = make()
    (ended,) = train(config, fault="after_optimizer:3:0:term")
    other = config.with_values("trainer", objective=make(trainer__objective={"name": "ipo"}).trainer.objective)
    (ended,) = train(other, resume="tiny")
    assert ended.code == ExitCode.USAGE
    assert "trainer.objective" in ended.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__objective": {"name": "ipo"}},
        {"trainer__objective": {"name": "orpo"}},
        {"trainer__objective": {"name": "simpo"}},
        {"model__lora": None},
        {"data__packing": False, "trainer__micro_batch_size": 2},
        {"data__num_workers": 2},
        {"trainer__activation_checkpointing": "blocks"},
        GPT,
    ],
    ids=["ipo", "orpo", "simpo", "full", "unpacked", "workers", "checkpointing", "gpt"],
)
def test_other_runs_are_bit_exact(make: MakeConfig, changes: dict[str, Any]) -> None:
    """On 1, 2 and 4 processes, and killed at the third step."""
    config = make(**changes)
    expected = fine_tuned(config, trained(config))
    for size in (2, 4):
        config = make(**changes)
        assert fine_tuned(config, trained(config, size)) == expected
    config = make(**changes)
    (ended,) = train(config, fault="after_optimizer:3:0:kill")
    assert ended.code == -9
    resume_and_check(config, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [{"model__lora": {"rank": 4, "alpha": 8.0}}, {"model__lora": None}, {**GPT, "model__dropout": 0.0}],
    ids=["lora", "full", "gpt"],
)
def test_compiled_run_has_the_same_loss_and_resumes_exactly(make: MakeConfig, changes: dict[str, Any]) -> None:
    """Without dropout: compiled code draws other masks."""
    plain = make(**changes)
    trained(plain)
    compiled = make(trainer__compile=True, **changes)
    expected = fine_tuned(compiled, trained(compiled))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)

    config = make(trainer__compile=True, **changes)
    (ended,) = train(config, fault="after_optimizer:3:0:kill")
    assert ended.code == -9
    resume_and_check(config, expected)


def losses(config: Config) -> list[float]:
    folder = run_dir(config)
    return [float.fromhex(row[name]) for name in ("train/loss", "val/loss") for _, row in rows(folder, name)]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"rank": 4, "alpha": 8.0}, None], ids=["lora", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 3])
def test_ddp_and_fsdp_differ_only_by_rounding(make: MakeConfig, strategy: str, lora: Any, size: int) -> None:
    """3 processes share 4 micro-batches as 2, 1 and 1."""
    parallel = {"distributed__strategy": strategy, "distributed__reproducible_reduce": False}
    config = make(model__lora=lora)
    trained(config)
    other = make(model__lora=lora, **parallel)
    trained(other, size)
    assert losses(other) == pytest.approx(losses(config), rel=1e-4)


@pytest.mark.slow
def test_fsdp_resumes_exactly(make: MakeConfig) -> None:
    changes = {"distributed__strategy": "fsdp"}
    config = make(**changes)
    expected = fine_tuned(config, trained(config, 2))
    config = make(**changes)
    ends = train(config, 2, fault="after_optimizer:3:0:term")
    assert {ended.code for ended in ends} == {ExitCode.INTERRUPTED}, ends[0].output
    resume_and_check(config, expected, 2)
