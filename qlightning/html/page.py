"""The page: facts and plots put into a template, with styles and script inside. Every text is escaped."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from markupsafe import Markup, escape

from qlightning.html import charts
from qlightning.html.content import Grid, History, Layer, Page
from qlightning.html.wording import decibel, megabytes, metric, milliseconds, number, percent

MOVERS = 12
"""How many ranges the overview shows: those that moved most."""
BARS = 30
"""How many layers the overview of the sensitivity shows at once."""


def render(page: Page) -> str:
    """The page as one HTML document, which loads nothing.

    Args:
        page: What it shows; names and notes may hold any characters.
    """
    grids = {grid.name: grid for grid in page.grids}
    return _template().render(
        page=page,
        grids=grids,
        tiles=_tiles(page, grids),
        metrics=sorted({name for form in page.measured for name in form.metrics}),
        overview=charts.sqnr_of_layers(page.layers, grids),
        details=[_detail(layer, grids, page) for layer in page.layers],
        others=[(grid, _of_grid(grid, page)) for grid in page.grids if grid.name not in {r.grid for r in page.layers}],
        movers=_movers(page),
        trends=_trends(page.history, page),
        segments=_segments(page),
        sensitivity=_bars(page),
        few=BARS,
        schemes=list(dict.fromkeys(layer.scheme for layer in page.layers if layer.scheme)),
        sections=_sections(page),
    )


@lru_cache(maxsize=1)
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # of no use before a page is written

    environment = Environment(
        loader=PackageLoader("qlightning.html"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        db=decibel, percent=percent, number=number, megabytes=megabytes, ms=milliseconds, sortkey=_sortkey,
        metric=metric, breakable=_breakable,
    )  # fmt: skip
    loader = environment.loader
    assert loader is not None
    for name in ("style.css", "script.js"):
        source = loader.get_source(environment, name)[0]
        environment.globals[name.replace(".", "_")] = Markup(source)
    return environment.get_template("report.html")


def _sortkey(value: float | None) -> str:
    """What a cell is sorted by: what is not known comes last."""
    return "" if value is None else json.dumps(value) if math.isfinite(value) else "1e999"


def _breakable(name: str) -> Markup:
    """A name that may break after a dot or an underscore."""
    spelled = str(escape(name))
    return Markup(spelled.replace(".", ".<wbr>").replace("_", "_<wbr>"))


def _tiles(page: Page, grids: dict[str, Grid]) -> list[tuple[str, str, str]]:
    """The few figures that say most: value, what it is, more."""
    count = sum(layer.int8 for layer in page.layers)
    tiles = [(f"{count} of {len(page.layers)}", "layers in int8", "")]
    if page.output_sqnr is not None:
        same = "" if page.same_answer is None else f"same answer for {percent(page.same_answer)}"
        unit = "" if math.isinf(page.output_sqnr) else " dB"
        tiles.append((decibel(page.output_sqnr) + unit, "SQNR of the output", same))
    sizes = {form.name: form.size for form in page.measured if form.size}
    if "int8" in sizes:
        less = f"{sizes['float'] / sizes['int8']:.1f}x smaller than float" if "float" in sizes else ""
        tiles.append((megabytes(sizes["int8"]), "size in int8", less))
    times = {form.name: form.latency for form in page.measured if form.latency}
    if "int8" in times:
        faster = f"{times['float'] / times['int8']:.1f}x as fast as float" if "float" in times else ""
        tiles.append((milliseconds(times["int8"]), "latency in int8", faster))
    found = [(layer.output_sqnr, layer.name) for layer in page.layers if layer.output_sqnr is not None]
    if found:
        worst = min(found)
        tiles.append((f"{decibel(worst[0])} dB", "least SQNR of a layer", worst[1] or "(model)"))
    return tiles


def _detail(layer: Layer, grids: dict[str, Grid], page: Page) -> list[Markup]:
    """The plots of one layer."""
    plots = []
    if layer.weight is not None:
        plots.append(charts.histogram(layer.weight, "Weight: how often each code occurs"))
    if (grid := grids.get(layer.grid)) is not None:
        plots += _of_grid(grid, page, "Input: ")
    elif layer.grid or layer.name in page.history.low:
        plots += _ranges(layer.grid or layer.name, page, "Input: ")
    if layer.name in page.history.sqnr:
        plot = charts.lines(
            page.history.steps,
            [("weight", page.history.sqnr[layer.name])],
            page.stages,
            "Weight: SQNR over training (dB)",
            page.length,
        )
        plots += [plot] if plot is not None else []
    return plots


def _of_grid(grid: Grid, page: Page, what: str = "") -> list[Markup]:
    plots = []
    if grid.codes is not None:
        plots.append(charts.histogram(grid.codes, f"{what or 'Values: '}distribution on the grid", grid))
    return plots + _ranges(grid.name, page, what)


def _ranges(name: str, page: Page, what: str = "") -> list[Markup]:
    history = page.history
    if name not in history.low:
        return []
    caption = f"{what}range over training" if what else "Range over training"
    plot = charts.band(history.steps, history.low[name], history.high[name], page.stages, caption, page.length)
    return [plot] if plot is not None else []


def _movers(page: Page) -> list[Markup]:
    """The ranges that moved most, by how much wider or narrower they became."""
    history, moved = page.history, []
    for name, low in history.low.items():
        widths = [b - a for a, b in zip(low, history.high[name], strict=True) if a is not None and b is not None]
        if len(widths) > 1 and max(widths) > 0:
            moved.append(((max(widths) - min(widths)) / max(widths), name))
    chosen = {name for _, name in sorted(moved, reverse=True)[:MOVERS]}
    plots = [
        charts.band(history.steps, low, history.high[name], page.stages, name or "(input)", page.length)
        for name, low in history.low.items()
        if name in chosen
    ]
    return [plot for plot in plots if plot is not None]


def _trends(history: History, page: Page) -> list[Markup]:
    """Middle and worst of all layers over training."""
    plots = []
    clip = _columns(history.clip.values(), len(history.steps))
    if clip:
        series = [
            ("output", [None if not c else 100 * statistics.median(c) for c in clip]),
            ("off", [None if not c else 100 * max(c) for c in clip]),
        ]
        plots.append(
            charts.lines(history.steps, series, page.stages, "Clipped values: middle and worst (%)", page.length)
        )
    ratios = _columns(history.sqnr.values(), len(history.steps))
    if ratios:
        series = [
            ("weight", [None if not c else statistics.median(c) for c in ratios]),
            ("off", [None if not c else min(c) for c in ratios]),
        ]
        plots.append(
            charts.lines(history.steps, series, page.stages, "SQNR of weights: middle and worst (dB)", page.length)
        )
    return [plot for plot in plots if plot is not None]


def _columns(rows: Any, count: int) -> list[list[float]]:
    """The values that are known at each step."""
    rows = list(rows)
    return [[r[i] for r in rows if r[i] is not None and math.isfinite(r[i])] for i in range(count)] if rows else []


def _segments(page: Page) -> list[dict[str, Any]]:
    """The stages of the schedule with the part of the training that each took."""
    ends = [stage.step for stage in page.stages[1:]] + [max(page.length, page.stages[-1].step if page.stages else 0)]
    found = []
    for stage, end in zip(page.stages, ends, strict=True) if page.stages else ():
        found.append({"stage": stage, "end": end, "steps": max(end - stage.step, 0)})
    return found


def _bars(page: Page) -> list[dict[str, Any]]:
    most = max((abs(row.value) for row in page.sensitivity if math.isfinite(row.value)), default=0) or 1
    return [
        {"row": row, "width": 100 * min(max(row.value, 0) / most, 1) if math.isfinite(row.value) else 100}
        for row in page.sensitivity
    ]


def _sections(page: Page) -> Sequence[tuple[str, str]]:
    """Anchors and titles of what is on the page."""
    known = [
        ("summary", "Summary", True),
        ("layers", "Layers", bool(page.layers)),
        ("training", "Training", bool(page.stages or page.history.steps)),
        ("sensitivity", "Sensitivity", bool(page.sensitivity)),
        ("steps", "Steps", bool(page.steps)),
        ("details", "Details", bool(page.layers)),
        ("settings", "Settings", bool(page.settings or page.versions)),
    ]
    return [(anchor, title) for anchor, title, there in known if there]
