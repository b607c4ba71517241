"""float32 arithmetic on Python numbers: bit for bit what 0-d tensors on a CPU give, at a tenth of their cost.

Python computes in float64. Rounding the result of one ``+ - * /`` on float32 numbers to float32 gives what float32
arithmetic gives, as 53 bits are at least 2 * 24 + 2 (Figueroa, When is double rounding innocuous?, 1995).
"""

from __future__ import annotations

from ctypes import c_float

import torch
from torch import Tensor


def float32(value: float) -> float:
    """Rounds to the nearest float32, half to even; what is beyond becomes infinite."""
    return c_float(value).value


def are_single(*tensors: Tensor) -> bool:
    """Whether reading the tensors as numbers is possible and free: 0-d float32, on a CPU, not while compiling."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) is Tensor and tensor.ndim == 0 and tensor.is_cpu and tensor.dtype is torch.float32
        for tensor in tensors
    )
