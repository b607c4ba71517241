"""Quantization-aware training and post-training quantization for PyTorch Lightning: true int8 models on the CPU."""

from qlightning.backends import Backend
from qlightning.errors import QuantizationError
from qlightning.graph import convert, prepare, unprepare
from qlightning.graph.calibrate import calibrate
from qlightning.graph.report import report
from qlightning.qconfig import QConfig
from qlightning.qscheme import QScheme
from qlightning.quantization import quantize_model

__all__ = [
    "Backend",
    "QConfig",
    "QScheme",
    "QuantizationError",
    "calibrate",
    "convert",
    "prepare",
    "quantize_model",
    "report",
    "unprepare",
]
