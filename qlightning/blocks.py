"""Fake-quantize on CPU: in blocks that stay in the cache, and with a mask only where something was clipped.

PyTorch's own CPU kernels for this are not vectorised, nor are its comparisons that make bools and its products with
these. What is used here is: a pass each for product, rounding and scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qlightning.qscheme import QScheme

BLOCK_NUMEL = 2**16
"""Elements worked on at a time on CPU, so that the passes over them stay in the cache (2x on tensors of 10 million)."""

_ZERO = torch.zeros((), device="cpu")


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme, inside: bool = False) -> Tensor:
    """Returns ``x`` on the grid, with straight-through gradients; the maths of `qlightning.affine.fake_quantize`.

    The backward keeps one bool for each element of the blocks in which something was clipped, and nothing else.

    Args:
        x: Floating point values on a CPU.
        scale: float32, shaped to broadcast over ``x``; with 0 dimensions per tensor.
        zero_point: As the scale, or one for all.
        scheme: The grid.
        inside: It is known that nothing will be clipped.
    """
    zero: Any = zero_point
    if scheme.symmetric and scheme.signed:
        zero = 0
    elif zero_point.numel() == 1:
        zero = int(zero_point)
    step = scale.item() if scale.numel() == 1 else None
    grid = _Grid(scale, step, scheme.quant_min - zero, scheme.quant_max - zero, inside)
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x, grid)
    return _round_trip(x.detach(), grid, None)[0]


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bools as zeros and ones, by way of bytes: the conversion of these is vectorised."""
    return mask.view(torch.uint8).to(dtype)


@dataclass
class _Grid:
    """A grid in the form that the passes take.

    Attributes:
        scale: float32, 0-d or shaped to broadcast over the tensor.
        step: The scale as a number, where there is one only.
        low: The lowest code less the zero point: a number, or a tensor where zero points differ.
        high: The highest, likewise.
        inside: Nothing that will be rounded lies off the grid.
    """

    scale: Tensor
    step: float | None
    low: Any
    high: Any
    inside: bool


def in_memory_order(x: Tensor) -> Tensor:
    """Returns the dimensions of ``x`` in the order of its memory: a view, contiguous where it has no gaps."""
    if x.is_contiguous():
        return x
    return x.permute(_memory_order(x))


def _memory_order(x: Tensor) -> tuple[int, ...]:
    strides = x.stride()
    return tuple(sorted(range(x.ndim), key=lambda dim: -strides[dim]))


@dataclass
class Cut:
    """How tensors of one shape and memory layout are cut into blocks.

    Attributes:
        order: The dimensions in the order of memory; None for a contiguous tensor.
        shape: What they are viewed as: 1-d, (channels, elements of each), or the shape of the tensor.
        rows: How many of the first dimension make a block.
    """

    order: tuple[int, ...] | None
    shape: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, x: Tensor, scale: Tensor) -> Cut:
        """Cuts a tensor without gaps so that ``scale``, which broadcasts over it, can be cut along with it."""
        numel = x.numel()
        order = None if x.is_contiguous() else _memory_order(x)
        shape: tuple[int, ...]
        if scale.numel() == 1:
            shape = (numel,)
        elif scale.shape[0] > 1 and (order is None or order[0] == 0):
            shape = (x.shape[0], numel // x.shape[0])
        else:
            order, shape = None, tuple(x.shape)
        return cls(order, shape, max(1, BLOCK_NUMEL * shape[0] // max(numel, 1)))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """The blocks of a tensor of the same shape and layout, as views."""
        ordered = x if self.order is None else x.permute(self.order)
        viewed = ordered.view(self.shape)
        return (viewed,) if self.shape[0] <= self.rows else viewed.split(self.rows)

    def along(self, qparam: Any) -> tuple[Any, ...]:
        """What belongs to each block of a scale, or of a bound, shaped to broadcast over the block."""
        first = self.shape[0]
        blocks = (first + self.rows - 1) // self.rows
        if not isinstance(qparam, Tensor):
            return (qparam,) * blocks
        if qparam.numel() == 1:
            return (qparam.reshape(()),) * blocks
        if len(self.shape) == 2 and qparam.shape[0] == qparam.numel() == first:
            qparam = qparam.reshape(-1, 1)
        return qparam.split(self.rows) if qparam.shape[0] > 1 else (qparam,) * blocks


class _StraightThrough(torch.autograd.Function):
    """Fake-quantize with the gradient of the identity inside the grid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: _Grid) -> Tensor:
        masks: dict[int, Tensor] = {}
        out, ctx.cut = _round_trip(x, grid, masks)
        if masks:
            ctx.clipped, ctx.layout = tuple(masks), (out.shape, out.stride())
            ctx.save_for_backward(*masks.values())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        if not (masks := ctx.saved_tensors):
            return grad, None
        if ctx.cut is None:
            return grad * as_numbers(masks[0], grad.dtype), None
        clipped = dict(zip(ctx.clipped, masks, strict=True))
        shape, stride = ctx.layout
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted: no writing in place
            mask = torch.empty_strided(shape, stride, dtype=torch.bool).fill_(True)
            for index, part in enumerate(ctx.cut(mask)):
                if index in clipped:
                    part.copy_(clipped[index])
            return grad * mask, None
        if grad.stride() != stride:
            grad = torch.empty_strided(shape, stride, dtype=grad.dtype).copy_(grad)
        masked = torch.empty_like(grad)
        for index, (part, given) in enumerate(zip(ctx.cut(masked), ctx.cut(grad), strict=True)):
            if index in clipped:
                torch.mul(given, as_numbers(clipped[index], grad.dtype), out=part)
            else:
                part.copy_(given)
        return masked, None


def _round_trip(x: Tensor, grid: _Grid, masks: dict[int, Tensor] | None) -> tuple[Tensor, Cut | None]:
    """Fake-quantizes a tensor; ``masks`` gets which elements lie on the grid, for the blocks in which not all do."""
    inverse = grid.scale.reciprocal()
    if x.numel() <= BLOCK_NUMEL:
        codes = x * inverse if x.dtype is torch.float32 else x.float() * inverse
        mask = _round(
            codes, grid.scale, grid.step, grid.low, grid.high, grid.inside or not codes.numel(), masks is None
        )
        if mask is not None:
            assert masks is not None
            masks[0] = mask
        return codes.to(x.dtype), None
    if not in_memory_order(x).is_contiguous():
        x = x.contiguous()
    out = torch.empty_like(x)
    cut = Cut.of(x, grid.scale)
    parts = (cut(x), cut(out), *map(cut.along, (grid.scale, inverse, grid.low, grid.high)))
    for index, (given, result, scale, inv, low, high) in enumerate(zip(*parts, strict=True)):
        codes = torch.mul(given, inv, out=result) if x.dtype is torch.float32 else given.float().mul_(inv)
        mask = _round(codes, scale, grid.step, low, high, grid.inside, masks is None)
        if mask is not None:
            assert masks is not None
            masks[index] = mask
        if codes is not result:
            result.copy_(codes)
    return out, cut


def _round(
    codes: Tensor, scale: Tensor, step: float | None, low: Any, high: Any, inside: bool, maskless: bool
) -> Tensor | None:
    """Turns quotients by the scale into values on the grid, in place; returns which were on it, if not all were."""
    codes.round_()
    mask, within = None, codes
    # Codes less their zero point: clamping these to the grid less its zero point is one pass fewer.
    if not inside and maskless:
        codes.clamp_(low, high)
    elif not inside and not _within(codes, low, high):
        within = codes.clamp(low, high)
        mask = codes.eq_(within).to(torch.bool)  # eq(), which makes a bool, is not vectorised
    # Adding zero turns -0.0 into 0.0, as codes have one zero only.
    if step is not None:
        torch.add(_ZERO, within, alpha=step, out=codes)
    else:
        torch.mul(within.add_(0.0), scale, out=codes)
    return mask


def _within(codes: Tensor, low: Any, high: Any) -> bool:
    """Whether all codes lie between two bounds; NaN does not."""
    if isinstance(low, Tensor):
        return False
    # Each takes a third of the time of aminmax(), which is bound by its arithmetic.
    return codes.amax().item() <= high and low <= codes.amin().item()
