"""What a step of quantization-aware training costs against a float step: time, peak memory, and whether it is right.

    python scripts/bench/qat_step.py --json docs/benchmarks/qat_step.json
    python scripts/bench/qat_step.py --nets resnet18 --sizes 64 --rounds 10 --only float qlightning

A step is forward, cross entropy, backward and SGD with momentum. All trainees of a case (net, image size, precision)
share one process and take turns; times are medians of the rounds, of CPU time and of wall time; ratios are medians of
the rounds' ratios of CPU time, with the 95 % interval of that median. With BatchNorm frozen the float net's is, too.
Peak memory is that of tensors: what the model and the optimizer hold, and the most that a step allocates beside it.

What ours computes is checked: the loss and the gradients have to equal, bit for bit, those of the same net with torch's
own fake-quantize kernels in place of ours.

Needs ``pip install 'qlightning[recipes,bench]'``; a peer that is not installed, or fails, is left out and listed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would count as the time of others

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qlightning.affine import fake_quantize
from qlightning.nn import activated
from qlightning.qscheme import QScheme
from scripts.bench.machine import machine, versions
from scripts.bench.memory import held_bytes, peak_bytes
from scripts.bench.timing import Ratio, by_turns, ratio
from scripts.bench.trainees import PHASES, Trainee, frozen, parameters, trainees

NETS = ("resnet18", "mobilenet_v2", "mobilenet_v3_large")
SIZES = (64, 128)
PRECISIONS = ("32-true", "bf16-mixed")
BATCH = 16
PACKAGES = ("torch", "torchvision", "torchao", "nncf", "brevitas")
REQUIRED = dict(zip(PHASES, (1.35, 1.2, 1.2), strict=True))
"""The ratio of CPU time to float that ours may take, in each phase."""
REQUIRED_MEMORY = 1.3

Row = dict[str, Any]


@dataclass
class Step:
    """A net and its optimizer, that can be called to train by one step."""

    net: nn.Module
    x: Tensor
    y: Tensor
    precision: str

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(parameters(self.net), lr=1e-3, momentum=0.9)

    def loss(self) -> Tensor:
        mixed = torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16-mixed" else contextlib.nullcontext()
        with mixed:
            return F.cross_entropy(self.net(self.x), self.y)

    def __call__(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def peak_bytes(self) -> int:
        """What model and optimizer hold, and the most that a step has allocated beside."""
        self()
        self.optimizer.zero_grad(set_to_none=True)
        state = (value for values in self.optimizer.state.values() for value in values.values())
        return held_bytes([*self.net.parameters(), *self.net.buffers(), *state]) + peak_bytes(self)


def by_torch(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme, inside: bool = False) -> Tensor:
    """Fake-quantizes as ours does, with torch's kernels."""
    limits = scheme.quant_min, scheme.quant_max
    if scheme.axis is None:
        return torch.fake_quantize_per_tensor_affine(x.float(), scale, zero_point, *limits).to(x.dtype)
    return torch.fake_quantize_per_channel_affine(x.float(), scale, zero_point, scheme.axis, *limits).to(x.dtype)


def _apart(apart: bool) -> contextlib.AbstractContextManager[Any]:
    """Within it activations and the rounding behind them are two calls, where that is wanted."""
    return mock.patch.dict(activated.STEPS, clear=True) if apart else contextlib.nullcontext()


def difference_from_torch(step: Step) -> float:
    """The largest difference of the loss and the gradients from those with torch's kernels, both of one batch."""
    results = []
    for kernel in (fake_quantize, by_torch):
        copied = Step(copy.deepcopy(step.net), step.x, step.y, step.precision)
        with mock.patch("qlightning.fake_quantize.fake_quantize", kernel), _apart(kernel is by_torch):
            loss = copied.loss()
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in copied.net.parameters() if p.grad is not None)])
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(*results, strict=True))


class Bench:
    """Runs the cases and gathers rows."""

    def __init__(self, chosen: list[Trainee], rounds: int) -> None:
        self.chosen = chosen
        self.rounds = rounds
        self.rows: list[Row] = []
        self.left_out: list[Row] = []
        self.missed: list[str] = []
        self._built: dict[Trainee, nn.Module] = {}

    def run(self, name: str, size: int, precisions: list[str]) -> None:
        """The cases of one net and size; each trainee is built once."""
        self._built = {}
        torch.manual_seed(0)
        net = torchvision.models.get_model(name, weights=None, num_classes=10)
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # the losses of all are to be the same
        x, y = torch.randn(BATCH, 3, size, size), torch.randint(10, (BATCH,))
        for precision in precisions:
            self._case({"net": name, "size": size, "precision": precision}, net, x, y)

    def _case(self, case: Row, net: nn.Module, x: Tensor, y: Tensor) -> None:
        """All trainees in all phases."""
        precision = case["precision"]
        steps: dict[tuple[Trainee, str], Step] = {}
        first: dict[tuple[Trainee, str], tuple[float, int]] = {}
        for trainee in self.chosen:
            for phase in trainee.phases:
                made = self._attempt(trainee, case, functools.partial(self._made, trainee, net, x, y, phase, precision))
                if made is None:
                    break
                steps[trainee, phase], first[trainee, phase] = made
        times = dict(zip(steps, by_turns(list(steps.values()), self.rounds), strict=True))
        floats = {phase: key for key in steps if key[0].kind == "float" for phase in [key[1]]}
        for key, step in steps.items():
            trainee, phase = key
            base = floats[phase]
            loss, peak = first[key]
            row = {
                **case,
                "trainee": trainee.name,
                "kind": trainee.kind,
                "phase": phase,
                "cpu_ms": 1e3 * statistics.median(seconds.cpu for seconds in times[key]),
                "wall_ms": 1e3 * statistics.median(seconds.wall for seconds in times[key]),
                "cpu_ratio": ratio([s.cpu for s in times[key]], [s.cpu for s in times[base]]),
                "peak_bytes": peak,
                "memory_ratio": peak / first[base][1],
                "loss": loss,
            }
            if trainee.kind == "ours":
                row["difference_from_torch"] = difference_from_torch(step)
                self._check(row)
            self.rows.append(row)
            print(_line(row), flush=True)

    def _made(
        self, trainee: Trainee, net: nn.Module, x: Tensor, y: Tensor, phase: str, precision: str
    ) -> tuple[Step, tuple[float, int]]:
        """A step, its first loss and its peak memory."""
        ready = self._built.get(trainee)
        if ready is None:
            ready = self._built[trainee] = trainee.build(copy.deepcopy(net).train(), x)
        step = Step(frozen(trainee, copy.deepcopy(ready), x, phase), x, y, precision)
        return step, (step(), step.peak_bytes())

    def _attempt(self, trainee: Trainee, case: Row, made: Callable[[], Any]) -> Any:
        """What is made; None, and a note, where it fails. Ours and float may not fail."""
        try:
            return made()
        except Exception as error:
            if trainee.kind != "peer":
                raise
            why = traceback.format_exception_only(error)[0].strip().splitlines()[0][:300]
            self.left_out.append({**case, "trainee": trainee.name, "why": why})
            print(f"{case}: {trainee.name} is left out: {why}", flush=True)
            return None

    def _check(self, row: Row) -> None:
        """Notes what ours misses: time and memory for float32, the loss for all."""
        where = f"{row['net']} {row['size']} {row['precision']}, {row['phase']}"
        if row["difference_from_torch"] != 0:
            self.missed.append(f"{where}: {row['difference_from_torch']:.1e} off torch's kernels")
        if row["precision"] != "32-true":
            return
        if row["cpu_ratio"].low > REQUIRED[row["phase"]]:
            self.missed.append(f"{where}: {row['cpu_ratio'].median:.2f}x the time, {REQUIRED[row['phase']]}x required")
        if row["memory_ratio"] > REQUIRED_MEMORY:
            self.missed.append(f"{where}: {row['memory_ratio']:.2f}x the memory, {REQUIRED_MEMORY}x required")

    def record(self) -> Row:
        """All that the run has found out."""
        return {
            "machine": machine(),
            "versions": versions(PACKAGES),
            "batch": BATCH,
            "rounds": self.rounds,
            "rows": self.rows,
            "left_out": self.left_out,
        }


def _line(row: Row) -> str:
    found: Ratio = row["cpu_ratio"]
    off = f"  off torch's kernels by {row['difference_from_torch']:g}" if "difference_from_torch" in row else ""
    return (
        f"{row['net']:18} {row['size']:3} {row['precision']:10} {row['trainee']:12} {row['phase']:16}"
        f"  CPU {row['cpu_ms']:7.1f} ms  wall {row['wall_ms']:7.1f} ms"
        f"  {found.median:.2f}x ({found.low:.2f} to {found.high:.2f})"
        f"  memory {row['memory_ratio']:.2f}x  loss {row['loss']:.4f}{off}"
    )


def main() -> None:
    """Prints and writes the rows, and fails where a required ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=NETS, metavar="NET")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="PIXELS")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="PART", help="the trainees whose name has one of these parts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    chosen = [t for t in trainees() if not options.only or t.kind == "float" or any(p in t.name for p in options.only)]
    bench = Bench(chosen, options.rounds)
    for name in options.nets:
        for size in options.sizes:
            bench.run(name, size, options.precisions)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(bench.record(), indent=1) + "\n")
    sys.exit("\n".join(["Missed:", *bench.missed]) if bench.missed else 0)


if __name__ == "__main__":
    main()
