"""Charts as SVG: valid, inside their frame, and with every peak."""

from xml.etree import ElementTree

import pytest

from llmtrain.core.svg import Curve, curve_svg, halved, short_number, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_chart_is_valid_and_curves_are_inside() -> None:
    curves = [Curve("training", [1, 50, 100], [9.0, 4.0, 2.5]), Curve("<b>", [50, 100], [4.2, 2.7], 1, True)]
    root = ElementTree.fromstring(curve_svg("Loss & more", curves, 600, 200))
    lines = root.findall(f"{SVG}polyline")
    points = [tuple(map(float, pair.split(","))) for line in lines for pair in line.attrib["points"].split()]
    assert len(points) == 5
    assert all(0 < x < 600 and 0 < y < 200 for x, y in points)
    assert len(root.findall(f"{SVG}circle")) == 2
    assert {"training", "<b>", "Loss & more"} <= {text.text for text in root.findall(f"{SVG}text")}


def test_every_label_is_shown_above_the_curves() -> None:
    curves = [Curve(f"a run with a long name {number}", [1, 2], [3, 4], number) for number in range(9)]
    root = ElementTree.fromstring(curve_svg("Loss", curves, 600, 200))
    labels = {text.text: float(text.attrib["y"]) for text in root.findall(f"{SVG}text")}
    assert {curve.label for curve in curves} <= set(labels)
    lines = [line.attrib["points"].split() for line in root.findall(f"{SVG}polyline")]
    highest = min(float(pair.split(",")[1]) for line in lines for pair in line)
    assert max(labels[curve.label] for curve in curves) < highest


@pytest.mark.parametrize("curves", [[], [Curve("a", [], [])], [Curve("a", [7], [0.0])], [Curve("a", [1, 2], [3, 3])]])
def test_few_points_make_a_chart(curves: list[Curve]) -> None:
    ElementTree.fromstring(curve_svg("Loss", curves))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (1, 6000, [1000, 2000, 3000, 4000, 5000, 6000]), (3, 3, [3])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 6) == expected


def test_short_numbers() -> None:
    assert [short_number(value) for value in (0, 2.5, 1500, 2e6, 6e-4)] == ["0", "2.5", "1.5k", "2M", "6e-04"]


def test_peaks_survive_halving() -> None:
    ys = [1.0] * 1000
    ys[500], ys[777] = 9.0, -4.0
    points: tuple[list[float], list[float]] = (list(range(1000)), ys)
    while len(points[0]) > 100:
        points = halved(points)
    assert (max(points[1]), min(points[1])) == (9.0, -4.0)
    assert points[0] == sorted(points[0])
