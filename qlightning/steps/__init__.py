"""Steps that make post-training quantization more accurate without training; ``quantize_model(steps=[...])``."""

from qlightning.steps.adaround import AdaRound
from qlightning.steps.base import Step
from qlightning.steps.batchnorm import ReestimateBatchNorm
from qlightning.steps.bias_correction import BiasCorrection
from qlightning.steps.equalization import CrossLayerEqualization

__all__ = ["AdaRound", "BiasCorrection", "CrossLayerEqualization", "ReestimateBatchNorm", "Step"]
