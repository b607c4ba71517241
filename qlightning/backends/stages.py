"""Grids for results that a kernel has to round before another call takes them, and whether these cost anything."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qlightning.backends.qdq import DEQUANTIZE, QUANTIZE, QParams

_SAMPLES = 2**16 + 1


def stage_of_sum(residual: QParams, out: QParams, ends: tuple[int, int]) -> QParams | None:
    """A grid for a result that a residual is added to; None where its steps would be coarser than two of the sum.

    Beyond it the sum is at an end of its own grid, whatever the residual is; so the sum is one code off at most.

    Args:
        residual: The grid of the other summand.
        out: The grid of the sum.
        ends: The smallest and the largest code of the sum.
    """
    low, high = ((code - out.zero_point) * out.scale for code in ends)
    least, most = ((code - residual.zero_point) * residual.scale for code in (residual.quant_min, residual.quant_max))
    stage = _covering(low - most, high - least)
    return stage if stage.scale <= 2 * out.scale else None


def stage_of_activation(post: list[fx.Node], out: QParams) -> tuple[QParams, Tensor] | None:
    """A grid for a result that elementwise calls are applied to, and what its 256 codes become behind them.

    None where a result could be more than one code off.

    Args:
        post: The calls.
        out: The grid behind them.
    """

    def apply(x: Tensor) -> Tensor:
        for node in post:
            x = node.target(x, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        return QUANTIZE(x, *out.args()).int()

    reach = 16 * max(1.0, *(abs(code - out.zero_point) * out.scale for code in (out.quant_min, out.quant_max)))
    x = torch.linspace(-reach, reach, _SAMPLES)
    exact = apply(x)
    changes = (exact[1:] != exact[:-1]).nonzero()
    if not changes.numel() or int(changes[0]) == 0 or int(changes[-1]) == _SAMPLES - 2:
        return None
    stage = _covering(float(x[changes[0]]), float(x[changes[-1] + 1]))
    table = apply(DEQUANTIZE(torch.arange(256, dtype=torch.uint8), *stage.args()))
    off = table[QUANTIZE(x, *stage.args()).int()] - exact
    return None if int(off.abs().max()) > 1 else (stage, table.to(torch.uint8))


def _covering(low: float, high: float) -> QParams:
    """A full 8-bit grid that holds a range, zero, and half a step at each end for the rounding of its zero point."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 254
    return QParams(scale, min(max(round(0.5 - low / scale), 0), 255), 0, 255, torch.uint8)
