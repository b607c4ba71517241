"""The Lightning callbacks; the only part of the package that imports Lightning."""

from qlightning.callbacks.distillation import Distillation
from qlightning.callbacks.ptq import PostTrainingQuantization
from qlightning.callbacks.qat import QuantizationAwareTraining
from qlightning.callbacks.schedule import SchedulePoint

__all__ = ["Distillation", "PostTrainingQuantization", "QuantizationAwareTraining", "SchedulePoint"]
