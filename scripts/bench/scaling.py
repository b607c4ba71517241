"""How the cost of quantizing grows with depth, width, batch and image size, against what the float net costs.

    python scripts/bench/scaling.py --json docs/benchmarks/scaling.json
    python scripts/bench/scaling.py --axes depth --rounds 3

Along each axis a net of convolutions, BatchNorm and ReLU, with a residual sum a block, grows; prepare, calibrate,
convert, a training step and the float step and forward are timed at each size, CPU time, the median of the rounds. A
slope is that of log time over log size, by least squares over the upper half of the sizes, where fixed costs count
least: 1 is linear. No slope may be above `LIMIT`, or above the float step's along the same axis by more than
`LIMIT - 1`: with the width, both grow with the square. ResNet-50 is prepared and converted in at most
`RESNET50_SECONDS`, and calibration takes no more than `CALIBRATION` times a plain forward.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qlightning import QConfig, calibrate, convert, prepare
from qlightning.observers import HistogramObserver, MinMaxObserver
from scripts.bench.machine import machine, versions
from scripts.bench.timing import by_turns, ratio, timed

AXES: dict[str, tuple[int, ...]] = {
    "depth": (10, 30, 100, 300, 1000),
    "width": (16, 32, 64, 128, 256),
    "batch": (4, 8, 16, 32, 64),
    "size": (16, 32, 64, 128),
}
START = {"depth": 10, "width": 16, "batch": 4, "size": 16}
PIXELS = {"size": 2}
"""The power of an axis that the amount of work grows with, where it is not 1."""
LIMIT = 1.15
RESNET50_SECONDS = 2.0
CALIBRATION: dict[type[nn.Module], float] = {MinMaxObserver: 1.2, HistogramObserver: 1.3}

Row = dict[str, Any]


class Block(nn.Module):
    """Convolution, BatchNorm and ReLU, and what came in added; its share is small, so that depth makes nothing huge."""

    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        nn.init.constant_(self.bn.weight, share)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn(self.conv(x)).relu()


def chain(depth: int, width: int) -> nn.Module:
    """A net of ``depth`` layers."""
    blocks = (Block(width, 1 / depth) for _ in range(depth - 2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head)


def step(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One of training."""
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.long)).backward()
    optimizer.step()


def costs(depth: int, width: int, batch: int, size: int, rounds: int) -> dict[str, float]:
    """CPU seconds of each stage."""
    torch.manual_seed(0)
    net, x = chain(depth, width).train(), torch.randn(batch, 3, size, size)
    found: dict[str, list[float]] = {}
    prepared, ptq, calls = net, net, []
    for _ in range(rounds):
        prepared, ptq = copy.deepcopy(net), copy.deepcopy(net).eval()
        prepare(ptq, mode="ptq")
        stages = {
            "prepare": functools.partial(prepare, prepared),
            "calibrate": functools.partial(calibrate, ptq, [x]),
            "convert": functools.partial(convert, ptq),
        }
        for stage, call in stages.items():
            found.setdefault(stage, []).append(timed(call).cpu)
    for trained in (net, prepared):
        calls.append(functools.partial(step, trained, x, torch.optim.SGD(trained.parameters(), lr=1e-3)))
    for name, seconds in zip(("float step", "step"), by_turns(calls, rounds), strict=True):
        found[name] = [s.cpu for s in seconds]
    return {stage: statistics.median(seconds) for stage, seconds in found.items()}


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Of log seconds over log size, over the upper half."""
    start = (len(sizes) - 1) // 2
    return statistics.linear_regression(
        [math.log(size) for size in sizes[start:]], [math.log(s) for s in seconds[start:]]
    ).slope


def grow(axis: str, rounds: int) -> list[Row]:
    """One axis: the seconds at each size, and the slope of each stage."""
    seconds: dict[str, list[float]] = {}
    for size in AXES[axis]:
        for stage, value in costs(**{**START, axis: size}, rounds=rounds).items():
            seconds.setdefault(stage, []).append(value)
    work = [size ** PIXELS.get(axis, 1) for size in AXES[axis]]
    return [
        {"axis": axis, "stage": stage, "sizes": AXES[axis], "seconds": values, "slope": slope(work, values)}
        for stage, values in seconds.items()
    ]


def excess(rows: list[Row]) -> list[str]:
    """The slopes that are too steep."""
    floats = {row["axis"]: row["slope"] for row in rows if row["stage"] == "float step"}
    return [
        f"{row['stage']} grows with the {row['axis']} by a slope of {row['slope']:.2f}"
        for row in rows
        if row["stage"] != "float step" and row["slope"] > max(LIMIT, floats[row["axis"]] + LIMIT - 1)
    ]


def resnet50(rounds: int) -> Row:
    """The seconds that ResNet-50 takes to be prepared and converted."""
    torch.manual_seed(0)
    net = torchvision.models.resnet50(weights=None).eval()
    found: dict[str, list[float]] = {"prepare": [], "convert": []}
    for _ in range(rounds):
        prepared = copy.deepcopy(net)
        found["prepare"].append(timed(functools.partial(prepare, prepared, mode="ptq")).cpu)
        calibrate(prepared, [torch.randn(1, 3, 64, 64)])
        found["convert"].append(timed(functools.partial(convert, prepared)).cpu)
    return {"net": "resnet50", **{stage: statistics.median(seconds) for stage, seconds in found.items()}}


def calibrations(rounds: int) -> list[Row]:
    """What calibration takes against a plain forward of the same images."""
    torch.manual_seed(0)
    net, images = torchvision.models.resnet18(weights=None).eval(), [torch.randn(16, 3, 224, 224) for _ in range(2)]

    @torch.no_grad()
    def forward() -> None:
        for x in images:
            net(x)

    calls: list[Callable[[], Any]] = [forward]
    for kind in CALIBRATION:
        config = QConfig(activation_observer=kind)
        calls.append(functools.partial(calibrate, prepare(copy.deepcopy(net), config, mode="ptq"), images))
    plain, *others = ([seconds.cpu for seconds in times] for times in by_turns(calls, rounds))
    return [
        {"net": "resnet18", "observer": kind.__name__, "cpu_ratio": ratio(times, plain), "required": required}
        for (kind, required), times in zip(CALIBRATION.items(), others, strict=True)
    ]


def main() -> None:
    """Prints and writes the rows, and fails where something grows too fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=AXES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    rows = []
    for axis in options.axes:
        for row in grow(axis, options.rounds):
            rows.append(row)
            shown = "  ".join(f"{size}: {1e3 * s:8.1f}" for size, s in zip(row["sizes"], row["seconds"], strict=True))
            print(f"{axis:6} {row['stage']:10} slope {row['slope']:5.2f}   ms {shown}", flush=True)
    missed = excess(rows)
    whole = resnet50(options.rounds)
    print(f"resnet50: prepare {whole['prepare']:.2f} s, convert {whole['convert']:.2f} s", flush=True)
    if whole["prepare"] + whole["convert"] > RESNET50_SECONDS:
        missed.append(f"resnet50: {whole['prepare'] + whole['convert']:.2f} s to prepare and convert")
    calibrated = calibrations(options.rounds)
    for row in calibrated:
        found, observer = row["cpu_ratio"], row["observer"]
        print(f"calibration, {observer}: {found.median:.2f}x a forward ({found.low:.2f} to {found.high:.2f})")
        if found.low > row["required"]:
            missed.append(f"calibration by {observer}: {found.median:.2f}x, {row['required']}x required")
    if options.json:
        record = {"machine": machine(), "versions": versions(("torch", "torchvision")), "rounds": options.rounds}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**record, "rows": rows, "resnet50": whole, "calibration": calibrated}, indent=1)
        options.json.write_text(text + "\n")
    sys.exit("\n".join(["Missed:", *missed]) if missed else 0)


if __name__ == "__main__":
    main()
