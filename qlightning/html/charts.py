"""Plots as inline SVG that stretches to any width, under labels in HTML that keep their size.

No script draws them, so that they are there in mails, in print and where scripts are blocked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup, escape

from qlightning.html.content import Code, Grid, Layer, Stage
from qlightning.html.wording import decibel, number

WIDE = 1000
"""Units of a drawing, both ways."""
STEEP = 30
"""How many times as high as the middle one a bar may be on a linear scale."""
TOP = 72
"""The ratio in dB, of 12 bits, from which on more makes no difference: values that lie on the grid already."""
POINTS = 80
"""How many points a line has at most."""

Point = TypeVar("Point", bound=tuple[float, ...])


@dataclass(frozen=True)
class Axis:
    """What an axis covers.

    Attributes:
        low: At its beginning.
        high: At its end.
        ticks: The values that are labelled, and the labels.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()

    def at(self, value: float) -> int:
        """The place of a value, in units of the drawing."""
        span = self.high - self.low
        place = (value - self.low) / span if span else 0.5
        return round(WIDE * min(max(place, 0.0), 1.0))

    @classmethod
    def round(cls, low: float, high: float, count: int = 4) -> Axis:
        """An axis over a range, with ticks at round numbers."""
        if not high > low:
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        raw = (high - low) / count
        power = 10 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        values = [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        return cls(low, high, tuple((value, number(round(value, 12))) for value in values))


def plot(
    body: str, x: Axis, y: Axis, caption: str, under: str, height: int = 130, grid: bool = True, over: str = ""
) -> Markup:
    """A drawing with its axes.

    Args:
        body: SVG, in units of the drawing; safe.
        x: The horizontal axis.
        y: The vertical one.
        caption: Stands above; escaped, as all texts are.
        under: What the horizontal axis counts.
        height: In CSS pixels.
        grid: Whether the ticks of the vertical axis have lines.
        over: HTML that stands on the drawing; safe.
    """
    lines = "".join(f"M0 {WIDE - y.at(value)}H{WIDE}" for value, _ in y.ticks) if grid else ""
    labels = [
        f'<span class="y" style="bottom:{y.at(value) / 10:.1f}%">{escape(text)}</span>' for value, text in y.ticks
    ]
    for value, text in x.ticks:
        place = x.at(value) / 10
        side = " first" if place < 8 else " last" if place > 92 else ""
        labels.append(f'<span class="x{side}" style="left:{place:.1f}%">{escape(text)}</span>')
    drawing = (
        f'<svg viewBox="0 0 {WIDE} {WIDE}" preserveAspectRatio="none" role="img" aria-label="{escape(caption)}">'
        f'<path class="rule" d="{lines}"/>{body}</svg>'
    )
    return Markup(
        f'<figure class="chart"><figcaption>{escape(caption)}</figcaption>'
        f'<div class="plot" style="height:{height}px">{drawing}{over}{"".join(labels)}</div>'
        f'<div class="under">{escape(under)}</div></figure>'
    )


def sqnr_of_layers(layers: Sequence[Layer], grids: dict[str, Grid]) -> Markup | None:
    """The error of every layer along the model: its weight, its input and its result; None where there is none."""
    series = {
        "weight": [layer.weight_sqnr for layer in layers],
        "input": [grids[layer.grid].sqnr if layer.grid in grids else None for layer in layers],
        "output": [layer.output_sqnr for layer in layers],
    }
    values = [v for several in series.values() for v in several if v is not None and math.isfinite(v)]
    if not values:
        return None
    y = Axis.round(min(0.0, min(values)), min(max(values) * 1.06, TOP))
    x = Axis(-0.5, len(layers) - 0.5, tuple((i, str(i + 1)) for i in sorted({0, len(layers) // 2, len(layers) - 1})))
    body = []
    line = [(x.at(i), WIDE - y.at(v)) for i, v in enumerate(series["output"]) if v is not None and math.isfinite(v)]
    if len(line) > 1:
        body.append(f'<path class="line output" d="M{" ".join(f"{a} {b}" for a, b in line)}"/>')
    for name, found in series.items():
        for i, value in enumerate(found):
            if value is not None and not math.isnan(value):
                top = min(value, y.high)
                label = escape(f"{layers[i].name}: {name} {decibel(value)} dB")
                place = f"M{x.at(i)} {WIDE - y.at(top)}h.01"
                body.append(f'<path class="dot {name}" d="{place}"><title>{label}</title></path>')
    return plot("".join(body), x, y, "Signal to quantization noise (dB)", "layer, in the order of the model", 220)


def histogram(code: Code, caption: str, grid: Grid | None = None) -> Markup:
    """How often codes occur, with the grid drawn in and what lies beyond it in another colour.

    Args:
        code: What was counted.
        caption: Stands above.
        grid: Gives the values that the codes stand for; None: the codes themselves are labelled.
    """
    filled = sorted(count for count in code.counts if count)
    steep = bool(filled) and filled[-1] > STEEP * filled[len(filled) // 2]
    most = filled[-1] if filled else 1

    def height(count: int) -> int:
        part = math.log1p(count) / math.log1p(most) if steep else count / most
        return round(WIDE * part)

    start, end = code.first - 0.5, code.first + code.width * len(code.counts) - 0.5
    low, high = code.quant_min - 0.5, code.quant_max + 0.5
    x = Axis(start, max(end, high), _code_ticks(code, grid))
    heights = [max(height(count), 6) if count else 0 for count in code.counts]
    edges = [min(start + i * code.width, x.high) for i in range(len(heights) + 1)]
    first = next((i for i, edge in enumerate(edges) if edge >= low), 0)
    last = next((i for i, edge in enumerate(edges) if edge >= high), len(heights))
    skylines = [
        _skyline(edges[a : b + 1], heights[a:b], x) for a, b in ((0, first), (first, last), (last, len(heights)))
    ]
    ends = "".join(f"M{x.at(place)} 0V{WIDE}" for place in (low, high))
    body = (
        f'<path class="bars" d="{skylines[1]}"/><path class="bars off" d="{skylines[0]}{skylines[2]}"/>'
        f'<path class="end" d="{ends}"/>'
    )
    left, right = x.at(low) / 10, x.at(high) / 10
    ticks = (
        f'<i class="comb" style="left:{left}%;width:{right - left:.1f}%;--n:{math.ceil(code.levels / code.width)}"></i>'
    )
    y = Axis(0, 1, ((1, _count(most)),))
    per = "code" if code.width == 1 else f"{code.width} codes"
    what = "value" if grid is not None and grid.zero_point is not None else "code"
    under = f"{what}; a tick each {per}; elements{', logarithmic' if steep else ''}"
    return plot(body, x, y, caption, under, grid=False, over=ticks)


def _skyline(edges: Sequence[float], heights: Sequence[int], x: Axis) -> str:
    """The outline of bars that stand side by side."""
    if not any(heights):
        return ""
    tops = "".join(f"V{WIDE - top}H{x.at(right)}" for top, right in zip(heights, edges[1:], strict=True))
    return f"M{x.at(edges[0])} {WIDE}{tops}V{WIDE}Z"


def _code_ticks(code: Code, grid: Grid | None) -> tuple[tuple[float, str], ...]:
    if grid is None or grid.zero_point is None:
        middle = (code.quant_min + code.quant_max) / 2
        return tuple((c, str(round(c))) for c in (code.quant_min, 0 if code.quant_min < 0 else middle, code.quant_max))
    ends = [(float(code.quant_min), number(grid.low)), (float(code.quant_max), number(grid.high))]
    zero = float(grid.zero_point)
    far = 0.22 * code.levels
    if code.quant_min + far < zero < code.quant_max - far:
        ends.insert(1, (zero, "0"))
    return tuple(ends)


def _count(value: int) -> str:
    for limit, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return str(value)


def band(
    steps: Sequence[int],
    low: Sequence[float | None],
    high: Sequence[float | None],
    stages: Iterable[Stage],
    caption: str,
    length: int,
) -> Markup | None:
    """How a range moved over a training; None where fewer than two points are known."""
    points = [(s, a, b) for s, a, b in zip(steps, low, high, strict=True) if a is not None and b is not None]
    points = _thinned(points)
    if len(points) < 2:
        return None
    y = Axis.round(min(min(a for _, a, _ in points), 0.0), max(max(b for _, _, b in points), 0.0), 3)
    x = _steps(length)
    upper = [f"{x.at(s)} {WIDE - y.at(b)}" for s, _, b in points]
    lower = [f"{x.at(s)} {WIDE - y.at(a)}" for s, a, _ in points]
    body = (
        f'<path class="area" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'
        f'<path class="line" d="M{"L".join(upper)}"/><path class="line" d="M{"L".join(lower)}"/>{_marks(stages, x)}'
    )
    return plot(body, x, y, caption, "optimizer step", 110)


def lines(
    steps: Sequence[int],
    series: Sequence[tuple[str, Sequence[float | None]]],
    stages: Iterable[Stage],
    caption: str,
    length: int,
) -> Markup | None:
    """Values over a training, each with the class that it is drawn in; None where fewer than two points are known."""
    found = []
    for kind, values in series:
        points = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None and math.isfinite(v)]
        found.append((kind, _thinned(points)))
    known = [v for _, points in found for _, v in points]
    if max(len(points) for _, points in found) < 2:
        return None
    y, x = Axis.round(min(0.0, min(known)), max(known) * 1.06, 3), _steps(length)
    body = "".join(
        f'<path class="line {kind}" d="M{"L".join(f"{x.at(s)} {WIDE - y.at(v)}" for s, v in points)}"/>'
        for kind, points in found
        if points
    )
    return plot(body + _marks(stages, x), x, y, caption, "optimizer step", 110)


def _thinned(points: list[Point]) -> list[Point]:
    """At most about `POINTS` of them, and the last one."""
    return points[:: -(-len(points) // POINTS) or 1] + points[-1:]


def _steps(length: int) -> Axis:
    return Axis(0, max(length, 1), ((0, "0"), (max(length, 1), str(max(length, 1)))))


def _marks(stages: Iterable[Stage], x: Axis) -> str:
    """Lines where ranges and BatchNorm froze."""
    places = "".join(f"M{x.at(stage.step)} 0V{WIDE}" for stage in stages if stage.number > 1 and stage.step > 0)
    return f'<path class="end" d="{places}"/>' if places else ""
