"""The grammar of --space and of `when`."""

import pytest

from llmtrain.sweep.space import Choice, Integers, Logarithmic, Uniform, parse_space, read_range, read_space


def test_space_option_is_split_at_spaces_outside_of_brackets() -> None:
    text = " trainer.lr=log(1e-3, 1e-1)  model.n_layers=[4, 8] trainer.optimizer=[adamw,muon]"
    assert parse_space(text) == {
        "trainer.lr": "log(1e-3, 1e-1)",
        "model.n_layers": "[4, 8]",
        "trainer.optimizer": "[adamw,muon]",
    }


def test_ranges_are_read() -> None:
    assert read_range("log(1e-3,1e-1)") == Logarithmic(1e-3, 1e-1)
    assert read_range("uniform(-1,2)") == Uniform(-1.0, 2.0)
    assert read_range("int(2,8)") == Integers(2, 8)
    assert read_range("[1e-3, adamw, null, true]") == Choice((1e-3, "adamw", None, True))
    assert read_range([4, 8, 4]) == Choice((4, 8))


def test_ranges_reach_their_ends_and_stay_inside() -> None:
    shares = [index / 1000 for index in range(1000)]
    assert {Integers(2, 5).at(share) for share in shares} == {2, 3, 4, 5}
    assert {Choice(("a", "b", "c")).at(share) for share in shares} == {"a", "b", "c"}
    for found in (Uniform(0.1, 0.3), Logarithmic(1e-4, 3e-2)):
        values = [found.at(share) for share in [*shares, 0.9999999]]
        assert min(values) == found.low
        assert max(values) <= found.high
        assert values == sorted(values)
    assert Logarithmic(1e-4, 1e-2).at(0.5) == 1e-3


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1,",
        "uniform(-1e308,1e308)",
        "",
        "5",
        "log(0,1)",
        "log(-1,1)",
        "log(1,1)",
        "uniform(2,1)",
        "uniform(1)",
        "uniform(a,b)",
        "uniform(0,inf)",
        "int(1.5,2)",
        "int(3,2)",
        "choice(1,2)",
        None,
        {"a": 1},
    ],
)
def test_bad_ranges_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_range(text)


def test_all_problems_of_a_space_are_found() -> None:
    problems: list[str] = []
    read_space(
        {
            "lr": "[1,2]",
            "trainer.lr": "log(0,1)",
            "model.n_layers": "[]",
            "trainer.momentum": {"values": "uniform(0,1)", "when": {"trainer.optimizer": "muon"}},
        },
        problems,
    )
    assert len(problems) == 4
    assert "trainer.optimizer" in problems[3]


def test_conditional_fields_apply_with_the_values_they_name() -> None:
    problems: list[str] = []
    space = read_space(
        {
            "trainer.optimizer": ["adamw", "muon"],
            "trainer.momentum": {"values": "[0.9,0.95]", "when": {"trainer.optimizer": "muon"}},
        },
        problems,
    )
    assert problems == []
    assert list(space.combinations()) == [
        {"trainer.optimizer": "adamw"},
        {"trainer.optimizer": "muon", "trainer.momentum": 0.9},
        {"trainer.optimizer": "muon", "trainer.momentum": 0.95},
    ]
    assert space.count(at_most=100) == 3
