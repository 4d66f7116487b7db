"""A chart of curves as SVG, without a library: for Markdown, notebooks and viewers without scripts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

# Space around the curves.
LEFT = 64
RIGHT = 16
TOP = 40
BOTTOM = 34
LEGEND_LINE = 18  # height of each further line of the legend
COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#db2777", "#0891b2", "#a16207", "#475569")
DARK_COLORS = ("#6aa3ff", "#fb923c", "#4ade80", "#c084fc", "#f472b6", "#22d3ee", "#eab308", "#94a3b8")
_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


@dataclass(frozen=True)
class Curve:
    label: str
    """Empty: not in the legend."""
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    has_dots: bool = False


def curve_svg(title: str, curves: Sequence[Curve], width: int = 760, height: int = 300) -> str:
    """The chart. It follows the color scheme of the system where SVG is shown as an image. A legend of several lines
    makes it higher."""
    legend = _legend(title, curves, width)
    top = TOP + LEGEND_LINE * max((line for _, line, _ in legend), default=0)
    height += top - TOP
    points = [(x, y) for curve in curves for x, y in zip(curve.x, curve.y, strict=True)]
    if not points:
        points = [(0, 0), (1, 1)]
    scale = _Scale(points, width, height, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12">',
        f"<style>{_style()}</style>",
        f'<rect class="lt-ground" width="{width}" height="{height}" rx="8"/>',
        f'<text class="lt-title" x="{LEFT}" y="22">{escape(title)}</text>',
        *_grid(scale, width, height),
        *(part for x, line, curve in legend for part in _legend_entry(x, line, curve)),
        *(part for curve in curves for part in _line(curve, scale)),
        "</svg>",
    ]
    return "\n".join(parts)


def _style() -> str:
    def rules(colors: Sequence[str], ground: str, text: str, muted: str, grid: str) -> str:
        lines = "".join(f".lt-c{number}{{--c:{color}}}" for number, color in enumerate(colors))
        fills = {"ground": ground, "title": text, "tick": muted}
        lines += "".join(f".lt-{name}{{fill:{fill}}}" for name, fill in fills.items())
        return f"{lines}.lt-grid{{stroke:{grid}}}"

    light = rules(COLORS, "#ffffff", "#16191d", "#5f6b7a", "#edf0f3")
    dark = rules(DARK_COLORS, "#171b21", "#e6e9ed", "#98a3b1", "#232931")
    shared = ".lt-title{font-weight:600}.lt-line{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}"
    return f"{shared}.lt-dot{{fill:var(--c)}}{light}@media (prefers-color-scheme:dark){{{dark}}}"


class _Scale:
    """Values to pixels."""

    def __init__(self, points: Sequence[tuple[float, float]], width: int, height: int, top: int) -> None:
        xs = [x for x, _ in points]
        ys = [y for _, y in points]
        self.x_low = min(xs)
        self.x_high = max(xs)
        # A curve keeps a distance from the edge, also one that is a horizontal line.
        space = (max(ys) - min(ys)) * 0.06 or abs(max(ys)) * 0.1 or 1.0
        self.y_low = min(ys) - space
        self.y_high = max(ys) + space
        if min(ys) >= 0:
            self.y_low = max(0.0, self.y_low)
        self.top = top
        self.width = width - LEFT - RIGHT
        self.height = height - top - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * self.width

    def y(self, value: float) -> float:
        return self.top + self.height - (value - self.y_low) / ((self.y_high - self.y_low) or 1.0) * self.height


def _grid(scale: _Scale, width: int, height: int) -> Iterator[str]:
    for value in ticks(scale.y_low, scale.y_high, 5):
        y = scale.y(value)
        yield f'<path class="lt-grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>'
        yield f'<text class="lt-tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short_number(value)}</text>'
    for value in ticks(scale.x_low, scale.x_high, 7):
        x = scale.x(value)
        y = height - BOTTOM + 18
        yield f'<path class="lt-grid" d="M{x:.1f} {scale.top}V{height - BOTTOM}"/>'
        yield f'<text class="lt-tick" x="{x:.1f}" y="{y}" text-anchor="middle">{short_number(value)}</text>'


def _legend(title: str, curves: Sequence[Curve], width: int) -> list[tuple[int, int, Curve]]:
    """Where the labels are: (x, line, curve). The first line begins after the title."""
    x = LEFT + 8 * len(title) + 24  # about 8 pixels per letter of the title, 7 of a label
    line = 0
    found = []
    for curve in curves:
        if not curve.label:
            continue
        size = 24 + 7 * len(curve.label)
        if x + size > width - RIGHT and x > LEFT:
            x = LEFT
            line += 1
        found.append((x, line, curve))
        x += size + 10
    return found


def _legend_entry(x: int, line: int, curve: Curve) -> Iterator[str]:
    y = LEGEND_LINE * line
    yield f'<rect class="lt-dot {_color(curve)}" x="{x}" y="{y + 15}" width="12" height="4" rx="2"/>'
    yield f'<text class="lt-tick" x="{x + 18}" y="{y + 22}">{escape(curve.label)}</text>'


def _color(curve: Curve) -> str:
    return f"lt-c{curve.color % len(COLORS)}"


def _line(curve: Curve, scale: _Scale) -> Iterator[str]:
    if len(curve.x) > 1:
        points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True))
        yield f'<polyline class="lt-line {_color(curve)}" points="{points}"/>'
    if (curve.has_dots and len(curve.x) <= 60) or len(curve.x) == 1:
        for x, y in zip(curve.x, curve.y, strict=True):
            yield f'<circle class="lt-dot {_color(curve)}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="2.6"/>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round numbers between two values."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    size = 10 ** math.floor(math.log10(span / count))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """`2.5`, `40k`, `1.2M`, `3e-04`"""
    if value == 0:
        return "0"
    for unit, size in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.0e}"


Points = tuple[list[float], list[float]]


def halved(points: Points) -> Points:
    """Half as many points: the lowest and the highest of every four, so that peaks stay."""
    xs, ys = points
    kept: list[int] = []
    for begin in range(0, len(xs), 4):
        group = range(begin, min(begin + 4, len(xs)))
        kept += sorted({min(group, key=ys.__getitem__), max(group, key=ys.__getitem__)})
    return [xs[index] for index in kept], [ys[index] for index in kept]
