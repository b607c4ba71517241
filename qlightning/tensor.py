"""QuantizedTensor: integers with the scale and zero point that give them their meaning."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qlightning.affine import dequantize


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized tensor on plain integer storage.

    Args:
        codes: int8 or uint8, any shape.
        scale: float32, 0-d, or one per slice along ``axis``.
        zero_point: int32, shaped as ``scale``.
        axis: The dimension whose slices have their own scale; None for one scale.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int | None = None

    def int_repr(self) -> Tensor:
        """The integers."""
        return self.codes

    def dequantize(self) -> Tensor:
        """(codes - zero_point) * scale, float32."""
        return dequantize(self.codes, self.scale, self.zero_point, self.axis)
