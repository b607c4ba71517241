"""The integer weight of a layer, with the BatchNorm behind it folded in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qlightning.affine import SCALE_MIN, quantize
from qlightning.fake_quantize import WeightFakeQuantize
from qlightning.nn.bias import folded_bias, folded_factor, rounded_bias
from qlightning.nn.quantized import QuantizedLayer
from qlightning.qscheme import QScheme


def quantized_layer(
    weight: Tensor,
    bias: Tensor | None,
    fq: WeightFakeQuantize,
    bn: Any | None,
    kind: str = "",
    multiplier: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> QuantizedLayer:
    """Quantizes a layer's weight as its fake-quantizer does, folds the BatchNorm behind it in, and rounds the bias.

    With f = gamma / sqrt(running_var + eps): weight * f and (bias - running_mean) * f + beta. It is weight * multiplier
    that is on the grid, as in training; f / multiplier goes into the scales of the channels, its sign into the codes.

    Args:
        weight: The float weight, in the layer's layout.
        bias: float (out,), or None.
        fq: The fake-quantizer of the weight.
        bn: The BatchNorm, or None.
        kind: The type of the layer, for the report.
        multiplier: float32 (out,): what the fake-quantizer was given beside the weight; None for nothing.
        x_scale: The scale of the input, by which the bias is rounded to steps of the integer sums; None: it is not.
    """
    fq = fq.observed_on(weight, multiplier)
    w = fq.to_output_first(weight.detach().float())
    channels = w.shape[0]
    scale, zero_point = fq.scale.detach().clone(), fq.zero_point.detach().clone()
    if scale.dim() == 0:
        scale, zero_point = scale.repeat(channels), zero_point.repeat(channels)
    if multiplier is None:
        codes = quantize(w, fq.scale, fq.zero_point, fq.scheme)
    else:
        codes = quantize(w * _shaped(multiplier, w), fq.scale, fq.zero_point, fq.scheme)
    factor = folded_factor(scale, bn, multiplier)
    codes, scale, zero_point = _scaled(codes, scale, zero_point, factor, fq.scheme)
    new_bias = folded_bias(bias, bn)
    # Where gamma is zero, or as good as, all of the channel is, whatever its scale is said to be.
    vanished = (scale == 0) | (bn.weight.detach() == 0 if bn is not None and bn.weight is not None else False)
    if bool(vanished.any()):
        codes[vanished] = _shaped(zero_point[vanished].to(codes.dtype), w)
        scale[vanished] = 1.0
    if new_bias is not None and x_scale is not None:
        codes, scale = _with_room(codes, scale, zero_point, new_bias.abs() / x_scale)
        new_bias = rounded_bias(new_bias, scale.abs() * x_scale)
    new_bias = None if new_bias is None else new_bias.cpu()
    scheme = replace(fq.scheme, axis=0)
    return QuantizedLayer(codes.cpu(), scale.cpu(), zero_point.cpu(), new_bias, fq.transposed_groups, kind, scheme)


def _shaped(channels: Tensor, weight: Tensor) -> Tensor:
    """A value a channel, as it multiplies a weight (out, ...)."""
    return channels.view(-1, *[1] * (weight.dim() - 1))


def _with_room(codes: Tensor, scale: Tensor, zero_point: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales with which the bias fits the 32 bits of integer sums.

    A channel of zeros has any scale: it gets one in which the bias can be counted in float32. One that is small beside
    its bias gets a larger one; that takes at most 2**-31 of the bias from a weight, for each step of its input.

    Args:
        codes: (out, ...).
        scale: (out,).
        zero_point: (out,).
        bias: Its size in steps of the input, (out,).
    """
    zero = _shaped(zero_point, codes)
    is_empty = (codes == zero).flatten(1).all(1)
    least = (bias * torch.where(is_empty, 2.0**-22, 2.0**-30)).clamp_min(SCALE_MIN)
    grows = is_empty | (scale.abs() < least)
    if not bool(grows.any()):
        return codes, scale
    new = torch.where(grows, least.copysign(scale), scale)
    fewer = ((codes - zero).double() * _shaped(scale.double() / new.double(), codes)).round() + zero
    return torch.where(_shaped(grows, codes), fewer.to(codes.dtype), codes), new


def _scaled(
    codes: Tensor, scale: Tensor, zero_point: Tensor, factor: Tensor, scheme: QScheme
) -> tuple[Tensor, Tensor, Tensor]:
    """A quantized weight times a factor a channel, exactly: codes, scale and zero point.

    The sign of a negative factor goes into the codes, and so that they stay on the grid: a symmetric signed one is its
    own mirror image around zero, any other around its middle. It stays in the scale where a channel has the one code
    of a symmetric grid that has no opposite (-128).
    """
    mirror = 0 if scheme.symmetric and scheme.signed else scheme.quant_min + scheme.quant_max
    opposite = mirror - codes.int()
    has_room = (opposite <= scheme.quant_max).flatten(1).all(1)
    flips = (factor < 0) & has_room
    codes = torch.where(_shaped(flips, codes), opposite.to(codes.dtype), codes)
    return codes, scale * torch.where(flips, -factor, factor), torch.where(flips, mirror - zero_point, zero_point)
