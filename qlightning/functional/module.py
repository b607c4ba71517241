"""QFunctional: a place in a model where quantized tensors are added, multiplied or put side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qlightning.backends import Backend
from qlightning.errors import CaptureError
from qlightning.functional.elementwise import add_scalar, mul_scalar
from qlightning.functional.layers import matmul
from qlightning.functional.pairs import add, add_relu, cat, mul
from qlightning.functional.target import Grid
from qlightning.qparams import as_scheme, checked_qparams
from qlightning.qscheme import QScheme
from qlightning.tensor import QuantizedTensor


class QFunctional(nn.Module):
    """Arithmetic on quantized tensors with a result on one grid, like torch.ao's ``QFunctional``.

    Args:
        scale: Of the results, above zero.
        zero_point: Of the results, a code of the grid.
        scheme: Of the results, per tensor.
        backend: What computes.

    Attributes:
        scale: float32, 0-d. Saved.
        zero_point: int32, 0-d. Saved.

    Raises:
        ConfigError: They do not fit together.

    Examples:
        >>> from qlightning import quantize
        >>> x = quantize(torch.tensor([1.0, 2.0]), 0.1, 0)
        >>> QFunctional(scale=0.5, zero_point=0, scheme=QScheme()).add(x, x).int_repr()
        tensor([4, 8], dtype=torch.int8)
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        scale: float = 1.0,
        zero_point: int = 0,
        scheme: QScheme | torch.dtype = torch.quint8,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__()
        self.scheme = as_scheme(scheme)
        self.backend = backend
        scales, zero_points, _ = checked_qparams(scale, zero_point, self.scheme, torch.empty(()))
        self.register_buffer("scale", scales.clone())
        self.register_buffer("zero_point", zero_points.clone())

    @property
    def _grid(self) -> Grid:
        return Grid(scale=self.scale, zero_point=self.zero_point, scheme=self.scheme, backend=self.backend)

    def add(self, a: QuantizedTensor, b: QuantizedTensor) -> QuantizedTensor:
        """``a + b``."""
        return add(a, b, **self._grid)

    def add_relu(self, a: QuantizedTensor, b: QuantizedTensor) -> QuantizedTensor:
        """``max(a + b, 0)``, rounded once."""
        return add_relu(a, b, **self._grid)

    def mul(self, a: QuantizedTensor, b: QuantizedTensor) -> QuantizedTensor:
        """``a * b``."""
        return mul(a, b, **self._grid)

    def matmul(self, a: QuantizedTensor, b: QuantizedTensor) -> QuantizedTensor:
        """The matrix product."""
        return matmul(a, b, **self._grid)

    def cat(self, tensors: Sequence[QuantizedTensor], dim: int = 0) -> QuantizedTensor:
        """The tensors side by side."""
        return cat(tensors, dim, **self._grid)

    def add_scalar(self, x: QuantizedTensor, value: float) -> QuantizedTensor:
        """``x + value``."""
        return add_scalar(x, value, **self._grid)

    def mul_scalar(self, x: QuantizedTensor, value: float) -> QuantizedTensor:
        """``x * value``."""
        return mul_scalar(x, value, **self._grid)

    def forward(self, *args: object, **kwargs: object) -> QuantizedTensor:
        """Has no meaning of its own.

        Raises:
            CaptureError: Always; says what to call.
        """
        raise CaptureError("QFunctional is not called itself: call one of its methods, such as add(a, b).")

    def extra_repr(self) -> str:
        """The grid, for ``print(model)``."""
        return f"scale={float(self.scale):.6g}, zero_point={int(self.zero_point)}, {self.scheme}"
