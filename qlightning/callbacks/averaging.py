"""Lightning's averages of weights (EMA, SWA) beside quantization: what they copy, and the grids of averages."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qlightning.callbacks.base import is_a
from qlightning.errors import ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.nn.qat import QATLayer

_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


def averaging_callbacks(trainer: Any) -> list[Any]:
    """The callbacks of a Trainer that average weights: of either package, subclasses included."""
    return [c for c in trainer.callbacks if is_a(c, *_AVERAGING)]


def check_averaging(trainer: Any) -> None:
    """Checks that at most one callback averages weights.

    Raises:
        ConfigError: Several do, so that what validation measures is not what the training ends with.
    """
    found = [type(callback).__name__ for callback in averaging_callbacks(trainer)]
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(found)} each put an average of the weights in place, one over the other: what validation "
            "measures would not be what is converted. Use one of them."
        )


def saves_averages(trainer: Any) -> str:
    """The name of a callback that validates and saves averages in the place of the current weights (EMA), or ""."""
    found = [c for c in averaging_callbacks(trainer) if is_a(c, "WeightAveraging")]
    return type(found[0]).__name__ if found else ""


def renew_copies(trainer: Any, pl_module: nn.Module) -> None:
    """Lets the callbacks that average weights copy the prepared module.

    They copy the LightningModule in their ``setup``, which a callback that stands before ours has done by now.
    """
    for callback in averaging_callbacks(trainer):
        if getattr(callback, "_average_model", None) is not None:
            callback.setup(trainer, pl_module, "fit")


def regrid(module: nn.Module, *, weights: bool) -> None:
    """Takes every grid anew, where averages have taken the place of what was observed.

    An average rounds zero points down and knows nothing of scales, but averages the states of observers rightly.

    Args:
        module: A prepared module.
        weights: Whether the weights are looked at again; else their observers' states count, like those of activations.
    """
    if weights:
        for layer in module.modules():
            if isinstance(layer, QATLayer) and layer.weight_fake_quant.observed:
                layer.observe_weight()
    for _, fq in fake_quantizers(module):
        if fq.observed and not (weights and isinstance(fq, WeightFakeQuantize)):
            fq.refresh()


class FrozenStatistics:
    """The BatchNorm statistics that the schedule has frozen.

    StochasticWeightAveraging ends with a pass over the training data that puts new statistics in the place of those of
    every BatchNorm. Averages of weights that were trained with frozen statistics go with these, so they are put back.
    """

    def __init__(self) -> None:
        self._frozen: dict[Any, tuple[Tensor | None, Tensor | None, Tensor | None]] = {}

    def hold(self, bn: Any) -> None:
        """Remembers the statistics of a BatchNorm, which are to stay; those that it had when it was held first."""
        if bn in self._frozen:
            return
        tracked = bn.num_batches_tracked
        self._frozen[bn] = bn.running_mean, bn.running_var, None if tracked is None else tracked.clone()

    def put_back(self) -> None:
        """Puts statistics back that were replaced."""
        for bn, (mean, var, tracked) in self._frozen.items():
            if bn.running_mean is not mean:
                bn.running_mean, bn.running_var = mean, var
                if bn.num_batches_tracked is not None and tracked is not None:
                    bn.num_batches_tracked.copy_(tracked)
