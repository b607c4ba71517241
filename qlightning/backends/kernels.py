"""What the lowered graphs call: int8 kernels on plain uint8 tensors, and the steps between them.

All codes are uint8 with one scale and zero point a tensor; scales are Python floats, so that a call reads nothing but
its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_onednn = torch.ops.onednn


def call(function: Callable[..., Tensor], *operands: Any) -> Tensor:
    """A kernel that a layer is bound to."""
    return function(*operands)


def quantize(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    """clamp(round(x / scale) + zero_point), uint8; images become channels_last, as the kernels want them."""
    if x.dtype != torch.float32:
        x = x.float()
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return rounded(x.mul(1.0 / scale), zero_point, quant_min, quant_max)


def rounded(values: Tensor, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    """clamp(round(values) + zero_point), uint8; overwrites the values, which are float32.

    Many by way of int8, to which torch (2.14) converts with vector instructions, as it does not to uint8.
    """
    if values.numel() < 4096:
        values = values.round_().add_(zero_point) if zero_point else values.round_()
        return values.clamp_(quant_min, quant_max).to(torch.uint8)
    codes = values.round_().add_(zero_point - 128).clamp_(quant_min - 128, quant_max - 128).to(torch.int8)
    return codes.view(torch.uint8).bitwise_xor_(128)


def quantize_pixels(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    """As :func:`quantize`, for images of three channels; the result has a fourth, whose codes say nothing.

    The codes of a pixel are put together to one integer in float32, in which 24 bits are exact: that is faster than to
    interleave three planes of bytes. Where one value of a pixel is NaN, all of its codes are those of NaN.

    Raises:
        RuntimeError: There are not three channels.
    """
    if x.dim() == 3:
        return quantize_pixels(x[None], scale, zero_point, quant_min, quant_max)[0]
    if x.dim() != 4 or x.shape[1] != 3:
        raise RuntimeError(f"Images of three channels are needed, (N, 3, H, W), not {tuple(x.shape)}.")
    batch, _, height, width = x.shape
    pixels = x.new_empty((batch, height, width), dtype=torch.int32)
    # What one step reads the one before has left in the cache.
    step = batch if torch.compiler.is_compiling() else max(1, _IN_CACHE // (3 * height * width + 1))
    for part, words in zip(x.float().split(max(1, step)), pixels.split(max(1, step)), strict=True):
        codes = part.mul(1.0 / scale).round_().clamp_(quant_min - zero_point, quant_max - zero_point)
        red, green, blue = codes.unbind(1)
        word = torch.add(red, green, alpha=2**8).add_(blue, alpha=2**16)
        words.copy_(word.add_(zero_point * (1 + 2**8 + 2**16)))
    return pixels.view(torch.uint8).view(batch, height, width, 4).permute(0, 3, 1, 2)


_IN_CACHE = 2**18  # floats, a megabyte


def dequantize(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    """(codes - zero_point) * scale, float32; codes that are float32 already are overwritten."""
    values = codes.float()
    return (values.sub_(zero_point) if zero_point else values).mul_(scale)


def to_float(codes: Tensor) -> Tensor:
    """The codes as float32 numbers."""
    return codes.float()


def regrid(
    codes: Tensor, factor: float, from_zero_point: int, zero_point: int, quant_min: int, quant_max: int
) -> Tensor:
    """Codes of another grid, uint8; overwrites the codes, which are float32 and may lie between those of a grid.

    Args:
        codes: In steps of the first grid.
        factor: What a step of it is in steps of the other.
        from_zero_point: The code of zero there.
        zero_point: That of the other grid, as the next two.
        quant_min: Its smallest code.
        quant_max: Its largest.
    """
    values = codes.sub_(from_zero_point) if from_zero_point else codes
    return rounded(values.mul_(factor), zero_point, quant_min, quant_max)


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


def check_width(x: Tensor, expected: int, dim: int = -1) -> None:
    """Refuses an input of a wrong width, where the kernel itself would not see it.

    Raises:
        RuntimeError: It has another one.
    """
    if x.shape[dim] != expected:
        raise RuntimeError(f"An input of shape {tuple(x.shape)} is given to a layer that takes {expected} channels.")


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
