"""FixedRangeObserver: a range that is known beforehand."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from qlightning.errors import ConfigError
from qlightning.observers.base import Observer
from qlightning.qscheme import QScheme


class FixedRangeObserver(Observer):
    """Gives the same range whatever it sees: for values whose bounds are known, such as those of a sigmoid (0 to 1).

    Args:
        scheme: The grid; with an axis, the same range for each slice along it.
        low: The lowest value to be represented.
        high: The highest one.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: It is no range of finite numbers.

    Examples:
        >>> observer = FixedRangeObserver(QScheme(signed=False), 0.0, 1.0)
        >>> _ = observer(torch.tensor([0.2, 7.0]))
        >>> observer.range()
        (tensor(0.), tensor(1.))
    """

    seen: Tensor

    def __init__(
        self, scheme: QScheme, low: float = 0.0, high: float = 1.0, *, nonfinite: Literal["raise", "skip"] = "raise"
    ) -> None:
        super().__init__(scheme, nonfinite=nonfinite)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ConfigError(f"FixedRangeObserver low={low!r}, high={high!r}: finite numbers, the lower one first.")
        self.low, self.high = float(low), float(high)
        self.add_state("seen", torch.tensor(0.0), reduction="max")

    def update(self, x: Tensor) -> None:
        low, high = self.extremes(x)
        self.set_state("seen", torch.maximum(self.seen, (low <= high).float()))

    def range(self) -> tuple[Tensor, Tensor]:
        seen = self.seen > 0
        low, high = torch.full_like(self.seen, self.low), torch.full_like(self.seen, self.high)
        return low.where(seen, torch.inf), high.where(seen, -torch.inf)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.low:g} to {self.high:g}"
