"""Quantization-aware training and post-training quantization for PyTorch Lightning: true int8 models on the CPU."""

from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_module_registration_hook

from qlightning.analysis import describe, sensitivity
from qlightning.backends import Backend
from qlightning.errors import QuantizationError
from qlightning.export import load, save
from qlightning.graph import convert, prepare, unprepare
from qlightning.graph.calibrate import calibrate
from qlightning.graph.ranges import ranges
from qlightning.graph.report import report
from qlightning.lsq import LearnedScales
from qlightning.qconfig import QConfig
from qlightning.qparams import choose_qparams
from qlightning.qscheme import QScheme
from qlightning.quantization import quantize_model
from qlightning.tensor import QuantizedTensor, quantize, quantize_per_channel
from qlightning.tensor_file import load_tensors, save_tensors
from qlightning.version import __version__

if TYPE_CHECKING:
    from qlightning.callbacks import Distillation, PostTrainingQuantization, QuantizationAwareTraining

__all__ = [
    "Backend",
    "Distillation",
    "LearnedScales",
    "PostTrainingQuantization",
    "QConfig",
    "QScheme",
    "QuantizationAwareTraining",
    "QuantizationError",
    "QuantizedTensor",
    "__version__",
    "calibrate",
    "choose_qparams",
    "convert",
    "describe",
    "load",
    "load_tensors",
    "prepare",
    "quantize",
    "quantize_model",
    "quantize_per_channel",
    "ranges",
    "report",
    "save",
    "save_tensors",
    "sensitivity",
    "unprepare",
]


def _meet_checkpoints(module: Any, name: str, submodule: Any) -> None:
    if any(base.__name__ == "LightningModule" for base in type(module).__mro__):
        from qlightning.callbacks.loading import ensure

        ensure(module)


# `LightningModule.load_from_checkpoint` builds a float model and loads a state dict strictly, without a hook in between
# that is not the user's own. So every LightningModule meets checkpoints of the prepared form from its first child on.
register_module_module_registration_hook(_meet_checkpoints)


def __getattr__(name: str) -> Any:
    # Lightning takes seconds to import, and the core does without it.
    if name in ("Distillation", "PostTrainingQuantization", "QuantizationAwareTraining"):
        from qlightning import callbacks

        return getattr(callbacks, name)
    raise AttributeError(f"module 'qlightning' has no attribute {name!r}")
