"""Sums, products and averages of images of codes by oneDNN's convolutions, which round once and are right everywhere.

torch's kernels of their own, ``onednn::qadd`` and ``onednn::qmul`` (2.14), do not broadcast and take codes from 128 on
for negative numbers where they use AVX512.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qlightning.backends import kernels
from qlightning.backends.onednn_calls import Geometry
from qlightning.nn.quantized import QuantizedLayer

_onednn = torch.ops.onednn
_qconv, _qconv_binary = _onednn.qconv_pointwise.default, _onednn.qconv2d_pointwise.binary
_ONE, _NONE = [1, 1], [0, 0]


def binary(
    name: str,
    left: Tensor,
    left_scale: float,
    left_zero_point: int,
    right: Tensor,
    right_scale: float,
    right_zero_point: int,
    scale: float,
    zero_point: int,
) -> Tensor:
    """``"add"``, ``"add_relu"`` or ``"mul"`` of codes, rounded once; tensors of different shapes broadcast."""
    a, b = (left, left_scale, left_zero_point), (right, right_scale, right_zero_point)
    if left.dim() == right.dim() == 4 and left.numel() and right.numel() and not torch.compiler.is_compiling():
        if name == "mul":
            if _is_gate(right, left):
                return _scale_channels(*a, *b, scale, zero_point)
            if _is_gate(left, right):
                return _scale_channels(*b, *a, scale, zero_point)
        elif left.shape == right.shape:
            return _add(*a, *b, scale, zero_point, "relu" if name == "add_relu" else "none")
    return kernels.binary(name, *a, *b, scale, zero_point)


def _is_gate(gate: Tensor, images: Tensor) -> bool:
    return gate.shape == (*images.shape[:2], 1, 1)


def _add(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    y: Tensor,
    y_scale: float,
    y_zero_point: int,
    scale: float,
    zero_point: int,
    post_op: str,
) -> Tensor:
    """The convolution that gives each value back, into which ``y`` is summed."""
    channels = x.shape[1]
    weight, ones, zeros = _ones(channels, (1, 1), x_zero_point != 0)
    total: Tensor = _qconv_binary(
        x, x_scale, x_zero_point, weight, ones, zeros, y.clone(memory_format=torch.channels_last), None, _ONE, _NONE,
        _ONE, channels, scale, zero_point, torch.uint8, y_scale, y_zero_point, "sum", 1.0, post_op, [], "",
    )  # fmt: skip
    return total


def _scale_channels(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    gate: Tensor,
    gate_scale: float,
    gate_zero_point: int,
    scale: float,
    zero_point: int,
) -> Tensor:
    """Images times a factor for each of their channels, which is the scale of a convolution's weight of ones."""
    batch, channels, height, width = x.shape
    factors = kernels.dequantize(gate, gate_scale, gate_zero_point).reshape(
        (batch, channels) if batch > 1 else channels
    )
    size = channels * height * width
    if batch > 1 and size < _LARGE:
        products = torch.empty_like(x)
        step = max(1, 2 * _LARGE // size)
        factors.mul_(x_scale / scale)
        for part, factor, product in zip(x.split(step), factors.split(step), products.split(step), strict=True):
            values = part.float()
            values = values.sub_(x_zero_point) if x_zero_point else values
            product.copy_(kernels.rounded(values.mul_(factor[:, :, None, None]), zero_point, 0, 255))
        return products
    weight, _, zeros = _ones(channels, (1, 1), x_zero_point != 0)

    def scaled(image: Tensor, factor: Tensor) -> Tensor:
        product: Tensor = _qconv(
            image, x_scale, x_zero_point, weight, factor, zeros, None, _ONE, _NONE, _ONE, channels,
            scale, zero_point, torch.uint8, "none", [], "",
        )  # fmt: skip
        return product

    if batch == 1:
        return scaled(x, factors)
    return torch.cat([scaled(image, factor) for image, factor in zip(x.split(1), factors, strict=True)])


_LARGE = 2**16  # values of an image from which on a call of a kernel for each is faster than passes in float


def average(x: Tensor, x_scale: float, x_zero_point: int, scale: float, zero_point: int) -> Tensor:
    """The averages of images of codes (..., height, width), of size (..., 1, 1), rounded once."""
    size = x.shape[-2:]
    many = x.dim() == 4 and x.numel() >= _MANY and x.shape[1:].numel() <= _MOST_WEIGHTS
    if not many or torch.compiler.is_compiling():
        return kernels.regrid(x.float().mean((-2, -1), True), x_scale / scale, x_zero_point, zero_point, 0, 255)
    channels = x.shape[1]
    weight, ones, zeros = _ones(channels, tuple(size), x_zero_point != 0)
    averages: Tensor = _qconv(
        x, x_scale / size.numel(), x_zero_point, weight, ones, zeros, None, _ONE, _NONE, _ONE, channels,
        scale, zero_point, torch.uint8, "none", [], "",
    )  # fmt: skip
    return averages


_MANY = 2**17  # codes from which on a convolution is faster than passes in float
_MOST_WEIGHTS = 2**19  # bytes of a convolution as large as its images


@lru_cache(maxsize=128)
def _ones(channels: int, size: tuple[int, int], has_zero_point: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The packed weight of ones of a depthwise convolution, its scales and its zero points.

    Args:
        channels: How many.
        size: Of the kernel.
        has_zero_point: Whether the zero point of the input is other than 0, of which the packed form depends.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        scale, zero_point = torch.ones(channels), torch.zeros(channels, dtype=torch.int32)
        weight = QuantizedLayer(torch.ones(channels, 1, *size, dtype=torch.int8), scale, zero_point, None)
        geometry = Geometry(1.0, int(has_zero_point), _ONE, _NONE, _ONE, channels)
        return geometry.pack(weight, (1, channels, *size)), scale, zero_point
