"""From a QDQ graph to one of kernel calls: what every kernel family has in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from qlightning.backends import kernels
from qlightning.backends.qdq import (
    DEQUANTIZE,
    NO_KERNEL,
    QUANTIZE,
    QParams,
    aten,
    free_name,
    is_layer,
    layer_path,
    max_pool2d_args,
)
from qlightning.calls import argument, function_name, is_known_origin
from qlightning.nn.quantized import QuantizedLayer, dequantized_weight
from qlightning.vocabulary import Kind, Vocabulary, has_effect, is_dropout


@dataclass
class Value:
    """What is known of a value while the graph is rewritten: its codes, its float form, or a call not emitted yet."""

    qparams: QParams | None = None
    codes: fx.Node | None = None
    floats: fx.Node | None = None
    pending: Pending | None = None

    def coded(self) -> tuple[fx.Node, float, int]:
        """Codes, scale and zero point, as kernels take them."""
        assert self.codes is not None
        assert self.qparams is not None
        return self.codes, self.qparams.scale, self.qparams.zero_point


@dataclass
class Pending:
    """A call that waits for what its result is needed as, so that it rounds once, in its kernel.

    Attributes:
        node: The layer, add, mul, cat or activation of the QDQ graph.
        inputs: Its operands; for a sum that a layer takes in, the layer's operand and the other summand.
        absorbed: Whether the last input is such a summand.
        post: Elementwise calls behind it.
    """

    node: fx.Node
    inputs: list[Value]
    absorbed: bool = False
    post: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class LayerCall:
    """A layer that is to run on codes, and what its kernel may take in.

    Attributes:
        node: The layer in the QDQ graph.
        layer: Its weight.
        path: The name of that.
        x: The operand.
        residual: What is added to the result, before ``post``.
        post: Elementwise calls behind it.
        out: The grid of the result; None: it is float32.
    """

    node: fx.Node
    layer: QuantizedLayer
    path: str
    x: Value
    residual: Value | None
    post: list[fx.Node]
    out: QParams | None

    def packed(self, graph: fx.Graph, pack: Any) -> fx.Node:
        """A kernel's own form of the weight, built by ``pack`` (see ``QuantizedLayer.add_packing``)."""
        return graph.get_attr(f"{self.path}.{self.layer.add_packing(pack)}")


class Kernels(Protocol):
    """The calls of one kernel family; each method returns None where the family has no kernel that rounds once."""

    def emit_layer(self, graph: fx.Graph, call: LayerCall) -> fx.Node | None:
        """Appends a layer to the graph."""

    def emit_binary(self, graph: fx.Graph, name: str, left: Value, right: Value, out: QParams) -> fx.Node | None:
        """Appends an ``"add"``, ``"add_relu"`` or ``"mul"`` of codes to the graph."""

    def emit_average(self, graph: fx.Graph, value: Value, out: QParams) -> fx.Node | None:
        """Appends the averages of images (..., height, width) to the graph, of size (..., 1, 1)."""


def lower(graph: fx.Graph, root: nn.Module, family: Kernels) -> fx.Graph:
    """Turns a QDQ graph into one of kernel calls.

    Args:
        graph: The QDQ graph; left as it is.
        root: The module it belongs to; its QuantizedLayers get packed weights.
        family: The kernels.
    """
    return _Lowering(graph, root, family).run()


class _Lowering:
    def __init__(self, graph: fx.Graph, root: nn.Module, family: Kernels) -> None:
        self._old = graph
        self._root = root
        self._family = family
        self._ops = Vocabulary(graph, root)
        self._new = fx.Graph()
        self._values: dict[fx.Node, Value] = {}

    def run(self) -> fx.Graph:
        for node in self._old.nodes:
            self._values[node] = self._visit(node)
        self._new.eliminate_dead_code(is_impure_node=has_effect)
        self._new.lint()
        return self._new

    def _visit(self, node: fx.Node) -> Value:
        kind = self._ops[node].kind
        if node.target is QUANTIZE:
            return self._quantize(self._values[node.args[0]], QParams.of(node))  # type: ignore[index]
        if node.target is DEQUANTIZE:
            value = self._values[node.args[0]]  # type: ignore[index]
            return value if value.qparams == QParams.of(node) else self._copy(node)
        if is_layer(node) and (x := self._values[node.args[0]]).codes is not None:  # type: ignore[index]
            return self._defer(Pending(node, [x]), node)
        if kind is Kind.ACTIVATION:
            before = self._values[self._ops[node].inputs[0]]
            if before.pending is not None:
                before.pending.post.append(node)
                return self._defer(before.pending, node)
            if before.codes is not None:
                return self._defer(Pending(node, [before], post=[node]), node)
        if kind is Kind.BINARY:
            left, right = (self._values[n] for n in self._ops[node].inputs)
            return self._binary(node, left, right)
        if kind is Kind.CAT:
            return self._defer(Pending(node, [self._values[n] for n in self._ops[node].inputs]), node)
        if (
            kind is Kind.POOL
            and self._is_average(node)
            and (before := self._values[self._ops[node].inputs[0]]).codes is not None
        ):
            return self._defer(Pending(node, [before]), node)
        if (
            kind is Kind.SAME
            and not is_dropout(node)
            and (before := self._values[self._ops[node].inputs[0]]).codes is not None
        ):
            return self._move(node, before)
        return self._copy(node)

    def _binary(self, node: fx.Node, left: Value, right: Value) -> Value:
        if function_name(node.target) == "add":
            for layer, other in ((left, right), (right, left)):
                waits = layer.pending is not None and is_layer(layer.pending.node) and not layer.pending.post
                if waits and not layer.pending.absorbed and other.codes is not None and layer is not other:  # type: ignore[union-attr]
                    return self._defer(Pending(layer.pending.node, [layer.pending.inputs[0], other], True), node)  # type: ignore[union-attr]
        if left.codes is not None and right.codes is not None:
            return self._defer(Pending(node, [left, right]), node)
        return self._copy(node)

    def _defer(self, pending: Pending, node: fx.Node) -> Value:
        """Waits where the only use is a call that may take it in; else emits it in float."""
        value = Value(pending=pending)
        users = [user for user in node.users if self._ops[user].kind is not Kind.OTHER]
        if len(users) == 1 and len(users) == len(node.users) and self._may_fuse(pending, node, users[0]):
            return value
        self._as_float(value)
        return value

    def _may_fuse(self, pending: Pending, node: fx.Node, user: fx.Node) -> bool:
        if user.target is QUANTIZE:
            return True
        kind = self._ops[user].kind
        if self._ops[pending.node].kind in (Kind.CAT, Kind.POOL):
            return False
        return kind in (Kind.ACTIVATION, Kind.CAT) or (
            kind is Kind.BINARY and not pending.post and is_layer(pending.node)
        )

    # What a value is needed as

    def _as_float(self, value: Value) -> fx.Node:
        if value.floats is None:
            if value.pending is not None:
                value.floats = self._emit_float(value.pending)
                value.pending = None
            else:
                q = value.qparams
                assert q is not None
                value.floats = self._call(kernels.dequantize, value.codes, q.scale, q.zero_point)
        return value.floats

    def _quantize(self, value: Value, qparams: QParams) -> Value:
        if value.codes is not None and value.qparams == qparams:
            return value
        if value.pending is not None and (codes := self._emit_codes(value.pending, qparams)) is not None:
            return Value(qparams, codes)
        q = qparams
        codes = self._call(kernels.quantize, self._as_float(value), q.scale, q.zero_point, q.quant_min, q.quant_max)
        return Value(qparams, codes)

    def _emit_codes(self, pending: Pending, out: QParams) -> fx.Node | None:
        """The call with its result on a grid; None where no kernel rounds it so."""
        kind = self._ops[pending.node].kind
        if kind is Kind.CAT:
            parts = [self._quantize(value, out).codes for value in pending.inputs]
            return self._call(torch.cat, parts, argument(pending.node, 1, "dim", 0))
        if is_layer(pending.node):
            return self._emit_layer(pending, out)
        if kind is Kind.ACTIVATION:
            return self._emit_lookup(pending, out)
        if kind is Kind.POOL:
            codes, scale, zero_point = pending.inputs[0].coded()
            if self._is_global(pending.node):
                average = self._family.emit_average(self._new, pending.inputs[0], out)
                if average is not None:
                    return average
            grid = (scale / out.scale, zero_point, out.zero_point, out.quant_min, out.quant_max)
            return self._call(kernels.regrid, self._emit_pool(pending.node, codes), *grid)
        names = [function_name(node.target) for node in pending.post]
        name = function_name(pending.node.target)
        if names not in ([], ["relu"]) or (name == "mul" and names):
            return None
        left, right = pending.inputs
        return self._family.emit_binary(self._new, "add_relu" if names else name, left, right, out)

    def _emit_float(self, pending: Pending) -> fx.Node:
        kind = self._ops[pending.node].kind
        post = pending.post
        if is_layer(pending.node):
            result = self._emit_layer(Pending(pending.node, pending.inputs[:1]), None) or self._emit_float_layer(
                pending
            )
            if pending.absorbed:
                result = self._call(torch.add, result, self._as_float(pending.inputs[1]))
        elif kind is Kind.ACTIVATION:
            result = self._as_float(pending.inputs[0])
        elif kind is Kind.CAT:
            parts = [self._as_float(value) for value in pending.inputs]
            result = self._call(torch.cat, parts, argument(pending.node, 1, "dim", 0))
        elif kind is Kind.POOL:
            codes, scale, zero_point = pending.inputs[0].coded()
            result = self._call(kernels.dequantize, self._emit_pool(pending.node, codes), scale, zero_point)
        else:
            left, right = (self._as_float(value) for value in pending.inputs)
            result = self._call(pending.node.target, left, right)
        for node in post:
            result = self._call(node.target, result, *node.args[1:], **node.kwargs)
        return result

    def _emit_lookup(self, pending: Pending, out: QParams) -> fx.Node:
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

    def _is_average(self, node: fx.Node) -> bool:
        """Whether a pooling gives averages of what it is given, and nothing else: that of codes says all."""
        module = self._ops.module(node)
        if module is not None:
            return isinstance(module, _ADAPTIVE_AVERAGES)
        name = function_name(node.target)
        return name.startswith("adaptive_avg_pool") or (name == "mean" and "dtype" not in node.kwargs)

    def _is_global(self, node: fx.Node) -> bool:
        """Whether a pooling gives the averages of whole images, of size (1, 1)."""
        module = self._ops.module(node)
        if module is None and function_name(node.target) == "adaptive_avg_pool2d":
            return argument(node, 1, "output_size") in (1, (1, 1), [1, 1])
        return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))

    def _emit_pool(self, node: fx.Node, codes: fx.Node) -> fx.Node:
        """The pooling of the codes themselves, in float32, where their sums are exact."""
        values = self._call(kernels.to_float, codes)
        if self._is_global(node):
            return self._call(aten.mean.dim, values, [-2, -1], True)
        substitute = {self._ops[node].inputs[0]: values}
        return self._new.node_copy(node, lambda n: substitute.get(n) or self._any(self._values[n]))

    # Layers

    def _emit_layer(self, pending: Pending, out: QParams | None) -> fx.Node | None:
        path, layer = self._layer(pending.node)
        residual = pending.inputs[1] if pending.absorbed else None
        return self._family.emit_layer(
            self._new, LayerCall(pending.node, layer, path, pending.inputs[0], residual, pending.post, out)
        )

    def _emit_float_layer(self, pending: Pending) -> fx.Node:
        """The layer as the QDQ graph has it, but that its float weight is kept."""
        path, layer = self._layer(pending.node)
        layer.kernel = NO_KERNEL
        weight = self._new.get_attr(f"{path}.{layer.add_packing(float_weight)}")
        bias = None if layer.bias is None else self._new.get_attr(f"{path}.bias")
        return self._call(
            pending.node.target,
            self._as_float(pending.inputs[0]),
            weight,
            bias,
            *pending.node.args[3:],
            **pending.node.kwargs,
        )

    def _layer(self, node: fx.Node) -> tuple[str, QuantizedLayer]:
        path = layer_path(node)
        assert path is not None
        layer = self._root.get_submodule(path)
        assert isinstance(layer, QuantizedLayer)
        return path, layer

    # All else

    def _move(self, node: fx.Node, before: Value) -> Value:
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
            return Value(q, self._call(kernels.max_pool2d, before.codes, *pool))
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
            return Value(q, self._new.call_method("to", (copied, torch.uint8)))
        _allow_any_layout(copied)
        return Value(q, copied)

    def _copy(self, node: fx.Node) -> Value:
        op = self._ops[node]
        if is_layer(node):
            self._layer(node)[1].kernel = NO_KERNEL
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
        return Value(floats=copied)

    def _any(self, value: Value) -> fx.Node:
        """Any form of a value, for questions about its shape."""
        return value.codes if value.codes is not None else self._as_float(value)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._new.call_function(function, args, kwargs)


_OF_MEMORY = {"as_strided", "stride", "is_contiguous", "storage_offset", "view_as_complex"}
_ADAPTIVE_AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_FLOAT_MOVES = (nn.MaxPool1d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)


def float_weight(layer: QuantizedLayer) -> Tensor:
    """The weight of a layer in float, in the layout of the float layer."""
    return dequantized_weight(layer.codes, layer.scale, layer.zero_point, layer.transposed_groups)


def _allow_any_layout(node: fx.Node) -> None:
    """Images are channels_last here, so that a view of one may be none of its memory."""
    to_dtype = any(isinstance(value, torch.dtype) for value in node.args)
    if node.op == "call_method" and node.target in ("view", "view_as") and not to_dtype:
        node.target = {"view": "reshape", "view_as": "reshape_as"}[str(node.target)]
    if node.target is aten.view.default:
        node.target = aten.reshape.default
