"""EntropyObserver: the range that keeps most of the information in the distribution of the values."""

from __future__ import annotations

import torch
from torch import Tensor

from qlightning import affine
from qlightning.observers.counting import CountingObserver, Counts
from qlightning.qscheme import QScheme

CANDIDATES = 128
"""How many ranges are compared."""

NOTHING = 1e-12
"""The share that stands for none, where the quantized distribution lacks what the clipped one has."""


class EntropyObserver(CountingObserver):
    """Clips at the magnitude whose grid gives the distribution with the least Kullback-Leibler divergence.

    The calibration of TensorRT (S. Migacz, 8-bit Inference with TensorRT, 2017), for any grid: for each of some
    magnitudes t, P is the histogram of everything seen (`CountingObserver`) between -t and t, with what lies beyond put
    into its outermost bins. Q is the same without that, where the bins that share a code share their sum evenly, but
    for the empty ones. The t of the least ``sum(P * log(P / Q))`` is taken, the largest of several. P and Q are shares.

    Args:
        scheme: The grid; with an axis, one range for each slice along it.
        bins: The size of a histogram, at least 256.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: There are too few bins.

    Examples:
        >>> observer = EntropyObserver(QScheme(bits=4))
        >>> _ = observer(torch.cat([torch.linspace(-1, 1, 10_000), torch.tensor([30.0])]))
        >>> low, high = observer.range()
        >>> bool(high < 10)
        True
    """

    def _best(self, seen: Counts) -> tuple[Tensor, Tensor]:
        """Takes some tens of milliseconds for each row."""
        best = [
            _least_divergence(row, int(first), self.scheme) for row, first in zip(seen.counts, seen.first, strict=True)
        ]
        bound = torch.tensor(best, dtype=torch.float64) * seen.width
        return torch.maximum(seen.low, -bound), torch.minimum(seen.high, bound)


def candidates(counts: Tensor, first: int) -> list[int]:
    """The magnitudes that are compared, in bins: from a share of the farthest one to all of it."""
    filled = counts.nonzero().flatten() + first
    farthest = int(max(filled[-1] + 1, -filled[0]))
    return sorted({-(-farthest * i // CANDIDATES) for i in range(1, CANDIDATES + 1)}, reverse=True)


def _least_divergence(counts: Tensor, first: int, scheme: QScheme) -> int:
    """The magnitude, in bins, of the least divergence; the largest of several."""
    divergences = [(_divergence(counts, first, bound, scheme), bound) for bound in candidates(counts, first)]
    return min(divergences, key=lambda found: found[0])[1]


def _divergence(counts: Tensor, first: int, bound: int, scheme: QScheme) -> float:
    start, end = max(-bound - first, 0), min(bound - first, len(counts))
    inside = counts[start:end]
    total = counts.sum()
    clipped = inside.clone()
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[end:].sum()
    centers = torch.arange(first + start, first + end, dtype=torch.float64) + 0.5
    low, high = torch.tensor(float(first + start)), torch.tensor(float(first + end))
    scale, zero_point = affine.calculate_qparams(low, high, scheme)
    codes = (centers / scale.double()).round().add(zero_point).clamp(scheme.quant_min, scheme.quant_max)
    codes = codes.long() - scheme.quant_min
    levels = scheme.quant_max - scheme.quant_min + 1
    sums = torch.bincount(codes, weights=inside, minlength=levels)
    filled = torch.bincount(codes, weights=(inside > 0).double(), minlength=levels)
    spread = (sums / filled.clamp(min=1)).index_select(0, codes).where(inside > 0, 0.0)
    p, q = clipped / total, spread / inside.sum().clamp(min=torch.finfo(spread.dtype).tiny)
    q = q.clamp(min=NOTHING)
    return float(torch.xlogy(p, p / q).sum())
