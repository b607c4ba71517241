"""What observers cost: one pass against torch.ao's twin, and a calibration against plain forwards.

    python scripts/bench/observers.py [--rounds 100] [--threads 1] [--json FILE]

The pass is over a (16, 64, 112, 112) float32 activation, the calibration one of resnet18 at 224x224, batch 16, with
histogram observers. Both sides run in one process, by turns; ratios are medians of the rounds' ratios of CPU time, each
with the 95 % confidence interval of that median. A bound is missed where the whole interval lies above it.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qlightning import QConfig, QScheme, calibrate, prepare
from qlightning.observers import (
    EntropyObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    MSEObserver,
    PercentileObserver,
)
from scripts.bench.timing import by_turns, ratio

SHAPE = (16, 64, 112, 112)
REQUIRED = {"MinMaxObserver": 1.0, "MovingAverageObserver": 1.0, "HistogramObserver": 0.5, "calibration": 1.3}


def twins() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module] | None]]:
    """Ours and torch.ao's observers of the same statistic."""
    import torch.ao.quantization as ao

    scheme, channels = QScheme(signed=False), QScheme(signed=False, axis=1)
    per_channel: dict[str, Any] = {"dtype": torch.quint8, "qscheme": torch.per_channel_affine, "ch_axis": 1}
    return {
        "MinMaxObserver": (lambda: MinMaxObserver(scheme), ao.MinMaxObserver),
        "MovingAverageObserver": (lambda: MovingAverageObserver(scheme), ao.MovingAverageMinMaxObserver),
        "HistogramObserver": (lambda: HistogramObserver(scheme), ao.HistogramObserver),
        "MinMaxObserver per channel": (
            lambda: MinMaxObserver(channels),
            lambda: ao.PerChannelMinMaxObserver(**per_channel),
        ),
        "HistogramObserver per channel": (lambda: HistogramObserver(channels), None),
        "PercentileObserver": (lambda: PercentileObserver(scheme), ao.HistogramObserver),
        "EntropyObserver": (lambda: EntropyObserver(scheme), ao.HistogramObserver),
        "MSEObserver": (lambda: MSEObserver(scheme), None),
    }


def cpu_times(calls: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """CPU seconds of each call in each round."""
    return [[seconds.cpu for seconds in times] for times in by_turns(calls, rounds)]


def passes(rounds: int) -> list[dict[str, Any]]:
    """One pass of each observer, after it has seen a batch."""
    generator = torch.Generator().manual_seed(0)
    first, x = (torch.randn(SHAPE, generator=generator).relu_() for _ in range(2))
    rows = []
    for name, (ours, theirs) in twins().items():
        observers = [build() for build in (ours, theirs) if build is not None]
        for observer in observers:
            observer(first)
        calls = [lambda observer=observer: observer(x) for observer in observers]
        times = cpu_times([*calls, lambda: x.sum()], rounds)
        row: dict[str, Any] = {"observer": name, "ms": 1000 * statistics.median(times[0])}
        row["passes of sum()"] = ratio(times[0], times[-1])[0]
        if theirs is not None:
            row["ratio to torch.ao"], *row["interval"] = ratio(times[0], times[1])
        rows.append(row)
    return rows


def calibration(rounds: int, batches: int = 2) -> list[dict[str, Any]]:
    """Calibrations of resnet18 against forwards of the float net on the same batches."""
    torch.manual_seed(0)
    net = torchvision.models.resnet18(weights=None).eval()
    images = [torch.randn(16, 3, 224, 224) for _ in range(batches)]
    rows = []
    for kind in (HistogramObserver, MinMaxObserver):
        prepared = prepare(copy.deepcopy(net), QConfig(activation_observer=kind), mode="ptq")

        def forward() -> None:
            with torch.no_grad():
                for x in images:
                    net(x)

        def calibrated(prepared: nn.Module = prepared) -> None:
            calibrate(prepared, images)

        ours, plain = cpu_times([calibrated, forward], rounds)
        row: dict[str, Any] = {"calibration": kind.__name__, "seconds": statistics.median(ours)}
        row["ratio to forward"], *row["interval"] = ratio(ours, plain)
        rows.append(row)
    return rows


def shown(value: Any) -> Any:
    """Three decimals of every number."""
    if isinstance(value, list):
        return [shown(number) for number in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Prints the ratios, and fails where one that is required is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    observers, calibrations = passes(options.rounds), calibration(max(6, options.rounds // 10))
    for row in [*observers, *calibrations]:
        print({name: shown(value) for name, value in row.items()})
    lowest = {row["observer"]: row["interval"][0] for row in observers if "interval" in row}
    lowest["calibration"] = calibrations[0]["interval"][0]
    missed = {name: lowest[name] for name, bound in REQUIRED.items() if lowest[name] > bound}
    if options.json:
        record = {"torch": torch.__version__, "threads": options.threads, "rounds": options.rounds}
        options.json.write_text(json.dumps({**record, "observers": observers, "calibration": calibrations}, indent=2))
    sys.exit(f"Missed: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
