"""The figures of a run: how they are measured, written and shown."""

from __future__ import annotations

import io
import json
import platform
import statistics
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

Metrics = dict[str, Any]
FILE = "metrics.json"
KINDS = ("float", "fake_quant", "int8")
HEADER = ("model", "accuracy", "size (MB)", "latency (ms)")


def size_mb(model: nn.Module) -> float:
    """Returns what the state dict takes on disk, in megabytes (1e6 bytes)."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getbuffer().nbytes / 1e6


def latency_ms(models: Mapping[str, nn.Module], images: Tensor, rounds: int = 50, warmup: int = 10) -> dict[str, float]:
    """Returns the median time of a forward in milliseconds, for each model.

    The models take turns, so that whatever else the machine does meets them alike.

    Args:
        models: By name; on the CPU, set to eval mode.
        images: What each is called with.
        rounds: Timed calls of each model.
        warmup: Calls before these.
    """
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for turn in range(warmup + rounds):
            for name, model in models.items():
                model.eval()
                start = time.perf_counter()
                model(images)
                if turn >= warmup:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def versions() -> dict[str, str | int]:
    """Returns what the figures depend on beside the config: packages, processor, threads."""
    packages = ("qlightning", "torch", "torchvision", "pytorch-lightning")
    found = {name: _version(name) for name in packages}
    return {**found, "python": platform.python_version(), "cpu": _cpu(), "threads": torch.get_num_threads()}


def write(metrics: Metrics, folder: Path) -> Path:
    """Writes ``metrics.json`` into a folder."""
    path = folder / FILE
    path.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return path


def rows(metrics: Metrics) -> list[tuple[str, ...]]:
    """Words the figures of one run: for each model its name, accuracy, size and latency."""
    labels = {
        "float": "float",
        "fake_quant": "fake-quantized",
        "int8": f"int8, {metrics.get('int8', {}).get('backend')}",
    }
    return [
        (
            label,
            percent(metrics[name]["accuracy"]),
            *(_number(metrics[name].get(key)) for key in ("size_mb", "latency_ms")),
        )
        for name, label in labels.items()
        if name in metrics
    ]


def table(metrics: Metrics) -> Table:
    """Shows the figures of one run."""
    shown = Table(*HEADER)
    if "int8" in metrics:
        layers = metrics["int8_layers"]
        shown.title = f"{layers} of {layers + metrics['float_layers']} layers in int8"
    for row in rows(metrics):
        shown.add_row(*row)
    return shown


def summary(metrics: Metrics) -> tuple[str, ...]:
    """Words the figures of one run in a line: its accuracies, the size and the latency of the last of its models."""
    kinds = [kind for kind in KINDS if kind in metrics]
    accuracies = (percent(metrics[kind]["accuracy"]) if kind in kinds else "-" for kind in KINDS)
    return (*accuracies, *(_number(metrics[kinds[-1]][key]) for key in ("size_mb", "latency_ms")))


def percent(fraction: float) -> str:
    """Words a fraction."""
    return f"{100 * fraction:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # imported from a checkout that is not installed
        return "not installed"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
