"""What ``qat_step.py`` and ``scaling.py`` have measured, as sections of ``docs/benchmarks.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench.markdown import head, line

PHASES = ("observers on", "observers frozen", "all frozen")


def training(path: Path) -> Iterator[str]:
    """The cost of a training step beside the float one, from the JSON of ``qat_step.py``."""
    record = json.loads(path.read_text())
    rows = {(r["net"], r["size"], r["precision"], r["trainee"], r["phase"]): r for r in record["rows"]}
    trainees = [name for name in dict.fromkeys(r["trainee"] for r in record["rows"]) if name != "float"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items() if number)
    yield "## A training step against the float step"
    yield ""
    yield f"From [`{path.name}`](benchmarks/{path.name}), which `python scripts/bench/qat_step.py` has measured: median"
    yield "ratios of CPU time with their 95 % interval, and ratios of peak memory where observers are on."
    yield f"Batch {record['batch']}, {record['machine']['threads']} thread, {record['rounds']} rounds. {versions}."
    yield ""
    yield from head(["net, image, precision", "phase"], trainees)
    for net, size, precision in dict.fromkeys((r["net"], r["size"], r["precision"]) for r in record["rows"]):
        for phase in PHASES:
            cells = [_step(rows.get((net, size, precision, name, phase)), phase) for name in trainees]
            yield line([f"{net}, {size}x{size}, {precision}", phase, *cells])
    yield ""


def _step(row: dict[str, Any] | None, phase: str) -> str:
    if row is None:
        return ""
    median, low, high = row["cpu_ratio"]
    memory = f", memory {row['memory_ratio']:.2f}" if phase == PHASES[0] and row.get("memory_ratio") else ""
    return f"{median:.2f} ({low:.2f} to {high:.2f}){memory}"


def growth(path: Path) -> Iterator[str]:
    """How costs grow, from the JSON of ``scaling.py``."""
    record = json.loads(path.read_text())
    slopes = {(row["axis"], row["stage"]): row["slope"] for row in record["rows"]}
    axes, stages = (list(dict.fromkeys(key[i] for key in slopes)) for i in (0, 1))
    yield "## How costs grow"
    yield ""
    yield f"Slopes of log time over log size, from [`scaling.json`](benchmarks/{path.name}), which"
    yield "`python scripts/bench/scaling.py` has measured: 1 is linear, and the float step is what grows anyway."
    yield ""
    yield from head([""], axes)
    for stage in stages:
        cells = (slopes.get((axis, stage)) for axis in axes)
        yield line([stage, *("" if slope is None else f"{slope:.2f}" for slope in cells)])
    yield ""
