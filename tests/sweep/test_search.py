"""The values of trials: all different, the same in every process, and evenly spread."""

import subprocess
import sys

import pytest

from llmtrain.sweep.optuna_search import propose
from llmtrain.sweep.search import SEARCHES, Point, draw
from llmtrain.sweep.space import Space, read_space
from llmtrain.sweep.spec import SweepSpec

MIXED = {"trainer.lr": "log(1e-4,1e-2)", "model.n_layers": "int(1,4)", "trainer.optimizer": "[adamw,muon]"}


def space_of(values: dict[str, object]) -> Space:
    problems: list[str] = []
    space = read_space(values, problems)
    assert problems == []
    return space


@pytest.mark.parametrize("search", ["random", "halton"])
def test_values_of_a_trial_do_not_depend_on_the_number_of_trials(search: str) -> None:
    space = space_of(MIXED)
    assert draw(space, search, 0, 40)[:10] == draw(space, search, 0, 10)
    assert draw(space, search, 0, 10) != draw(space, search, 1, 10)


@pytest.mark.parametrize("search", list(SEARCHES))
def test_trials_are_all_different_and_fill_a_finite_space(search: str) -> None:
    space = space_of({"a.b": "int(1,5)", "a.c": ["x", "y", "z"]})
    drawn = draw(space, search, 0, 15)
    assert len(drawn) == 15
    assert {tuple(values.items()) for values in drawn} == {tuple(values.items()) for values in space.combinations()}


def test_grid_is_in_order_and_the_last_field_changes_fastest() -> None:
    drawn = draw(space_of({"a.b": [1, 2], "a.c": ["x", "y"]}), "grid", 0, 4)
    assert [list(values.values()) for values in drawn] == [[1, "x"], [1, "y"], [2, "x"], [2, "y"]]


def test_halton_fills_each_dimension_more_evenly_than_random() -> None:
    """Of 27 trials in 9 parts of a dimension, each part gets 2 to 4; random leaves parts empty."""
    space = space_of({f"a.f{number}": "uniform(0,1)" for number in range(6)})
    counts = {}
    for search in ("halton", "random"):
        drawn = draw(space, search, 0, 27)
        worst = 27
        for path in drawn[0]:
            parts = [int(values[path] * 3) for values in drawn]
            worst = min(worst, *(parts.count(part) for part in range(3)))
        counts[search] = worst
    assert counts["halton"] >= 6
    assert counts["halton"] > counts["random"]


def test_search_needs_no_torch() -> None:
    code = "import sys, llmtrain.commands.sweep, llmtrain.sweep.driver; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_optuna_proposes_the_same_trials_after_a_restart() -> None:
    pytest.importorskip("optuna")
    space = space_of(MIXED)
    first = draw(space, "halton", 0, 8)
    earlier = [Point(values, values["trainer.lr"]) for values in first]
    earlier[3] = Point(first[3], None)  # it diverged
    proposed = propose(space, SweepSpec(), earlier, 8)
    assert proposed == propose(space, SweepSpec(), earlier, 8)
    assert len(proposed) == 8
    assert not [values for values in proposed if values in first]


def test_optuna_maximizes_where_higher_is_better() -> None:
    pytest.importorskip("optuna")
    space = space_of(MIXED)
    first = draw(space, "halton", 0, 12)
    scores = [None, *(values["trainer.lr"] for values in first[1:])]
    low = [Point(values, score) for values, score in zip(first, scores, strict=True)]
    high = [Point(values, None if score is None else -score) for values, score in zip(first, scores, strict=True)]
    assert propose(space, SweepSpec(metric="val/accuracy"), high, 8) == propose(space, SweepSpec(), low, 8)


def test_optuna_proposes_no_more_than_the_space_has() -> None:
    pytest.importorskip("optuna")
    space = space_of({"a.b": [1, 2, 3], "a.c": ["x", "y"]})
    earlier = [Point(values, 1.0) for values in draw(space, "grid", 0, 4)]
    assert len(propose(space, SweepSpec(), earlier, 2)) == 2
