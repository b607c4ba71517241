"""What each ATen call on images is in ONNX: pooling, resizing, padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qlightning.backends.onnx_call import Call, Operator
from qlightning.backends.qdq import ints

aten = torch.ops.aten


def _pad(mode: str) -> Operator:
    def translate(c: Call) -> str:
        margins = list(c["pad"] if "pad" in c.arguments else c["padding"])
        pairs = list(zip(margins[::2], margins[1::2], strict=True))[::-1]
        pairs = [(0, 0)] * (c.value().dim() - len(pairs)) + pairs
        pads = c.graph.constant([p[0] for p in pairs] + [p[1] for p in pairs])
        value = [c.graph.constant(c["value"], c.out.dtype)] if mode == "constant" else []
        return c.add("Pad", c.name("self"), pads, *value, mode=mode)

    return translate


def _max_pool(c: Call) -> tuple[str, None]:
    dims = len(c["kernel_size"]) if len(c["kernel_size"]) > 1 else c.value().dim() - 2
    kernel, padding, dilation = (ints(c[name], dims) for name in ("kernel_size", "padding", "dilation"))
    stride = ints(c["stride"], dims) if c["stride"] else kernel
    _batched(c, dims)
    ends = _ends(c, c.out[0], kernel, stride, padding, dilation)
    pooled = c.add(
        "MaxPool", c.name("self"), kernel_shape=kernel, strides=stride, pads=padding + ends, dilations=dilation
    )
    return pooled, None


def _avg_pool(c: Call) -> str:
    dims = int(c.node.target._schema.name[-2])  # type: ignore[union-attr]
    kernel, padding = (ints(c[name], dims) for name in ("kernel_size", "padding"))
    stride = ints(c["stride"], dims) if c["stride"] else kernel
    _batched(c, dims)
    ends = _ends(c, c.out, kernel, stride, padding, [1] * dims)
    if ends != padding or c.arguments.get("divisor_override") is not None:
        raise c.refuse("divides by other numbers than those of the places")
    x = c.name("self")
    if c["count_include_pad"] and any(padding):
        # OpenVINO (2026.4) takes padding that counts for zeros among the codes, whatever the zero point is; and takes
        # in a Pad before the pooling, unless its value is no zero.
        margins = c.graph.constant([0, 0, *padding] * 2)
        x, padding = c.add("Pad", x, margins, c.graph.constant(_NEXT_TO_ZERO, torch.float32)), [0] * dims
    return c.add("AveragePool", x, kernel_shape=kernel, strides=stride, pads=padding * 2)


_NEXT_TO_ZERO = 1e-30
"""Added to any value on a grid it changes nothing in float32."""


def _batched(c: Call, dims: int) -> None:
    if c.value().dim() != dims + 2:
        raise c.refuse("has no batch dimension")


def _ends(
    c: Call, out: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """The padding behind each dimension that gives the size of the result, also where that was rounded up."""
    sizes = zip(c.value().shape[2:], out.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [max(p, (o - 1) * s + d * (k - 1) + 1 - i - p) for i, o, k, s, p, d in sizes]


def _adaptive_pool(op_type: str, dims: int) -> Operator:
    def translate(c: Call) -> Any:
        _batched(c, dims)
        out = c.out[0] if isinstance(c.out, tuple) else c.out
        sizes = list(zip(c.value().shape[2:], out.shape[2:], strict=True))
        if any(size % result for size, result in sizes):
            raise c.refuse("has windows of several sizes")
        window = [size // result for size, result in sizes]
        pooled = c.add(op_type, c.name("self"), kernel_shape=window, strides=window)
        return (pooled, None) if isinstance(c.out, tuple) else pooled

    return translate


def _resize(c: Call) -> str:
    sizes = c.graph.constant(list(c.out.shape))
    mode = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    argument = "self" if "self" in c.arguments else "input"
    return c.add("Resize", c.name(argument), "", "", sizes, mode="nearest", **mode)


def _resize_linear(c: Call) -> str:
    argument = "self" if "self" in c.arguments else "input"
    if c.arguments.get("scales_h") or c.arguments.get("scale_factors"):
        raise c.refuse("has factors that need not be the ratio of the sizes")
    mode = "align_corners" if c["align_corners"] else "half_pixel"
    sizes = c.graph.constant(list(c.out.shape))
    return c.add("Resize", c.name(argument), "", "", sizes, mode="linear", coordinate_transformation_mode=mode)


def _pixel_shuffle(c: Call) -> str:
    if c.value().dim() != 4:
        raise c.refuse("has no batch dimension, or several")
    return c.add("DepthToSpace", c.name("self"), blocksize=c["upscale_factor"], mode="CRD")


IMAGES: dict[Any, Operator] = {
    aten.constant_pad_nd.default: _pad("constant"),
    **{getattr(aten, f"{name}_pad{dims}d").default: _pad(mode) for name, mode in (
        ("reflection", "reflect"), ("replication", "edge"),
    ) for dims in (1, 2, 3)},
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool3d_with_indices.default: _max_pool,
    aten.avg_pool1d.default: _avg_pool,
    aten.avg_pool2d.default: _avg_pool,
    aten.avg_pool3d.default: _avg_pool,
    aten._adaptive_avg_pool2d.default: _adaptive_pool("AveragePool", 2),
    aten._adaptive_avg_pool3d.default: _adaptive_pool("AveragePool", 3),
    aten.adaptive_max_pool2d.default: _adaptive_pool("MaxPool", 2),
    aten.adaptive_max_pool3d.default: _adaptive_pool("MaxPool", 3),
    **{getattr(getattr(aten, f"upsample_nearest{dims}d"), kind): _resize
       for dims in (1, 2, 3) for kind in ("default", "vec")},
    aten.upsample_bilinear2d.default: _resize_linear,
    aten.upsample_bilinear2d.vec: _resize_linear,
    aten.pixel_shuffle.default: _pixel_shuffle,
}  # fmt: skip
