"""Shape, batch and learning rate of a modern GPT follow from its size; what contradicts is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from llmtrain.compat.downgrade import downgrade, lost_in_v2
from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.load import dump_config, load_config
from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.config.schema import Config, differences
from llmtrain.config.sizes import (
    BATCH_TOKENS,
    DEFAULT_MLP,
    LEARNING_RATES,
    MAX_BATCH_TOKENS,
    MAX_LAYERS,
    MAX_LEARNING_RATES,
    MAX_WIDTH,
    MICRO_BATCH_TOKENS,
    SIZES,
    default_batch,
    default_batch_tokens,
    default_heads,
    default_lr,
)
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.errors import ConfigError, UsageError


def load(trainer: dict[str, Any] | None = None, **model: Any) -> Config:
    return load_config({"model": {"architecture": "modern", **model}, "trainer": trainer or {}})


def problems(**model: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(**model)
    return error.value.problems


@pytest.mark.parametrize(("size", "shape"), SIZES.items())
def test_size_sets_depth_and_width(size: str, shape: tuple[int, int]) -> None:
    model = load(size=size).model
    assert isinstance(model, ModernGptSection)
    assert (model.n_layers, model.d_model) == shape
    assert model.shape.head_dim in (64, 128)


@pytest.mark.parametrize(
    ("d_model", "heads"), [(2, 1), (32, 4), (128, 4), (256, 4), (768, 6), (1600, 25), (2048, 16), (100, 5), (6, 3)]
)
def test_default_heads_divide_the_width_evenly(d_model: int, heads: int) -> None:
    assert default_heads(d_model) == heads
    assert d_model % (2 * heads) == 0
    assert load(d_model=d_model).model.n_heads == heads  # type: ignore[union-attr]


@pytest.mark.parametrize(("d_model", "near"), [(34, "128"), (254, "256"), (514, "512")])
def test_width_with_few_divisors_has_no_default_heads(d_model: int, near: str) -> None:
    assert default_heads(d_model) is None
    (problem,) = problems(d_model=d_model)
    assert "Set model.n_heads" in problem
    assert near in problem
    assert load(d_model=d_model, n_heads=1).model.n_heads == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("mlp", "d_ff"), [("swiglu", 2048), ("relu2", 3072)])
def test_default_d_ff_gives_the_same_number_of_weights(mlp: str, d_ff: int) -> None:
    assert load(size="124m", mlp=mlp).model.d_ff == d_ff  # type: ignore[union-attr]
    assert load(size="124m", mlp=mlp, d_ff=100).model.d_ff == 100  # type: ignore[union-attr]


def test_learning_rate_falls_and_batch_grows_with_size() -> None:
    shapes = [(4, 128), *SIZES.values()]
    for optimizer in ("adamw", "muon"):
        rates = [default_lr(optimizer, width) for _, width in shapes]
        tokens = [default_batch_tokens(optimizer, *shape) for shape in shapes]
        assert rates == sorted(rates, reverse=True)
        assert tokens == sorted(tokens)
        assert len(set(rates)) == len(set(tokens)) == len(shapes)


def test_batch_has_the_default_number_of_tokens() -> None:
    for shape in SIZES.values():
        batch = default_batch("adamw", *shape, 1024, None, None)
        assert batch.micro_batch_size * batch.grad_accum_steps * 1024 == default_batch_tokens("adamw", *shape)
    assert default_batch("adamw", 12, 768, 1024, 16, None) == (16, 4)
    assert default_batch("adamw", 12, 768, 1024, None, 8) == (8, 8)
    assert default_batch("adamw", 12, 768, 1024, 3, 5) == (3, 5)
    assert default_batch("adamw", 1, 2, 4096, None, None) == (1, 1)


@pytest.mark.parametrize(("n_layers", "d_model"), [(1, 16), (2, 64), (4, 128)])
def test_batch_of_a_tiny_model_is_not_tiny(n_layers: int, d_model: int) -> None:
    assert default_batch_tokens("muon", n_layers, d_model) == 2048


def test_default_batch_is_split_for_several_processes() -> None:
    for processes, expected in {1: (16, 1), 2: (8, 2), 3: (4, 4), 4: (4, 4), 16: (1, 16), 17: (1, 16)}.items():
        assert default_batch("muon", 12, 768, 1024, None, None, processes) == expected
    assert default_batch("muon", 12, 768, 1024, 16, None, 2) == (16, 1)  # a size that is set is kept
    config = load_config("gpt_modern_124m", processes=2)
    assert (config.trainer.micro_batch_size, config.trainer.grad_accum_steps) == (8, 2)
    explicit = load_config("gpt_modern_124m", ["trainer.micro_batch_size=16"], processes=2)
    assert (explicit.trainer.micro_batch_size, explicit.trainer.grad_accum_steps) == (16, 1)


def test_settings_for_more_processes_keep_the_batch() -> None:
    config = load_config("gpt_modern_124m")
    with pytest.raises(UsageError) as error:
        micro_batches_in_step(config.trainer, config.distributed, 4)
    settings = re.findall(r"--set (trainer\.\w+=\d+)", error.value.remedy or "")
    changed = load_config("gpt_modern_124m", settings)
    assert micro_batches_in_step(changed.trainer, changed.distributed, 4) == 4
    assert changed.trainer.micro_batch_size * 4 == config.trainer.micro_batch_size


def test_loaded_config_has_all_numbers() -> None:
    """So that a run does not depend on formulas of later versions."""
    config = load(size="124m", block_size=1024)
    assert config.trainer.lr == 6e-4
    assert (config.trainer.micro_batch_size, config.trainer.grad_accum_steps) == (64, 1)
    shape = {"n_layers": 12, "d_model": 768, "n_heads": 6, "n_kv_heads": 6, "d_ff": 3072}
    assert shape.items() <= config.as_dict()["model"].items()
    assert load_config(config.as_dict()) == config


def test_settings_win_over_derived_defaults() -> None:
    config = load({"lr": 1e-2, "micro_batch_size": 2, "grad_accum_steps": 3}, size="124m", n_heads=6, n_kv_heads=2)
    assert (config.trainer.lr, config.trainer.micro_batch_size, config.trainer.grad_accum_steps) == (1e-2, 2, 3)
    assert (config.model.n_heads, config.model.n_kv_heads) == (6, 2)  # type: ignore[union-attr]


def test_gpt2_has_the_defaults_it_always_had() -> None:
    config = load_config({"model": {"d_model": 768}})
    assert isinstance(config.model, GptSection)
    assert (config.trainer.lr, config.trainer.micro_batch_size, config.model.n_heads) == (3e-4, 8, 4)


def test_docs_have_the_numbers_of_the_code(repo: Path) -> None:
    page = (repo / "docs" / "recipes.md").read_text()
    heads = tuple(f"| `{size}`" for size in SIZES)
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(heads)]
    assert {row[0].strip("`"): tuple(map(int, row[1:])) for row in rows} == {
        size: (*shape, default_heads(shape[1])) for size, shape in SIZES.items()
    }
    assert f"{LEARNING_RATES['adamw']:.0e}".replace("e-0", "e-") in page
    for number in (*BATCH_TOKENS.values(), MICRO_BATCH_TOKENS, MAX_BATCH_TOKENS):
        assert f"{number:,}" in page
    for number in (LEARNING_RATES["muon"], *MAX_LEARNING_RATES.values()):
        assert f" {number}" in page
    assert f"`{DEFAULT_MLP}` (the default)" in page


# Bad input.


@pytest.mark.parametrize(
    ("model", "field", "fits"),
    [
        ({"n_heads": 5}, "model.n_heads", "1, 2, 4, 8, 16"),
        ({"n_heads": 12, "d_model": 96, "n_kv_heads": 5}, "model.n_kv_heads", "1, 2, 3, 4, 6, 12"),
        ({"n_heads": 4, "d_model": 20}, "model.n_heads", "1, 2, 5, 10"),
        ({"d_model": 129}, "model.d_model", "130"),
        ({"size": "124m", "d_model": 1024}, "model.size", "768"),
        ({"size": "124m", "n_layers": 24}, "model.size", "12"),
        ({"size": "100m"}, "model.size", "'124m', '350m', '774m' or '1.5b'"),
        ({"architecture": "modren"}, "model.architecture", "modern"),
        ({"architecture": 3}, "model.architecture", "gpt2, modern"),
        ({"dropout": 0.1}, "model.dropout", "gpt2"),
        ({"d_model": "wide"}, "model.d_model", "integer"),
        ({"n_heads": -1}, "model.n_heads", "above 0"),
        ({"size": "350m", "n_layers": 4, "d_model": 128}, "model.n_layers and model.d_model", "null"),
        ({"d_model": 2147483646}, "model.d_model", "131072"),
        ({"n_layers": 2147483646}, "model.n_layers", "10000"),
        ({"d_ff": 2147483646}, "model.d_ff", "1048576"),
        ({"rope_theta": 1e-300}, "model.rope_theta", "at least 1"),
        ({"rope_theta": 1e300}, "model.rope_theta", "at most 1"),
        ({"rope_theta": float("inf")}, "model.rope_theta", "finite"),
        ({"rope_theta": float("nan")}, "model.rope_theta", "finite"),
    ],
)
def test_one_problem_names_field_and_what_fits(model: dict[str, Any], field: str, fits: str) -> None:
    (problem,) = problems(**model)
    assert field in problem
    assert fits in problem


def test_width_of_gpt2_is_limited_too() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"model": {"d_model": 2147483646}})
    assert ["model.d_model" in problem for problem in error.value.problems] == [True]


@pytest.mark.parametrize("block_size", [1, 2048])
def test_largest_shape_has_valid_defaults(block_size: int) -> None:
    config = load(n_layers=MAX_LAYERS, d_model=MAX_WIDTH, block_size=block_size)
    assert config.trainer.micro_batch_size * config.trainer.grad_accum_steps * block_size == MAX_BATCH_TOKENS


def test_fields_of_modern_are_refused_for_gpt2() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"model": {"mlp": "relu2"}})
    assert "model.architecture modern" in error.value.problems[0]


# Documents.


def test_print_config_shows_only_fields_of_the_architecture() -> None:
    assert "rope_theta" not in dump_config(load_config({}))
    assert "dropout" not in dump_config(load()).partition("data:")[0]


def test_architecture_of_a_document_can_be_overridden() -> None:
    notes: list[str] = []
    document = {"model": {"n_layers": 2, "d_model": 64, "n_heads": 2, "dropout": 0.1}}
    model = load_config(document, ["model.architecture=modern"], on_note=notes.append).model
    assert isinstance(model, ModernGptSection)
    assert (model.n_layers, model.d_model, model.n_heads) == (2, 64, 2)
    assert any("model.dropout" in note for note in notes)


def test_runs_recorded_without_architecture_are_unchanged() -> None:
    now = load_config({}).as_dict()
    then = {**now, "model": {name: value for name, value in now["model"].items() if name != "architecture"}}
    assert differences(upgraded_values(then), now) == []


def test_images_of_schema_2_get_gpt2_only() -> None:
    gpt2 = load_config({}).as_dict()
    assert "architecture" not in downgrade(gpt2)["model"]
    assert lost_in_v2(gpt2) == []
    assert lost_in_v2(load().as_dict()) == ["model.architecture"]


def test_gpt2_keeps_the_numbers_of_a_size() -> None:
    model = load_config("gpt_modern_124m", ["model.architecture=gpt2"]).model
    assert isinstance(model, GptSection)
    assert (model.n_layers, model.d_model, model.n_heads) == (12, 768, 12)
