"""From what ``int8.py``, ``qat_step.py`` and ``scaling.py`` have written to ``docs/benchmarks.md`` and its pictures.

python scripts/bench/render.py [--json docs/benchmarks/int8.json] [--out docs/benchmarks.md]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.markdown import head, line
from scripts.bench.render_training import growth, training

Row = dict[str, Any]
Case = tuple[int, int]
FLOAT, OURS, PEER = "float", "onednn", "torch.ao FX, x86"
FASTEST = "openvino"
"""Which of ours is held against the fastest peer of each case."""
COLOURS = {"float": ("0.75", "0.6"), "ours": ("#0b5fa5", "#3d8fd1", "#7db8e8", "#16467a", "#a9cdec", "#5aa0c8")}
COLOURS["peer"] = ("#d9822b", "#b5521b", "#e9b44c", "#8c6d31", "#c49a6c")


class Results:
    """The rows of a run, by net, case and runner."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self._rows = {(row["net"], row["batch"], row["threads"], row["runner"]): row for row in record["rows"]}
        self.nets = list(dict.fromkeys(row["net"] for row in record["rows"]))
        self.cases: list[Case] = sorted({(row["batch"], row["threads"]) for row in record["rows"]})
        kinds = {row["runner"]: row["kind"] for row in record["rows"]}
        self.peers = [name for name, kind in kinds.items() if kind == "peer"]
        self.runners = sorted(kinds, key=lambda name: ("float", "ours", "peer").index(kinds[name]))
        counts = dict.fromkeys(COLOURS, 0)
        self.colours = {}
        for name in self.runners:
            shades = COLOURS[kinds[name]]
            self.colours[name] = shades[counts[kinds[name]] % len(shades)]
            counts[kinds[name]] += 1

    def row(self, net: str, case: Case, runner: str) -> Row | None:
        return self._rows.get((net, *case, runner))


def markdown(results: Results, pictures: str) -> str:
    """The document."""
    record = results.record
    machine = record["machine"]
    rates = ", ".join(
        f"{float(rate) / 1e12:.2f} TOP/s with {count} thread{'s' if int(count) > 1 else ''}"
        for count, rate in machine["int8_operations_per_cpu_second"].items()
    )
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items() if number)
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `scripts/bench/render.py` from [`int8.json`](benchmarks/int8.json), which "
            f"`python scripts/bench/int8.py {shlex.join(record['arguments'])}` has measured; do not edit.",
            "",
            "Images are 224x224, weights random, BatchNorm statistics those of the images. All runners of a case share",
            "one process and take turns; a time is the median of the rounds, a ratio the median of the rounds' ratios",
            "of CPU time (all threads together), with its 95 % interval. SQNR is that of the logits of unseen images",
            "against the float net. The limit is the best rate of int8 matrix products that oneDNN reaches here:",
            f"{rates}, a second of CPU time.",
            "",
            f"Machine: {machine['cores']} cores, {machine['cpu']}. {versions}.",
            f"{record['rounds']} rounds at batch 1, a third of that at larger batches.",
            "",
            *_against(results, OURS, PEER, [PEER]),
            "With two threads at batch 1 torch.ao's nets are slower than they could be: torch keeps the layout of a",
            "weight from the first number of threads it ran with, and packs it again in each call with another. A net",
            "that is made and run with two threads alone does not; MobileNetV3-Large then comes near ours.",
            "",
            *_against(results, FASTEST, "the fastest peer of each case", results.peers),
            "## Times as fast as the float net",
            "",
            f"![Speed of int8 nets as a multiple of the float net's]({pictures}/speed.svg)",
            "",
            *_tables(results, _speed),
            "## CPU time and wall time, ms",
            "",
            *_tables(results, lambda row: f"{row['cpu_ms']:.2f} / {row['wall_ms']:.2f}"),
            "## SQNR of the logits, dB",
            "",
            *_tables(results, lambda row: "" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"),
            "## Part of the limit",
            "",
            f"![Part of the best int8 matrix product rate that each net reaches]({pictures}/limit.svg)",
            "",
            *_tables(results, lambda row: f"{row['of_limit']:.1%}"),
            *_left_out(record["left_out"]),
        ]
    )


def _against(results: Results, ours: str, words: str, peers: list[str]) -> Iterator[str]:
    """The ratios of CPU time that are required of one of ours, against that peer of each case that is the fastest."""
    lines, medians = [], []
    for net in results.nets:
        cells = []
        for case in results.cases:
            ratios = (results.row(net, case, ours) or {}).get("times_as_fast_as", {})
            found = min((ratios[name] for name in peers if name in ratios), default=None)
            cells.append("" if found is None else _interval(found))
            medians += [] if found is None else [found[0]]
        lines.append(line([net, *cells]))
    if not medians:
        return
    yield f"## `{ours}` against {words}: times as fast"
    yield ""
    yield from head(["net"], [_case(case) for case in results.cases])
    yield from lines
    yield ""
    yield f"Geometric mean: {statistics.geometric_mean(medians):.2f}."
    yield ""


def _tables(results: Results, cell: Callable[[Row], str]) -> Iterator[str]:
    for case in results.cases:
        yield f"{_case(case)[0].upper()}{_case(case)[1:]}:"
        yield ""
        yield from head([""], results.nets)
        for runner in results.runners:
            rows = (results.row(net, case, runner) for net in results.nets)
            cells = ["" if row is None else cell(row) for row in rows]
            if any(cells):
                yield line([runner, *cells])
        yield ""


def _left_out(rows: list[Row]) -> Iterator[str]:
    if rows:
        yield "## Left out"
        yield ""
        yield from (f"- {text}" for text in dict.fromkeys(f"{r['runner']}, {r['net']}: {r['why']}" for r in rows))
        yield ""


def _speed(row: Row) -> str:
    found = row["times_as_fast_as"].get(FLOAT)
    return "" if found is None else _interval(found)


def _interval(ratio: list[float]) -> str:
    median, low, high = ratio
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def _case(case: Case) -> str:
    batch, threads = case
    return f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}"


def draw(results: Results, path: Path, value: Callable[[Row], list[float] | None], label: str) -> None:
    """Bars for each net and runner, a panel a case; a whisker is the 95 % interval."""
    shown = [r for r in results.runners if any(value(row) for row in results.record["rows"] if row["runner"] == r)]
    figure, panels = plt.subplots(
        len(results.cases), figsize=(10, 2.7 * len(results.cases)), squeeze=False, sharex=True
    )
    width = 0.86 / max(1, len(shown))
    for case, panel in zip(results.cases, panels[:, 0], strict=True):
        for number, runner in enumerate(shown):
            for place, net in enumerate(results.nets):
                row = results.row(net, case, runner)
                found = None if row is None else value(row)
                if found is None:
                    continue
                median, low, high = found
                left = place - 0.43 + number * width
                label_once = runner if place == 0 else None
                panel.bar(left, median, width * 0.9, align="edge", color=results.colours[runner], label=label_once)
                if high > low:
                    middle = left + width * 0.45
                    panel.plot([middle, middle], [low, high], color="black", linewidth=0.8)
        panel.set_title(_case(case), loc="left", fontsize=10)
        panel.set_ylabel(label)
        panel.grid(axis="y", color="0.9")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xticks(range(len(results.nets)), results.nets)
        panel.tick_params(axis="x", length=0, labelbottom=True)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / len(results.cases) / 2.7 - 0.02))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Writes the document and the pictures."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=docs / "benchmarks" / "int8.json")
    parser.add_argument("--out", type=Path, default=docs / "benchmarks.md")
    options = parser.parse_args()
    results = Results(json.loads(options.json.read_text()))
    plt.rcParams["svg.hashsalt"] = "qlightning"  # the same file for the same numbers
    pictures = options.out.parent / "benchmarks"
    pictures.mkdir(exist_ok=True)
    draw(results, pictures / "speed.svg", lambda row: row["times_as_fast_as"].get(FLOAT), "times as fast as float")
    draw(results, pictures / "limit.svg", lambda row: [100 * row["of_limit"]] * 3, "% of the limit")
    text = [markdown(results, pictures.name)]
    for section, name in ((training, "qat_step.json"), (growth, "scaling.json")):
        if (measured := options.json.with_name(name)).exists():
            text += section(measured)
    options.out.write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main()
