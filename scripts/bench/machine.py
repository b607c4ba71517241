"""What a benchmark ran on: the CPU, threads and versions, and nothing that names the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """CPU features, cores and the threads that torch uses."""
    names = ("_is_avx2_supported", "_is_avx512_supported", "_is_vnni_supported", "_is_amx_tile_supported")
    has = {name.split("_")[2]: getattr(torch.cpu, name, bool)() for name in names}
    return {
        "cpu": [name for name, supported in has.items() if supported],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The versions of packages; None for one that is not installed."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
