"""Pooling and resizing of quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from qlightning.backends import kernels
from qlightning.backends.qdq import ints
from qlightning.functional.operands import check, exact, is_activation, runs_kernels
from qlightning.functional.target import Grid, Target
from qlightning.tensor import QuantizedTensor

Size = int | list[int] | tuple[int, ...]


def max_pool1d(
    x: QuantizedTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The largest value of each window of (..., length); on the grid of ``x`` where none is given."""
    return _picked("max_pool1d", x, lambda t: F.max_pool1d(t, kernel_size, stride, padding, dilation, ceil_mode), grid)


def max_pool2d(
    x: QuantizedTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The largest value of each window of (..., height, width); on the grid of ``x`` where none is given."""
    check("max_pool2d", x=x)
    is_image = is_activation(x) and x.ndim in (3, 4) and x.numel() > 0
    if is_image and not grid.keys() - {"backend"} and runs_kernels(grid, x):
        size, step, margin, distance = (ints(v, 2) for v in (kernel_size, stride or kernel_size, padding, dilation))
        codes = kernels.max_pool2d(x.codes, size, step, margin, distance, ceil_mode)
        return QuantizedTensor(codes, x.scale, x.zero_point, x.scheme)
    return _picked("max_pool2d", x, lambda t: F.max_pool2d(t, kernel_size, stride, padding, dilation, ceil_mode), grid)


def max_pool3d(
    x: QuantizedTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The largest value of each window of (..., depth, height, width); on the grid of ``x`` where none is given."""
    return _picked("max_pool3d", x, lambda t: F.max_pool3d(t, kernel_size, stride, padding, dilation, ceil_mode), grid)


def adaptive_max_pool1d(x: QuantizedTensor, output_size: int, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The largest values of so many windows; on the grid of ``x`` where none is given."""
    return _picked("adaptive_max_pool1d", x, lambda t: F.adaptive_max_pool1d(t, output_size), grid)


def adaptive_max_pool2d(x: QuantizedTensor, output_size: Any, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The largest values of so many windows; on the grid of ``x`` where none is given."""
    return _picked("adaptive_max_pool2d", x, lambda t: F.adaptive_max_pool2d(t, output_size), grid)


def adaptive_max_pool3d(x: QuantizedTensor, output_size: Any, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The largest values of so many windows; on the grid of ``x`` where none is given."""
    return _picked("adaptive_max_pool3d", x, lambda t: F.adaptive_max_pool3d(t, output_size), grid)


def avg_pool1d(
    x: QuantizedTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The mean of each window of (..., length). Torch's quantized kernels keep the grid of ``x`` for means."""
    options: Any = (kernel_size, stride, padding, ceil_mode, count_include_pad)
    return _computed("avg_pool1d", x, lambda t: F.avg_pool1d(t, *options), grid)


def avg_pool2d(
    x: QuantizedTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The mean of each window of (..., height, width)."""
    options: Any = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _computed("avg_pool2d", x, lambda t: F.avg_pool2d(t, *options), grid)


def avg_pool3d(
    x: QuantizedTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """The mean of each window of (..., depth, height, width)."""
    options: Any = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _computed("avg_pool3d", x, lambda t: F.avg_pool3d(t, *options), grid)


def adaptive_avg_pool1d(x: QuantizedTensor, output_size: int, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The means of so many windows."""
    return _computed("adaptive_avg_pool1d", x, lambda t: F.adaptive_avg_pool1d(t, output_size), grid)


def adaptive_avg_pool2d(x: QuantizedTensor, output_size: Any, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The means of so many windows."""
    return _computed("adaptive_avg_pool2d", x, lambda t: F.adaptive_avg_pool2d(t, output_size), grid)


def adaptive_avg_pool3d(x: QuantizedTensor, output_size: Any, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The means of so many windows."""
    return _computed("adaptive_avg_pool3d", x, lambda t: F.adaptive_avg_pool3d(t, output_size), grid)


def interpolate(
    x: QuantizedTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """Resizes as ``torch.nn.functional.interpolate``; ``"nearest"`` keeps the grid of ``x`` where none is given."""

    def resize(t: Tensor) -> Tensor:
        return F.interpolate(t, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)

    return (_picked if mode.startswith("nearest") else _computed)("interpolate", x, resize, grid)


def _picked(name: str, x: QuantizedTensor, pick: Callable[[Tensor], Tensor], grid: Grid) -> QuantizedTensor:
    """The result of a function that picks elements: the same function of the codes, which float32 holds exactly."""
    check(name, x=x)
    target = Target.of(name, x, grid, keep=x.axis is None)
    if grid.keys() - {"backend"} or x.axis is not None:
        return target.round(pick(exact(x)))
    # A window that lies in the padding alone has no largest value, minus infinity: the lowest code is nearest to it.
    return target.hold(pick(x.codes.float()).clamp(min=x.scheme.quant_min).to(x.dtype))


def _computed(name: str, x: QuantizedTensor, compute: Callable[[Tensor], Tensor], grid: Grid) -> QuantizedTensor:
    check(name, x=x)
    return Target.of(name, x, grid).round(compute(exact(x)))
