"""Steps that make post-training quantization more accurate without training; ``quantize_model(steps=[...])``."""

from qlightning.steps.base import Step
from qlightning.steps.bias_correction import BiasCorrection
from qlightning.steps.equalization import CrossLayerEqualization

__all__ = ["BiasCorrection", "CrossLayerEqualization", "Step"]
