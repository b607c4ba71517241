"""MinMaxObserver: the range of everything seen."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from qlightning.observers.base import Observer
from qlightning.qscheme import QScheme


class MinMaxObserver(Observer):
    """The lowest and the highest value ever seen: nothing is clipped, and one outlier sets the scale.

    The usual choice for weights, and for activations whose range is bounded. Equals torch.ao's ``MinMaxObserver`` and
    ``PerChannelMinMaxObserver``.

    Args:
        scheme: The grid; with an axis, one range for each slice along it.
        nonfinite: ``"raise"`` an error at NaN and infinity, or ``"skip"`` them.

    Examples:
        >>> observer = MinMaxObserver(QScheme(axis=0))
        >>> _ = observer(torch.tensor([[-1.0, 2.0], [0.5, 3.0]]))
        >>> observer.range()
        (tensor([-1.0000,  0.5000]), tensor([2., 3.]))
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(self, scheme: QScheme, *, nonfinite: Literal["raise", "skip"] = "raise") -> None:
        super().__init__(scheme, nonfinite=nonfinite)
        # The neutral element of min and max, 0-d for any number of channels.
        self.add_state("min_val", torch.tensor(torch.inf), reduction="min")
        self.add_state("max_val", torch.tensor(-torch.inf), reduction="max")

    def update(self, x: Tensor) -> None:
        self.update_range(*self.extremes(x))

    def saw(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Takes a tensor for all that there is to see, whose extremes are known and finite."""
        self._remember(x)
        self.set_state("min_val", low)
        self.set_state("max_val", high)

    def observe_extremes(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Does what a call does, for a batch of the shape and dtype of ``x`` whose extremes are known and finite."""
        self.batch_range = low, high
        self._remember(x)
        self.update_range(low, high)

    @classmethod
    def needs_extremes_alone(cls) -> bool:
        """Whether a call does no more than :meth:`observe_extremes`, also in a subclass."""
        own, here = cls.forward, MinMaxObserver
        return own is here.forward and cls.update is here.update and cls._record is here._record

    def update_range(self, low: Tensor, high: Tensor) -> None:
        """Takes in the extremes of a batch."""
        min_val, max_val = self.min_val, self.max_val
        if min_val.shape == low.shape:
            min_val.clamp_max_(low)
            max_val.clamp_min_(high)
        else:  # the first of several channels
            self.set_state("min_val", torch.minimum(min_val, low))
            self.set_state("max_val", torch.maximum(max_val, high))

    def range(self) -> tuple[Tensor, Tensor]:
        return self.min_val, self.max_val

    def _record(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Only the extremes count: spares the float32 copy of a low-precision batch."""
        self.update_range(low, high)
