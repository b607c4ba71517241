"""What the oneDNN kernels take: the calls they fuse, the geometry of a layer, packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from qlightning.backends.qdq import QParams, ints
from qlightning.calls import argument, function_name

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


def conv_geometry(node: fx.Node, dims: int) -> tuple[list[int], list[int], list[int], int]:
    """Stride, padding, dilation and groups of an ATen convolution."""
    stride, padding, dilation = (
        ints(argument(node, index, name, default), dims)
        for index, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    return stride, padding, dilation, int(argument(node, 6, "groups", 1))


def transpose_geometry(node: fx.Node, dims: int) -> tuple[list[int], list[int], list[int], int, list[int]]:
    """Stride, padding, output padding, groups and dilation of an ATen transposed convolution."""
    stride, padding, output_padding, dilation = (
        ints(argument(node, index, name, default), dims)
        for index, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1))
    )
    return stride, padding, output_padding, int(argument(node, 6, "groups", 1)), dilation


def max_pool2d_args(node: fx.Node, module: nn.Module | None) -> tuple[Any, ...] | None:
    """Arguments of the int8 max pooling kernel, for a call that is one."""
    if isinstance(module, nn.MaxPool2d):
        values = (module.kernel_size, module.stride, module.padding, module.dilation)
        return (*(ints(value, 2) for value in values), module.ceil_mode)
    if node.op == "call_function" and function_name(node.target) == "max_pool2d":
        kernel = argument(node, 1, "kernel_size")
        values = (
            kernel,
            argument(node, 2, "stride") or kernel,
            argument(node, 3, "padding", 0),
            argument(node, 4, "dilation", 1),
        )
        if any(
            isinstance(part, fx.Node)
            for value in values
            for part in (value if isinstance(value, (list, tuple)) else [value])
        ):
            return None
        return (*(ints(value, 2) for value in values), bool(argument(node, 5, "ceil_mode", False)))
    return None


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
