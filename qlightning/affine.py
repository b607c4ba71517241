"""The maths of quantization as pure functions: scale and zero point from a range, quantize, dequantize, fake-quantize.

Two rules make them agree with each other and with torch's kernels bit for bit: ``x`` is multiplied by the float32
reciprocal of the scale, then rounded half to even; the zero point is added after the rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qlightning import blocks
from qlightning.errors import CalibrationError, ConfigError, NonFiniteError
from qlightning.qscheme import QScheme
from qlightning.single import are_single, float32

SCALE_MIN = 2.0**-60
"""The smallest scale, for ranges of zero width: the product of two, as kernels compute it, still has a reciprocal."""


def calculate_qparams(min_val: Tensor, max_val: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor]:
    """Returns the scale and the zero point of the grid that covers a range.

    The range is first extended to contain zero, which every grid represents exactly. With
    ``levels = quant_max - quant_min``:

    - affine: ``scale = (max - min) / levels``, ``zero_point = quant_min - round(min / scale)``, clamped to the grid;
    - symmetric: ``scale = max(|min|, |max|) / (levels / 2)``; the zero point is 0 for signed codes, the upper middle of
      the grid for unsigned ones (128 for 8 bits).

    For full 8-bit grids this equals torch.ao's observers bit for bit (with their ``eps`` as `SCALE_MIN`). A scale is at
    least `SCALE_MIN`, and finite for any finite range. While torch.compile traces it, a range is taken as it
    is: whether it is one would be a branch.

    Args:
        min_val: The lowest values, float32: 0-d, or 1-d with one value a channel.
        max_val: The highest values, of the same shape.
        scheme: The grid.

    Returns:
        The scale (float32) and the zero point (int32), shaped and placed as the range.

    Raises:
        NonFiniteError: A bound is NaN or infinite.
        CalibrationError: A minimum is above its maximum, which means that nothing was observed.

    Examples:
        >>> scale, zero_point = calculate_qparams(torch.tensor(0.0), torch.tensor(2.55), QScheme(signed=False))
        >>> round(scale.item(), 4), zero_point.item()
        (0.01, 0)
    """
    if are_single(min_val, max_val):
        single = _single_qparams(min_val.item(), max_val.item(), scheme)
        if single is not None:
            scale = torch.scalar_tensor(single[0], dtype=torch.float32, device="cpu")
            return scale, torch.scalar_tensor(single[1], dtype=torch.int32, device="cpu")
    ordinary = False
    if not torch.compiler.is_compiling():
        # One number tells that all is well; what is not, or beyond float32, is looked at closely.
        narrowest, widest = (max_val - min_val).aminmax()
        ordinary = narrowest.item() >= 0 and widest.item() < math.inf
        if not ordinary:
            _check_range(min_val, max_val)
    levels = float(scheme.quant_max - scheme.quant_min)
    if scheme.symmetric:
        scale = symmetric_scale(min_val, max_val, scheme)
        return scale, torch.full_like(scale, scheme.middle, dtype=torch.int32)
    low, high = min_val.clamp(max=0.0), max_val.clamp(min=0.0)
    scale = (high - low) / levels
    if not ordinary:
        # The span of a huge range is no float32, its quotient is. (Dividing first is one bit off torch.ao elsewhere.)
        scale = torch.where(scale.isinf(), high / levels - low / levels, scale)
    scale = scale.clamp(min=SCALE_MIN)
    zero_point = scheme.quant_min - torch.round(low / scale).to(torch.int32)
    return scale, zero_point.clamp(scheme.quant_min, scheme.quant_max)


def symmetric_scale(min_val: Tensor, max_val: Tensor, scheme: QScheme) -> Tensor:
    """Returns the scale of the symmetric grid that covers a range, of which nothing is checked."""
    levels = float(scheme.quant_max - scheme.quant_min)
    return torch.maximum(-min_val, max_val).div_(levels / 2).clamp_(min=SCALE_MIN)


def is_inside(lowest: Tensor, highest: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> bool:
    """Whether values between two bounds are surely not clamped; it costs nothing, so only single numbers are looked at.

    Args:
        lowest: The lowest value.
        highest: The highest.
        scale: Of the grid.
        zero_point: Likewise.
        scheme: Likewise.
    """
    if not are_single(lowest, highest, scale):
        return False
    step, zero = scale.item(), zero_point.item()
    # Rounding moves a code by less than 0.01 beside a half.
    reach = (scheme.quant_min - zero - 0.49) * step, (scheme.quant_max - zero + 0.49) * step
    return bool(reach[0] <= lowest.item() and highest.item() <= reach[1])


def _single_qparams(low: float, high: float, scheme: QScheme) -> tuple[float, int] | None:
    """Scale and zero point of one ordinary range; None for any other, which has to be looked at."""
    if not 0 <= float32(high - low) < math.inf:
        return None
    low, high = min(low, 0.0), max(high, 0.0)
    levels = float(scheme.quant_max - scheme.quant_min)
    if scheme.symmetric:
        return max(float32(max(-low, high) / (levels / 2)), SCALE_MIN), scheme.middle
    scale = float32(float32(high - low) / levels)
    if math.isinf(scale):
        return None
    scale = max(scale, SCALE_MIN)
    zero_point = scheme.quant_min - round(float32(low / scale))
    return scale, min(max(zero_point, scheme.quant_min), scheme.quant_max)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> Tensor:
    """Returns the codes of ``x``: ``clamp(round(x / scale) + zero_point, quant_min, quant_max)``, half rounded to even.

    Args:
        x: Floating point values, of any shape.
        scale: 0-d, or 1-d with one value for each slice along ``scheme.axis``.
        zero_point: As the scale.
        scheme: The grid.

    Returns:
        A tensor shaped as ``x`` of ``scheme.dtype``. Infinities saturate; the code of NaN is undefined.

    Raises:
        ConfigError: The scale does not fit ``x`` along the axis, or ``x`` has no such axis.

    Examples:
        >>> quantize(torch.tensor([-1.0, 0.25, 9.0]), torch.tensor(0.5), torch.tensor(0), QScheme(bits=4))
        tensor([-2,  0,  7], dtype=torch.int8)
    """
    scale, zero_point = _aligned(scale, x, scheme.axis), _aligned(zero_point, x, scheme.axis)
    codes = x.float() * scale.reciprocal()
    return codes.round_().add_(zero_point).clamp_(scheme.quant_min, scheme.quant_max).to(scheme.dtype)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None = None) -> Tensor:
    """Returns the float32 values that codes stand for: ``(codes - zero_point) * scale``.

    Args:
        codes: Integer codes, of any shape.
        scale: 0-d, or 1-d with one value for each slice along ``axis``.
        zero_point: As the scale.
        axis: The dimension of the channels; None for per-tensor codes.

    Raises:
        ConfigError: The scale does not fit the codes along the axis, or they have no such axis.

    Examples:
        >>> dequantize(torch.tensor([-2, 0, 7], dtype=torch.int8), torch.tensor(0.5), torch.tensor(0))
        tensor([-1.0000,  0.0000,  3.5000])
    """
    scale, zero_point = _aligned(scale, codes, axis), _aligned(zero_point, codes, axis)
    return (codes.float() - zero_point).mul_(scale)


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    scheme: QScheme,
    inside: bool = False,
) -> Tensor:
    """Returns ``x`` rounded to the grid, still in floating point: ``dequantize(quantize(x))`` bit for bit.

    Its gradient is the straight-through estimator: it passes where the code lies in the grid, and is zero where it was
    clamped. The backward keeps at most one bool an element, and on CPU nothing where nothing was clamped. Values and
    gradients equal those of torch's ``fake_quantize_per_tensor_affine`` and ``fake_quantize_per_channel_affine``, whose
    CPU kernels take several times as long, and whose codes wrap beyond int64: here huge values saturate and NaN stays
    NaN.

    Args:
        x: Floating point values, of any shape and memory format; left as they are.
        scale: 0-d, or 1-d with one value for each slice along ``scheme.axis``. It gets no gradient.
        zero_point: As the scale.
        scheme: The grid.
        inside: It is known that nothing will be clamped, which spares a pass.

    Returns:
        A tensor with the shape, memory format and dtype of ``x``. Low-precision inputs are computed in float32.

    Raises:
        ConfigError: The scale does not fit ``x`` along the axis, or ``x`` has no such axis.

    Examples:
        >>> x = torch.tensor([-9.0, 0.3, 0.8], requires_grad=True)
        >>> y = fake_quantize(x, torch.tensor(0.5), torch.tensor(0), QScheme(bits=4))
        >>> y.tolist()
        [-4.0, 0.5, 1.0]
        >>> y.sum().backward()
        >>> x.grad
        tensor([0., 1., 1.])
    """
    scale = _aligned(scale, x, scheme.axis)
    if x.is_cpu and type(x) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling():
        if zero_point.numel() > 1 and not (scheme.symmetric and scheme.signed):
            zero_point = _aligned(zero_point, x, scheme.axis)
        return blocks.fake_quantize(x, scale, zero_point, scheme, inside)
    zero_point = _aligned(zero_point, x, scheme.axis)
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x, scale, zero_point, scheme)
    return _round_trip(x.detach(), scale, zero_point, scheme, with_mask=False)[0]


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Returns the signal to quantization noise ratio in dB: ``10 log10(sum(ref ** 2) / sum((ref - other) ** 2))``.

    Computed in float64. Infinite where the tensors are equal; 6 dB are about one bit.

    Args:
        reference: The signal.
        other: The same signal with noise, of the same shape.

    Raises:
        ConfigError: The shapes differ.

    Examples:
        >>> round(sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])), 6)
        20.0
    """
    if reference.shape != other.shape:
        raise ConfigError(f"sqnr of shapes {tuple(reference.shape)} and {tuple(other.shape)}: they must be equal.")
    exact = reference.detach().double()
    noise = (exact - other.detach().double()).square().sum().item()
    signal = exact.square().sum().item()
    return decibels(signal, noise)


def decibels(signal: float, noise: float) -> float:
    """The ratio of two powers in dB: infinite where there is no noise, minus infinity for noise without a signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


class _StraightThrough(torch.autograd.Function):
    """Fake-quantize with the gradient of the identity inside the grid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> Tensor:
        out, mask = _round_trip(x, scale, zero_point, scheme, with_mask=True)
        ctx.save_for_backward(mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask, None, None, None


def _round_trip(
    x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme, with_mask: bool
) -> tuple[Tensor, Tensor | None]:
    """Fake-quantizes ``x``; on demand it tells, too, which codes lie in the grid."""
    # The zero point of a symmetric signed grid is 0: adding the number spares a pass, and still turns -0.0 into 0.0.
    centred = scheme.symmetric and scheme.signed
    codes = (x.float() * scale.reciprocal()).round_().add_(0.0 if centred else zero_point)
    clamped = codes.clamp(scheme.quant_min, scheme.quant_max)
    mask = clamped == codes if with_mask else None
    if not centred:
        clamped.sub_(zero_point)
    return clamped.mul_(scale).to(x.dtype), mask


def _aligned(qparam: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Returns a scale or zero point as float32, shaped to broadcast over ``x``."""
    if axis is None:
        if qparam.ndim == 0 and qparam.dtype is torch.float32 and not qparam.requires_grad:
            return qparam
        if qparam.numel() != 1:
            raise ConfigError(
                f"A per-tensor scheme takes one scale and zero point, got {qparam.numel()}. Set its axis."
            )
        return _as_constant(qparam).reshape(())
    if not -x.ndim <= axis < x.ndim:
        raise ConfigError(f"QScheme axis={axis}: a tensor of shape {tuple(x.shape)} has no such dimension.")
    if qparam.numel() not in (1, x.shape[axis]):
        raise ConfigError(
            f"{qparam.numel()} scales or zero points for {x.shape[axis]} channels (axis {axis} of {tuple(x.shape)})."
        )
    shape = [1] * x.ndim
    shape[axis] = -1
    return _as_constant(qparam).reshape(shape)


def _as_constant(qparam: Tensor) -> Tensor:
    return qparam.detach().to(torch.float32) if qparam.requires_grad or qparam.dtype != torch.float32 else qparam


def _check_range(min_val: Tensor, max_val: Tensor) -> None:
    """Says what is wrong with a range, if anything is."""
    unseen = min_val > max_val
    bounds = torch.stack(torch.broadcast_tensors(min_val, max_val))
    if (bounds.isnan() | (bounds.isinf() & ~unseen)).any():
        raise NonFiniteError(
            f"NaN or infinity in the range to quantize (minimum {_shown(min_val)}, maximum {_shown(max_val)}). "
            "Look for the layer that made it."
        )
    if not unseen.any():
        return
    where = f" in {int(unseen.sum())} of {unseen.numel()} channels" if unseen.ndim else ""
    raise CalibrationError(f"No range{where}: nothing was observed. Run batches through the observer first.")


def _shown(bound: Tensor) -> str:
    return str(bound.tolist() if bound.numel() <= 4 else f"of {bound.numel()} channels")
