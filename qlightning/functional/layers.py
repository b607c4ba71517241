"""Convolutions, linear layers and matrix products of quantized tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from qlightning.backends import Backend, kernels, resolve_backend
from qlightning.backends.onednn_calls import Geometry, pack_linear
from qlightning.backends.qdq import ints
from qlightning.errors import ConfigError
from qlightning.functional.operands import check, exact, is_activation, runs_kernels
from qlightning.functional.target import Grid, Target
from qlightning.tensor import QuantizedTensor

Size = int | Sequence[int]
_INT16_MAX = 2**15 - 1


def conv1d(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """A convolution of (batch, in, length), or (in, length), with a weight (out, in / groups, kernel).

    Args:
        x: The activation.
        weight: The weight, per tensor or per output channel.
        bias: float (out,), or None.
        stride: As for ``torch.nn.functional.conv1d``, like the rest.
        padding: Of zeros: elements at both ends, ``"same"`` or ``"valid"``.
        dilation: The distance of the kernel's elements.
        groups: The number of groups of channels.
        **grid: Of the result, and the backend.
    """
    return _conv(1, x, weight, bias, stride, padding, dilation, groups, grid)


def conv2d(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """A convolution of (batch, in, height, width), or without batch, with a weight (out, in / groups, *kernel).

    Arguments as for :func:`conv1d`.

    Examples:
        >>> from qlightning import QScheme, quantize
        >>> x = quantize(torch.ones(1, 1, 3, 3), 0.01, 0, torch.quint8)
        >>> w = quantize(torch.full((1, 1, 3, 3), 0.5), 0.1, 0, QScheme(symmetric=True))
        >>> conv2d(x, w, torch.tensor([1.0]), scale=0.5, zero_point=10).int_repr()
        tensor([[[[21]]]], dtype=torch.uint8)
    """
    return _conv(2, x, weight, bias, stride, padding, dilation, groups, grid)


def conv3d(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """A convolution of (batch, in, depth, height, width), or without batch.

    Arguments as for :func:`conv1d`.
    """
    return _conv(3, x, weight, bias, stride, padding, dilation, groups, grid)


def linear(
    x: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None = None, **grid: Unpack[Grid]
) -> QuantizedTensor:
    """``x @ weight.T + bias`` of (..., in) and a weight (out, in).

    Args:
        x: The activation.
        weight: The weight, per tensor or per output channel.
        bias: float (out,), or None.
        **grid: Of the result, and the backend.
    """
    check("linear", x=x, weight=weight)
    _check_bias("linear", bias)
    target = Target.of("linear", x, grid)
    w = _kernel_weight(x, weight, bias, target, grid)
    if w is not None and x.shape[-1] == weight.shape[-1]:
        packed = pack_linear(w)
        result = kernels.linear(
            x.codes, x.q_scale(), x.q_zero_point(), packed, w.scale, w.zero_point, _float(bias), *_result(target),
            "none", [], "",
        )  # fmt: skip
        return _finished(target, result)
    return target.round(F.linear(exact(x), exact(weight), _double(bias)))


def matmul(a: QuantizedTensor, b: QuantizedTensor, **grid: Unpack[Grid]) -> QuantizedTensor:
    """The matrix product of two quantized tensors, as ``torch.matmul``; computed exactly by every backend."""
    check("matmul", a=a, b=b)
    return Target.of("matmul", a, grid).round(torch.matmul(exact(a), exact(b)))


_EXACT_CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _conv(
    dims: int,
    x: QuantizedTensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    grid: Grid,
) -> QuantizedTensor:
    name = f"conv{dims}d"
    check(name, x=x, weight=weight)
    _check_bias(name, bias)
    target = Target.of(name, x, grid)
    w = _kernel_weight(x, weight, bias, target, grid)
    if w is None or not isinstance(padding, (int, list, tuple)) or not _fits(dims, x, w, groups):
        values = _EXACT_CONVS[dims](exact(x), exact(weight), _double(bias), stride, padding, dilation, groups)
        return target.round(values)
    steps, margins, distances = (ints(value, dims) for value in (stride, padding, dilation))
    packed = Geometry(x.q_scale(), x.q_zero_point(), steps, margins, distances, groups).pack(w)
    result = kernels.conv(
        x.codes, x.q_scale(), x.q_zero_point(), packed, w.scale, w.zero_point, _float(bias), steps, margins, distances,
        groups, *_result(target), "none", [],
    )  # fmt: skip
    return _finished(target, result)


def _fits(dims: int, x: QuantizedTensor, weight: QuantizedTensor, groups: int) -> bool:
    """Whether the shapes fit; torch's own float kernels say best what does not."""
    return (
        weight.ndim == dims + 2
        and x.ndim in (dims + 1, dims + 2)
        and groups > 0
        and x.shape[-dims - 1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and x.numel() > 0
    )


def _kernel_weight(
    x: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None, target: Target, grid: Grid
) -> QuantizedTensor | None:
    """The weight, per output channel, where the kernels take the operands and cannot be off; else None."""
    if not (is_activation(x) and runs_kernels(grid, x, weight)) or target.scheme.axis is not None:
        return None
    if not (weight.scheme.signed and weight.axis in (None, 0)) or bool(weight.zero_point.any()) or not weight.numel():
        return None
    if _saturates(x, weight, resolve_backend(grid.get("backend", "auto"))):
        return None
    out = weight.shape[0]
    scale = weight.scale.expand(out).contiguous()
    largest = weight.codes.abs().flatten(1).sum(1, dtype=torch.float32) * scale * (255 * x.q_scale())
    if bias is not None:
        if bias.shape != (out,):
            return None
        largest = largest + bias.abs()
    if target.is_given and not target.float32_is_fine(float(largest.max())):
        return None
    scheme = replace(weight.scheme, axis=0)
    return QuantizedTensor(weight.codes, scale, weight.zero_point.expand(out).contiguous(), scheme)


def _saturates(x: QuantizedTensor, weight: QuantizedTensor, backend: Backend) -> bool:
    """Whether this CPU adds two products up in 16 bits, and they may not fit."""
    largest = int(weight.codes.int().abs().max())
    return backend.reduced is not None and 2 * x.scheme.quant_max * largest > _INT16_MAX


def _result(target: Target) -> tuple[float, int, torch.dtype]:
    """What a kernel is told of its result: the grid, or float32 where it is chosen afterwards."""
    if not target.is_given:
        return 1.0, 0, torch.float32
    return float(target.scale), int(target.zero_point), target.scheme.dtype


def _finished(target: Target, result: Tensor) -> QuantizedTensor:
    return target.hold(result) if target.is_given else target.round(result.double())


def _check_bias(name: str, bias: Any) -> None:
    if bias is not None and not (isinstance(bias, Tensor) and bias.is_floating_point()):
        found = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise ConfigError(f"{name}: bias has to be a float Tensor or None, got {found}.")


def _double(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().double()


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float()
