"""QScheme: the grid that a tensor is quantized to, as a frozen value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qlightning.errors import ConfigError

MIN_BITS, MAX_BITS = 2, 8


@dataclass(frozen=True)
class QScheme:
    """The integer grid of a quantized tensor.

    Args:
        bits: Bit width, 2 to 8. Codes of fewer than 8 bits are stored in 8.
        signed: Signed codes (stored as ``torch.int8``) or unsigned ones (``torch.uint8``).
        symmetric: The zero point is fixed at the middle of the grid (0 for signed codes); else it follows the range.
        axis: The dimension along which every slice has its own scale and zero point; None for one pair for the whole
            tensor. For the weight of a layer, axis 0 means its output channels, wherever the layer keeps them.
        narrow_range: Leaves out the lowest code, so that a signed grid is its own mirror image.

    Raises:
        ConfigError: A value is out of its limits.

    Examples:
        >>> QScheme().quant_min, QScheme().quant_max
        (-128, 127)
        >>> QScheme(bits=7, signed=False).quant_max
        127
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = False
    axis: int | None = None
    narrow_range: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not MIN_BITS <= self.bits <= MAX_BITS:
            raise ConfigError(f"QScheme bits={self.bits!r}: an integer from {MIN_BITS} to {MAX_BITS} is possible.")
        if self.axis is not None and (isinstance(self.axis, bool) or not isinstance(self.axis, int)):
            raise ConfigError(f"QScheme axis={self.axis!r}: a dimension (an integer) or None (per tensor) is possible.")
        for flag in ("signed", "symmetric", "narrow_range"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(f"QScheme {flag}={getattr(self, flag)!r}: True or False is possible.")

    @property
    def quant_min(self) -> int:
        """The lowest code."""
        lowest = -(2 ** (self.bits - 1)) if self.signed else 0
        return lowest + int(self.narrow_range)

    @property
    def quant_max(self) -> int:
        """The highest code."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid: 0 for signed codes, the upper middle of unsigned ones (128 of 8 bits)."""
        return 0 if self.signed else (self.quant_min + self.quant_max + 1) // 2

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that stores the codes."""
        return torch.int8 if self.signed else torch.uint8

    @property
    def per_channel(self) -> bool:
        """Whether every slice along ``axis`` has its own scale and zero point."""
        return self.axis is not None

    def reduced(self) -> QScheme:
        """Returns the scheme with one bit less, for kernels that would saturate on the full range."""
        return replace(self, bits=self.bits - 1)

    def __str__(self) -> str:
        sign = "int" if self.signed else "uint"
        shape = "per tensor" if self.axis is None else f"per channel (axis {self.axis})"
        kind = "symmetric" if self.symmetric else "affine"
        return f"{sign}{self.bits} {kind} {shape}{', narrow range' if self.narrow_range else ''}"
