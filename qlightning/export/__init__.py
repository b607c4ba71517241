"""Files that int8 models leave in."""

from qlightning.export.metadata import Metadata
from qlightning.export.onnx import save_onnx

__all__ = ["Metadata", "save_onnx"]
