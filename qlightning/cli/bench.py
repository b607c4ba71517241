"""``qlightning bench``: latency and throughput of the model in a file."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlightning.backends import resolve_backend
from qlightning.backends.base import cpu_features
from qlightning.cli import nets
from qlightning.cli.output import positive, progress, shown
from qlightning.cli.runners import Runner, facts_of, of_net, runner
from qlightning.errors import ConfigError
from qlightning.table import aligned

HELP = "time the model of a file over batch sizes and threads, beside the float net where that is given"
DESCRIPTION = """\
Times the model of a file. All that is compared runs in one process, by turns, on the same random inputs; times are
medians of the calls. .pt2 and .safetensors run in torch, .onnx in ONNX Runtime, .xml in OpenVINO."""
EPILOG = """\
examples:
  qlightning bench net.pt2
  qlightning bench net.pt2 net.onnx --batch 1 16 --threads 1 2
  qlightning bench net.pt2 --model torchvision.models.resnet18 num_classes=10 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command takes."""
    parser.add_argument("files", nargs="+", type=Path, metavar="file", help="the file, or several of one model")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1], help="batch sizes (default: 1)")
    parser.add_argument("--threads", type=positive, nargs="+", default=None, help="threads (default: as torch has)")
    parser.add_argument("--rounds", type=positive, default=30, help="timed calls of each (default: 30)")
    parser.add_argument("--backend", default="auto", help="what runs .pt2 and .safetensors (default: auto)")
    parser.add_argument("--model", nargs="+", metavar=("TARGET", "NAME=VALUE"), help=nets.MODEL_HELP)


def run(options: argparse.Namespace) -> str:
    """Runs the command, and returns what it has to say."""
    resolve_backend(options.backend)
    facts, *_ = [facts_of(path) for path in options.files]
    net = nets.build(options.model) if options.model else None
    cases = [(t, b) for t in options.threads or [torch.get_num_threads()] for b in options.batch]
    inputs = {batch: nets.inputs_like(facts, batch) for batch in options.batch}
    rows: list[dict[str, Any]] = []
    for threads, batch in progress(cases, "timing"):
        with _threads(threads):
            runners = {str(path): runner(path, options.model, options.backend, threads) for path in options.files}
            if net is not None:
                runners["float"] = of_net(net)
            times = _times(runners, inputs[batch], options.rounds)
        slowest = times.get("float", times[str(options.files[0])])
        rows += [
            {
                "model": name,
                "threads": threads,
                "batch": batch,
                "ms": 1e3 * seconds,
                "per_second": batch / seconds,
                "speedup": slowest / seconds,
            }
            for name, seconds in times.items()
        ]
    result = {"torch": torch.__version__, "cpu": cpu_features(), "rounds": options.rounds, "results": rows}
    return shown(result, _text(rows, "float" if net is not None else str(options.files[0])), options.json)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _times(runners: Mapping[str, Runner], inputs: tuple[Tensor, ...], rounds: int) -> dict[str, float]:
    """Median seconds of a call, by name; the models take turns."""
    warmup = 3
    times: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(warmup + rounds):
        for name, call in runners.items():
            start = time.perf_counter()
            try:
                call(*inputs)
            except Exception as error:  # each runtime has errors of its own
                shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
                raise ConfigError(f"{name} does not take inputs of shape {shapes}: {error}") from error
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _text(rows: Sequence[Mapping[str, Any]], base: str) -> str:
    head = ("model", "threads", "batch", "ms", "per second", f"times as fast as {base}")
    cells = [
        (
            row["model"],
            str(row["threads"]),
            str(row["batch"]),
            f"{row['ms']:.3f}",
            f"{row['per_second']:.1f}",
            f"{row['speedup']:.2f}",
        )
        for row in rows
    ]
    return aligned(head, cells)
