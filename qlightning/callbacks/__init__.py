"""The Lightning callbacks; the only part of the package that imports Lightning."""

from qlightning.callbacks.distillation import Distillation
from qlightning.callbacks.max_drop import MaxDrop
from qlightning.callbacks.ptq import PostTrainingQuantization
from qlightning.callbacks.qat import QuantizationAwareTraining
from qlightning.callbacks.schedule import SchedulePoint

__all__ = ["Distillation", "MaxDrop", "PostTrainingQuantization", "QuantizationAwareTraining", "SchedulePoint"]
