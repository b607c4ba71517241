"""How the codes of a grid are used by the values that pass: counted over several batches."""

from __future__ import annotations

import torch
from torch import Tensor

from qlightning.affine import decibels
from qlightning.html import Code

BINS = 64
"""Bins of a histogram within the grid, about; a quarter as many stand on both sides of it."""
MOST = 2**18
"""Elements of a tensor that are counted at most, evenly picked."""


class CodeUse:
    """Counts codes and what lies beyond them, and the error of rounding.

    Args:
        quant_min: The lowest code.
        quant_max: The highest.
        margin: Whether what lies beyond the grid gets bins of its own.
    """

    def __init__(self, quant_min: int, quant_max: int, margin: bool) -> None:
        self.quant_min, self.quant_max = quant_min, quant_max
        self._levels = quant_max - quant_min + 1
        self._width = -(-self._levels // BINS)
        self._margin = BINS // 4 * self._width if margin else 0
        self._codes = torch.zeros(self._levels, dtype=torch.int64)
        self._outside = torch.zeros(2 * self._margin, dtype=torch.int64)
        self._below = self._above = self._seen = 0
        self._signal = self._noise = 0.0

    def add_codes(self, codes: Tensor) -> None:
        """Counts integers on the grid."""
        self._codes += torch.bincount(codes.flatten().int() - self.quant_min, minlength=self._levels)
        self._seen += codes.numel()

    def add(self, x: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> None:
        """Counts values that are rounded to the grid.

        Args:
            x: Floating point values; at most 2**18 of them are looked at.
            scale: Of the grid: a number, or shaped to broadcast over ``x``.
            zero_point: Likewise.
        """
        if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
            scale, zero_point = evenly(scale.expand_as(x)), evenly(zero_point.expand_as(x))
        exact = evenly(x.detach()).double() / scale
        codes = exact.round() + zero_point
        inside = codes.clamp(self.quant_min, self.quant_max)
        self._signal += float(exact.square().sum())
        self._noise += float((exact - (inside - zero_point)).square().sum())
        self.add_codes(inside)
        low, high = codes < self.quant_min, codes > self.quant_max
        self._below += int(low.sum())
        self._above += int(high.sum())
        if self._margin:
            outer = torch.cat(
                [codes[low] - self.quant_min + self._margin, codes[high] - self.quant_max - 1 + self._margin]
            )
            self._outside += torch.bincount(outer.clamp(0, 2 * self._margin - 1).int(), minlength=2 * self._margin)

    @property
    def sqnr(self) -> float | None:
        """Of rounding to the grid, in dB; None where no value or nothing but zeros was seen."""
        return decibels(self._signal, self._noise) if self._signal else None

    def result(self) -> Code:
        """What was counted."""
        counts = self._codes
        if self._margin:
            # Those that were clipped stand where they were, and not on the ends of the grid.
            inner = counts.clone()
            inner[0] -= self._below
            inner[-1] -= self._above
            counts = torch.cat([self._outside[: self._margin], inner, self._outside[self._margin :]])
        padded = torch.cat([counts, counts.new_zeros(-len(counts) % self._width)])
        share = 1 / max(self._seen, 1)
        return Code(
            counts=tuple(padded.view(-1, self._width).sum(1).tolist()),
            first=self.quant_min - self._margin,
            width=self._width,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            used=int((self._codes > 0).sum()),
            below=self._below * share,
            above=self._above * share,
            lowest=int(self._codes[0]) * share,
            highest=int(self._codes[-1]) * share,
        )


def evenly(x: Tensor, most: int = MOST) -> Tensor:
    """At most so many elements of a tensor, evenly picked, in one dimension: always the same of tensors of a shape."""
    return x.flatten()[:: -(-x.numel() // most) or 1]
