"""The Lightning callbacks; the only part of the package that imports Lightning."""

from qlightning.callbacks.ptq import PostTrainingQuantization
from qlightning.callbacks.qat import QuantizationAwareTraining
from qlightning.callbacks.schedule import SchedulePoint

__all__ = ["PostTrainingQuantization", "QuantizationAwareTraining", "SchedulePoint"]
