"""What the oneDNN kernels take: the calls they fuse, the geometry of a layer, packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, fx

from qlightning.backends.qdq import QParams
from qlightning.calls import function_name

SUM_POST_OPS: tuple[tuple[str, list[float], str], ...] = (("none", [], ""), ("relu", [], ""))


def kernel_name(kernel: str, post_op: str, out: QParams | None) -> str:
    """What the report calls a kernel."""
    fused = "" if post_op == "none" else f"+{post_op}"
    return f"onednn {kernel}{fused} to {'float32' if out is None else 'uint8'}"


def find_post_op(post: list[fx.Node], out: QParams | None, linear: bool) -> tuple[str, list[float], str] | None:
    """The kernel's name for the elementwise calls behind it; None where it has none."""
    if len(post) > 1:
        return None
    name = function_name(post[0].target) if post else "none"
    args: list[float] = [float(a) for a in post[0].args[1:]] if post else []  # type: ignore[arg-type]
    algorithm = ""
    if name == "silu":
        name = "swish"
    if name == "gelu" and linear:
        algorithm = str(post[0].kwargs.get("approximate", "none"))
    allowed = ("none", "relu", "hardtanh", "hardswish", "swish", *(("gelu", "tanh", "leaky_relu") if linear else ()))
    if name not in allowed:
        return None
    if out is not None and (out.quant_min, out.quant_max) != (0, 255):
        # The kernel saturates at 0 and 255; a narrower grid needs its ends as a clamp.
        low, high = (out.quant_min - out.zero_point) * out.scale, (out.quant_max - out.zero_point) * out.scale
        if name == "relu":
            low = max(low, 0.0)
        elif name == "hardtanh":
            low, high = max(low, args[0]), min(high, args[1])
        elif name != "none":
            return None
        return "hardtanh", [low, high], ""
    return name, args, algorithm


class IntegerWeight(Protocol):
    """What has integer codes, output channels first, and a scale for each of these."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class ConvPacking:
    """Packs the weight of a convolution for the kernel, for one place where it is called."""

    x_scale: float
    x_zero_point: int
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    flipped: bool = False

    def __call__(self, layer: IntegerWeight) -> Tensor:
        codes = layer.codes
        if self.flipped:
            codes = codes.flip(list(range(2, codes.dim())))
        return torch.ops.onednn.qconv_prepack(
            codes.contiguous(), layer.scale, self.x_scale, self.x_zero_point, self.stride, self.padding, self.dilation,
            self.groups, None,
        )  # fmt: skip


@dataclass(frozen=True)
class LinearPacking:
    """Packs the weight of a linear layer for the kernel."""

    def __call__(self, layer: IntegerWeight) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(layer.codes, None)
