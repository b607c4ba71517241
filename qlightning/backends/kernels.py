"""What the lowered graphs call: int8 kernels on plain uint8 tensors, and the steps between them.

All codes are uint8 with one scale and zero point a tensor; scales are Python floats, so that a call reads nothing but
its tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_onednn = torch.ops.onednn


def quantize(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    """clamp(round(x / scale) + zero_point), uint8; images become channels_last, as the kernels want them."""
    if x.dtype != torch.float32:
        x = x.float()
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.mul(1.0 / scale).round_().add_(zero_point).clamp_(quant_min, quant_max).to(torch.uint8)


def dequantize(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    """(codes - zero_point) * scale, float32."""
    return codes.float().sub_(zero_point).mul_(scale)


def lookup(codes: Tensor, table: Tensor) -> Tensor:
    """table[codes] in the memory layout of the codes, for a function of one code: 256 entries say it all.

    Args:
        codes: uint8.
        table: uint8 (256,).
    """
    picked = table.index_select(0, codes.int().as_strided((codes.numel(),), (1,))) if _is_dense(codes) else None
    if picked is None:
        return table[codes.int()]
    return picked.as_strided(codes.shape, codes.stride())


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, from the start of the storage on."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def contiguous(value: Any) -> Any:
    """A tensor in the standard memory layout; all else as it is."""
    return value.contiguous() if isinstance(value, Tensor) else value


def max_pool2d(
    codes: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> Tensor:
    """Max pooling of codes (..., height, width)."""
    if codes.dim() == 3:
        return _max_pool2d(codes[None], kernel, stride, padding, dilation, ceil_mode)[0]
    return _max_pool2d(codes, kernel, stride, padding, dilation, ceil_mode)


_max_pool2d = torch.ops.quantized.max_pool2d


def conv(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    scale: float,
    zero_point: int,
    dtype: torch.dtype,
    post_op: str,
    post_args: list[float],
) -> Tensor:
    """A convolution of codes with a packed int8 weight, an elementwise call behind it, rounded once."""
    if x.dim() == len(stride) + 1:
        return _onednn.qconv_pointwise(
            x[None], x_scale, x_zero_point, weight, w_scale, w_zero_point, bias, stride, padding, dilation, groups,
            scale, zero_point, dtype, post_op, post_args, "",
        )[0]  # fmt: skip
    y = _onednn.qconv_pointwise(
        x, x_scale, x_zero_point, weight, w_scale, w_zero_point, bias, stride, padding, dilation, groups,
        scale, zero_point, dtype, post_op, post_args, "",
    )  # fmt: skip
    # For an empty batch torch (2.14) forgets that it has made an image of a row.
    return y.squeeze(2) if y.dim() > x.dim() else y


def conv2d_add(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    kernel: list[int],
    residual: Tensor,
    residual_scale: float,
    residual_zero_point: int,
    scale: float,
    zero_point: int,
    relu: bool,
) -> Tensor:
    """A convolution of codes plus a residual of codes, with or without ReLU, rounded once.

    The kernel sums into the residual in place, so it gets a copy; a residual of another shape than the result's is
    added in float.
    """
    height = (x.shape[-2] + 2 * padding[0] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    width = (x.shape[-1] + 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    if residual.shape == (x.shape[0], w_scale.shape[0], height, width) and x.dim() == 4:
        accumulator = residual.clone(memory_format=torch.channels_last)
        return _onednn.qconv2d_pointwise.binary(
            x, x_scale, x_zero_point, weight, w_scale, w_zero_point, accumulator, bias, stride, padding, dilation,
            groups, scale, zero_point, torch.uint8, residual_scale, residual_zero_point, "sum", 1.0,
            "relu" if relu else "none", [], "",
        )  # fmt: skip
    y = conv(
        x, x_scale, x_zero_point, weight, w_scale, w_zero_point, bias, stride, padding, dilation, groups,
        1.0, 0, torch.float32, "none", [],
    )  # fmt: skip
    y = y + dequantize(residual, residual_scale, residual_zero_point)
    return quantize(y.relu_() if relu else y, scale, zero_point, 0, 255)


def spread(x: Tensor, zero_point: int, stride: list[int], before: list[int], after: list[int]) -> Tensor:
    """Puts zeros between the elements and around them: what turns a transposed convolution into a plain one.

    Args:
        x: Codes (batch, channels, *spatial).
        zero_point: The code of zero.
        stride: Distance of neighbouring elements in the result, a dimension each.
        before: Zeros before the first element; negative: elements cut off.
        after: Zeros behind the last one; negative: elements cut off.
    """
    spatial = x.shape[2:]
    sizes = [(size - 1) * step + 1 for size, step in zip(spatial, stride, strict=True)]
    spaced = x.new_full((*x.shape[:2], *sizes), zero_point)
    everywhere = (slice(None), slice(None))
    spaced[everywhere + tuple(slice(None, None, step) for step in stride)] = x
    margins = [m for pair in zip(reversed(before), reversed(after), strict=True) for m in pair]
    return torch.nn.functional.pad(spaced, margins, value=zero_point)


def conv_transpose(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    bias: Tensor | None,
    spacing: list[int],
    before: list[int],
    after: list[int],
    dilation: list[int],
    groups: int,
    scale: float,
    zero_point: int,
    dtype: torch.dtype,
    post_op: str,
    post_args: list[float],
) -> Tensor:
    """A transposed convolution of codes: a plain one with the flipped weight over the spread input."""
    dims = len(dilation)
    batched = x[None] if x.dim() == dims + 1 else x
    y = conv(
        spread(batched, x_zero_point, spacing, before, after),
        x_scale, x_zero_point, weight, w_scale, w_zero_point, bias, [1] * dims, [0] * dims, dilation, groups,
        scale, zero_point, dtype, post_op, post_args,
    )  # fmt: skip
    return y[0] if x.dim() == dims + 1 else y


def linear(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    bias: Tensor | None,
    scale: float,
    zero_point: int,
    dtype: torch.dtype,
    post_op: str,
    post_args: list[float],
    algorithm: str,
) -> Tensor:
    """A linear layer on codes (..., features) with a packed int8 weight and an elementwise call, rounded once."""
    if not x.numel():  # torch (2.14) gives it two dimensions whatever x has
        return x.new_empty((*x.shape[:-1], w_scale.shape[0]), dtype=dtype)
    return _onednn.qlinear_pointwise(
        x.contiguous(), x_scale, x_zero_point, weight, w_scale, w_zero_point, bias,
        scale, zero_point, dtype, post_op, post_args, algorithm,
    )  # fmt: skip


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
    same = left.shape == right.shape and left.stride() == right.stride()
    if same and _is_dense(left) and _is_dense(right) and has_binary(name):
        return _BINARY[name](
            left, left_scale, left_zero_point, right, right_scale, right_zero_point, scale, zero_point, torch.uint8
        )
    x, y = dequantize(left, left_scale, left_zero_point), dequantize(right, right_scale, right_zero_point)
    result = x * y if name == "mul" else x + y
    return quantize(result.relu_() if name == "add_relu" else result, scale, zero_point, 0, 255)


@lru_cache
def has_binary(name: str) -> bool:
    """Whether torch has the kernel of :func:`binary`, and whether it computes right on this CPU.

    Where torch (2.14) uses AVX512, these kernels take codes from 128 on for negative numbers.
    """
    if name not in _BINARY:
        return False
    with torch.inference_mode(False), torch.no_grad():
        codes = torch.arange(256, dtype=torch.uint8, device="cpu").repeat(2)
        mirrored = codes.flip(0).contiguous()
        scale = 256.0 if name == "mul" else 2.0
        found = _BINARY[name](codes, 1.0, 0, mirrored, 1.0, 0, scale, 0, torch.uint8)
        expected = codes.float() * mirrored if name == "mul" else codes.float() + mirrored
        return bool(((expected / scale).round().clamp(0, 255) - found.float()).abs().max() <= 1)


_BINARY = (
    {"add": _onednn.qadd.tensor, "add_relu": _onednn.qadd_relu.tensor, "mul": _onednn.qmul.tensor}
    if all(hasattr(_onednn, name) for name in ("qadd", "qadd_relu", "qmul"))
    else {}
)
