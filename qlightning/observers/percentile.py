"""PercentileObserver: the range that all but a given share of the values lie in."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from qlightning.errors import ConfigError
from qlightning.observers.counting import CountingObserver, Counts
from qlightning.qscheme import QScheme


class PercentileObserver(CountingObserver):
    """Clips a fixed share of the values at each end, whatever it costs: for data with rare, huge outliers.

    A percentile is the smallest value that so many percent of all values do not exceed (numpy's ``inverted_cdf``), read
    from a histogram of everything seen (`CountingObserver`), so that it is at most one bin width outside of the true
    one, and never outside of what was seen. 0 and 100 are the minimum and the maximum, exactly.

    Args:
        scheme: The grid; with an axis, one range for each slice along it.
        lower: Percentile of the lower end, 0 to 100; 0 clips the upper end alone.
        upper: Percentile of the upper end, above the lower one; 100 clips the lower end alone.
        bins: The size of a histogram, at least 256.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: The percentiles are off their limits, or there are too few bins.

    Examples:
        >>> observer = PercentileObserver(QScheme(), lower=0.0, upper=99.0)
        >>> _ = observer(torch.cat([torch.linspace(-1, 1, 1000), torch.tensor([30.0])]))
        >>> low, high = observer.range()
        >>> low.item(), round(high.item(), 1)
        (-1.0, 1.0)
    """

    def __init__(
        self,
        scheme: QScheme,
        lower: float = 0.01,
        upper: float = 99.99,
        bins: int = 2048,
        *,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(scheme, bins, nonfinite=nonfinite)
        if not 0 <= lower < upper <= 100:
            raise ConfigError(f"PercentileObserver lower={lower!r}, upper={upper!r}: 0 <= lower < upper <= 100.")
        self.lower, self.upper = float(lower), float(upper)

    def _best(self, seen: Counts) -> tuple[Tensor, Tensor]:
        low = seen.low if self.lower == 0 else self._edge(seen, self.lower, 0)
        high = seen.high if self.upper == 100 else self._edge(seen, self.upper, 1)
        return low, torch.maximum(low, high)

    @staticmethod
    def _edge(seen: Counts, percentile: float, side: int) -> Tensor:
        """The lower (0) or upper (1) edge of the bin that holds a percentile."""
        below = seen.counts.cumsum(1)
        # A hair less, so that a product that is meant to be a whole count is not above it. Counts may be shares of
        # whole ones (of ranks that resume), so that nothing is rounded up to a count.
        rank = below[:, -1:] * (percentile / 100) * (1 - 2.0**-48)
        number = torch.searchsorted(below, rank).squeeze(1)
        edge = (seen.first + number + side) * seen.width
        return edge.clamp(seen.low, seen.high)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lower={self.lower}, upper={self.upper}"
