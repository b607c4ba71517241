"""Step: one way to make a calibrated net more accurate without training, as a value; and how a chain of them runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from qlightning.errors import ConfigError
from qlightning.graph.changes import StepReport
from qlightning.steps.subject import Subject


class Step(ABC):
    """One step of post-training quantization: a frozen value that says how, and changes prepared nets when applied.

    Attributes:
        before_calibration: Whether it changes the float net that the ranges are then calibrated on, and not a
            calibrated one.
    """

    before_calibration: ClassVar[bool] = False

    @abstractmethod
    def apply(self, subject: Subject) -> StepReport:
        """Changes the nets of a subject by ``subject.write``, and says what it did to each layer."""


def checked_steps(steps: Any) -> tuple[Step, ...]:
    """A chain of steps as a tuple, after a look at what it is made of.

    Raises:
        ConfigError: It holds anything but steps, or one that works on the float net behind one that needs its ranges.
    """
    if isinstance(steps, (str, bytes, Step)) or not isinstance(steps, Iterable):
        raise ConfigError(f"steps={steps!r}: a list of steps is needed, such as [BiasCorrection()].")
    chain = tuple(steps)
    for step in chain:
        if not isinstance(step, Step):
            hint = f"; did you mean {step.__name__}()?" if isinstance(step, type) else "."
            raise ConfigError(f"steps: {step!r} is no step of qlightning.steps{hint}")
    late = [type(step).__name__ for step in chain if not step.before_calibration]
    for index, step in enumerate(chain):
        if step.before_calibration and any(not other.before_calibration for other in chain[:index]):
            raise ConfigError(
                f"steps: {type(step).__name__} changes the float net before it is calibrated: put it before {late[0]}."
            )
    return chain


def apply_steps(steps: Sequence[Step], subject: Subject, before_calibration: bool) -> None:
    """Applies those steps of a chain that come before the calibration, or those that come behind it."""
    for step in steps:
        if step.before_calibration == before_calibration:
            with torch.inference_mode(False), torch.no_grad():
                subject.note(step.apply(subject))
    if before_calibration:
        subject.originals.clear()  # what these steps have made of the nets is what the ranges are calibrated on
