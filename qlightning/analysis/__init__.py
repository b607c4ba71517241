"""Looking inside: what quantization does to tensors, and what each layer costs."""

from qlightning.analysis.describe import Description, describe
from qlightning.analysis.sensitivity import LayerSensitivity, Sensitivity, sensitivity

__all__ = ["Description", "LayerSensitivity", "Sensitivity", "describe", "sensitivity"]
