"""From what ``accuracy.py`` has written to ``docs/accuracy.md`` and its picture.

python scripts/bench/render_accuracy.py [--json docs/benchmarks/accuracy.json] [--out docs/accuracy.md]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.accuracy import OURS, REQUIRED_DROP, Bench, means
from scripts.bench.markdown import head, line

Row = dict[str, Any]
COLOURS = {"ours": "#0b5fa5", "peer": "#d9822b"}
PICTURED = {"agreement": "agreement with float, % of the predictions", "sqnr_db": "SQNR of the logits, dB"}


class Results:
    """The rows of a run, by net and tool."""

    def __init__(self, record: Row) -> None:
        self.record = record
        self.nets: dict[str, Row] = {row["net"]: row for row in record["nets"]}
        self.kinds: dict[str, str] = {row["tool"]: row["kind"] for row in record["rows"]}
        self.tools = sorted(self.kinds, key=lambda tool: ("ours", "peer").index(self.kinds[tool]))

    def rows(self, net: str, tool: str) -> list[Row]:
        """One a seed."""
        return [row for row in self.record["rows"] if (row["net"], row["tool"]) == (net, tool)]

    def best_peer(self, net: str, figure: str, sign: int) -> tuple[str, float]:
        """The peer of the highest (lowest, where ``sign`` is -1) mean."""
        found = {t: v for t, v in means(self.record["rows"], net, figure).items() if self.kinds[t] == "peer"}
        return max(found.items(), key=lambda item: sign * item[1])


def markdown(results: Results, picture: str) -> str:
    """The document."""
    record = results.record
    seeds = sorted({row["seed"] for row in record["rows"]})
    nets = results.nets.items()
    return "\n".join(
        [
            "# Accuracy after quantization, beside other tools",
            "",
            "Written by `scripts/bench/render_accuracy.py` from [`accuracy.json`](benchmarks/accuracy.json), which",
            "`python scripts/bench/accuracy.py` has measured; do not edit.",
            "",
            "Post-training quantization to 8 bits, without training. All tools start from the same float net and see",
            "the same calibration images, drawn from the training images anew for each seed "
            f"({', '.join(map(str, seeds))}).",
            " ".join(f"{name}: {row['calibration']} images calibrate, {row['images']} test." for name, row in nets),
            "Figures are means over the seeds, with the lowest and the highest in brackets.",
            "",
            "- **drop**: points of accuracy lost against float. Below zero, the int8 net is right more often by luck.",
            "- **flipped**: predictions that differ from the float net's; of these, **broken** were right and are",
            "  wrong, **mended** the other way round. The drop is what is left of the two: mostly chance where small.",
            "- **agreement**: the predictions that are the float net's, in percent.",
            "- **SQNR**: of the logits against the float net's, in dB: 6 dB more are errors half as large.",
            "",
            "qlightning is used as `quantize_model(net, images, backend=...)`: nothing is set.",
            "Tools marked *simulated* have no int8 kernels for CPUs: their nets compute in float with rounded values.",
            "",
            f"![Agreement with the float net and SQNR of the logits]({picture})",
            "",
            *_held(results),
            *(text for net in results.nets for text in _table(results, net)),
            *_left_out(record["left_out"]),
            *_versions(results),
        ]
    )


def _held(results: Results) -> Iterator[str]:
    """Ours against the best peer of each figure."""
    nets = [net for net in results.nets if results.rows(net, OURS) and len(results.tools) > 1]
    if "peer" not in results.kinds.values() or not nets:
        return
    yield f"## `{OURS}` against the best of the others in each figure"
    yield ""
    yield f"Required: a drop of at most {REQUIRED_DROP} points more, and no less agreement. Behind ± stands how much of"
    yield "a drop may be chance of the test images (one standard error)."
    yield ""
    yield from head(["net"], ["drop", "best peer's", "agreement", "best peer's", "SQNR", "best peer's"])
    for net in nets:
        ours = results.rows(net, OURS)
        cells = [f"{_mean(ours, 'drop'):+.3f} ± {standard_error(ours, results.nets[net]['images']):.3f}"]
        tool, drop = results.best_peer(net, "drop", -1)
        peers = results.rows(net, tool)
        cells.append(f"{drop:+.3f} ± {standard_error(peers, results.nets[net]['images']):.3f} ({tool})")
        for figure, digits, unit in (("agreement", 3, "%"), ("sqnr_db", 1, "dB")):
            tool, value = results.best_peer(net, figure, 1)
            cells += [f"{_mean(ours, figure):.{digits}f} {unit}", f"{value:.{digits}f} {unit} ({tool})"]
        yield line([net, *cells])
    yield ""
    if missed := Bench([], [], 0, results.record).missed():
        yield "Missed:"
        yield ""
        yield from (f"- {text}" for text in missed)
        yield ""


def standard_error(rows: Sequence[Row], images: int) -> float:
    """Of a drop in points, from the predictions that quantization has broken and mended: that of McNemar's test.

    Examples:
        >>> standard_error([{"broken": 60, "mended": 40}], images=10_000)
        0.1
    """
    return statistics.fmean(100 * math.sqrt(row["broken"] + row["mended"]) / images for row in rows)


def _mean(rows: Sequence[Row], figure: str) -> float:
    return statistics.fmean(row[figure] for row in rows)


def _table(results: Results, net: str) -> Iterator[str]:
    yield f"## {net}: {results.nets[net]['accuracy']:.2f} % in float"
    yield ""
    yield from head([""], ["accuracy, %", "drop", "flipped", "broken", "mended", "agreement, %", "SQNR, dB"])
    for tool in results.tools:
        if rows := results.rows(net, tool):
            counts = [f"{_mean(rows, figure):.0f}" for figure in ("flipped", "broken", "mended")]
            spreads = [_spread(rows, figure, digits) for figure, digits in (("agreement", 2), ("sqnr_db", 1))]
            yield line([tool, f"{_mean(rows, 'accuracy'):.2f}", _spread(rows, "drop", 2, "+"), *counts, *spreads])
    yield ""


def _spread(rows: Sequence[Row], figure: str, digits: int, sign: str = "") -> str:
    low, high = (f"{bound(row[figure] for row in rows):{sign}.{digits}f}" for bound in (min, max))
    mean = f"{_mean(rows, figure):{sign}.{digits}f}"
    return mean if len(rows) == 1 else f"{mean} ({low} to {high})"


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "## Left out"
        yield ""
        yield from (f"- {text}" for text in dict.fromkeys(f"{r['tool']}, {r['net']}: {r['why']}" for r in rows))
        yield ""


def _versions(results: Results) -> Iterator[str]:
    found = dict(results.record["versions"])
    for row in results.record["rows"]:
        found.update(row["versions"])
    machine = results.record["machine"]
    yield "## Versions"
    yield ""
    yield (
        ", ".join(f"{name} {number}" for name, number in found.items() if number)
        + f". CPU: {', '.join(machine['cpu'])}."
    )
    yield ""


def draw(results: Results, path: Path) -> None:
    """A row of panels a net: every seed a dot, the mean a line."""
    tools_of = {net: [tool for tool in results.tools if results.rows(net, tool)] for net in results.nets}
    nets, counts = list(tools_of), [len(tools) for tools in tools_of.values()]
    figure, panels = plt.subplots(
        len(nets),
        len(PICTURED),
        figsize=(10, 0.8 + 0.6 * len(nets) + 0.23 * sum(counts)),
        squeeze=False,
        height_ratios=[count + 1 for count in counts],
    )
    for (net, tools), row in zip(tools_of.items(), panels, strict=True):
        for (name, label), panel in zip(PICTURED.items(), row, strict=True):
            for place, tool in enumerate(tools):
                values = [r[name] for r in results.rows(net, tool)]
                colour = COLOURS[results.kinds[tool]]
                panel.scatter(values, [place] * len(values), s=14, color=colour, alpha=0.6, linewidths=0)
                panel.plot([statistics.fmean(values)] * 2, [place - 0.35, place + 0.35], color=colour, linewidth=2)
            panel.set_ylim(len(tools) - 0.4, -0.6)
            panel.set_yticks(range(len(tools)), tools if panel is row[0] else [""] * len(tools), fontsize=8)
            panel.tick_params(axis="y", length=0)
            panel.grid(color="0.92")
            panel.set_axisbelow(True)
            panel.spines[["top", "right", "left"]].set_visible(False)
            panel.set_xlabel(label if net == nets[-1] else "", fontsize=9)
        row[0].set_title(net, loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the document and the picture."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=docs / "benchmarks" / "accuracy.json")
    parser.add_argument("--out", type=Path, default=docs / "accuracy.md")
    options = parser.parse_args(arguments)
    results = Results(json.loads(options.json.read_text()))
    plt.rcParams["svg.hashsalt"] = "qlightning"  # the same file for the same numbers
    picture = options.out.parent / "benchmarks" / "accuracy.svg"
    picture.parent.mkdir(exist_ok=True)
    draw(results, picture)
    options.out.write_text(markdown(results, f"benchmarks/{picture.name}").rstrip() + "\n")


if __name__ == "__main__":
    main()
