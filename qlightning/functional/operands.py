"""What goes into an operation: quantized tensors, as exact values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qlightning.backends import resolve_backend
from qlightning.errors import ConfigError
from qlightning.functional.target import Grid
from qlightning.tensor import QuantizedTensor


def check(operation: str, **operands: Any) -> None:
    """Checks that operands are quantized tensors.

    Raises:
        ConfigError: One is not; names the operation and the argument.
    """
    for name, value in operands.items():
        if not isinstance(value, QuantizedTensor):
            found = f"a {value.dtype} Tensor" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{operation}: {name} has to be a QuantizedTensor, got {found}. Quantize it first.")


def exact(q: QuantizedTensor) -> Tensor:
    """The values that codes stand for, float64: a code has 8 bits and a scale 24, so nothing is rounded."""
    shape = [1] * q.ndim
    if q.axis is not None:
        shape[q.axis] = -1
    return (q.codes.double() - q.zero_point.reshape(shape)) * q.scale.double().reshape(shape)


def runs_kernels(grid: Grid, *operands: QuantizedTensor) -> bool:
    """Whether the int8 kernels of the CPU are asked for, and can be had."""
    chosen = resolve_backend(grid.get("backend", "auto"))
    return chosen.name == "onednn" and all(q.codes.is_cpu for q in operands)


def is_activation(q: QuantizedTensor) -> bool:
    """Whether the kernels take a tensor as an activation: unsigned, with one scale."""
    return q.axis is None and q.codes.dtype == torch.uint8
