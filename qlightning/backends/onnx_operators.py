"""What each ATen call is in ONNX. The layers and the grids are in onnx_form."""

from __future__ import annotations

from typing import Any

from qlightning.backends.onnx_arithmetic import ARITHMETIC
from qlightning.backends.onnx_call import Operator
from qlightning.backends.onnx_images import IMAGES
from qlightning.backends.onnx_moves import MOVES

OPERATORS: dict[Any, Operator] = {**ARITHMETIC, **IMAGES, **MOVES}
