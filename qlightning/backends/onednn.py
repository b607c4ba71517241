"""The backend ``onednn``: torch's oneDNN kernels on plain uint8 and int8 tensors."""

from __future__ import annotations

import platform

import torch
from torch import fx, nn

from qlightning.backends import kernels, lowering, onednn_images
from qlightning.backends.base import Backend, accepts_symmetric_weights, cpu_has_int8_dot_products
from qlightning.backends.liveness import overwrite_residuals
from qlightning.backends.lowering import LayerCall, Value
from qlightning.backends.onednn_calls import Conv, ConvSum, ConvTranspose, Geometry, Linear, Result
from qlightning.backends.onednn_kernels import SUM_POST_OPS, PostOp, find_post_op, kernel_name
from qlightning.backends.qdq import CONV_TRANSPOSES, CONVS, DEQUANTIZE, QParams, aten, conv_geometry, spread_geometry

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
    lowered = lowering.lower(graph, root, OneDnn())
    overwrite_residuals(lowered)
    return lowered


class OneDnn:
    """The kernels of oneDNN, as the lowering asks for them."""

    def emit_binary(self, graph: fx.Graph, name: str, left: Value, right: Value, out: QParams) -> fx.Node | None:
        if (out.quant_min, out.quant_max) != (0, 255):
            return None
        args = (name, *left.coded(), *right.coded(), out.scale, out.zero_point)
        return graph.call_function(onednn_images.binary, args)

    def emit_average(self, graph: fx.Graph, value: Value, out: QParams) -> fx.Node | None:
        if (out.quant_min, out.quant_max) != (0, 255):
            return None
        return graph.call_function(onednn_images.average, (*value.coded(), out.scale, out.zero_point))

    def emit_layer(self, graph: fx.Graph, call: LayerCall) -> fx.Node | None:
        node, layer, out = call.node, call.layer, call.out
        post = find_post_op(call.post, out, linear=node.target is aten.linear.default)
        if post is None:
            return None
        if call.residual is not None and not (node.target is aten.conv2d.default and post in SUM_POST_OPS):
            return None
        # The kernels (torch 2.14) have nothing behind a 3-d convolution, and only a ReLU behind a 1-d one.
        if layer.codes.dim() == 5 and post.name == "relu" and out is not None and out.zero_point == out.quant_min:
            post = PostOp()  # codes end where the values of a ReLU do
        allowed = {3: ("none", "relu"), 5: ("none",)}.get(layer.codes.dim(), (post.name,))
        if post.name not in allowed:
            return None
        result = Result(post=post) if out is None else Result(out.scale, out.zero_point, torch.uint8, post)
        name, bound = _bind(call, result)
        layer.kernel = kernel_name(name, post, out)
        operands = (call.x.codes,) if call.residual is None else (call.x.codes, call.residual.codes, False)
        return graph.call_function(kernels.call, (call.packed(graph, bound), *operands))


def _bind(call: LayerCall, result: Result) -> tuple[str, Linear | Conv | ConvSum | ConvTranspose]:
    """The kernel of a layer: what the report calls it, and what binds the layer to it."""
    node, layer = call.node, call.layer
    _, x_scale, x_zero_point = call.x.coded()
    if node.target is aten.linear.default:
        return "qlinear", Linear(x_scale, x_zero_point, result)
    if node.target in CONV_TRANSPOSES:
        dims = CONV_TRANSPOSES[node.target]
        spacing, before, after, dilation, groups = spread_geometry(node, dims, layer.codes.shape[2:])
        plain = Geometry(x_scale, x_zero_point, [1] * dims, [0] * dims, dilation, groups, flipped=True)
        return f"qconv{dims}d, transposed", ConvTranspose(plain, result, spacing, before, after)
    dims = CONVS[node.target]  # type: ignore[index]
    geometry = Geometry(x_scale, x_zero_point, *conv_geometry(node, dims), channels=_channels(call))
    if call.residual is None:
        return f"qconv{dims}d", Conv(geometry, result)
    return f"qconv{dims}d+sum", ConvSum(geometry, result, *call.residual.coded()[1:])


def _channels(call: LayerCall) -> int | None:
    """Lets images of three channels come with a fourth where nothing but a convolution reads their codes.

    Three codes of a pixel and a byte of zeros are one word, which is computed as a whole.
    """
    codes, dequantized = call.x.codes, call.node.args[0]
    assert codes is not None
    if codes.target is kernels.quantize and call.node.target is aten.conv2d.default and call.layer.codes.shape[1] == 3:
        assert isinstance(dequantized, fx.Node)
        quantized = dequantized.args[0]
        assert isinstance(quantized, fx.Node)
        groups = conv_geometry(call.node, 2)[-1]
        source = quantized.args[0]
        own = isinstance(source, fx.Node) and source.target is not DEQUANTIZE
        if groups == 1 and own and len(dequantized.users) == len(quantized.users) == 1:
            codes.target = kernels.quantize_pixels
    return 4 if codes.target is kernels.quantize_pixels else None
