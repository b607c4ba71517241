"""MSEObserver: the range of least error on the values of each batch, averaged over the batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from qlightning import affine
from qlightning.blocks import BLOCK_NUMEL
from qlightning.errors import ConfigError
from qlightning.observers.base import Observer
from qlightning.qscheme import QScheme

UNIT = 2.0**-16
"""What sums are kept in: those of the widest ranges have to stay float32."""


class MSEObserver(Observer):
    """Clips at magnitudes that shrink to zero, tried on the values themselves, and takes the best of each batch.

    The error of a range is ``sum(abs(x - quantized(x)) ** power)`` over the batch, or an even sample of it; the range
    of several batches is the mean of their best ones. A search that looks at each value costs more than the one of
    `HistogramObserver`, which also moves the two ends apart and judges all batches together; it is exact for weights,
    which are seen whole, and its ``power`` says how much outliers count.

    Args:
        scheme: The grid; with an axis, one range for each slice along it.
        power: Of the error, above 0: 2 for the mean square; larger ones clip less.
        steps: How many magnitudes are tried: ``i / steps`` of the largest.
        samples: How many values of a batch (for each channel) are looked at most, at even distances that reach every
            place along each dimension.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Raises:
        ConfigError: A setting is off its limits.

    Examples:
        >>> observer = MSEObserver(QScheme(bits=4))
        >>> _ = observer(torch.cat([torch.linspace(-1, 1, 10_000), torch.tensor([30.0])]))
        >>> low, high = observer.range()
        >>> bool(high < 10)
        True
    """

    low_sum: Tensor
    high_sum: Tensor
    batches: Tensor
    _keeps_gaps = True

    def __init__(
        self,
        scheme: QScheme,
        power: float = 2.0,
        steps: int = 100,
        samples: int = 2**16,
        *,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(scheme, nonfinite=nonfinite)
        if not 0 < power < float("inf"):
            raise ConfigError(f"MSEObserver power={power!r}: a number above 0 is possible.")
        for name, value in (("steps", steps), ("samples", samples)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 2:
                raise ConfigError(f"MSEObserver {name}={value!r}: an integer from 2 on is possible.")
        self.power, self.steps, self.samples = float(power), steps, samples
        for name in ("low_sum", "high_sum", "batches"):
            self.add_state(name, torch.tensor(0.0), reduction="sum")

    def update(self, x: Tensor) -> None:
        low, high = (bound.reshape(-1) for bound in self.extremes(x))
        seen = low <= high
        rows = x.reshape(1, -1) if self.scheme.axis is None else x.movedim(self.scheme.axis, 0).flatten(1)
        rows = rows[:, :: _stride(rows.shape[1], self.samples)].contiguous()
        best = self._best(rows, low.clamp(max=0.0).where(seen, 0.0), high.clamp(min=0.0).where(seen, 0.0))
        scaled = (best[0] * UNIT, best[1] * UNIT, seen.float())
        for name, value in zip(("low_sum", "high_sum", "batches"), scaled, strict=True):
            old = self._state(name)
            self.set_state(name, old + value.reshape(() if self.scheme.axis is None else -1))

    def _best(self, rows: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range of least error of each row (rows, values); the widest of several."""
        largest = torch.maximum(-low, high).unsqueeze(1)
        bounds = largest * (torch.arange(self.steps, 0, -1, device=rows.device) / self.steps)
        lows, highs = torch.maximum(low.unsqueeze(1), -bounds), torch.minimum(high.unsqueeze(1), bounds)
        # All at once for few values; for many so few that they stay in the cache.
        some = max(1, BLOCK_NUMEL // rows.numel())
        errors = [self._errors(rows, *ends) for ends in zip(lows.split(some, 1), highs.split(some, 1), strict=True)]
        index = torch.cat(errors, 1).argmin(1, keepdim=True)
        return lows.gather(1, index).squeeze(1), highs.gather(1, index).squeeze(1)

    def _errors(self, rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """The errors of ranges (rows, candidates), each for its row of values."""
        scheme = replace(self.scheme, axis=0)
        scale, zero_point = affine.calculate_qparams(low.flatten(), high.flatten(), scheme)
        values = rows.unsqueeze(1).expand(-1, low.shape[1], -1).reshape(-1, rows.shape[1])
        difference = affine.fake_quantize(values, scale, zero_point, scheme).sub_(values).abs_()
        return (difference.square_() if self.power == 2 else difference.pow_(self.power)).nansum(1).view(low.shape)

    def range(self) -> tuple[Tensor, Tensor]:
        """Returns the mean of the best ranges; ``inf`` to ``-inf`` where nothing was seen."""
        seen = self.batches > 0
        count = self.batches.where(seen, 1.0) * UNIT  # below 1 in the share of a rank that resumes
        return (self.low_sum / count).where(seen, torch.inf), (self.high_sum / count).where(seen, -torch.inf)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power:g}, steps={self.steps}"


def _stride(numel: int, samples: int) -> int:
    """The distance at which values are taken: at most so many samples, from all places along every dimension.

    A distance that has a factor in common with the size of a dimension would take some places alone: of (128, 512, 512)
    tokens every 512th value, which is the first feature of each.
    """
    stride = -(-numel // samples)
    while math.gcd(stride, numel) > 1:
        stride += 1
    return stride
