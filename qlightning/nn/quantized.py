"""What an int8 layer keeps: its integer weight, and the bias that goes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qlightning.errors import CaptureError
from qlightning.fake_quantize import swap_channels
from qlightning.qscheme import QScheme
from qlightning.tensor import QuantizedTensor


class QuantizedLayer(nn.Module):
    """The integer weight and the float bias of one int8 layer, BatchNorm folded in; the graph runs the kernel on them.

    Args:
        codes: int8 (uint8 where the scheme is unsigned), output channels first: (out, in / groups, ...), for
            transposed convolutions too.
        scale: float32 (out,).
        zero_point: int32 (out,).
        bias: float32 (out,), or None.
        transposed_groups: ``groups`` of a transposed convolution; None for all other layers.
        kind: The type of the float layer.
        scheme: The grid of the weight before BatchNorm was folded in; axis 0.

    Attributes:
        kernel: What computes the layer, for the report.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        bias: Tensor | None,
        transposed_groups: int | None = None,
        kind: str = "",
        scheme: QScheme = QScheme(axis=0),  # noqa: B008
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.register_buffer("bias", bias)
        self.transposed_groups = transposed_groups
        self.kind, self.scheme, self.kernel = kind, scheme, ""
        self._packings: list[tuple[str, Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Has no meaning of its own: the grids of its input and its output are in the graph of the model.

        Raises:
            CaptureError: Always; says what to call instead.
        """
        raise CaptureError(
            f"An int8 {self.kind or 'layer'} runs inside the graph of the model that was captured: call that model. "
            f"To call a part of it on its own, prepare that part."
        )

    def weight(self) -> QuantizedTensor:
        """The weight, BatchNorm folded in, in the layout of the float layer; one scale for each output channel.

        A transposed convolution with groups has no axis of its output channels in that layout; its weight is given
        output channels first, (out, in / groups, ...). A channel whose negative factor (of the BatchNorm) stands in its
        scale, as one of its codes has no opposite, is given mirrored around the middle of the grid: the same values.
        """
        codes, scale, zero_point, scheme = self.codes, self.scale, self.zero_point, self.scheme
        if bool((negative := scale < 0).any()):
            mirror = scheme.quant_min + scheme.quant_max
            shaped = negative.view(-1, *[1] * (codes.dim() - 1))
            codes = torch.where(shaped, (mirror - codes.int()).to(codes.dtype), codes)
            scale, zero_point = scale.abs(), torch.where(negative, mirror - zero_point, zero_point)
        scheme = replace(scheme, symmetric=scheme.symmetric and bool((zero_point == scheme.middle).all()))
        if self.transposed_groups == 1:
            return QuantizedTensor(codes.transpose(0, 1), scale, zero_point, replace(scheme, axis=1))
        return QuantizedTensor(codes, scale, zero_point, scheme)

    def add_packing(self, pack: Any) -> str:
        """Keeps a kernel's own form of the weight beside it; returns the attribute that holds it.

        Args:
            pack: Builds the packed weight from this layer; picklable. The packed form is not saved or copied, but
                built again.
        """
        name = f"packed_{len(self._packings)}"
        self._packings.append((name, pack))
        self.__dict__[name] = pack(self)
        return name

    def unpack(self) -> None:
        """Drops the packed weights."""
        for name, _ in self._packings:
            del self.__dict__[name]
        self._packings = []

    def repack(self) -> None:
        """Builds the packed weights again, after the codes have changed."""
        for name, pack in self._packings:
            self.__dict__[name] = pack(self)

    def __getstate__(self) -> dict[str, Any]:
        packed = {name for name, _ in self._packings}
        return {name: value for name, value in self.__dict__.items() if name not in packed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.repack()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.repack()

    def extra_repr(self) -> str:
        """Shape and kernel, for ``print(model)``."""
        return f"{tuple(self.codes.shape)}, int8{f', {self.kernel}' if self.kernel else ''}"


def has_int8_layers(module: nn.Module) -> bool:
    """Whether a module is, or holds, an int8 layer."""
    return any(isinstance(m, QuantizedLayer) for m in module.modules())


def dequantized_weight(codes: Tensor, scale: Tensor, zero_point: Tensor, transposed_groups: int | None) -> Tensor:
    """The float weight of an int8 layer in the layout of the float layer, as the QDQ graph computes it."""
    ends = torch.iinfo(codes.dtype)
    weight = torch.ops.quantized_decomposed.dequantize_per_channel(
        codes, scale, zero_point, 0, ends.min, ends.max, codes.dtype
    )
    return weight if transposed_groups is None else swap_channels(weight, transposed_groups)
