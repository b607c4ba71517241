"""Normalization of quantized tensors: computed on their values, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from qlightning.functional.operands import check, exact
from qlightning.functional.target import Grid, Target
from qlightning.tensor import QuantizedTensor


def batch_norm(
    x: QuantizedTensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """Batch normalization by given statistics, of (batch, channels, ...).

    Args:
        x: The activation.
        running_mean: float (channels,).
        running_var: float (channels,).
        weight: float (channels,), or None for ones.
        bias: float (channels,), or None for zeros.
        eps: Added to the variance.
        **grid: Of the result, and the backend.
    """
    check("batch_norm", x=x)
    mean, var, gamma, beta = (_double(t) for t in (running_mean, running_var, weight, bias))
    return Target.of("batch_norm", x, grid).round(F.batch_norm(exact(x), mean, var, gamma, beta, eps=eps))


def layer_norm(
    x: QuantizedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **grid: Unpack[Grid],
) -> QuantizedTensor:
    """Layer normalization over the last dimensions.

    Args:
        x: The activation.
        normalized_shape: The sizes of those dimensions.
        weight: float, of that shape, or None for ones.
        bias: float, of that shape, or None for zeros.
        eps: Added to the variance.
        **grid: Of the result, and the backend.
    """
    check("layer_norm", x=x)
    values = F.layer_norm(exact(x), list(normalized_shape), _double(weight), _double(bias), eps)
    return Target.of("layer_norm", x, grid).round(values)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float64)
