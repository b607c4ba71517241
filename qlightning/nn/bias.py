"""The bias of an int8 layer, which runtimes add to integer sums: BatchNorm folded in, and in steps of those sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qlightning.fake_quantize import FakeQuantize
from qlightning.nn.qat import QATLayer, bn_factor

SMALLEST_STEP = 1e-30  # in which a bias is counted: far from where float32 loses digits


def folded_bias(bias: Tensor | None, bn: Any | None) -> Tensor | None:
    """(bias - running_mean) * gamma / sqrt(running_var + eps) + beta, float32 (out,); None where there is neither."""
    start = None if bias is None else bias.detach().float()
    if bn is None:
        return start
    mean, factor = bn.running_mean.float(), bn_factor(bn)
    if bn.weight is not None:
        factor = factor.masked_fill(bn.weight.detach() == 0, 0.0)
    folded = (-mean if start is None else start - mean) * factor
    return folded if bn.bias is None else folded + bn.bias.detach().float()


def folded_factor(scale: Tensor, bn: Any | None, multiplier: Tensor | None) -> Tensor:
    """What folding multiplies the scales of a weight by, float32 (out,).

    Args:
        scale: float32 (out,), of the weight as it is.
        bn: The BatchNorm that folds into the layer; None for none.
        multiplier: What is in these scales already, float32 (out,); None for nothing.
    """
    factor = torch.ones_like(scale) if bn is None else bn_factor(bn)
    return factor if multiplier is None else factor / multiplier


def rounded_bias(bias: Tensor, step: Tensor) -> Tensor:
    """The multiple of ``step`` that is nearest, as int32 biases are in the steps of integer sums.

    Args:
        bias: float32 (out,).
        step: float32 (out,), above zero: input scale * weight scale. Where it is too small to count in, the bias stays.
    """
    return torch.where(step > SMALLEST_STEP, (bias / step).round() * step, bias)


class BiasRounding(nn.Identity):
    """Moves the result of a layer, in eval mode, by what its bias is rounded by in int8.

    It stands behind a layer, or behind the BatchNorm that folds into it, and passes its input on until both operands
    of the layer are on a grid. It has no state of its own.

    Args:
        layer: The layer.
        bn: The BatchNorm that folds into it; None for none.
        x: The fake-quantizer of its input.
    """

    def __init__(self, layer: QATLayer, bn: Any | None, x: FakeQuantize) -> None:
        super().__init__()
        self.of = (layer, bn, x)  # in a tuple: they have their own places in the model

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        shift = self.shift()
        if shift is None:
            return input
        layer = self.of[0]
        if isinstance(layer, nn.modules.conv._ConvNd):
            shift = shift.view(-1, *[1] * len(layer.kernel_size))
        return input + shift.to(input.dtype)

    @torch.no_grad()
    def shift(self) -> Tensor | None:
        """What is added, float32 (out,); None while nothing is rounded."""
        layer, bn, x = self.of
        weight = layer.weight_fake_quant
        active = all(fq.fake_quant_enabled and fq.observed and not fq.calibrating for fq in (x, weight))
        if not active or not self.rounds():
            return None
        bias = folded_bias(layer.bias, bn)
        if bias is None:
            return None
        scale = weight.scale.expand(bias.shape)
        scale = scale * folded_factor(scale, bn, layer.multiplier())
        shift = rounded_bias(bias, scale.abs() * x.scale) - bias
        return shift if bn is None or bn.weight is None else shift.masked_fill(bn.weight == 0, 0.0)

    def rounds(self) -> bool:
        """Whether sums have steps of one size a channel, and the BatchNorm folds into the layer."""
        layer, bn, x = self.of
        if x.scheme.per_channel:
            return False
        return bn is None or not isinstance(layer, nn.Linear) or x.seen_ndims == {2}
