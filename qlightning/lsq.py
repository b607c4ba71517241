"""Learned step size quantization: fake-quantize with gradients for the grid, and who has such a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qlightning.affine import fake_quantize
from qlightning.blocks import in_memory_order
from qlightning.errors import ConfigError
from qlightning.qscheme import QScheme

# In steps: what lies right on an end of the range, as zeros behind a ReLU do, lies inside.
_EDGE = 2.0**-10


@dataclass(frozen=True)
class LearnedScales:
    """Which scales are learned by gradient, along with the weights of the net, in quantization-aware training.

    Args:
        activations: Those of activations. Where an affine scheme has a range with negative values (Hardswish, SiLU),
            its lower end is learned, too; the zero point stays on the grid.
        weights: Those of weights.
        lr_factor: The learning rate of scales, as a multiple of that of the weights.

    Raises:
        ConfigError: None of the two, or a rate that is no number above zero.

    Examples:
        >>> LearnedScales.of("weights")
        LearnedScales(activations=False, weights=True, lr_factor=1.0)
    """

    activations: bool = True
    weights: bool = True
    lr_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("activations", "weights"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"LearnedScales {name}={getattr(self, name)!r}: True or False is possible.")
        if not (self.activations or self.weights):
            raise ConfigError("LearnedScales(activations=False, weights=False) learns nothing: write learned=None.")
        factor = self.lr_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ConfigError(f"LearnedScales lr_factor={factor!r}: a number above zero is needed.")

    @classmethod
    def of(cls, value: Any) -> LearnedScales | None:
        """Reads what stands in a QConfig: itself, True or "lsq" (both), "activations", "weights", None or False.

        Raises:
            ConfigError: It is none of these.
        """
        if isinstance(value, cls):
            return value
        if value is None or value is False:
            return None
        if value is True or value == "lsq":
            return cls()
        if value in ("activations", "weights"):
            return cls(activations=value == "activations", weights=value == "weights")
        raise ConfigError(
            f"learned={value!r}: a LearnedScales, True or 'lsq' (scales of activations and weights), 'activations', "
            "'weights', or None is possible."
        )


def learned_fake_quantize(
    x: Tensor,
    step: Tensor,
    offset: Tensor | None,
    scale: Tensor,
    zero_point: Tensor,
    scheme: QScheme,
    gradient_scale: float,
) -> Tensor:
    """Returns what `qlightning.affine.fake_quantize` does, and lets gradients reach the grid.

    With v = x / s, codes n to p and the zero point z (Esser et al., Learned Step Size Quantization, 2020; Bhalgat et
    al., LSQ+, 2020):

    - the gradient of ``x`` passes inside the range of the grid, and is 0 beyond (up to half a step earlier than with
      `fake_quantize`, as the papers have it);
    - that of the scale is ``round(v) - v`` inside, ``n - z`` below and ``p - z`` above; where the lower end ``o = (n -
      z) s`` is learned, too, 0 below and ``p - n`` above;
    - that of the lower end is 0 inside and 1 outside; while it is 0 it stays, as ranges of values that are never
      negative do.

    Both of the grid's are multiplied by ``gradient_scale``.

    Args:
        x: Floating point values.
        step: float32, the parameter behind the scale: 0-d, or one for each slice along ``scheme.axis``.
        offset: float32 0-d, the parameter behind the lower end; None where the zero point stays.
        scale: The scale, as of ``step``; kept for the backward, so not to be changed in place before it.
        zero_point: int32, likewise as of ``offset``.
        scheme: The grid.
        gradient_scale: See :func:`gradient_scale`.

    Examples:
        >>> x, step = torch.tensor([-0.4, 0.6, 9.0]), torch.tensor(1.0, requires_grad=True)
        >>> grid = step.detach(), torch.tensor(0)
        >>> y = learned_fake_quantize(x, step, None, *grid, QScheme(bits=2), gradient_scale=1.0)
        >>> y.tolist()
        [0.0, 1.0, 1.0]
        >>> y.sum().backward()
        >>> round(step.grad.item(), 4)  # 0.4 and 0.4 inside, 1 above
        1.8
    """
    if not torch.is_grad_enabled():
        return fake_quantize(x, scale, zero_point, scheme)
    result: Tensor = _Learned.apply(x, step, offset, scale, zero_point, scheme, gradient_scale)
    return result


def gradient_scale(elements: int, scheme: QScheme) -> float:
    """1 / sqrt(N Qp), so that a scale moves, relative to its size, about as much as the weights do (Esser, 2.2).

    Args:
        elements: N, how many elements share the scale: of a weight, or of one sample of an activation.
        scheme: The grid, with Qp codes above its zero point (of an affine one above its lowest code).
    """
    start = scheme.middle if scheme.symmetric else scheme.quant_min
    return 1 / math.sqrt(max(1, elements) * (scheme.quant_max - start))


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        step: Tensor,
        offset: Tensor | None,
        scale: Tensor,
        zero_point: Tensor,
        scheme: QScheme,
        factor: float,
    ) -> Tensor:
        out = fake_quantize(x, scale, zero_point, scheme)
        ctx.save_for_backward(x, out, scale, zero_point, None if offset is None else offset.detach().clone())
        ctx.scheme, ctx.factor = scheme, factor
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, out, scale, zero_point, offset = ctx.saved_tensors
        scheme: QScheme = ctx.scheme
        (grad,) = grads
        if grad.stride() != x.stride():
            grad = torch.empty_like(x).copy_(grad)
        inside = _inside(grad, x, scale, zero_point, scheme)
        if x.dtype is not torch.float32:  # codes times a scale have more digits than x
            exact = x.float()
            out, x = fake_quantize(exact, scale, zero_point, scheme), exact
        sums = _Sums(scheme.axis)
        full, inner = grad.float(), inside.float()
        total = sums.inner(inner, out - x) + (sums.inner(full, out) - sums.inner(inner, out))
        grad_offset = None
        if offset is not None:
            beyond = sums.of(full) - sums.of(inner)
            total = total - (scheme.quant_min - zero_point) * scale * beyond
            grad_offset = torch.where(offset < 0, beyond, 0.0) * ctx.factor
        return inside, (total / scale).reshape(scale.shape) * ctx.factor, grad_offset, None, None, None, None


def _inside(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> Tensor:
    """The gradient where ``x`` lies between the lowest and the highest value of the grid, 0 elsewhere."""
    low, high = scheme.quant_min - zero_point - _EDGE, scheme.quant_max - zero_point + _EDGE
    if x.is_cpu and scale.ndim == 0 and not torch.compiler.is_compiling():
        # The one masking kernel on CPU that is vectorised, and needs no mask.
        return torch.ops.aten.hardtanh_backward(grad, x, (low * scale).item(), (high * scale).item())
    shape = [1] * x.ndim
    if scale.ndim:
        assert scheme.axis is not None
        shape[scheme.axis] = -1
    steps = x.float() * scale.reciprocal().reshape(shape)
    return grad * ((steps > low.reshape(shape)) & (steps < high.reshape(shape)))


class _Sums:
    """Sums over all elements that share a scale."""

    def __init__(self, axis: int | None) -> None:
        self._axis = axis

    def of(self, x: Tensor) -> Tensor:
        """The sum."""
        if self._axis is None:
            return x.sum()
        rest = [dim for dim in range(x.ndim) if dim != self._axis % x.ndim]
        return x.sum(rest) if rest else x

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum of products."""
        if self._axis is None and a.stride() == b.stride():
            a, b = in_memory_order(a), in_memory_order(b)
            if a.is_contiguous() and b.is_contiguous():
                return torch.dot(a.view(-1), b.view(-1))
        return self.of(a * b)
