"""Functions of one quantized tensor, element by element: for one scale, a table of what each code becomes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from qlightning.backends.kernels import lookup
from qlightning.errors import ConfigError
from qlightning.functional.operands import check, exact, is_activation, runs_kernels
from qlightning.functional.target import Grid, Target
from qlightning.tensor import QuantizedTensor


def _map(
    name: str, x: QuantizedTensor, function: Callable[[Tensor], Tensor], grid: Grid, keep: bool = False
) -> QuantizedTensor:
    check(name, x=x)
    target = Target.of(name, x, grid, keep=keep)
    if x.axis is not None or target.scheme.axis is not None:
        return target.round(function(exact(x)))
    codes = torch.arange(x.scheme.quant_min, x.scheme.quant_max + 1, device=x.device)
    values = function((codes - x.zero_point).double() * x.scale.double())
    index = x.codes.int() - x.scheme.quant_min
    if not target.is_given:
        used = torch.bincount(index.flatten(), minlength=len(codes)) > 0
        target = target.chosen_for(values[used])
    table = target.round(values)
    if is_activation(x) and runs_kernels(grid, x):
        full = F.pad(table.codes, (x.scheme.quant_min, 255 - x.scheme.quant_max))
        return target.hold(lookup(x.codes, full))
    return target.hold(table.codes[index])


def requantize(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The same values on another grid.

    Examples:
        >>> from qlightning import quantize
        >>> requantize(quantize(torch.tensor([0.5, 1.0]), 0.01, 0), scale=0.5, zero_point=3).int_repr()
        tensor([4, 5], dtype=torch.int8)
    """
    return _map("requantize", x, lambda v: v, grid)


def relu(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``max(x, 0)``; on the grid of ``x`` where none is given, as it lies on it."""
    return _map("relu", x, torch.relu, grid, keep=True)


def relu6(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``min(max(x, 0), 6)``."""
    return _map("relu6", x, F.relu6, grid)


def leaky_relu(
    x: QuantizedTensor,
    negative_slope: float = 0.01,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``x`` where it is positive, ``negative_slope * x`` elsewhere."""
    return _map("leaky_relu", x, lambda v: F.leaky_relu(v, negative_slope), grid)


def elu(
    x: QuantizedTensor,
    alpha: float = 1.0,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``x`` where it is positive, ``alpha * (exp(x) - 1)`` elsewhere."""
    return _map("elu", x, lambda v: F.elu(v, alpha), grid)


def hardswish(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``x * relu6(x + 3) / 6``."""
    return _map("hardswish", x, F.hardswish, grid)


def hardsigmoid(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``relu6(x + 3) / 6``. Torch's quantized kernel always gives the scale 1/256."""
    return _map("hardsigmoid", x, F.hardsigmoid, grid)


def sigmoid(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``1 / (1 + exp(-x))``. Torch's quantized kernel gives the scale 1/256 where none is given."""
    return _map("sigmoid", x, torch.sigmoid, grid)


def tanh(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The hyperbolic tangent. Torch's quantized kernel always gives the scale 2/256."""
    return _map("tanh", x, torch.tanh, grid)


def silu(
    x: QuantizedTensor,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``x * sigmoid(x)``."""
    return _map("silu", x, F.silu, grid)


def gelu(
    x: QuantizedTensor,
    approximate: str = "none",
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``x`` times the normal distribution function of ``x``, or its approximation by ``"tanh"``."""
    return _map("gelu", x, lambda v: F.gelu(v, approximate=approximate), grid)


def clamp(
    x: QuantizedTensor,
    min: float | None = None,  # noqa: A002  torch's names
    max: float | None = None,  # noqa: A002
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The values, but none below ``min`` or above ``max``.

    Raises:
        ConfigError: Neither bound is given, or they cross.
    """
    if min is None and max is None:
        raise ConfigError("clamp: give min, max or both.")
    if min is not None and max is not None and min > max:
        raise ConfigError(f"clamp: min={min} is above max={max}.")
    return _map("clamp", x, lambda v: v.clamp(min, max), grid)


def add_scalar(
    x: QuantizedTensor,
    value: float,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``x + value``."""
    return _map("add_scalar", x, lambda v: v + float(value), grid)


def mul_scalar(
    x: QuantizedTensor,
    value: float,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """``x * value``."""
    return _map("mul_scalar", x, lambda v: v * float(value), grid)
