"""Sums and products of two quantized tensors, and tensors side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from qlightning.backends import kernels
from qlightning.errors import ConfigError
from qlightning.functional.operands import check, exact, is_activation, runs_kernels
from qlightning.functional.target import Grid, Target
from qlightning.tensor import QuantizedTensor


def add(a: QuantizedTensor, b: QuantizedTensor, **grid: Unpack[Grid]) -> QuantizedTensor:
    """``a + b``; shapes broadcast.

    Examples:
        >>> from qlightning import quantize
        >>> a, b = quantize(torch.tensor([1.0, 2.0]), 0.5, 0), quantize(torch.tensor([0.25, 9.0]), 0.25, 0)
        >>> add(a, b, scale=0.5, zero_point=0).dequantize()
        tensor([ 1., 11.])
    """
    return _binary("add", a, b, torch.add, grid)


def add_relu(a: QuantizedTensor, b: QuantizedTensor, **grid: Unpack[Grid]) -> QuantizedTensor:
    """``max(a + b, 0)``, rounded once; shapes broadcast."""
    return _binary("add_relu", a, b, lambda x, y: torch.relu(x + y), grid)


def mul(a: QuantizedTensor, b: QuantizedTensor, **grid: Unpack[Grid]) -> QuantizedTensor:
    """``a * b``; shapes broadcast."""
    return _binary("mul", a, b, torch.mul, grid)


def cat(tensors: Sequence[QuantizedTensor], dim: int = 0, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The tensors side by side along a dimension; on their own grid where all have the same and none is given.

    Raises:
        ConfigError: There is none.
    """
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise ConfigError("cat: a list of at least one QuantizedTensor is needed.")
    check("cat", **{f"tensors[{i}]": q for i, q in enumerate(tensors)})
    first = tensors[0]
    same = first.axis is None and all(_grid_of(q) == _grid_of(first) for q in tensors)
    target = Target.of("cat", first, grid, keep=same)
    if same and not grid.keys() - {"backend"}:
        return target.hold(torch.cat([q.codes for q in tensors], dim))
    return target.round(torch.cat([exact(q) for q in tensors], dim))


def _binary(
    name: str,
    a: QuantizedTensor,
    b: QuantizedTensor,
    function: Callable[[Tensor, Tensor], Tensor],
    grid: Grid,
) -> QuantizedTensor:
    check(name, a=a, b=b)
    target = Target.of(name, a, grid)
    if is_activation(a) and is_activation(b) and target.takes_codes_of(torch.uint8) and runs_kernels(grid, a, b):
        ends = [max(q.zero_point.item(), 255 - q.zero_point.item()) * q.scale.item() for q in (a, b)]
        if kernels.has_binary(name) and target.float32_is_fine(ends[0] * ends[1] if name == "mul" else max(ends)):
            operands = (a.codes, a.q_scale(), a.q_zero_point(), b.codes, b.q_scale(), b.q_zero_point())
            return target.hold(kernels.binary(name, *operands, float(target.scale), int(target.zero_point)))
    return target.round(function(exact(a), exact(b)))


def _grid_of(q: QuantizedTensor) -> tuple[object, ...]:
    return q.scheme, *((q.q_scale(), q.q_zero_point()) if q.axis is None else ())
