"""How fast int8 nets run: ours on every backend that is here, beside float and the peers, and how exact they are.

    python scripts/bench/int8.py --json docs/benchmarks/int8.json     # all: half an hour
    python scripts/bench/int8.py --nets resnet18 --batch 1 --threads 1 --rounds 20 --only onednn FX

Images are 224x224, weights random, BatchNorm statistics those of the images. All runners of a case (net, batch size,
threads) share one process and take turns; times are medians of the rounds, of CPU time (of all threads together) and of
wall time; ratios are medians of the rounds' ratios of CPU time, with the 95 % interval of that median. The SQNR of each
int8 net against the float one stands beside: a fast net that computes something else is no result. The limit is the
best rate of int8 matrix products that oneDNN reaches here, in the same seconds of CPU time.

Needs ``pip install 'qlightning[recipes,bench]'``; a peer that is not installed, or fails, is left out and listed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would count as the time of others

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qlightning.affine import sqnr
from qlightning.backends.base import cpu_features
from scripts.bench.gemm import best_int8_rate
from scripts.bench.runners import Family, Run, Subject, families, scratch
from scripts.bench.timing import Call, Seconds, by_turns, ratio, timed

NETS = ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0")
BATCHES, THREADS = (1, 16), (1, 2)
PACKAGES = ("torch", "torchao", "onnxruntime", "openvino", "nncf")
BUILD_SECONDS = 300
"""What a peer may take to build a net."""
OURS, PEER = "onednn", "torch.ao FX, x86"
FASTEST = "openvino"
REQUIRED = {OURS: 1.5, FASTEST: 1.1}
"""Times as fast as PEER, and as the fastest peer, that ours have to be in the geometric mean; in every case once."""

Row = dict[str, Any]


def build(name: str, folder: Path) -> tuple[Subject, Tensor]:
    """A net with random weights, on images that are smooth and noisy as photographs are; and images it has not seen."""
    torch.manual_seed(0)
    net = torchvision.models.get_model(name, weights=None).train()
    images = [_images(max(BATCHES)) for _ in range(5)]
    with torch.no_grad():
        for _ in range(4):  # so that the statistics of BatchNorm forget where they started
            for x in images[:-1]:
                net(x)
    return Subject(name, net.eval(), tuple(images[:-1]), folder), images[-1]


def _images(count: int) -> Tensor:
    octaves = (nn.functional.interpolate(torch.randn(count, 3, s, s), size=224, mode="bilinear") for s in (4, 16, 64))
    return sum(octaves, 0.1 * torch.randn(count, 3, 224, 224))


def operations(net: nn.Module) -> int:
    """What one image costs: two for a multiply-add of convolutions and linear layers."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, 3, 224, 224))
    return int(counter.get_total_flops())


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in what takes longer, at the next step of Python."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def warm(call: Call) -> Seconds:
    """Seconds of a call that follows its like; of several, where one is too short to time."""
    first = timed(call)
    if first.wall > 0.1:
        return first
    calls = max(1, math.ceil(0.01 / first.wall))
    total = timed(lambda: [call() for _ in range(calls)])
    return Seconds(total.cpu / calls, total.wall / calls)


class Bench:
    """Runs the cases and gathers rows.

    Args:
        families: What is timed.
        rounds: Turns of each at batch 1; larger batches get a third.
    """

    def __init__(self, families: list[Family], rounds: int) -> None:
        self.families = families
        self.rounds = rounds
        self.rows: list[Row] = []
        self.left_out: list[Row] = []
        self.limits: dict[int, float] = {}

    def run(self, name: str, batches: list[int], threads: list[int], done: Callable[[], None]) -> None:
        """All cases of one net; ``done`` is called after each."""
        with scratch() as folder:
            torch.set_num_threads(max(threads))
            subject, unseen = build(name, folder)
            with torch.no_grad():
                reference = subject.net(unseen)
            cost = operations(subject.net)
            prepared = {}
            for family in self.families:
                if (ready := self._attempt(family, name, functools.partial(family.prepare, subject))) is not None:
                    prepared[family] = ready
            for batch in batches:
                for count in threads:
                    case = {"net": name, "batch": batch, "threads": count}
                    self.rows += self._case(case, prepared, unseen[:batch].clone(), reference[:batch], cost)
                    done()

    def _case(self, case: Row, prepared: dict[Family, Any], x: Tensor, reference: Tensor, cost: int) -> list[Row]:
        batch, threads = case["batch"], case["threads"]
        torch.set_num_threads(threads)
        if threads not in self.limits:
            self.limits[threads] = best_int8_rate()
        runs: dict[Family, Run] = {}
        noise: dict[Family, float] = {}
        for family, ready in prepared.items():

            def compiled(family: Family = family, ready: Any = ready) -> tuple[Run, Tensor]:
                run = family.compile(ready, batch, threads)
                return run, run(x)

            if (found := self._attempt(family, case["net"], compiled)) is not None:
                runs[family], noise[family] = found[0], sqnr(reference, found[1])
        rounds = self.rounds if batch == 1 else max(3, self.rounds // 3)
        times = dict(
            zip(runs, by_turns([functools.partial(run, x) for run in runs.values()], rounds, warm), strict=True)
        )
        cpu = {family.name: [seconds.cpu for seconds in times[family]] for family in runs}
        rows = []
        for family in runs:
            cpu_seconds = statistics.median(cpu[family.name])
            row = {
                **case,
                "runner": family.name,
                "kind": family.kind,
                "cpu_ms": 1e3 * cpu_seconds,
                "wall_ms": 1e3 * statistics.median(seconds.wall for seconds in times[family]),
                "sqnr_db": None if family.kind == "float" else noise[family],
                "of_limit": cost * batch / cpu_seconds / self.limits[threads],
                "times_as_fast_as": {name: ratio(cpu[name], cpu[family.name]) for name in cpu if name != family.name},
            }
            rows.append(row)
            print(_line(row), flush=True)
        return rows

    def _attempt(self, family: Family, net: str, step: Callable[[], Any]) -> Any:
        """What a step of a family gives; None, and a note, where it fails. Ours and float may not fail."""
        try:
            with time_limit(BUILD_SECONDS):
                return step()
        except Exception as error:
            if family.kind != "peer":
                raise
            why = traceback.format_exception_only(error)[0].strip().splitlines()[0]
            self.left_out.append({"net": net, "runner": family.name, "why": why[:300]})
            print(f"{net}: {family.name} is left out: {why}", flush=True)
            return None

    def record(self) -> Row:
        """All that the run has found out."""
        return {
            "machine": {
                "cpu": cpu_features(),
                "cores": os.cpu_count(),
                "int8_operations_per_cpu_second": self.limits,
            },
            "versions": {package: _version(package) for package in PACKAGES},
            "arguments": sys.argv[1:],
            "rounds": self.rounds,
            "rows": self.rows,
            "left_out": self.left_out,
        }

    def missed(self) -> list[str]:
        """What of the required ratios is missed."""
        peers = {family.name for family in self.families if family.kind == "peer"}
        return self._missed(OURS, {PEER}) + self._missed(FASTEST, peers)

    def _missed(self, ours: str, peers: set[str]) -> list[str]:
        found = {}
        for row in self.rows:
            ratios = [row["times_as_fast_as"][name].median for name in peers & row["times_as_fast_as"].keys()]
            if row["runner"] == ours and ratios:
                found[row["net"], row["batch"], row["threads"]] = min(ratios)
        if not found:
            return []
        mean = statistics.geometric_mean(found.values())
        print(f"{ours} against the fastest of {sorted(peers)}: {mean:.2f}x in the mean of {len(found)} cases")
        low = [f"{ours}, {case}: {value:.2f}x" for case, value in found.items() if value < 1.0]
        return low + ([f"{ours}: mean {mean:.2f}x, required {REQUIRED[ours]}x"] if mean < REQUIRED[ours] else [])


def _line(row: Row) -> str:
    ratios = ((name, row["times_as_fast_as"].get(name)) for name in ("float", PEER))
    cells = [
        f"{row['net']:18} batch {row['batch']:2} threads {row['threads']}  {row['runner']:24}",
        f"CPU {row['cpu_ms']:8.2f} ms  wall {row['wall_ms']:8.2f} ms  {row['of_limit']:5.1%} of the limit",
        "" if row["sqnr_db"] is None else f"SQNR {row['sqnr_db']:5.1f} dB",
        *(f"{found.median:.2f}x ({found.low:.2f} to {found.high:.2f}) {name}" for name, found in ratios if found),
    ]
    return "  ".join(cells)


def _text(record: Row) -> str:
    """As JSON, a row a line."""
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    return json.dumps({**record, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Prints and writes the rows, and fails where a required ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=NETS, metavar="NET")
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES, metavar="SIZE")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS, metavar="COUNT")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="+", metavar="PART", help="the runners whose name has one of these parts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [f for f in families() if not options.only or any(part in f.name for part in options.only)]
    bench = Bench(chosen, options.rounds)

    def written() -> None:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(_text(bench.record()))

    for name in options.nets:
        bench.run(name, options.batch, options.threads, written)
    sys.exit("\n".join(["Missed:", *missed]) if (missed := bench.missed()) else 0)


if __name__ == "__main__":
    main()
