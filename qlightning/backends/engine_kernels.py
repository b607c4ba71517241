"""What graphs for torch's classic engines call: ``torch.ops.quantized`` on plain uint8 codes.

These operators want quantized tensors. A call shares the memory of the codes with one and takes its result out of
another: nothing is copied.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qlightning.backends import kernels
from qlightning.nn.quantized import QuantizedLayer

_quantized = torch.ops.quantized


class _Engines:
    """Which engine torch's operators use now.

    torch keeps one for the whole process, and reads it when weights are packed and in sums (2.14); a packed weight
    stays with its own. Several threads may be inside ``running`` with one engine; with another they wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._name = self._before = ""
        self._inside = 0

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Lets torch use an engine inside the block, and then again what the user has set."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inside or self._name == name)
            if not self._inside:
                self._before, self._name = torch.backends.quantized.engine, name
                torch.backends.quantized.engine = name
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    if torch.backends.quantized.engine == name:  # else another thread of the user's has changed it
                        torch.backends.quantized.engine = self._before
                    self._changed.notify_all()


running = _Engines().running


# Quantized tensors


def wrap(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    """A quantized tensor in the memory of the codes."""
    wrapped = torch._empty_affine_quantized((0,), scale=scale, zero_point=zero_point, dtype=torch.quint8)
    return wrapped.set_(codes.untyped_storage(), codes.storage_offset(), codes.shape, codes.stride())


def unwrap(wrapped: Tensor) -> Tensor:
    """The codes of a quantized tensor, in its memory; ``view(torch.uint8)`` gives others (torch 2.14)."""
    codes = torch.empty(0, dtype=torch.uint8)
    return codes.set_(wrapped.untyped_storage(), wrapped.storage_offset(), wrapped.shape, wrapped.stride())


def _ended(codes: Tensor, ends: tuple[int, int] | None) -> Tensor:
    return codes if ends is None else codes.clamp_(*ends)


# What graphs call


def conv(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    packed: Any,
    dims: int,
    channels: int,
    scale: float,
    zero_point: int,
    relu: bool,
    ends: tuple[int, int] | None,
) -> Tensor:
    """A convolution of codes (batch, channels, *spatial), or without the batch, rounded once.

    ``packed`` is the weight in the form of its engine, with the geometry in it, for so many ``channels``; ``ends`` are
    the smallest and the largest code of the result, where these are not 0 and 255 or what ``relu`` makes of them.
    """
    if x.dim() == dims + 1:
        return conv(x[None], x_scale, x_zero_point, packed, dims, channels, scale, zero_point, relu, ends)[0]
    kernels.check_width(x, channels, 1)  # qnnpack reads what is not there
    function = _convolution(dims, relu)
    return _ended(unwrap(function(wrap(x, x_scale, x_zero_point), packed, scale, zero_point)), ends)


@lru_cache
def _convolution(dims: int, relu: bool) -> Any:
    found = getattr(_quantized, f"conv{dims}d_relu" if relu else f"conv{dims}d")
    return found if dims == 1 else found.new


def conv_transpose(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    packed: Any,
    channels: int,
    spacing: list[int],
    before: list[int],
    after: list[int],
    scale: float,
    zero_point: int,
    relu: bool,
    ends: tuple[int, int] | None,
) -> Tensor:
    """A transposed convolution of codes: a plain one with the flipped weight over the spread input."""
    dims = len(spacing)
    batched = x[None] if x.dim() == dims + 1 else x
    spread = kernels.spread(batched, x_zero_point, spacing, before, after)
    y = conv(spread, x_scale, x_zero_point, packed, dims, channels, scale, zero_point, relu, ends)
    return y[0] if x.dim() == dims + 1 else y


def linear(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    packed: Any,
    shape: list[int],
    scale: float,
    zero_point: int,
    relu: bool,
    ends: tuple[int, int] | None,
) -> Tensor:
    """A linear layer on codes (..., features) with a packed weight (of a shape), rounded once."""
    kernels.check_width(x, shape[1])  # qnnpack reads what is not there
    if not x.numel():
        return x.new_empty((*x.shape[:-1], shape[0]))
    rows = x[None] if x.dim() == 1 else x
    function = _quantized.linear_relu if relu else _quantized.linear
    y = _ended(unwrap(function(wrap(rows, x_scale, x_zero_point), packed, scale, zero_point)), ends)
    return y[0] if x.dim() == 1 else y


def linear_to_float(x: Tensor, x_scale: float, x_zero_point: int, packed: Any, shape: list[int]) -> Tensor:
    """A linear layer on codes (..., features) with a weight packed by fbgemm, not rounded: float32."""
    kernels.check_width(x, shape[1])
    if not x.numel():
        return x.new_empty((*x.shape[:-1], shape[0]), dtype=torch.float32)
    # The operator puts floats on this grid itself, on which these are.
    floats = kernels.dequantize(x if x.dim() > 1 else x[None], x_scale, x_zero_point)
    y = _quantized.linear_with_input_q_dq_qweight_dq_output_fp32(floats, x_scale, x_zero_point, packed)
    return y[0] if x.dim() == 1 else y


def conv2d_add(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    packed: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    weight_shape: list[int],
    residual: Tensor,
    residual_scale: float,
    residual_zero_point: int,
    scale: float,
    zero_point: int,
    relu: bool,
    ends: tuple[int, int] | None,
) -> Tensor:
    """A convolution of codes plus a residual of codes, with or without ReLU, rounded once; by oneDNN's kernels.

    The kernel sums into the residual in place, so it gets a copy; a residual of another shape than the result's is
    added in float.
    """
    out, _, *kernel = weight_shape
    size = [
        (length + 2 * p - d * (k - 1) - 1) // s + 1
        for length, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation, strict=True)
    ]
    if x.dim() != 4 or residual.shape != (x.shape[0], out, *size):
        weight, bias = _quantized.conv2d_unpack(packed)
        y = torch.conv2d(
            kernels.dequantize(x, x_scale, x_zero_point), weight.dequantize(), bias, stride, padding, dilation, groups
        )
        y = y + kernels.dequantize(residual, residual_scale, residual_zero_point)
        return _ended(kernels.quantize(y.relu_() if relu else y, scale, zero_point, 0, 255), ends)
    total = wrap(residual.clone(memory_format=torch.channels_last), residual_scale, residual_zero_point)
    function = _quantized.conv2d_add_relu if relu else _quantized.conv2d_add
    with running("onednn"):
        y = function(wrap(x, x_scale, x_zero_point), total, packed, scale, zero_point)
    return _ended(unwrap(y), ends)


def binary(
    name: str,
    engine: str,
    left: Tensor,
    left_scale: float,
    left_zero_point: int,
    right: Tensor,
    right_scale: float,
    right_zero_point: int,
    scale: float,
    zero_point: int,
    ends: tuple[int, int] | None,
) -> Tensor:
    """``"add"``, ``"add_relu"`` or ``"mul"`` of codes, rounded once; tensors of different shapes broadcast."""
    if not left.dim() and not right.dim():  # qnnpack takes no scalars
        end = (scale, zero_point, ends)
        return binary(
            name, engine, left[None], left_scale, left_zero_point, right[None], right_scale, right_zero_point, *end
        )[0]
    x, y = wrap(left, left_scale, left_zero_point), wrap(right, right_scale, right_zero_point)
    with running(engine):
        result = getattr(_quantized, name)(x, y, scale, zero_point)
    return _ended(unwrap(result), ends)


# Packed weights


@dataclass(frozen=True)
class ConvPacking:
    """Packs the weight of a convolution for an engine, for one place where it is called."""

    engine: str
    x_scale: float
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    flipped: bool = False

    def __call__(self, layer: QuantizedLayer) -> Any:
        dims = layer.codes.dim() - 2
        prepack = getattr(_quantized, f"conv{dims}d_prepack")
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        return _pack(layer, self.engine, self.x_scale, lambda w, b: prepack(w, b, *geometry), self.flipped)


@dataclass(frozen=True)
class LinearPacking:
    """Packs the weight of a linear layer for an engine."""

    engine: str
    x_scale: float

    def __call__(self, layer: QuantizedLayer) -> Any:
        return _pack(layer, self.engine, self.x_scale, _quantized.linear_prepack)


def _pack(
    layer: QuantizedLayer, engine: str, x_scale: float, prepack: Callable[..., Any], flipped: bool = False
) -> Any:
    codes, scale, zero_point = layer.codes, layer.scale, layer.zero_point
    if engine == "qnnpack":
        codes, scale, zero_point = _for_qnnpack(layer, x_scale)
    if flipped:
        codes = codes.flip(list(range(2, codes.dim())))
    with running(engine), warnings.catch_warnings():
        # torch says once that quantized tensors will go (pytorch #184982); this is where the first one is made.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        weight = torch._make_per_channel_quantized_tensor(codes.contiguous(), scale.double(), zero_point.long(), 0)
        return prepack(weight, layer.bias)


def _for_qnnpack(layer: QuantizedLayer, x_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points as qnnpack needs them: positive scales, and biases that fit 32 bits.

    A negative scale becomes positive by codes that are mirrored, -1 - code with zero point -1: the same values. The
    kernel rounds the bias to multiples of x_scale * scale, in 32 bits. A channel that is small beside its bias gets a
    scale with which that fits; what this takes from its weights is 2**-30 of the bias a weight and unit of x, at most.
    """
    codes, scale, zero_point = layer.codes, layer.scale, layer.zero_point
    empty = ~codes.flatten(1).any(1)
    negative = scale < 0
    if bool(negative.any()):
        mirrored = negative.view(-1, *[1] * (codes.dim() - 1))
        codes = torch.where(mirrored, -1 - codes, codes)
        scale, zero_point = scale.abs(), torch.where(negative, -1 - zero_point, zero_point)
    zero = zero_point.view(-1, *[1] * (codes.dim() - 1))
    bias = torch.zeros_like(scale) if layer.bias is None else layer.bias
    needed = bias.abs().div(x_scale * 2.0**30).clamp_min(2.0**-100)
    new = torch.where(empty, needed, torch.maximum(scale, needed))
    shrunk = (codes - zero).double().mul((scale.double() / new).view_as(zero)).round()
    codes = torch.where((new == scale).view_as(zero), codes, (shrunk + zero).to(codes.dtype))
    return codes, new, zero_point
