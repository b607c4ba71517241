"""How accurate int8 nets are after post-training quantization: ours on each backend, beside the peers.

    python scripts/bench/accuracy.py                            # offline: a ResNet-8, trained here on digits
    python scripts/bench/accuracy.py --data cifar10.npz --nets resnet20=resnet20.safetensors \
        mobilenet_v2=mobilenet_v2.safetensors --json docs/benchmarks/accuracy.json

All start from the same float net and calibrate on the same images, drawn from the training images by each seed in turn.
Each int8 net is asked about all test images: its accuracy and the drop from float, in points; the predictions that
differ from the float net's, of these how many were right and are wrong, and the other way round; the agreement, which
is the rest in percent; and the SQNR of the logits in dB. Drops of the size of 0.1 points are luck, the errors made up
and those mended; agreement and SQNR tell more.

With ``--json`` the rows of nets and tools that are not asked for again stay in the file. The exit status is 1 where
ours misses what is required: a drop no more than 0.02 points above the best peer's, and an agreement no less than the
best peer's, as means over the seeds. Every row is written as soon as its tool is done.

Needs ``pip install 'qlightning[recipes,bench]'``; a peer that is not installed, or fails, is left out and listed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qlightning.affine import sqnr
from scripts.bench.accuracy_nets import BATCH, Question, published, trained_on_digits
from scripts.bench.accuracy_tools import Tool, tools
from scripts.bench.machine import machine, versions
from scripts.bench.runners import Run, Subject, torch_run

CALIBRATION, CALIBRATION_BATCH = 512, 64
OURS = "qlightning, onednn"
"""Whose figures are required."""
REQUIRED_DROP, REQUIRED_AGREEMENT = 0.02, 0.0
"""Points that the drop may be above, and the agreement below, the best peer's."""

Row = dict[str, Any]


def logits(run: Run, images: Tensor) -> Tensor:
    """What a net says of all images, (N, classes)."""
    return torch.cat([run(x) for x in images.split(BATCH)])


def compared(reference: Tensor, found: Tensor, labels: Tensor) -> Row:
    """What quantization has changed.

    Args:
        reference: Logits of the float net, (N, classes).
        found: Those of the int8 net.
        labels: The classes, (N,).

    Examples:
        >>> float_logits, int8_logits = torch.eye(4), torch.eye(4)[[0, 1, 3, 3]]
        >>> row = compared(float_logits, int8_logits, torch.tensor([0, 1, 2, 0]))
        >>> row["accuracy"], row["drop"], row["broken"], row["agreement"]
        (50.0, 25.0, 1, 75.0)
    """
    before, after = reference.argmax(1), found.argmax(1)
    was, stays = before == labels, after == labels
    changed = int((before != after).sum())
    return {
        "accuracy": _percent(int(stays.sum()), len(labels)),
        "drop": _percent(int(was.sum()) - int(stays.sum()), len(labels)),
        "flipped": changed,
        "broken": int((was & ~stays).sum()),
        "mended": int((stays & ~was).sum()),
        "agreement": _percent(len(labels) - changed, len(labels)),
        "sqnr_db": sqnr(reference, found),
    }


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 6)


class Bench:
    """Runs nets, tools and seeds, and gathers rows, those of an earlier record among them."""

    def __init__(self, chosen: list[Tool], seeds: Sequence[int], calibration: int, earlier: Row | None = None) -> None:
        self.chosen = chosen
        self.seeds = seeds
        self.calibration = calibration
        self.nets: dict[str, Row] = {row["net"]: row for row in (earlier or {}).get("nets", [])}
        self.rows: list[Row] = (earlier or {}).get("rows", [])
        self.left_out: list[Row] = (earlier or {}).get("left_out", [])

    def run(self, question: Question, done: Callable[[], None]) -> None:
        """All tools and seeds for one net; ``done`` is called after each tool."""
        reference = logits(torch_run(question.net), question.images)
        right = int((reference.argmax(1) == question.labels).sum())
        net = {"net": question.name, "images": len(question.labels), "calibration": self.calibration}
        self.nets[question.name] = {**net, "accuracy": _percent(right, len(question.labels))}
        with tempfile.TemporaryDirectory() as folder:
            for tool in self.chosen:
                asked = (question.name, tool.name)
                self.rows = [r for r in self.rows if (r["net"], r["tool"]) != asked]
                self.left_out = [r for r in self.left_out if (r["net"], r["tool"]) != asked]
                for seed in self.seeds:
                    if not self._row(tool, seed, question, reference, Path(folder)):
                        break
                done()

    def _row(self, tool: Tool, seed: int, question: Question, reference: Tensor, folder: Path) -> bool:
        """Notes how a tool does, or that it fails; ours may not fail."""
        images = question.calibration(seed, self.calibration, CALIBRATION_BATCH)
        case = {"net": question.name, "tool": tool.name, "kind": tool.kind}
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # some talk much
                run = tool.quantize(Subject(question.name, question.net, images, folder))
            found = logits(run, question.images)
        except Exception as error:
            if tool.kind == "ours":
                raise
            why = traceback.format_exception_only(error)[0].strip().splitlines()[0][:300]
            self.left_out.append({**case, "why": why})
            print(f"{question.name}: {tool.name} is left out: {why}", flush=True)
            return False
        row = {**case, "versions": versions(tool.packages), "seed": seed}
        self.rows.append({**row, **compared(reference, found, question.labels)})
        print(_line(self.rows[-1]), flush=True)
        return True

    def record(self) -> Row:
        """All that is known."""
        return {
            "machine": machine(),
            "versions": versions(("torch",)),
            "nets": list(self.nets.values()),
            "rows": self.rows,
            "left_out": self.left_out,
        }

    def missed(self) -> list[str]:
        """What of ours misses what is required, for the nets that have peers."""
        found = []
        for net in self.nets:
            drop, agreement = (means(self.rows, net, figure) for figure in ("drop", "agreement"))
            peers = {row["tool"] for row in self.rows if row["net"] == net and row["kind"] == "peer"}
            if not peers or OURS not in drop:
                continue
            least, most = min(drop[p] for p in peers), max(agreement[p] for p in peers)
            if drop[OURS] > least + REQUIRED_DROP:
                found.append(f"{net}: a drop of {drop[OURS]:.3f} points, the best peer's is {least:.3f}")
            if agreement[OURS] < most - REQUIRED_AGREEMENT:
                found.append(f"{net}: {agreement[OURS]:.3f} % agreement, the best peer's is {most:.3f} %")
        return found


def means(rows: list[Row], net: str, figure: str) -> dict[str, float]:
    """The mean of a figure over the seeds, by tool."""
    names = dict.fromkeys(row["tool"] for row in rows if row["net"] == net)
    return {
        name: statistics.fmean(row[figure] for row in rows if (row["net"], row["tool"]) == (net, name))
        for name in names
    }


def _line(row: Row) -> str:
    return (
        f"{row['net']:14} {row['tool']:42} seed {row['seed']}  {row['accuracy']:6.2f} %  drop {row['drop']:+5.2f}"
        f"  flipped {row['flipped']:4} ({row['broken']} broken, {row['mended']} mended)"
        f"  agreement {row['agreement']:6.2f} %  SQNR {row['sqnr_db']:5.1f} dB"
    )


def _text(record: Row) -> str:
    """As JSON, a row a line."""
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    return json.dumps({**record, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"


def _question(text: str, data: Path | None, epochs: int) -> Question:
    name, _, weights = text.partition("=")
    if data is None and not weights:
        return trained_on_digits(name, epochs)
    if data is None or not weights:
        raise SystemExit(f"{text}: --data FILE.npz and a file of weights (--nets {name}=FILE) are needed together.")
    return published(name, Path(weights), data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the rows; gives 1 where ours misses what is required."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["resnet8"], metavar="NET[=WEIGHTS]")
    parser.add_argument("--data", type=Path, metavar="NPZ", help="images of the weights; none: digits, and training")
    parser.add_argument("--epochs", type=int, default=8, help="of training on digits")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--calibration", type=int, default=CALIBRATION, metavar="IMAGES")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="PART", help="the tools whose name has one of these parts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    chosen = [tool for tool in tools() if not options.only or any(part in tool.name for part in options.only)]
    earlier = json.loads(options.json.read_text()) if options.json and options.json.exists() else None
    bench = Bench(chosen, options.seeds, options.calibration, earlier)

    def written() -> None:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(_text(bench.record()))

    for text in options.nets:
        bench.run(_question(text, options.data, options.epochs), written)
    missed = bench.missed()
    print("\n".join(["Missed:", *missed] if missed else []))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
