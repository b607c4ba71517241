"""Quantization-aware training and post-training quantization for PyTorch Lightning: true int8 models on the CPU."""

from typing import TYPE_CHECKING, Any

from qlightning.backends import Backend
from qlightning.errors import QuantizationError
from qlightning.graph import convert, prepare, unprepare
from qlightning.graph.calibrate import calibrate
from qlightning.graph.loading import watch_lightning_modules
from qlightning.graph.report import report
from qlightning.qconfig import QConfig
from qlightning.qscheme import QScheme
from qlightning.quantization import quantize_model
from qlightning.version import __version__

if TYPE_CHECKING:
    from qlightning.callbacks import PostTrainingQuantization, QuantizationAwareTraining

__all__ = [
    "Backend",
    "PostTrainingQuantization",
    "QConfig",
    "QScheme",
    "QuantizationAwareTraining",
    "QuantizationError",
    "__version__",
    "calibrate",
    "convert",
    "prepare",
    "quantize_model",
    "report",
    "unprepare",
]

watch_lightning_modules()


def __getattr__(name: str) -> Any:
    # Lightning takes seconds to import, and the core does without it.
    if name in ("PostTrainingQuantization", "QuantizationAwareTraining"):
        from qlightning import callbacks

        return getattr(callbacks, name)
    raise AttributeError(f"module 'qlightning' has no attribute {name!r}")
