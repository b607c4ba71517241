"""When fake quantization starts and what freezes when: a pure function of how far the training is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from qlightning.errors import ConfigError

Unit = Literal["epoch", "step", "fraction"]

# Fractions, so that they suit a training of any length: ranges and weights settle together first, then the ranges hold
# still, then the BatchNorm statistics, as the int8 model will have them.
FREEZE_OBSERVERS = 0.75
FREEZE_BN = 0.85

_POSSIBLE = (
    "an epoch (an integer), a fraction of the training (a float from 0 up to but not including 1), a count such as "
    '"1000 steps" or "3 epochs", or None for never'
)


@dataclass(frozen=True)
class Progress:
    """How far a training is, before one of its batches.

    Args:
        epoch: Complete epochs, ``trainer.current_epoch``.
        step: Optimizer steps done, ``trainer.global_step``.
        fraction: Part of the whole training that is done, 0 to 1; None where the training has no end.
    """

    epoch: int
    step: int
    fraction: float | None


@dataclass(frozen=True)
class SchedulePoint:
    """A point of the training, from which on something holds.

    Args:
        unit: ``"epoch"``, ``"step"`` (optimizer steps, ``trainer.global_step``) or ``"fraction"``.
        value: The number of these.

    Examples:
        >>> SchedulePoint.parse("1000 steps")
        SchedulePoint(unit='step', value=1000)
        >>> SchedulePoint.parse(0.75).reached(Progress(epoch=2, step=80, fraction=0.8))
        True
    """

    unit: Unit
    value: float

    @classmethod
    def parse(cls, value: Any, name: str = "schedule point") -> SchedulePoint | None:
        """Reads an epoch, a fraction or a count with its unit; None stays None: never.

        Args:
            value: What the user wrote.
            name: Of the setting, for the message.

        Raises:
            ConfigError: The value is none of these.
        """
        if value is None or isinstance(value, SchedulePoint):
            return value
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+)\s*(epoch|step)s?\s*", value)
            if match:
                unit: Unit = "epoch" if match[2] == "epoch" else "step"
                return cls(unit, int(match[1]))
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls("epoch", value)
        elif isinstance(value, float) and 0 <= value < 1:
            return cls("fraction", value)
        raise ConfigError(f"{name}={value!r}: possible are {_POSSIBLE}.")

    def reached(self, progress: Progress) -> bool:
        """Whether the training has come to the point."""
        if self.value == 0:
            return True
        done = {"epoch": progress.epoch, "step": progress.step, "fraction": progress.fraction}[self.unit]
        return done is not None and done >= self.value

    def __str__(self) -> str:
        return f"{self.value:g} of the training" if self.unit == "fraction" else f"{self.unit} {self.value:g}"


@dataclass(frozen=True)
class Phase:
    """What holds for a training batch.

    Attributes:
        fake_quant: Weights and activations are rounded to their grids.
        observers_frozen: The ranges no longer follow the batches.
        bn_frozen: BatchNorm normalizes with its running statistics, which no longer move.
    """

    fake_quant: bool
    observers_frozen: bool
    bn_frozen: bool

    @property
    def stage(self) -> int:
        """How many of the three hold: 0 at first in a run that starts in float, 3 when all has been frozen."""
        return self.fake_quant + self.observers_frozen + self.bn_frozen

    def __str__(self) -> str:
        fake_quant = "fake quantization on" if self.fake_quant else "float"
        observers = "observers frozen" if self.observers_frozen else "observers follow the batches"
        bn = "BatchNorm statistics frozen" if self.bn_frozen else "BatchNorm statistics follow the batches"
        return f"{fake_quant}, {observers}, {bn}"


@dataclass(frozen=True)
class Schedule:
    """The three points of a quantization-aware training.

    Args:
        fake_quant_start: From here on tensors are rounded; observers follow the batches from the start.
        freeze_observers: From here on ranges hold still.
        freeze_bn: From here on the statistics of every BatchNorm hold still.

    Raises:
        ConfigError: Fake quantization would never start, or would start after the observers froze.
    """

    fake_quant_start: SchedulePoint | None
    freeze_observers: SchedulePoint | None
    freeze_bn: SchedulePoint | None

    def __post_init__(self) -> None:
        if self.fake_quant_start is None:
            raise ConfigError(
                "fake_quant_start=None: fake quantization would never start. Give the point where it does (0: at once),"
                " or use PostTrainingQuantization to quantize without training."
            )
        self.check_order({})

    def at(self, progress: Progress) -> Phase:
        """What holds when the training is this far."""

        def is_past(point: SchedulePoint | None) -> bool:
            return point is not None and point.reached(progress)

        return Phase(is_past(self.fake_quant_start), is_past(self.freeze_observers), is_past(self.freeze_bn))

    def points(self) -> dict[str, SchedulePoint]:
        """The points that are not None, by the names of the settings."""
        named = {
            "fake_quant_start": self.fake_quant_start,
            "freeze_observers": self.freeze_observers,
            "freeze_bn": self.freeze_bn,
        }
        return {name: point for name, point in named.items() if point is not None}

    def check_order(self, lengths: dict[Unit, float]) -> None:
        """Checks that observers do not freeze before fake quantization starts.

        Args:
            lengths: How long the whole training is in each unit, as far as it is known; points are compared where they
                have the same unit, or where both of their units are known.

        Raises:
            ConfigError: They do.
        """
        start, freeze = self.fake_quant_start, self.freeze_observers
        if start is None or freeze is None or start.value == 0:
            return
        if start.unit == freeze.unit or freeze.value == 0:
            in_order = start.value <= freeze.value
        elif lengths.get(start.unit) and lengths.get(freeze.unit):
            in_order = start.value / lengths[start.unit] <= freeze.value / lengths[freeze.unit]
        else:
            return
        if not in_order:
            raise ConfigError(
                f"fake_quant_start is {start}, after freeze_observers at {freeze}: the ranges would freeze before fake "
                "quantization starts. Start it earlier or freeze later."
            )
