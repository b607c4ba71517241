"""The backend ``onednn``: torch's oneDNN kernels on plain uint8 and int8 tensors."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from qlightning.backends import kernels
from qlightning.backends.base import Backend, cpu_has_int8_dot_products
from qlightning.backends.onednn_kernels import (
    SUM_POST_OPS,
    ConvPacking,
    LinearPacking,
    conv_geometry,
    find_post_op,
    kernel_name,
    max_pool2d_args,
    transpose_geometry,
)
from qlightning.backends.qdq import (
    CONV_TRANSPOSES,
    CONVS,
    DEQUANTIZE,
    QUANTIZE,
    QParams,
    aten,
    free_name,
    is_layer,
    layer_path,
)
from qlightning.calls import argument, function_name, is_known_origin
from qlightning.nn.quantized import QuantizedLayer
from qlightning.qscheme import QScheme
from qlightning.vocabulary import Kind, Vocabulary, has_effect, is_dropout

_NEEDED = ("qconv_pointwise", "qconv2d_pointwise", "qconv_prepack", "qlinear_pointwise", "qlinear_prepack")


def build() -> Backend:
    """Builds the backend for this machine.

    A CPU without VNNI or AMX adds pairs of products up in 16 bits: 2 * 255 * 127 does not fit, 2 * 255 * 63 does.
    """
    return Backend(
        name="onednn",
        lower=lower,
        unavailable=_unavailable(),
        reduced=None if cpu_has_int8_dot_products() else "weight",
        accepts=_accepts,
    )


def _unavailable() -> str:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "its int8 kernels are for x86 CPUs."
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN."
    missing = [name for name in _NEEDED if not hasattr(torch.ops.onednn, name)]
    return f"this torch has no onednn::{missing[0]}." if missing else ""


def _accepts(activation: QScheme, weight: QScheme) -> str:
    if activation.signed or activation.per_channel:
        return f"its activations are unsigned and per tensor, not {activation}."
    if not (weight.signed and weight.symmetric) or weight.axis not in (None, 0):
        return f"its weights are signed, symmetric, per tensor or per output channel (axis 0), not {weight}."
    return ""


@dataclass
class _Value:
    """What is known of a value while the graph is rewritten: its codes, its float form, or a call not emitted yet."""

    qparams: QParams | None = None
    codes: fx.Node | None = None
    floats: fx.Node | None = None
    pending: _Pending | None = None


@dataclass
class _Pending:
    """A call that waits for what its result is needed as, so that it rounds once, in its kernel.

    Attributes:
        node: The layer, add, mul, cat or activation of the QDQ graph.
        inputs: Its operands; for a sum that a layer takes in, the layer's operand and the other summand.
        absorbed: Whether the last input is such a summand.
        post: Elementwise calls behind it.
    """

    node: fx.Node
    inputs: list[_Value]
    absorbed: bool = False
    post: list[fx.Node] = field(default_factory=list)


def lower(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """Turns a QDQ graph into one of kernel calls.

    Args:
        graph: The QDQ graph; left as it is.
        root: The module it belongs to; its QuantizedLayers get packed weights.
    """
    return _Lowering(graph, root).run()


class _Lowering:
    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self._old = graph
        self._root = root
        self._ops = Vocabulary(graph, root)
        self._new = fx.Graph()
        self._values: dict[fx.Node, _Value] = {}

    def run(self) -> fx.Graph:
        for node in self._old.nodes:
            self._values[node] = self._visit(node)
        self._new.eliminate_dead_code(is_impure_node=has_effect)
        self._new.lint()
        return self._new

    def _visit(self, node: fx.Node) -> _Value:
        kind = self._ops[node].kind
        if node.target is QUANTIZE:
            return self._quantize(self._values[node.args[0]], QParams.of(node))  # type: ignore[index]
        if node.target is DEQUANTIZE:
            value = self._values[node.args[0]]  # type: ignore[index]
            return value if value.qparams == QParams.of(node) else self._copy(node)
        if is_layer(node) and (x := self._values[node.args[0]]).codes is not None:  # type: ignore[index]
            return self._defer(_Pending(node, [x]), node)
        if kind is Kind.ACTIVATION:
            before = self._values[self._ops[node].inputs[0]]
            if before.pending is not None:
                before.pending.post.append(node)
                return self._defer(before.pending, node)
            if before.codes is not None:
                return self._defer(_Pending(node, [before], post=[node]), node)
        if kind is Kind.BINARY:
            left, right = (self._values[n] for n in self._ops[node].inputs)
            return self._binary(node, left, right)
        if kind is Kind.CAT:
            return self._defer(_Pending(node, [self._values[n] for n in self._ops[node].inputs]), node)
        if (
            kind is Kind.SAME
            and not is_dropout(node)
            and (before := self._values[self._ops[node].inputs[0]]).codes is not None
        ):
            return self._move(node, before)
        return self._copy(node)

    def _binary(self, node: fx.Node, left: _Value, right: _Value) -> _Value:
        if function_name(node.target) == "add":
            for layer, other in ((left, right), (right, left)):
                waits = layer.pending is not None and is_layer(layer.pending.node) and not layer.pending.post
                if waits and not layer.pending.absorbed and other.codes is not None and layer is not other:  # type: ignore[union-attr]
                    return self._defer(_Pending(layer.pending.node, [layer.pending.inputs[0], other], True), node)  # type: ignore[union-attr]
        if left.codes is not None and right.codes is not None:
            return self._defer(_Pending(node, [left, right]), node)
        return self._copy(node)

    def _defer(self, pending: _Pending, node: fx.Node) -> _Value:
        """Waits where the only use is a call that may take it in; else emits it in float."""
        value = _Value(pending=pending)
        users = [user for user in node.users if self._ops[user].kind is not Kind.OTHER]
        if len(users) == 1 and len(users) == len(node.users) and self._may_fuse(pending, node, users[0]):
            return value
        self._as_float(value)
        return value

    def _may_fuse(self, pending: _Pending, node: fx.Node, user: fx.Node) -> bool:
        if user.target is QUANTIZE:
            return True
        kind = self._ops[user].kind
        if self._ops[pending.node].kind is Kind.CAT:
            return False
        return kind in (Kind.ACTIVATION, Kind.CAT) or (
            kind is Kind.BINARY and not pending.post and is_layer(pending.node)
        )

    # What a value is needed as

    def _as_float(self, value: _Value) -> fx.Node:
        if value.floats is None:
            if value.pending is not None:
                value.floats = self._emit_float(value.pending)
                value.pending = None
            else:
                q = value.qparams
                assert q is not None
                value.floats = self._call(kernels.dequantize, value.codes, q.scale, q.zero_point)
        return value.floats

    def _quantize(self, value: _Value, qparams: QParams) -> _Value:
        if value.codes is not None and value.qparams == qparams:
            return value
        if value.pending is not None and (codes := self._emit_codes(value.pending, qparams)) is not None:
            return _Value(qparams, codes)
        q = qparams
        codes = self._call(kernels.quantize, self._as_float(value), q.scale, q.zero_point, q.quant_min, q.quant_max)
        return _Value(qparams, codes)

    def _emit_codes(self, pending: _Pending, out: QParams) -> fx.Node | None:
        """The call with its result on a grid; None where no kernel rounds it so."""
        kind = self._ops[pending.node].kind
        if kind is Kind.CAT:
            parts = [self._quantize(value, out).codes for value in pending.inputs]
            return self._call(torch.cat, parts, argument(pending.node, 1, "dim", 0))
        if is_layer(pending.node):
            return self._emit_layer(pending, out)
        if kind is Kind.ACTIVATION:
            return self._emit_lookup(pending, out)
        full = out.quant_min == 0 and out.quant_max == 255
        names = [function_name(node.target) for node in pending.post]
        name = function_name(pending.node.target)
        if not full or names not in ([], ["relu"]) or (name == "mul" and names):
            return None
        left, right = pending.inputs
        assert left.qparams is not None
        assert right.qparams is not None
        return self._call(
            kernels.binary,
            "add_relu" if names else name,
            left.codes,
            left.qparams.scale,
            left.qparams.zero_point,
            right.codes,
            right.qparams.scale,
            right.qparams.zero_point,
            out.scale,
            out.zero_point,
        )

    def _emit_float(self, pending: _Pending) -> fx.Node:
        kind = self._ops[pending.node].kind
        post = pending.post
        if is_layer(pending.node):
            result = self._emit_layer(_Pending(pending.node, pending.inputs[:1], False, []), None)
            assert result is not None
            if pending.absorbed:
                result = self._call(torch.add, result, self._as_float(pending.inputs[1]))
        elif kind is Kind.ACTIVATION:
            result = self._as_float(pending.inputs[0])
        elif kind is Kind.CAT:
            parts = [self._as_float(value) for value in pending.inputs]
            result = self._call(torch.cat, parts, argument(pending.node, 1, "dim", 0))
        else:
            left, right = (self._as_float(value) for value in pending.inputs)
            result = self._call(pending.node.target, left, right)
        for node in post:
            result = self._call(node.target, result, *node.args[1:], **node.kwargs)
        return result

    def _emit_lookup(self, pending: _Pending, out: QParams) -> fx.Node:
        """A table of what each code of the input becomes, computed by the QDQ form itself."""
        (value,) = pending.inputs
        assert value.qparams is not None
        codes = torch.arange(256, dtype=torch.uint8)
        x = DEQUANTIZE(codes, *value.qparams.args())
        for node in pending.post:
            x = node.target(x, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        name = free_name(self._root, "table")
        self._root.register_buffer(name, QUANTIZE(x, *out.args()), persistent=False)
        return self._call(kernels.lookup, value.codes, self._new.get_attr(name))

    # Layers

    def _emit_layer(self, pending: _Pending, out: QParams | None) -> fx.Node | None:
        node, x = pending.node, pending.inputs[0]
        path = layer_path(node)
        assert path is not None
        assert x.qparams is not None
        layer = self._root.get_submodule(path)
        assert isinstance(layer, QuantizedLayer)
        sums = pending.absorbed and out is not None
        fused = find_post_op(pending.post, out, linear=node.target is aten.linear.default)
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
        head = (x.codes, x.qparams.scale, x.qparams.zero_point)
        tail = (*result, post_op, post_args)
        if node.target is aten.linear.default:
            layer.kernel = kernel_name("qlinear", post_op, out)
            weight = self._weight(path, layer, LinearPacking())
            return self._call(kernels.linear, *head, *weight, *tail, algorithm)
        if node.target in CONV_TRANSPOSES:
            dims = CONV_TRANSPOSES[node.target]
            spacing, padding, output_padding, groups, dilation = transpose_geometry(node, dims)
            reach = [d * (k - 1) for d, k in zip(dilation, layer.codes.shape[2:], strict=True)]
            before = [r - p for r, p in zip(reach, padding, strict=True)]
            after = [b + o for b, o in zip(before, output_padding, strict=True)]
            ones, zeros = [1] * dims, [0] * dims
            pack = ConvPacking(x.qparams.scale, x.qparams.zero_point, ones, zeros, dilation, groups, flipped=True)
            layer.kernel = kernel_name(f"qconv{dims}d, transposed", post_op, out)
            weight = self._weight(path, layer, pack)
            return self._call(kernels.conv_transpose, *head, *weight, spacing, before, after, dilation, groups, *tail)
        dims = CONVS[node.target]  # type: ignore[index]
        stride, padding, dilation, groups = conv_geometry(node, dims)
        pack = ConvPacking(x.qparams.scale, x.qparams.zero_point, stride, padding, dilation, groups)
        weight = self._weight(path, layer, pack)
        geometry = (stride, padding, dilation, groups)
        if not sums:
            layer.kernel = kernel_name(f"qconv{dims}d", post_op, out)
            return self._call(kernels.conv, *head, *weight, *geometry, *tail)
        residual = pending.inputs[1]
        assert residual.qparams is not None
        assert out is not None
        layer.kernel = kernel_name(f"qconv{dims}d+sum", post_op, out)
        kernel = list(layer.codes.shape[2:])
        other = (residual.codes, residual.qparams.scale, residual.qparams.zero_point)
        return self._call(
            kernels.conv2d_add, *head, *weight, *geometry, kernel, *other, out.scale, out.zero_point, post_op == "relu"
        )

    def _weight(self, path: str, layer: QuantizedLayer, pack: Any) -> tuple[fx.Node | None, ...]:
        packed = self._new.get_attr(f"{path}.{layer.add_packing(pack)}")
        scale, zero_point = self._new.get_attr(f"{path}.scale"), self._new.get_attr(f"{path}.zero_point")
        return packed, scale, zero_point, None if layer.bias is None else self._new.get_attr(f"{path}.bias")

    # All else

    def _move(self, node: fx.Node, before: _Value) -> _Value:
        """A call that keeps the grid, run on the codes."""
        q = before.qparams
        assert q is not None
        assert before.codes is not None
        name = function_name(node.target) if node.op != "call_module" else ""
        module = self._ops.module(node)
        substitute = {self._ops[node].inputs[0]: before.codes}

        def take(n: fx.Node) -> fx.Node:
            return substitute.get(n) or self._any(self._values[n])

        if (pool := max_pool2d_args(node, module)) is not None:
            return _Value(q, self._call(kernels.max_pool2d, before.codes, *pool))
        copied = self._new.node_copy(node, take)
        if isinstance(module, nn.modules.padding._ConstantPadNd):
            copied.op, copied.target = "call_function", torch.nn.functional.pad
            copied.args, copied.kwargs = (before.codes, list(module.padding), "constant", q.zero_point), {}
        elif name in ("pad", "constant_pad_nd") and argument(node, 2, "mode", "constant") == "constant":
            copied.target = torch.nn.functional.pad
            copied.args, copied.kwargs = (before.codes, argument(node, 1, "pad"), "constant", q.zero_point), {}
        elif "max_pool" in name or isinstance(module, _FLOAT_MOVES):
            # torch has these for float tensors only, in which codes are exact.
            with self._new.inserting_before(copied):
                exact = self._new.call_method("float", (before.codes,))
            copied.replace_input_with(before.codes, exact)
            return _Value(q, self._new.call_method("to", (copied, torch.uint8)))
        _allow_any_layout(copied)
        return _Value(q, copied)

    def _copy(self, node: fx.Node) -> _Value:
        op = self._ops[node]
        of_shape = op.kind is Kind.OTHER and op.shape
        module = self._ops.module(node)
        parts = () if module is None else module.modules()
        of_memory = (
            node.op == "output"
            or function_name(node.target) in _OF_MEMORY
            or (node.op == "call_function" and not is_known_origin(node.target))
            or any(not type(m).__module__.startswith("torch.nn.") for m in parts)
        )

        def take(n: fx.Node) -> fx.Node:
            if of_shape:
                return self._any(self._values[n])
            floats = self._as_float(self._values[n])
            # What the user's code gets is laid out as in the float model: it may ask for a view.
            return self._call(kernels.contiguous, floats) if of_memory else floats

        copied = self._new.node_copy(node, take)
        _allow_any_layout(copied)
        return _Value(floats=copied)

    def _any(self, value: _Value) -> fx.Node:
        """Any form of a value, for questions about its shape."""
        return value.codes if value.codes is not None else self._as_float(value)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._new.call_function(function, args, kwargs)


_OF_MEMORY = {"as_strided", "stride", "is_contiguous", "storage_offset", "view_as_complex"}
_FLOAT_MOVES = (nn.MaxPool1d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)


def _allow_any_layout(node: fx.Node) -> None:
    """Images are channels_last here, so that a view of one may be none of its memory."""
    to_dtype = any(isinstance(value, torch.dtype) for value in node.args)
    if node.op == "call_method" and node.target in ("view", "view_as") and not to_dtype:
        node.target = {"view": "reshape", "view_as": "reshape_as"}[str(node.target)]
    if node.target is aten.view.default:
        node.target = aten.reshape.default
