"""Which runs are best, and what runs of one setting have in common."""

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.run_tables import comparison_lines, group_lines
from llmtrain.errors import UsageError
from llmtrain.runs.compare import compare
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.groups import is_distinguishable, sample_statistics

MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make(tmp_path: Path) -> MakeRun:
    """A run with this validation loss: make("a", 2.5, lr=1e-3, seed=1)."""

    def make_run(name: str, loss: float | None, *, lr: float = 1e-3, seed: int = 0, more: str = "") -> RunDirectory:
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        run.config.write_text(
            f"schema_version: 3\nrun: {{name: {name}, seed: {seed}}}\nmodel: {{name: gpt}}\n"
            f"data: {{name: dummy_text, cache_dir: cache-of-{name}}}\ntrainer: {{lr: {lr}{more}}}\n"
        )
        validated = "" if loss is None else f', "val/loss": {loss}'
        run.metrics.write_text(f'{{"step": 1, "train/loss": 3.5{validated}}}\n')
        return run

    return make_run


def text_of(value: dict[str, Any]) -> str:
    return "\n".join(comparison_lines(value))


def test_two_of_three_runs_are_best_together(make: MakeRun) -> None:
    value = compare([make("a", 2.5, lr=1e-3), make("b", 3.0, lr=2e-3), make("c", 2.5, lr=3e-3)])
    assert value["best"]["run_ids"] == ["a", "c"]
    assert value["best"]["margin"] == 0.5
    assert "equal: " not in text_of(value)
    assert "Best: a and c, validation loss 2.5000, lower by 0.5000." in text_of(value)


def test_all_runs_are_equal(make: MakeRun) -> None:
    value = compare([make("a", 2.5, lr=1e-3), make("b", 2.5, lr=2e-3)])
    assert (value["best"]["run_ids"], value["best"]["margin"]) == (["a", "b"], 0.0)
    assert "The best validation losses are equal: 2.5000." in text_of(value)


def test_one_best_run(make: MakeRun) -> None:
    best = compare([make("a", 2.5, lr=1e-3), make("b", 2.25, lr=2e-3), make("c", None, lr=3e-3)])["best"]
    assert best == {
        "run_id": "b",
        "run_ids": ["b"],
        "values": {},
        "best_val_loss": 2.25,
        "margin": 0.25,
        "not_distinguishable_from": [],
    }


def test_seeds_of_one_setting_are_samples(make: MakeRun) -> None:
    value = compare([make("a", 2.5, seed=1), make("b", 3.0, seed=2), make("c", 2.75, seed=3)])
    assert value["best"] is None
    (group,) = value["groups"]
    assert group["run_ids"] == ["a", "b", "c"]
    assert group["best_val_loss"].pop("standard_error") == pytest.approx(0.25 / 3**0.5)
    assert group["best_val_loss"] == {"n": 3, "mean": 2.75, "standard_deviation": 0.25}
    assert "3 samples of one setting, best validation loss 2.7500 ± 0.2500" in text_of(value)
    assert "Best:" not in text_of(value)


def test_settings_compete_by_their_means(make: MakeRun) -> None:
    """The run with the lowest loss of all is of the worse setting."""
    runs = [make("a", 2.0, lr=1e-3, seed=1), make("b", 4.0, lr=1e-3, seed=2), make("c", 2.5, lr=2e-3)]
    value = compare(runs)
    assert value["best"]["run_ids"] == ["c"]
    assert (value["best"]["best_val_loss"], value["best"]["margin"]) == (2.5, 0.5)
    assert "Best: c" in text_of(value)
    assert f"differ by more (standard deviation {statistics.stdev([2.0, 4.0]):.4f})" in text_of(value)


def test_setting_that_is_not_distinguishable_from_the_best_is_named(make: MakeRun) -> None:
    runs = [make(f"a{seed}", loss, lr=1e-3, seed=seed) for seed, loss in enumerate((2.0, 2.2, 2.4))]
    runs += [make(f"b{seed}", loss, lr=2e-3, seed=seed) for seed, loss in enumerate((2.1, 2.3, 2.5))]
    runs += [make(f"c{seed}", loss, lr=3e-3, seed=seed) for seed, loss in enumerate((5.0, 5.1, 5.2))]
    best = compare(runs)["best"]
    assert best["not_distinguishable_from"] == [{"values": {}, "run_ids": ["b0", "b1", "b2"]}]
    assert "Not distinguishable from b0 and b1 and b2" in text_of(compare(runs))


@pytest.mark.parametrize("seed", range(30))
def test_distinguishable_agrees_with_scipy(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    chance = random.Random(seed)
    first = [chance.gauss(2.0, 0.1) for _ in range(chance.randint(2, 8))]
    second = [chance.gauss(2.0 + chance.choice([0.0, 0.15, 0.4]), chance.choice([0.05, 0.2])) for _ in range(5)]
    exact = stats.ttest_ind(first, second, equal_var=False)
    found = is_distinguishable(sample_statistics(first), sample_statistics(second))
    if not found:  # degrees of freedom are rounded down: it may miss a difference, but never sees one more
        floor = stats.t.sf(abs(exact.statistic), math.floor(exact.df)) * 2
        assert floor > 0.0499
    else:
        assert exact.pvalue < 0.0501


def test_single_samples_cannot_be_told_apart() -> None:
    one, two = sample_statistics([1.0]), sample_statistics([2.0, 2.0])
    assert is_distinguishable(one, two) is None
    assert is_distinguishable(two, sample_statistics([2.0, 2.0])) is False
    assert is_distinguishable(two, sample_statistics([2.1, 2.1])) is True


def test_runs_without_config_are_not_one_setting(make: MakeRun) -> None:
    runs = [make("a", 2.5), make("b", 3.0)]
    for run in runs:
        run.config.unlink()
    value = compare(runs)
    assert [group["run_ids"] for group in value["groups"]] == [["a"], ["b"]]
    assert value["best"]["run_id"] == "a"


class TestGroupBy:
    def test_mean_deviation_and_number_per_value(self, make: MakeRun) -> None:
        runs = [
            make("d", 3.0, lr=1e-2),
            make("a", 2.0, lr=2e-3, seed=1),
            make("b", 2.5, lr=2e-3, seed=2),
            make("c", None, lr=2e-3, seed=3),
        ]
        value = compare(runs, ["trainer.lr"])
        low, high = value["groups"]
        assert (low["values"], low["run_ids"], low["n"]) == ({"trainer.lr": 2e-3}, ["a", "b", "c"], 3)
        assert low["best_val_loss"]["n"] == 2, "one run was not evaluated"
        assert low["best_val_loss"]["mean"] == 2.25
        assert low["best_val_loss"]["standard_deviation"] == pytest.approx(statistics.stdev([2.0, 2.5]))
        assert low["train_loss"] == {"n": 3, "mean": 3.5, "standard_deviation": 0.0, "standard_error": 0.0}
        assert high["best_val_loss"] == {"n": 1, "mean": 3.0, "standard_deviation": None, "standard_error": None}
        assert (value["best"]["values"], value["best"]["run_id"]) == ({"trainer.lr": 2e-3}, None)
        assert value["mixed_fields"] == []
        lines = group_lines(value)
        assert "Best: trainer.lr 0.002, mean validation loss 2.2500, lower by 0.7500." in lines

    def test_several_fields(self, make: MakeRun) -> None:
        runs = [make("a", 2.0, more=", weight_decay: 0.5"), make("b", 2.5), make("c", 3.0, lr=1.0)]
        value = compare(runs, ["trainer.lr", "trainer.weight_decay"])
        assert [group["run_ids"] for group in value["groups"]] == [["b"], ["a"], ["c"]]

    def test_fields_that_differ_inside_a_group_are_named(self, make: MakeRun) -> None:
        value = compare([make("a", 2.0, more=", weight_decay: 0.5"), make("b", 2.5)], ["trainer.lr"])
        assert value["mixed_fields"] == ["trainer.weight_decay"]
        assert "--group-by trainer.weight_decay" in group_lines(value)[-1]

    def test_no_seed_is_best(self, make: MakeRun) -> None:
        assert compare([make("a", 2.0, seed=1), make("b", 2.5, seed=2)], ["run.seed"])["best"] is None

    @pytest.mark.parametrize("field", ["trainer.lrr", "trainer", "lr", "trainer.lr.x", ""])
    def test_unknown_field_is_refused(self, make: MakeRun, field: str) -> None:
        with pytest.raises(UsageError, match="--group-by"):
            compare([make("a", 2.0), make("b", 2.5)], [field])
