"""HistogramObserver: the range with the least quantization error over everything seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qlightning import affine
from qlightning.observers.counting import CountingObserver, Counts
from qlightning.qscheme import QScheme

SEARCH_NUMEL = 2**16
"""Candidate grids times codes in the first round of the search, some milliseconds."""

ZOOM = 5
"""Candidates for each end of the range in a later round."""


class HistogramObserver(CountingObserver):
    """Clips the outliers whose loss is smaller than what a finer grid gains: the range with the least squared error.

    Keeps a histogram of everything seen (`CountingObserver`). The error of a grid is computed with the values spread
    evenly inside their bins. As the distance to the nearest code changes no faster than the value, the root mean square
    error found is within one bin width of the true one.

    Args:
        scheme: The grid; with an axis, one range for each slice along it.
        bins: The size of a histogram, at least 256.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: There are too few bins.

    Examples:
        >>> observer = HistogramObserver(QScheme(bits=4))
        >>> _ = observer(torch.cat([torch.linspace(-1, 1, 10_000), torch.tensor([30.0])]))
        >>> low, high = observer.range()
        >>> bool(high < 10)
        True
    """

    def _best(self, seen: Counts) -> tuple[Tensor, Tensor]:
        """The search takes some milliseconds for each row."""
        # Rows are searched together, but not so many that the tables leave the cache.
        found = [
            _search(_GridError(seen, rows, self.scheme), self.bins) for rows in torch.arange(len(seen.low)).split(16)
        ]
        lows, highs = zip(*found, strict=True)
        return torch.cat(lows), torch.cat(highs)


class _GridError:
    """The squared error of grids over histograms, each value replaced by its nearest code.

    With edges e between neighbouring codes, the distribution function F, and G(e), the integral of F up to e, summation
    by parts gives ``sum((x - code(x)) ** 2) = sum((x - last_code) ** 2) - 2 * scale * sum(G(e) for all edges)``. So one
    look-up in a table for each edge is enough, and clipping is part of the formula. Unit: the bin width.
    """

    def __init__(self, seen: Counts, rows: Tensor, scheme: QScheme) -> None:
        self.scheme = scheme
        self.first, self.width = seen.first[rows, None], seen.width[rows, None]
        self.low, self.high = seen.low[rows].clamp(max=0.0), seen.high[rows].clamp(min=0.0)
        counts = seen.counts[rows]
        centers = torch.arange(counts.shape[1], dtype=torch.float64) + 0.5
        zero = counts.new_zeros(len(counts), 1)
        self.bins = counts.shape[1]
        self.half_density = torch.cat((counts / 2, zero), 1).flatten()
        below = torch.cat((zero, counts.cumsum(1)), 1)
        self.below = below.flatten()
        self.integral = torch.cat((zero, (below[:, :-1] + counts / 2).cumsum(1)), 1).flatten()
        moments = counts.sum(1), (counts * centers).sum(1), (counts * (centers.square() + 1 / 12)).sum(1)
        self.moments = [moment[:, None] for moment in moments]
        self.start = (torch.arange(len(counts), dtype=torch.int32) * (self.bins + 1)).view(-1, 1, 1)

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        """Returns the errors (float64) of the grids that candidate ranges (rows, candidates) lead to."""
        scale32, zero_point = affine.calculate_qparams(low.flatten().float(), high.flatten().float(), self.scheme)
        scale, zero_point = scale32.double().view(low.shape) / self.width, zero_point.view(low.shape)
        codes = torch.arange(self.scheme.quant_min, self.scheme.quant_max, dtype=torch.float64) + 0.5
        edges = ((codes - zero_point[..., None]) * scale[..., None] - self.first[..., None]).clamp_(min=0)
        number = edges.clamp(max=self.bins).int()
        within = edges.sub_(number).flatten()
        # index_select with int32 takes a fifth of the time of indexing.
        place = number.add_(self.start).flatten()
        integral, below, half = (t.index_select(0, place) for t in (self.integral, self.below, self.half_density))
        integral = within.mul(half).add_(below).mul_(within).add_(integral).view(*low.shape, -1)
        last = (self.scheme.quant_max - zero_point) * scale - self.first
        zeroth, first, second = self.moments
        return second - 2 * last * first + last.square() * zeroth - 2 * scale * integral.sum(-1)


def _search(error: _GridError, bins: int) -> tuple[Tensor, Tensor]:
    """Returns the ranges of least error: first over those that shrink to one bin geometrically, then ever finer around.

    The first round looks at both ends together, so that it finds the best of several minima (outliers in or out).
    """
    symmetric = error.scheme.symmetric
    lowest, highest = error.low[:, None], error.high[:, None]
    if symmetric:
        highest = torch.maximum(-lowest, highest)
        lowest = -highest
    two_sided = not symmetric and bool(((lowest < 0) & (highest > 0)).any())
    budget = SEARCH_NUMEL // 2**error.scheme.bits
    count = math.isqrt(budget) if two_sided else budget
    step = math.log(bins) / (count - 1)
    offsets = -step * torch.arange(count, dtype=torch.float64)
    center = torch.zeros(len(lowest), 2, dtype=torch.float64)
    best = torch.full((len(lowest),), math.inf, dtype=torch.float64)
    while True:
        low, high = ((center[:, end, None] + offsets).clamp(max=0.0) for end in (0, 1))
        if two_sided:
            low, high = low.repeat_interleave(count, 1), high.repeat(1, count)
        # Ties go to the first, the widest range.
        least, index = error(lowest * low.exp(), highest * high.exp()).min(1, keepdim=True)
        better = (least.squeeze(1) < best).unsqueeze(1)
        best = torch.where(better.squeeze(1), least.squeeze(1), best)
        center = torch.where(better, torch.cat((low.gather(1, index), high.gather(1, index)), 1), center)
        if step < 1 / bins:
            ends = center.exp()
            return lowest.squeeze(1) * ends[:, 0], highest.squeeze(1) * ends[:, 1]
        count = ZOOM if two_sided else ZOOM**2
        offsets = step * torch.linspace(1, -1, count, dtype=torch.float64)
        step *= 2 / (count - 1)
