"""The backend ``onednn``: torch's oneDNN kernels on plain uint8 and int8 tensors."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import fx, nn

from qlightning.backends import kernels, lowering
from qlightning.backends.base import Backend, accepts_symmetric_weights, cpu_has_int8_dot_products
from qlightning.backends.lowering import LayerCall, Value
from qlightning.backends.onednn_kernels import SUM_POST_OPS, ConvPacking, LinearPacking, find_post_op, kernel_name
from qlightning.backends.qdq import CONV_TRANSPOSES, CONVS, QParams, aten, conv_geometry, spread_geometry

_NEEDED = ("qconv_pointwise", "qconv2d_pointwise", "qconv_prepack", "qlinear_pointwise", "qlinear_prepack")


def build() -> Backend:
    """Builds the backend for this machine.

    A CPU without VNNI or AMX adds pairs of products up in 16 bits: 2 * 255 * 127 does not fit, 2 * 255 * 63 does.
    """
    return Backend(
        name="onednn",
        lower=lower,
        unavailable=unavailable(),
        reduced=None if cpu_has_int8_dot_products() else "weight",
        accepts=accepts_symmetric_weights,
    )


def unavailable() -> str:
    """Why this machine cannot run the kernels; empty where it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "its int8 kernels are for x86 CPUs."
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN."
    missing = [name for name in _NEEDED if not hasattr(torch.ops.onednn, name)]
    return f"this torch has no onednn::{missing[0]}." if missing else ""


def lower(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """Turns a QDQ graph into one of oneDNN's kernels; see :func:`qlightning.backends.lowering.lower`."""
    return lowering.lower(graph, root, OneDnn())


class OneDnn:
    """The kernels of oneDNN, as the lowering asks for them."""

    def emit_binary(self, graph: fx.Graph, name: str, left: Value, right: Value, out: QParams) -> fx.Node | None:
        if (out.quant_min, out.quant_max) != (0, 255):
            return None
        args = (name, *left.coded(), *right.coded(), out.scale, out.zero_point)
        return graph.call_function(kernels.binary, args)

    def emit_layer(self, graph: fx.Graph, call: LayerCall) -> fx.Node | None:
        node, layer, out = call.node, call.layer, call.out
        _, x_scale, x_zero_point = head = call.x.coded()
        fused = find_post_op(call.post, out, linear=node.target is aten.linear.default)
        sums = call.residual is not None
        if sums and not (node.target is aten.conv2d.default and out.quant_max == 255 and fused in SUM_POST_OPS):  # type: ignore[union-attr]
            return None
        if fused is None:
            return None
        post_op, post_args, algorithm = fused
        # The kernels (torch 2.14) have nothing behind a 3-d convolution, and only a ReLU behind a 1-d one.
        if layer.codes.dim() == 5 and post_op == "relu" and out is not None and out.zero_point == out.quant_min:
            post_op = "none"  # codes end where the values of a ReLU do
        allowed = {3: ("none", "relu"), 5: ("none",)}.get(layer.codes.dim(), (post_op,))
        if post_op not in allowed:
            return None
        result = (out.scale, out.zero_point, torch.uint8) if out is not None else (1.0, 0, torch.float32)
        tail = (*result, post_op, post_args)
        if node.target is aten.linear.default:
            layer.kernel = kernel_name("qlinear", post_op, out)
            weight = _weight(graph, call, LinearPacking())
            return graph.call_function(kernels.linear, (*head, *weight, *tail, algorithm))
        if node.target in CONV_TRANSPOSES:
            dims = CONV_TRANSPOSES[node.target]
            spacing, before, after, dilation, groups = spread_geometry(node, dims, layer.codes.shape[2:])
            ones, zeros = [1] * dims, [0] * dims
            pack = ConvPacking(x_scale, x_zero_point, ones, zeros, dilation, groups, flipped=True)
            layer.kernel = kernel_name(f"qconv{dims}d, transposed", post_op, out)
            weight = _weight(graph, call, pack)
            return graph.call_function(
                kernels.conv_transpose, (*head, *weight, spacing, before, after, dilation, groups, *tail)
            )
        dims = CONVS[node.target]  # type: ignore[index]
        stride, padding, dilation, groups = conv_geometry(node, dims)
        pack = ConvPacking(x_scale, x_zero_point, stride, padding, dilation, groups)
        weight = _weight(graph, call, pack)
        geometry = (stride, padding, dilation, groups)
        if call.residual is None:
            layer.kernel = kernel_name(f"qconv{dims}d", post_op, out)
            return graph.call_function(kernels.conv, (*head, *weight, *geometry, *tail))
        assert out is not None
        layer.kernel = kernel_name(f"qconv{dims}d+sum", post_op, out)
        end = (list(layer.codes.shape[2:]), *call.residual.coded(), out.scale, out.zero_point, post_op == "relu")
        return graph.call_function(kernels.conv2d_add, (*head, *weight, *geometry, *end))


def _weight(graph: fx.Graph, call: LayerCall, pack: Any) -> tuple[fx.Node | None, ...]:
    names = ("scale", "zero_point") if call.layer.bias is None else ("scale", "zero_point", "bias")
    kept = [graph.get_attr(f"{call.path}.{name}") for name in names]
    return call.packed(graph, pack), *kept, *[None] * (3 - len(kept))
