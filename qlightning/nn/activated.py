"""An activation that clamps and the rounding of its result in one step, whose backward is one, too.

A gradient passes both where the input lies in one interval, so that the backward is one pass over the gradient and the
input, and the forward does not look for what is clipped. It keeps the input, or of large tensors a mask. (Tried for
Hardswish, Hardsigmoid and SiLU as well, which need a mask of what is clipped all the same: no faster.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from qlightning import blocks
from qlightning.affine import SCALE_MIN
from qlightning.fake_quantize import FakeQuantize
from qlightning.observers import MinMaxObserver, Observer
from qlightning.observers.base import all_finite, extremes_of
from qlightning.single import float32

_hardtanh_backward = torch.ops.aten.hardtanh_backward.default  # finding the overload takes longer than a small tensor
_hardtanh_backward_out = torch.ops.aten.hardtanh_backward.grad_input
_ZERO = torch.zeros((), device="cpu")
_ONE = torch.ones((), device="cpu")
MASKED_NUMEL = 2**22
"""From how many elements on a mask is kept instead of the input: then it is the memory that counts."""
_FLOAT32_MAX = torch.finfo(torch.float32).max


def activate_and_round(activation: nn.Module, fq: FakeQuantize, x: Tensor) -> Tensor:
    """Returns ``fq(activation(x))``, with the same gradients, in fewer passes.

    Only for float32 tensors on a CPU; what else modules do (hooks, other forwards) they do as ever. An activation that
    works in place may leave ``x`` as it is.
    """
    step = None if torch.compiler.is_compiling() else STEPS.get(type(activation))
    if step is not None and _is_plain(fq, x) and _run_forward_alone(activation, fq, fq.observer):
        rounded = step(activation, fq, x)
        if rounded is not None:
            return rounded
    as_ever: Tensor = fq(activation(x))
    return as_ever


def function_and_round(name: str, fq: FakeQuantize, x: Tensor) -> Tensor:
    """As :func:`activate_and_round`, for a function of torch: one of `FUNCTIONS`."""
    return activate_and_round(FUNCTIONS[name], fq, x)


def _is_plain(fq: FakeQuantize, x: Any) -> bool:
    """Whether a fake-quantizer would round a tensor as it does by default, with one scale."""
    if type(x) is not Tensor or x.dtype is not torch.float32 or not x.is_cpu or not x.numel():
        return False
    if type(fq) is not FakeQuantize or fq.scheme.axis is not None or not fq.scale.is_cpu:
        return False
    if getattr(type(fq.observer), "calculate_qparams", None) is not Observer.calculate_qparams:
        return False
    return fq.fake_quant_enabled and not fq.calibrating and (fq.observed or fq.follows())


def _run_forward_alone(*modules: nn.Module) -> bool:
    for m in modules:
        hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        if hooks or "forward" in m.__dict__:
            return False
    return not _has_any_global_hook()


@dataclass(frozen=True)
class _Interval:
    """What an activation that clamps, and the grid behind it, let through.

    Attributes:
        low: The lowest value; what is below becomes it.
        high: The highest, likewise.
        above: Gradients pass for values above this.
        below: And below this.
        scale: float32, 0-d: of the grid.
        step: The scale as a number.
    """

    low: float
    high: float
    above: float
    below: float
    scale: Tensor
    step: float

    def on_grid(self, lowest: int, highest: int) -> _Interval:
        """Narrows it to a grid, given the codes at its ends less the zero point."""
        low, high = -_last_of(-lowest, self.step), _last_of(highest, self.step)
        return replace(
            self,
            low=max(self.low, low),
            high=min(self.high, high),
            above=max(self.above, -_next(-low)),
            below=min(self.below, _next(high)),
        )

    def round(self, x: Tensor) -> Tensor:
        """Returns a tensor clamped and on the grid."""
        inverse = self.scale.reciprocal()
        if x.numel() <= blocks.BLOCK_NUMEL:
            return self._rounded(x.clamp(self.low, self.high), inverse)
        out = torch.empty_like(x)
        cut = blocks.Cut.of(x, self.scale)
        for given, result in zip(cut(x), cut(out), strict=True):
            self._rounded(torch.clamp(given, self.low, self.high, out=result), inverse)
        return out

    def _rounded(self, clamped: Tensor, inverse: Tensor) -> Tensor:
        codes = clamped.mul_(inverse).round_()
        return torch.add(_ZERO, codes, alpha=self.step, out=codes)  # zero turns -0.0 into 0.0


@lru_cache(maxsize=4096)
def _last_of(code: int, step: float) -> float:
    """The largest float32 that rounds to a code, from 0 up, as the kernels round; infinite where all are smaller."""
    inverse = float32(1.0 / step)
    x = float32(min((code + 0.5) * step, _FLOAT32_MAX))
    while round(float32(x * inverse)) > code:
        x = -_next(-x)
    while x < _FLOAT32_MAX and round(float32(_next(x) * inverse)) <= code:
        x = _next(x)
    return x if x < _FLOAT32_MAX else math.inf


def _next(x: float) -> float:
    """The next larger float32, of any but zero and NaN."""
    if x == math.inf:
        return x
    (bits,) = unpack("<i", pack("<f", x))
    (following,) = unpack("<f", pack("<i", bits + (1 if x > 0 else -1)))
    return float(following)


class _Clamped(torch.autograd.Function):
    """Keeps the input alone: gradients pass in an interval of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, interval: _Interval) -> Tensor:
        ctx.save_for_backward(x)
        ctx.interval = interval
        return interval.round(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad: Tensor = _hardtanh_backward(grads[0], x, ctx.interval.above, ctx.interval.below)
        return grad, None


class _Masked(torch.autograd.Function):
    """Keeps a bool an element, a quarter of the input: for large tensors, which are most of the memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, interval: _Interval) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool)
        cut = blocks.Cut.of(x, _ZERO)
        for given, passes in zip(cut(x), cut(mask), strict=True):
            passes.copy_(_hardtanh_backward(_ONE, given, interval.above, interval.below))
        ctx.save_for_backward(mask)
        return interval.round(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        grad = grads[0]
        if torch.is_grad_enabled() or grad.stride() != mask.stride():
            masked: Tensor = _hardtanh_backward(grad, blocks.as_numbers(mask, grad.dtype), 0.5, 2.0)
            return masked, None
        masked, cut = torch.empty_like(grad), blocks.Cut.of(mask, _ZERO)
        for given, passes, result in zip(cut(grad), cut(mask), cut(masked), strict=True):
            numbers = blocks.as_numbers(passes, grad.dtype)
            _hardtanh_backward_out(given, numbers, 0.5, 2.0, grad_input=result)
        return masked, None


def _clamp_and_round(fq: FakeQuantize, x: Tensor, low: float, high: float) -> Tensor | None:
    """The step of an activation that clamps to an interval with 0; None where it has to be taken as ever."""
    observer, inside = fq.observer, False
    if not blocks.in_memory_order(x).is_contiguous():
        return None
    if not fq.follows():
        if not SCALE_MIN <= fq.scale.item() < math.inf:  # loaded from elsewhere
            return None
    else:
        if not (isinstance(observer, MinMaxObserver) and observer.needs_extremes_alone()):
            return None
        lowest, highest = (bound.clamp_(low, high) for bound in extremes_of(x.detach(), None))
        if not all_finite(lowest, highest):
            return None
        inside = fq.follow_extremes(x, lowest, highest)
    step, zero = fq.scale.item(), int(fq.zero_point)
    interval = _Interval(low, high, low, high, fq.scale, step)
    if not inside:
        interval = interval.on_grid(fq.scheme.quant_min - zero, fq.scheme.quant_max - zero)
    if torch.is_grad_enabled() and x.requires_grad:
        function = _Masked if x.numel() >= MASKED_NUMEL else _Clamped
        result: Tensor = function.apply(x, interval)
        return result
    return interval.round(x.detach())


def _hardtanh(m: Any, fq: FakeQuantize, x: Tensor) -> Tensor | None:
    low, high = float32(m.min_val), float32(m.max_val)
    return _clamp_and_round(fq, x, low, high) if low <= 0 <= high else None


STEPS: dict[type[nn.Module], Callable[[Any, FakeQuantize, Tensor], Tensor | None]] = {
    nn.ReLU: lambda m, fq, x: _clamp_and_round(fq, x, 0.0, math.inf),
    nn.ReLU6: _hardtanh,
    nn.Hardtanh: _hardtanh,
}
"""The activations that have a step, by their class; a step gives None, and does nothing, where it cannot be taken."""

FUNCTIONS: dict[str, nn.Module] = {"relu": nn.ReLU(), "relu6": nn.ReLU6()}
"""The functions of torch that have one, by their names without trailing underscores."""
