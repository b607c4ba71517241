"""HistogramObserver: the range with the least quantization error over everything seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from qlightning import affine
from qlightning.errors import CalibrationError, ConfigError
from qlightning.observers.base import Observer, in_memory_order
from qlightning.qscheme import QScheme

MIN_BINS = 256
MIN_WIDTH_EXPONENT = -100
"""Bins are no narrower than ``2 ** -100``, whose reciprocal is a float32. With 256 bins or more none is too wide."""

SEARCH_NUMEL = 2**16
"""Candidate grids times codes in the first round of the search, some milliseconds."""

ZOOM = 5
"""Candidates for each end of the range in a later round."""


class HistogramObserver(Observer):
    """Clips the outliers whose loss is smaller than what a finer grid gains: the range with the least squared error.

    A histogram of everything seen is kept, on bins whose width is a power of two and whose edges are its multiples.
    When the range grows, the width doubles and pairs of bins merge: counts never need interpolation, and memory is
    `bins` numbers however many batches there are. The range, extended to zero, fills more than a third of the bins.

    The error of a grid is computed with the values spread evenly inside their bins. As the distance to the nearest code
    changes no faster than the value, the root mean square error found is within one bin width of the true one.

    The counts are float32: exact up to 2 ** 24 in a bin, then rounded to 24 bits.

    Args:
        scheme: The grid, per tensor.
        bins: The size of the histogram, at least 256.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: The scheme has an axis, or there are too few bins.

    Example:
        >>> observer = HistogramObserver(QScheme(bits=4))
        >>> _ = observer(torch.cat([torch.linspace(-1, 1, 10_000), torch.tensor([30.0])]))
        >>> low, high = observer.range()
        >>> bool(high < 10)
        True
    """

    histogram: Tensor
    width: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(self, scheme: QScheme, bins: int = 2048, *, nonfinite: Literal["raise", "skip"] = "raise") -> None:
        super().__init__(scheme, nonfinite=nonfinite)
        if scheme.per_channel:
            raise ConfigError(f"HistogramObserver is per tensor, got {scheme}. Use MinMaxObserver for channels.")
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < MIN_BINS:
            raise ConfigError(f"HistogramObserver bins={bins!r}: an integer from {MIN_BINS} on is possible.")
        self.bins = bins
        self.add_state("min_val", torch.tensor(torch.inf), reduction="min")
        self.add_state("max_val", torch.tensor(-torch.inf), reduction="max")
        self.add_state("width", torch.tensor(0.0), reduction="max")
        self.add_state("histogram", torch.zeros(bins), reduction="sum")

    def update(self, x: Tensor) -> None:
        low, high = self.extremes(x)
        self._cover(torch.minimum(self.min_val, low), torch.maximum(self.max_val, high))
        self.histogram.add_(_count(x, self.width.item(), self._first_bin(), self.bins))

    def range(self) -> tuple[Tensor, Tensor]:
        """Returns the best range, inside the range seen. Takes some milliseconds.

        Raises:
            CalibrationError: Nothing was observed.
        """
        if not self.observed:
            raise CalibrationError(
                "HistogramObserver has no range: nothing was observed. Run batches through it first."
            )
        if self.min_val == self.max_val:
            return self.min_val, self.max_val
        error = _GridError(self.histogram, self._first_bin(), self.width.item(), self.scheme)
        low, high = _search(error, min(self.min_val.item(), 0.0), max(self.max_val.item(), 0.0), self.bins)
        return self.min_val.new_tensor(low), self.min_val.new_tensor(high)

    @torch.no_grad()
    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Combines the histograms of several ranks, on bins that are wide enough for all of them."""
        # Copies: a state dict holds the buffers themselves, and this observer's are emptied first.
        seen = [{name: t.clone() for name, t in state.items()} for state in states if state["width"] > 0]
        self.reset()
        for state in seen:
            low = torch.minimum(self.min_val, state["min_val"].to(self.min_val))
            high = torch.maximum(self.max_val, state["max_val"].to(self.max_val))
            self._cover(low, high, at_least=state["width"].item())
            first = _first_bin(state["min_val"].item(), state["width"].item())
            self.histogram.add_(
                _rebinned(
                    state["histogram"].to(self.histogram),
                    first,
                    round(self.width.item() / state["width"].item()),
                    self._first_bin(),
                )
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bins={self.bins}"

    def _first_bin(self) -> int:
        return _first_bin(self.min_val.item(), self.width.item())

    def _cover(self, low: Tensor, high: Tensor, at_least: float = 0.0) -> None:
        """Widens the histogram to a range."""
        old = self.width.item()
        first = self._first_bin() if old else 0
        width = max(_bin_width(low.item(), high.item(), self.bins), old, at_least)
        self.set_state("min_val", low)
        self.set_state("max_val", high)
        self.set_state("width", torch.tensor(width))
        if old and (width != old or first != self._first_bin()):
            self.set_state("histogram", _rebinned(self.histogram, first, round(width / old), self._first_bin()))


def _bin_width(low: float, high: float, bins: int) -> float:
    """Returns the smallest power of two whose multiples cut the range, extended to zero, into `bins` bins or fewer."""
    low, high = min(low, 0.0), max(high, 0.0)
    exponent = max(math.frexp((high - low) / bins)[1] - 1, MIN_WIDTH_EXPONENT)
    while math.floor(math.ldexp(high, -exponent)) - math.floor(math.ldexp(low, -exponent)) >= bins:
        exponent += 1
    return math.ldexp(1.0, exponent)


def _first_bin(low: float, width: float) -> int:
    """Returns the multiple of the width at which the histogram begins."""
    return math.floor(min(low, 0.0) / width)


def _count(x: Tensor, width: float, first: int, bins: int) -> Tensor:
    """Returns the histogram of a tensor."""
    flat = in_memory_order(x)
    size = affine.BLOCK_NUMEL if x.is_cpu else flat.numel()
    scaled = flat.new_empty(min(size, flat.numel()))
    index = torch.empty_like(scaled, dtype=torch.int32)
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    # torch.histc searches the bin of each element and torch.bincount looks it up: together with these passes 4x faster.
    for block in flat.split(size):
        numbers = torch.mul(block, 1 / width, out=scaled[: block.numel()]).floor_().sub_(first)
        counts += torch.bincount(index[: block.numel()].copy_(numbers), minlength=bins)
    return counts


def _rebinned(histogram: Tensor, first: int, factor: int, new_first: int) -> Tensor:
    """Merges bins by a factor and moves them to another beginning. What would fall off the ends is empty."""
    bins = histogram.numel()
    number = torch.arange(first, first + bins, device=histogram.device).div(min(factor, 2**40), rounding_mode="floor")
    return torch.zeros_like(histogram).index_add_(0, (number - new_first).clamp_(0, bins - 1), histogram)


class _GridError:
    """The squared error of grids over a histogram, each value replaced by its nearest code.

    With edges e between neighbouring codes, the distribution function F, and G(e), the integral of F up to e, summation
    by parts gives ``sum((x - code(x)) ** 2) = sum((x - last_code) ** 2) - 2 * scale * sum(G(e) for all edges)``. So one
    look-up in a table for each edge is enough, and clipping is part of the formula. Unit: the bin width.
    """

    def __init__(self, histogram: Tensor, first: int, width: float, scheme: QScheme) -> None:
        self.scheme, self.first, self.width = scheme, first, width
        counts = histogram.double().cpu()
        centers = torch.arange(counts.numel(), dtype=torch.float64) + 0.5
        zero = counts.new_zeros(1)
        self.half_density = torch.cat((counts / 2, zero))
        self.below = torch.cat((zero, counts.cumsum(0)))
        self.integral = torch.cat((zero, (self.below[:-1] + counts / 2).cumsum(0)))
        self.moments = [counts.sum(), (counts * centers).sum(), (counts * (centers.square() + 1 / 12)).sum()]

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        """Returns the errors (float64) of the grids that candidate ranges (1-d) lead to."""
        scale32, zero_point = affine.calculate_qparams(low.float(), high.float(), self.scheme)
        scale = scale32.double() / self.width
        codes = torch.arange(self.scheme.quant_min, self.scheme.quant_max, dtype=torch.float64) + 0.5
        edges = ((codes - zero_point[:, None]) * scale[:, None] - self.first).clamp_(min=0)
        edges = edges.flatten()
        number = edges.clamp(max=self.half_density.numel() - 1).int()
        within = edges - number
        # index_select with int32 takes a fifth of the time of indexing.
        integral, below, half = (t.index_select(0, number) for t in (self.integral, self.below, self.half_density))
        integral = within.mul(half).add_(below).mul_(within).add_(integral).view(len(scale), -1)
        last = (self.scheme.quant_max - zero_point) * scale - self.first
        zeroth, first, second = self.moments
        return second - 2 * last * first + last.square() * zeroth - 2 * scale * integral.sum(1)


def _search(error: _GridError, lowest: float, highest: float, bins: int) -> tuple[float, float]:
    """Returns the range of least error: first over ranges that shrink to one bin geometrically, then ever finer around.

    The first round looks at both ends together, so that it finds the best of several minima (outliers in or out).
    """
    symmetric = error.scheme.symmetric
    if symmetric:
        lowest, highest = -max(-lowest, highest), max(-lowest, highest)
    two_sided = lowest < 0 < highest and not symmetric
    budget = SEARCH_NUMEL // 2**error.scheme.bits
    count = math.isqrt(budget) if two_sided else budget
    step = math.log(bins) / (count - 1)
    offsets = -step * torch.arange(count, dtype=torch.float64)
    center, best = (0.0, 0.0), math.inf
    while True:
        low, high = ((shift + offsets).clamp(max=0.0) for shift in center)
        if two_sided:
            low, high = low.repeat_interleave(count), high.repeat(count)
        errors = error(lowest * low.exp(), highest * high.exp())
        # Ties go to the first, the widest range.
        index = int(errors.argmin())
        if errors[index] < best:
            best, center = errors[index].item(), (low[index].item(), high[index].item())
        if step < 1 / bins:
            return lowest * math.exp(center[0]), highest * math.exp(center[1])
        count = ZOOM if two_sided else ZOOM**2
        offsets = step * torch.linspace(1, -1, count, dtype=torch.float64)
        step *= 2 / (count - 1)
