"""CountingObserver: a histogram of everything seen, that statistics read a range from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qlightning.blocks import BLOCK_NUMEL, in_memory_order
from qlightning.errors import CalibrationError, ConfigError
from qlightning.observers.base import Observer
from qlightning.qscheme import QScheme

MIN_BINS = 256
MIN_WIDTH_EXPONENT = -100
"""Bins are no narrower than ``2 ** -100``, whose reciprocal is a float32. With 256 bins or more none is too wide."""

TABLES = 4
"""How many histograms are counted side by side on the way to one."""


@dataclass(frozen=True)
class Counts:
    """The histograms of some rows (channels, or the one of a tensor), all of them of data that is not constant.

    Attributes:
        counts: float64 (rows, bins), on the CPU.
        first: The multiple of the width at which each histogram begins, float64 (rows,).
        width: The width of its bins, float64 (rows,).
        low: The lowest value of each row, float64 (rows,).
        high: The highest value of each row, float64 (rows,).
    """

    counts: Tensor
    first: Tensor
    width: Tensor
    low: Tensor
    high: Tensor


class CountingObserver(Observer):
    """Keeps a histogram of everything seen; a subclass is a way to choose a range from it.

    The width of a bin is a power of two and its edges are multiples of that. When the range grows, the width doubles
    and pairs of bins merge: counts never need interpolation, and memory is `bins` numbers (for each channel) however
    many batches there are. The range, extended to zero, fills more than a third of the bins.

    The counts are float32: exact up to 2 ** 24 in a bin, then rounded to 24 bits. Ranks combine to the histogram of
    all their data.

    Args:
        scheme: The grid; with an axis, one histogram for each slice along it.
        bins: The size of a histogram, at least 256.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: There are too few bins.
    """

    histogram: Tensor
    width: Tensor
    min_val: Tensor
    max_val: Tensor
    _keeps_gaps = True

    def __init__(self, scheme: QScheme, bins: int = 2048, *, nonfinite: Literal["raise", "skip"] = "raise") -> None:
        super().__init__(scheme, nonfinite=nonfinite)
        name = type(self).__name__
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < MIN_BINS:
            raise ConfigError(f"{name} bins={bins!r}: an integer from {MIN_BINS} on is possible.")
        self.bins = bins
        self.add_state("min_val", torch.tensor(torch.inf), reduction="min")
        self.add_state("max_val", torch.tensor(-torch.inf), reduction="max")
        self.add_state("width", torch.tensor(0.0), reduction="max")
        self.add_state("histogram", torch.tensor(0.0) if scheme.per_channel else torch.zeros(bins), reduction="sum")

    def allocate(self, channels: int) -> None:
        super().allocate(channels)
        self._defaults["histogram"] = torch.zeros(channels, self.bins)
        self.reset()

    def update(self, x: Tensor) -> None:
        low, high = self.extremes(x)
        self._cover(torch.minimum(self.min_val, low), torch.maximum(self.max_val, high))
        first = _first_bin(self.min_val, self.width)
        if self.scheme.axis is None:
            self.histogram.add_(_count(x, self.width.item(), int(first.item()), self.bins))
        else:
            self.histogram.add_(_count_channels(x, self.width, first, self.bins, self.scheme.axis % x.ndim))

    def range(self) -> tuple[Tensor, Tensor]:
        """Returns the chosen range, inside the range seen; of constant data its value.

        Raises:
            CalibrationError: Nothing was observed.
        """
        if not self.observed:
            raise CalibrationError(
                f"{type(self).__name__} has no range: nothing was observed. Run batches through it first."
            )
        low, high = self.min_val.reshape(-1).clone(), self.max_val.reshape(-1).clone()
        rows = (low < high).nonzero().flatten()
        if len(rows):
            width = self.width.reshape(-1)[rows]
            chosen = Counts(
                self.histogram.reshape(-1, self.bins)[rows].double().cpu(),
                _first_bin(low[rows], width).double().cpu(),
                width.double().cpu(),
                low[rows].double().cpu(),
                high[rows].double().cpu(),
            )
            best_low, best_high = self._best(chosen)
            low[rows], high[rows] = best_low.to(low), best_high.to(high)
        return low.reshape(self.min_val.shape), high.reshape(self.max_val.shape)

    @abstractmethod
    def _best(self, seen: Counts) -> tuple[Tensor, Tensor]:
        """Chooses the lowest and the highest value to be represented, float64 (rows,)."""

    @torch.no_grad()
    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Combines the histograms of several ranks, on bins that are wide enough for all of them."""
        # Copies: a state dict holds the buffers themselves, and this observer's are emptied first.
        seen = [
            {name: t.to(self.min_val.device, copy=True) for name, t in state.items()}
            for state in states
            if bool((state["width"] > 0).any())
        ]
        self.reset()
        for state in seen:
            self._cover(
                torch.minimum(self.min_val, state["min_val"]),
                torch.maximum(self.max_val, state["max_val"]),
                at_least=state["width"],
            )
            first = _first_bin(state["min_val"], state["width"])
            moved = _rebinned(
                state["histogram"], first, state["width"], _first_bin(self.min_val, self.width), self.width
            )
            self.histogram.add_(moved)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bins={self.bins}"

    def _cover(self, low: Tensor, high: Tensor, at_least: Tensor | None = None) -> None:
        """Widens the histograms to ranges; rows that nothing was seen of keep the width 0."""
        old, old_first = self.width.clone(), _first_bin(self.min_val, self.width)
        width = torch.maximum(_bin_width(low, high, self.bins), old)
        if at_least is not None:
            width = torch.maximum(width, at_least)
        self.set_state("min_val", low)
        self.set_state("max_val", high)
        self.set_state("width", width)
        shape = (*width.shape, self.bins)
        if self.histogram.shape != shape:
            self.set_state("histogram", self.histogram.new_zeros(shape))
            return
        first = _first_bin(self.min_val, self.width)
        if bool(((old > 0) & ((width != old) | (first != old_first))).any()):
            self.set_state("histogram", _rebinned(self.histogram, old_first, old, first, width))


def _bin_width(low: Tensor, high: Tensor, bins: int) -> Tensor:
    """Returns the smallest power of two whose multiples cut a range, extended to zero, into `bins` bins or fewer."""
    seen = low <= high
    low, high = low.double().clamp(max=0.0).where(seen, 0.0), high.double().clamp(min=0.0).where(seen, 0.0)
    exponent = torch.frexp((high - low) / bins).exponent.sub(1).clamp(min=MIN_WIDTH_EXPONENT)
    while True:
        width = torch.ldexp(torch.ones_like(low), exponent)
        too_many = (high / width).floor() - (low / width).floor() >= bins
        if not bool(too_many.any()):
            return width.where(seen, 0.0).float()
        exponent = exponent + too_many.int()


def _first_bin(low: Tensor, width: Tensor) -> Tensor:
    """Returns the multiple of the width at which a histogram begins, int64; 0 where the width is."""
    return (low.double().clamp(max=0.0) / width.double()).floor().where(width > 0, 0.0).long()


def _count(x: Tensor, width: float, first: int, bins: int) -> Tensor:
    """Returns the histogram of a tensor."""
    flat = in_memory_order(x).reshape(-1)
    size = min(BLOCK_NUMEL if x.is_cpu else flat.numel(), flat.numel())
    # Neighbours count in tables of their own: runs of equal values (zeros behind a ReLU) need not wait for each other.
    tables = TABLES if bins <= 2**12 else 1
    start = torch.arange(size, dtype=torch.float32, device=x.device).remainder_(tables).mul_(bins).sub_(first)
    scaled, index = torch.empty_like(start), torch.empty_like(start, dtype=torch.int32)
    counts = torch.zeros(tables * bins, dtype=torch.int64, device=x.device)
    # torch.histc searches the bin of each element and torch.bincount looks it up: together with these passes 5x faster.
    for block in flat.split(size):
        count = block.numel()
        numbers = torch.mul(block, 1 / width, out=scaled[:count]).floor_().add_(start[:count])
        counts += torch.bincount(index[:count].copy_(numbers), minlength=tables * bins)
    return counts.view(tables, bins).sum(0)


def _count_channels(x: Tensor, width: Tensor, first: Tensor, bins: int, axis: int) -> Tensor:
    """Returns a histogram for each slice along an axis, (channels, bins); NaN counts nowhere."""
    channels = len(width)
    shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
    inverse = (1 / width).where(width > 0, 0.0).reshape(shape)
    start = torch.arange(channels, device=x.device).mul(bins).sub(first).reshape(shape)
    counts = torch.zeros(channels * bins + 1, dtype=torch.int64, device=x.device)
    dim = max((d for d in range(x.ndim) if d != axis), key=lambda d: x.shape[d], default=axis)
    rows = max(1, BLOCK_NUMEL * x.shape[dim] // x.numel()) if x.is_cpu and dim != axis else x.shape[dim]
    for block in x.split(rows, dim):
        numbers = (block * inverse).floor()
        counted = numbers.isfinite()
        # What is not counted goes to a place behind the last bin.
        index = numbers.nan_to_num_(0.0).long().add_(start).where(counted, channels * bins)
        counts += torch.bincount(index.flatten(), minlength=channels * bins + 1)
    return counts[:-1].view(channels, bins) * (width > 0).unsqueeze(1)


def _rebinned(histogram: Tensor, first: Tensor, width: Tensor, new_first: Tensor, new_width: Tensor) -> Tensor:
    """Merges bins to wider ones and moves them to another beginning. What would fall off the ends is empty."""
    bins = histogram.shape[-1]
    factor = (new_width.double() / width.double()).where(width > 0, 1.0).clamp(max=2.0**40).round().long()
    number = torch.arange(bins, device=histogram.device) + first.unsqueeze(-1)
    number = number.div(factor.unsqueeze(-1), rounding_mode="floor").sub(new_first.unsqueeze(-1)).clamp_(0, bins - 1)
    return torch.zeros_like(histogram).scatter_add_(-1, number, histogram)
