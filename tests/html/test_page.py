"""The page alone, from facts: it is whole and safe, loads nothing, and draws what it is given."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from qlightning.html import Code, Grid, History, Layer, Measured, Page, Sensitivity, Stage, Step, render
from tests.html.documents import Element, parse

HOSTILE = """<script>alert("x")</script>'"&<img src=http://evil.example onerror=alert(1)>{{ 7*7 }}</style>"""


def code(seed: int = 1) -> Code:
    counts = tuple((i * seed * 37) % 50 for i in range(96))
    return Code(counts, -64, 4, 0, 255, 200, below=0.01, above=0.02, lowest=0.1, highest=0.03)


def page(count: int = 3, name: str = "net.layer{}") -> Page:
    layers = tuple(
        Layer(
            name.format(i),
            "Conv2d",
            True,
            "",
            "int8",
            "kernel",
            40.0 + i % 7,
            (1, 38.0),
            30.0 - i % 5,
            code(i + 1),
            f"g{i}",
        )
        for i in range(count)
    )
    grids = tuple(Grid(f"g{i}", "uint8 per tensor", -1.0, 2.0, 0.01, 100, 41.0, code(i + 2)) for i in range(count))
    steps = tuple(range(0, 100, 10))
    history = History(
        steps,
        {f"g{i}": tuple(-1.0 - i * s for s in steps) for i in range(count)},
        {f"g{i}": tuple(1.0 + i * s for s in steps) for i in range(count)},
        {f"g{i}": tuple(s / 1e4 for s in steps) for i in range(count)},
        {layer.name: tuple(40 - s / 10 for s in steps) for layer in layers},
    )
    return Page(
        "Net",
        "2026-01-01",
        facts=(("backend", "onednn"),),
        measured=(Measured("float", {"accuracy": 0.9173}, 1_000_000, 3.0), Measured("int8", {}, 250_000, 1.5)),
        metrics={"val_loss": 0.25},
        output_sqnr=33.3,
        same_answer=0.99,
        samples=16,
        layers=(*layers, Layer("head", "Linear", False, "excluded by its name")),
        grids=(*grids, Grid("other", "uint8 per tensor", 0.0, 1.0, 0.01, 0, math.inf, code())),
        history=history,
        length=100,
        stages=(Stage(0, 0, 1, "fake quantization on"), Stage(60, 1, 2, "ranges frozen")),
        sensitivity=tuple(Sensitivity(layer.name, 1.0 / (i + 1), f"{i} dB", "float") for i, layer in enumerate(layers)),
        sensitivity_unit="drop in dB",
        steps=(Step("BiasCorrection()", "error", (("net.layer0", True, "bias moved", 1.0, 0.5),)),),
        settings=(("mode", "qat"),),
        versions=(("torch", "2.14"),),
        notes=("A note.",),
        missing=(("Something", "get it so."),),
    )


def charts(document: Element) -> list[Element]:
    return document.find("figure", class_="chart")


def drawn(chart: Element) -> list[str]:
    """What the paths of a chart draw, but for rules and marks of the grid."""
    paths = chart.find("path")
    return [p.attributes["d"] for p in paths if p.attributes["class"].split()[0] not in ("rule", "end")]


def test_the_page_is_whole_and_has_everything() -> None:
    facts = page()
    document = parse(render(facts))
    text = document.text()
    for layer in facts.layers:
        assert layer.name in text
    rows = document.find("table", class_="sortable")[0].find("tbody")[0].find("tr")
    assert [row.find("a")[0].text() for row in rows] == [layer.name for layer in facts.layers]
    for wanted in (
        "91.73",
        "not measured",
        "val_loss",
        "33.3 dB",
        "excluded by its name",
        "ranges frozen",
        "drop in dB",
    ):
        assert wanted in text
    for wanted in ("BiasCorrection()", "bias moved", "A note.", "get it so.", "other", "2.14"):
        assert wanted in text
    targets = {e.attributes["id"] for tag in ("section", "details") for e in document.find(tag) if "id" in e.attributes}
    assert {a.attributes["href"].removeprefix("#") for a in document.find("a")} <= targets


def test_every_plot_has_data_and_labels() -> None:
    found = charts(parse(render(page())))
    assert len(found) > 10
    for chart in found:
        assert any(drawn(chart)), chart.text()
        assert chart.find("figcaption")[0].text()
        assert len(chart.find("span", class_="y")) >= 1
        assert len([s for s in chart.find("span") if s.attributes["class"].startswith("x")]) >= 2
        numbers = [int(n) for d in drawn(chart) for n in re.findall(r"-?\d+", d.replace("h.01", ""))]
        assert all(0 <= n <= 1000 for n in numbers), chart.text()


def test_nothing_is_loaded() -> None:
    text = render(page())
    for element in _all(parse(text)):
        assert {"src", "srcset", "data", "poster", "action"}.isdisjoint(element.attributes)
        assert element.attributes.get("href", "#").startswith("#")
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_hostile_names_are_shown_and_never_run() -> None:
    plain = page(2)
    bad = replace(
        page(2, HOSTILE + "{}"),
        title=HOSTILE,
        facts=((HOSTILE, HOSTILE),),
        measured=(Measured("float", {HOSTILE: 1.0}),),
        metrics={HOSTILE: 1.0},
        stages=(Stage(0, 0, 1, HOSTILE),),
        sensitivity=(Sensitivity(HOSTILE, 1.0, HOSTILE, HOSTILE),),
        sensitivity_unit=HOSTILE,
        steps=(Step(HOSTILE, HOSTILE, ((HOSTILE, True, HOSTILE, None, None),)),),
        settings=((HOSTILE, HOSTILE),),
        versions=((HOSTILE, HOSTILE),),
        notes=(HOSTILE,),
        missing=((HOSTILE, HOSTILE),),
    )
    document = parse(render(bad))
    assert document.text().count(HOSTILE) >= 15
    assert not document.find("img")
    assert len(document.find("script")) == len(parse(render(plain)).find("script")) == 1
    assert len(document.find("style")) == 1
    handlers = [name for e in (document, *_all(document)) for name in e.attributes if name.startswith("on")]
    assert handlers == []


def _all(element: Element) -> list[Element]:
    below = [child for child in element.children if isinstance(child, Element)]
    return below + [e for child in below for e in _all(child)]


def test_many_layers_stay_small() -> None:
    document = render(page(400))
    assert len(document) < 3_000_000
    root = parse(document)
    assert len(root.find("details", class_="layer")) == 402
    assert not [d for d in root.find("details", class_="layer") if "open" in d.attributes]


def test_a_page_of_little_is_a_page() -> None:
    document = parse(render(Page("Net", "now", missing=(("All", "train first."),))))
    assert charts(document) == []
    assert "train first." in document.text()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_are_drawn_nowhere(value: float) -> None:
    facts = page(2)
    layers = tuple(replace(layer, weight_sqnr=value, output_sqnr=value) for layer in facts.layers)
    history = replace(facts.history, sqnr={"net.layer0": (value,) * 10})
    document = render(replace(facts, layers=layers, history=history))
    parse(document)
    assert not re.search(r'd="[^"]*(nan|inf)', document)
