"""What the BatchNorm before a layer says of the layer's input: a normal distribution for each channel, clipped."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from qlightning.graph.patterns import can_fold
from qlightning.vocabulary import Kind, Vocabulary

aten = torch.ops.aten


def mean_before(layer: fx.Node, ops: Vocabulary) -> Tensor | None:
    """The mean of each channel of a layer's input, by the BatchNorm whose result, clipped, is that input.

    Args:
        layer: The call of a layer, in a prepared graph.
        ops: The vocabulary of the graph.

    Returns:
        float32 (channels,); None where anything else stands between.
    """
    low, high = -math.inf, math.inf
    node = ops[layer].inputs[0]
    while ops[node].kind in (Kind.FAKE_QUANT, Kind.ACTIVATION) or ops.is_identity(node):
        if ops[node].kind is Kind.ACTIVATION:
            target, args, _ = ops.elementwise(node)
            if target is aten.relu.default:
                low, high = max(low, 0.0), max(high, 0.0)
            elif target is aten.hardtanh.default and low == -math.inf and high == math.inf:
                low, high = args
            else:
                return None
        node = ops[node].inputs[0]
    bn: Any = ops.module(node)
    if not can_fold(node, ops) or bn.weight is None or bn.bias is None:
        return None
    return clipped_normal_mean(bn.bias.detach().float(), bn.weight.detach().float().abs(), low, high)


def clipped_normal_mean(mean: Tensor, std: Tensor, low: float, high: float) -> Tensor:
    """The mean of a normal distribution whose values are clamped to a range, float32.

    With a = (low - mean) / std, b = (high - mean) / std, and the density and the distribution function of the standard
    normal: low * cdf(a) + high * (1 - cdf(b)) + mean * (cdf(b) - cdf(a)) + std * (density(a) - density(b)). Appendix C
    of Nagel et al. 2019 has the case of the ReLU.

    Args:
        mean: Of the distribution before the clamp.
        std: Likewise; may be 0.
        low: May be minus infinity.
        high: May be infinity.

    Examples:
        >>> clipped_normal_mean(torch.zeros(1), torch.ones(1), 0.0, math.inf)
        tensor([0.3989])
    """
    middle, width = mean.double(), std.double().clamp_min(1e-30)
    a, b = (low - middle) / width, (high - middle) / width
    below, above = torch.special.ndtr(a), torch.special.ndtr(-b)
    density = [torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) for x in (a, b)]
    inside = middle * (1 - below - above) + width * (density[0] - density[1])
    ends = (low * below if math.isfinite(low) else 0.0) + (high * above if math.isfinite(high) else 0.0)
    return (inside + ends).float()
