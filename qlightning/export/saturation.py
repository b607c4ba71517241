"""CPUs on which the integer kernels of other runtimes saturate."""

from __future__ import annotations

import platform
import warnings
from pathlib import Path

from qlightning.backends import base
from qlightning.export.metadata import Metadata

_RUNTIMES = {".onnx": "ONNX Runtime and OpenVINO", ".xml": "OpenVINO"}


def warn_of_saturation(path: str | Path, facts: Metadata, stacklevel: int = 2) -> None:
    """Warns of a file whose runtimes give wrong answers on this CPU, which adds pairs of products up in 16 bits.

    The backends here know of this, and models made for one of them on this CPU never are such. A file made on another
    CPU may be; there nothing is wrong with it, so nothing is said there but in the facts, as ``full_range``.
    """
    runtimes = _RUNTIMES.get(Path(path).suffix)
    x86 = platform.machine().lower() in ("x86_64", "amd64")  # other CPUs have other kernels
    if facts.full_range and runtimes and x86 and not base.cpu_has_int8_dot_products():
        warnings.warn(
            f"{path} has full 8-bit activations and weights. On this CPU ({base.cpu_features()}), without VNNI and "
            f"AMX, the kernels of {runtimes} saturate on them, and answers are wrong. Quantize with 7-bit weights, as "
            "backend='auto' does on this CPU: QConfig(weight=QConfig().weight.reduced()).",
            stacklevel=stacklevel + 1,
        )
