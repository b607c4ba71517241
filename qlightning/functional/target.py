"""The grid of a result: given, or chosen from the exact result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from qlightning.backends import Backend, resolve_backend
from qlightning.errors import ConfigError, NonFiniteError
from qlightning.qparams import as_scheme, checked_qparams, choose_qparams
from qlightning.qscheme import QScheme
from qlightning.tensor import QuantizedTensor

FLOAT32_STEP = 2.0**-22
"""More than a float32 kernel is off by, relative to the largest value it handles: some roundings of 2 ** -24."""


class Grid(TypedDict, total=False):
    """The keywords that every operation has.

    Attributes:
        scale: Of the result.
        zero_point: Of the result.
        scheme: Of the result: a QScheme, or torch's name for one of 8 bits.
        backend: What computes.
    """

    scale: float | Tensor | None
    zero_point: int | Tensor | None
    scheme: QScheme | torch.dtype | None
    backend: str | Backend


@dataclass(frozen=True)
class Target:
    """The grid that a result is rounded to.

    Args:
        scheme: Its scheme.
        scale: None: to be chosen from the exact result.
        zero_point: None: to be chosen, or the middle of a symmetric grid.
    """

    scheme: QScheme
    scale: Any = None
    zero_point: Any = None

    @classmethod
    def of(cls, operation: str, like: QuantizedTensor, grid: Grid, keep: bool = False) -> Target:
        """The grid that an operation is asked for.

        Args:
            operation: Its name, for messages.
            like: The first operand: its scheme counts where none is given.
            grid: What the caller has given.
            keep: Whether the operand's own grid counts where none is given.

        Raises:
            ConfigError: Only half of a grid is given, or it is none; or no backend has the name.
            BackendError: This machine cannot run the backend.
            TypeError: A keyword is unknown.
        """
        if unknown := grid.keys() - Grid.__annotations__.keys():
            raise TypeError(f"{operation}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        resolve_backend(grid.get("backend", "auto"))
        scale, zero_point, scheme = (grid.get(name) for name in ("scale", "zero_point", "scheme"))
        if scale is None and zero_point is None and scheme is None and keep:
            return cls(like.scheme, like.scale, like.zero_point)
        chosen = replace(like.scheme, axis=None) if scheme is None else as_scheme(scheme)
        if scale is None and zero_point is not None:
            raise ConfigError(
                f"{operation}: zero_point={zero_point!r} without a scale: give both, or none to have them chosen."
            )
        if scale is not None and zero_point is None:
            if not chosen.symmetric:
                raise ConfigError(
                    f"{operation}: scale={scale!r} without a zero_point, which {chosen} needs: give both, or none."
                )
            zero_point = torch.full_like(torch.as_tensor(scale), chosen.middle, dtype=torch.int32)
        target = cls(chosen, scale, zero_point)
        if scale is not None and chosen.axis is None:
            checked_qparams(scale, zero_point, chosen, like.codes)
        return target

    @property
    def is_given(self) -> bool:
        """Whether the grid is known before the result is."""
        return self.scale is not None

    def chosen_for(self, values: Tensor) -> Target:
        """The same with a scale and a zero point: those given, or those that cover the values.

        Raises:
            NonFiniteError: A value is NaN or infinite.
        """
        if self.is_given:
            return self
        if values.numel() == 0:
            nothing = values.new_zeros(() if self.scheme.axis is None else values.shape[self.scheme.axis])
            return replace(self, scale=torch.ones_like(nothing), zero_point=Target(self.scheme)._middle(nothing))
        scale, zero_point = choose_qparams(values, self.scheme)
        return Target(self.scheme, scale, zero_point)

    def round(self, values: Tensor) -> QuantizedTensor:
        """Rounds exact values (float64) to the grid, half to even.

        Raises:
            ConfigError: The grid does not fit the shape of the values.
            NonFiniteError: A value is NaN, or infinite where the grid was to be chosen.
        """
        if bool(values.isnan().any()):
            raise NonFiniteError("The result has NaN, which no code stands for.")
        target = self.chosen_for(values)
        scale, zero_point, scheme = checked_qparams(target.scale, target.zero_point, target.scheme, values)
        shape = [1] * values.ndim
        if scheme.axis is not None:
            shape[scheme.axis] = -1
        codes = (values / scale.double().reshape(shape)).round_().add_(zero_point.reshape(shape))
        codes = codes.clamp_(scheme.quant_min, scheme.quant_max).to(scheme.dtype)
        return QuantizedTensor(codes, scale, zero_point, scheme)

    def float32_is_fine(self, largest: float) -> bool:
        """Whether a kernel that handles values up to ``largest`` in float32 stays within a quarter of a step."""
        return self.is_given and self.scheme.axis is None and largest * FLOAT32_STEP < float(self.scale) / 4

    def takes_codes_of(self, dtype: torch.dtype) -> bool:
        """Whether a kernel that saturates at the ends of a dtype saturates at those of the grid."""
        ends = torch.iinfo(dtype)
        return (self.scheme.quant_min, self.scheme.quant_max) == (ends.min, ends.max)

    def hold(self, codes: Tensor) -> QuantizedTensor:
        """The result whose codes a kernel has computed."""
        if not self.takes_codes_of(codes.dtype):
            codes = codes.clamp(self.scheme.quant_min, self.scheme.quant_max)
        scale, zero_point, scheme = checked_qparams(self.scale, self.zero_point, self.scheme, codes)
        return QuantizedTensor(codes, scale, zero_point, scheme)

    def _middle(self, like: Tensor) -> Tensor:
        symmetric_unsigned = self.scheme.symmetric and not self.scheme.signed
        middle = (self.scheme.quant_min + self.scheme.quant_max + 1) // 2 if symmetric_unsigned else 0
        return torch.full_like(like, max(middle, self.scheme.quant_min), dtype=torch.int32)
