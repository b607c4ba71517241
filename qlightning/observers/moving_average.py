"""MovingAverageObserver: the moving average of the batches' ranges."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from qlightning.errors import ConfigError
from qlightning.observers.base import all_finite
from qlightning.observers.minmax import MinMaxObserver
from qlightning.qscheme import QScheme
from qlightning.single import are_single, float32


class MovingAverageObserver(MinMaxObserver):
    """A moving average of each batch's minimum and maximum: follows the activations while the weights train.

    The first batch sets the range; then ``min += averaging_constant * (min(x) - min)``, and the maximum likewise.
    Equals torch.ao's ``MovingAverageMinMaxObserver`` and ``MovingAveragePerChannelMinMaxObserver``. Ranks combine
    by their mean.

    Args:
        scheme: The grid; with an axis, one range for each slice along it.
        averaging_constant: The weight of a new batch, above 0 up to 1 (only the last batch counts).
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: The averaging constant is out of its limits.

    Examples:
        >>> observer = MovingAverageObserver(QScheme(), averaging_constant=0.5)
        >>> for batch in (torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 3.0])):
        ...     _ = observer(batch)
        >>> observer.range()
        (tensor(-0.5000), tensor(2.))
    """

    def __init__(
        self, scheme: QScheme, averaging_constant: float = 0.01, *, nonfinite: Literal["raise", "skip"] = "raise"
    ) -> None:
        super().__init__(scheme, nonfinite=nonfinite)
        if not 0 < averaging_constant <= 1:
            raise ConfigError(f"MovingAverageObserver averaging_constant={averaging_constant!r}: above 0, up to 1.")
        self.averaging_constant = averaging_constant
        self.add_state("min_val", torch.tensor(torch.inf), reduction="mean")
        self.add_state("max_val", torch.tensor(-torch.inf), reduction="mean")

    def update_range(self, low: Tensor, high: Tensor) -> None:
        old_low, old_high = self.min_val, self.max_val
        if are_single(low, high, old_low, old_high):
            rate = float32(self.averaging_constant)
            single = [_moved(old.item(), new.item(), rate) for old, new in ((old_low, low), (old_high, high))]
            if all(map(math.isfinite, single)):
                old_low.fill_(single[0])
                old_high.fill_(single[1])
                return
        in_graph = torch.compiler.is_compiling()
        if not in_graph:
            min_val = (low - old_low).mul_(self.averaging_constant).add_(old_low)
            max_val = (high - old_high).mul_(self.averaging_constant).add_(old_high)
        if in_graph or not all_finite(min_val, max_val):
            min_val, max_val = self._average(old_low, low), self._average(old_high, high)
        self.set_state("min_val", min_val)
        self.set_state("max_val", max_val)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, averaging_constant={self.averaging_constant}"

    def _average(self, old: Tensor, new: Tensor) -> Tensor:
        """Averages channels that may have been seen once or never (infinite), or that moved by more than a float32."""
        average = old + self.averaging_constant * (new - old)
        # From -3e38 to 3e38, say. Elsewhere this form is one bit off torch.ao.
        weighted = (1 - self.averaging_constant) * old + self.averaging_constant * new
        average = torch.where(average.isfinite(), average, weighted)
        return torch.where(old.isinf(), new, torch.where(new.isinf(), old, average))


def _moved(old: float, new: float, rate: float) -> float:
    return float32(float32(float32(new - old) * rate) + old)
