"""The integer weight of a layer, with the BatchNorm behind it folded in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qlightning.fake_quantize import WeightFakeQuantize
from qlightning.functional import quantize
from qlightning.nn.qat import bn_factor, grid_scales_with_channel
from qlightning.nn.quantized import QuantizedLayer


def quantized_layer(
    weight: Tensor, bias: Tensor | None, fq: WeightFakeQuantize, bn: Any | None, kind: str = ""
) -> QuantizedLayer:
    """Quantizes a layer's weight as its fake-quantizer does, and folds the BatchNorm behind it in.

    With f = gamma / sqrt(running_var + eps): weight * f and (bias - running_mean) * f + beta. Where the grid scales
    with the channel, f goes into its scale, and its sign into the codes; else it is weight * f that is on the grid.

    Args:
        weight: The float weight, in the layer's layout.
        bias: float (out,), or None.
        fq: The fake-quantizer of the weight.
        bn: The BatchNorm, or None.
        kind: The type of the layer, for the report.
    """
    fq = fq.observed_on(weight, None if bn is None or grid_scales_with_channel(fq.scheme) else bn_factor(bn))
    w = fq.to_output_first(weight.detach().float())
    channels = w.shape[0]
    scale, zero_point = fq.scale.detach().clone(), fq.zero_point.detach().clone()
    if scale.dim() == 0:
        scale, zero_point = scale.repeat(channels), zero_point.repeat(channels)
    if bn is None:
        codes = quantize(w, fq.scale, fq.zero_point, fq.scheme)
        new_bias = None if bias is None else bias.detach().float().clone()
    else:
        factor = bn_factor(bn)
        gamma_is_zero = torch.zeros_like(factor, dtype=torch.bool) if bn.weight is None else bn.weight == 0
        shaped = factor.view(-1, *[1] * (w.dim() - 1))
        if grid_scales_with_channel(fq.scheme):
            codes = quantize(w, fq.scale, fq.zero_point, fq.scheme) * shaped.sign().to(torch.int8)
            scale = scale * factor.abs()
        else:
            codes = quantize(w * shaped, fq.scale, fq.zero_point, fq.scheme)
        if bool(gamma_is_zero.any()):
            codes[gamma_is_zero] = zero_point[gamma_is_zero].to(codes.dtype).view(-1, *[1] * (w.dim() - 1))
        mean = bn.running_mean.float()
        start = -mean if bias is None else bias.detach().float() - mean
        new_bias = start * factor.masked_fill(gamma_is_zero, 0.0)
        if bn.bias is not None:
            new_bias = new_bias + bn.bias.detach().float()
    new_bias = None if new_bias is None else new_bias.cpu()
    return QuantizedLayer(
        codes.cpu(), scale.cpu(), zero_point.cpu(), new_bias, fq.transposed_groups, kind, str(fq.scheme)
    )
