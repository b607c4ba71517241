"""The QDQ form in the patterns that ExecuTorch's XNNPACK partitioner takes for int8."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qlightning.backends.qdq import CONVS, DEQUANTIZE, QUANTIZE, QParams, free_name, ints, is_layer
from qlightning.errors import ArtifactError
from qlightning.nn.quantized import dequantized_weight
from qlightning.vocabulary import Kind, Vocabulary, is_dropout

aten = torch.ops.aten

_LAYERS = (aten.conv1d.default, aten.conv2d.default, aten.linear.default)
_FUSED = (aten.relu.default, aten.hardtanh.default)
"""Activations that XNNPACK's int8 layers and sums end in."""

_LAYER_RATIOS, _SUM_RATIOS, _PRODUCT_RATIOS = (2.0**-32, 2.0**8), (2.0**-10, 2.0**8), (2.0**-16, 2.0**8)
"""How large the steps of the operands may be in steps of the result: from the first on, below the second."""


def xnnpack_form(module: fx.GraphModule) -> fx.GraphModule:
    """Gives a copy of a QDQ form that computes the same, bit for bit, in patterns that XNNPACK has int8 kernels for.

    There every layer with an int8 weight stands between a dequantize call of its own and a quantize call, activations
    are int8, and layers that XNNPACK has no int8 kernel for have float weights.

    Raises:
        ArtifactError: Activations have other grids than those of 8 full bits.
    """
    return _Form(module).module


class _Form:
    def __init__(self, module: fx.GraphModule) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        self.module = fx.GraphModule(module, graph, type(module).__name__).eval()
        self._graph = self.module.graph
        self._ops = Vocabulary(self._graph, self.module)
        self._old = set(self._graph.nodes)  # the nodes that it knows
        for step in (self._round_before_moves, self._round_after_moves, self._part, self._fit, self._sign):
            step()
        self._graph.eliminate_dead_code()
        self._graph.lint()
        self.module.recompile()

    # Rounding a value and moving it can change places: what is moved may be rounded before and after.

    def _round_before_moves(self) -> None:
        """A layer whose values are moved before they are rounded is rounded itself."""
        waiting = self._nodes(QUANTIZE)
        while waiting:
            quantize = waiting.pop()
            move: Any = quantize.args[0]
            if not self._moves(move) or len(move.users) > 1:
                continue
            for value in self._tensors(move):
                if value.target is DEQUANTIZE and QParams.of(value) == QParams.of(quantize):
                    continue
                with self._graph.inserting_before(move):
                    codes, rounded = self._rounded(value, QParams.of(quantize))
                move.replace_input_with(value, rounded)
                waiting.append(codes)

    def _round_after_moves(self) -> None:
        """What has been moved is on a grid as before, and says so again."""
        grids = {node: QParams.of(node) for node in self._nodes(DEQUANTIZE)}
        for node in list(self._graph.nodes):
            if node not in self._old or self._ops[node].kind is not Kind.SAME or is_dropout(node):
                continue
            value = self._ops[node].inputs[0]
            if value not in grids:
                continue
            grids[node] = grids[value]
            users = [user for user in node.users if user.target is not QUANTIZE]
            if self._moves(node) and users:
                with self._graph.inserting_before(node.next):
                    _, rounded = self._rounded(node, grids[node])
                for user in users:
                    user.replace_input_with(node, rounded)

    def _moves(self, node: fx.Node) -> bool:
        known = node in self._old and self._ops[node].kind in (Kind.SAME, Kind.CAT) and not is_dropout(node)
        return known and not any(self._ops[n].sequence for n in (node, *node.all_input_nodes) if n in self._old)

    def _rounded(self, value: fx.Node, q: QParams) -> tuple[fx.Node, fx.Node]:
        """Quantize and dequantize calls of a value, at the place of insertion."""
        codes = self._graph.call_function(QUANTIZE, (value, *q.args()))
        return codes, self._graph.call_function(DEQUANTIZE, (codes, *q.args()))

    # What the kernels take

    def _part(self) -> None:
        """Gives each user a dequantize call of its own: one that goes into an int8 kernel is lost to all others."""
        for node in self._nodes(DEQUANTIZE, dequantized_weight):
            for user in list(node.users)[1:]:
                with self._graph.inserting_before(user):
                    user.replace_input_with(node, self._graph.node_copy(node))

    def _fit(self) -> None:
        """Makes all compute in float that XNNPACK's int8 kernels do not take."""
        for node in list(self._graph.nodes):
            if is_layer(node) and not self._is_int8(node):
                self._compute_in_float(node)
            elif node in self._old and self._ops[node].kind is Kind.BINARY and not self._is_in_range(node):
                self._hide_grid(node)

    def _is_int8(self, layer: fx.Node) -> bool:
        source: Any = layer.args[0]
        quantize = self._result(layer)
        if layer.target not in _LAYERS or source.target is not DEQUANTIZE or quantize is None:
            return False
        codes, scale, zero_point = self._weight(layer)
        step = scale.double() * QParams.of(source).scale
        fits = _within(step / QParams.of(quantize).scale, _LAYER_RATIOS) & (zero_point == 0)
        if len(layer.args) > 2 and layer.args[2] is not None:  # XNNPACK adds the bias in int32
            fits &= (self._tensor(layer.args[2]) / step).abs() < 2**31 - 1
        return codes.dtype == torch.int8 and bool(fits.all())

    def _is_in_range(self, node: fx.Node) -> bool:
        """Whether XNNPACK takes the steps of a sum or product, or need not as it is none of int8."""
        values, quantize = self._tensors(node), self._result(node)
        if quantize is None or any(value.target is not DEQUANTIZE for value in values):
            return True
        steps = torch.tensor([QParams.of(value).scale for value in values], dtype=torch.float64)
        result = QParams.of(quantize).scale
        if self._ops.binary_name(node) == "add":
            return bool(_within(steps / result, _SUM_RATIOS).all())
        return bool(_within(steps[0] * steps[-1] / result, _PRODUCT_RATIOS))

    @staticmethod
    def _result(node: fx.Node) -> fx.Node | None:
        """The quantize call that the one use of a node is, behind an activation or not."""
        for _ in range(2):
            if len(node.users) != 1:
                return None
            (node,) = node.users
            if node.target is QUANTIZE:
                return node
            if node.target not in _FUSED:
                return None
        return None

    def _compute_in_float(self, layer: fx.Node) -> None:
        """Gives a layer a float weight; a convolution over one dimension becomes one over two, the second of size one.

        ExecuTorch 1.5 takes the input of any convolution over one dimension for int8 where it has been rounded.
        """
        weight: Any = layer.args[1]
        value = dequantized_weight(*self._weight(layer), weight.args[3])
        one = layer.target in (aten.conv1d.default, aten.conv_transpose1d.default)
        name = free_name(self.module, str(weight.args[0].target).rpartition(".")[0].replace(".", "_") + "_weight")
        self.module.register_buffer(name, (value.unsqueeze(-1) if one else value).contiguous())
        with self._graph.inserting_before(layer):
            layer.replace_input_with(weight, self._graph.get_attr(name))
        if one:
            self._widen(layer)

    def _widen(self, layer: fx.Node) -> None:
        """Makes a convolution over two dimensions of one over one, whose weight has been unsqueezed."""
        with self._graph.inserting_before(layer):
            wide = self._graph.call_function(aten.unsqueeze.default, (layer.args[0], -1))
        forward = layer.target in CONVS
        defaults: tuple[Any, ...] = (1, 0, 1, 1) if forward else (1, 0, 0, 1, 1)
        neutral = (1, 0, 1, None) if forward else (1, 0, 0, None, 1)  # stride, padding, ..., None for the groups
        given = (*layer.args[3:], *defaults[len(layer.args[3:]) :])
        geometry = [v if n is None else [*ints(v, 1), n] for v, n in zip(given, neutral, strict=True)]
        bias = layer.args[2] if len(layer.args) > 2 else None
        layer.args = (wide, layer.args[1], bias, *geometry)
        layer.target = aten.conv2d.default if forward else aten.conv_transpose2d.input
        with self._graph.inserting_before(layer.next):
            narrow = self._graph.call_function(aten.squeeze.dim, (layer, -1))
        layer.replace_all_uses_with(narrow, lambda user: user is not narrow)

    def _hide_grid(self, node: fx.Node) -> None:
        """Puts a call that changes no value behind an operand, so that the sum or product is one of floats."""
        value = self._tensors(node)[0]
        q = QParams.of(value)
        ends = DEQUANTIZE(torch.tensor([q.quant_min, q.quant_max]).to(q.dtype), *q.args()).tolist()
        with self._graph.inserting_before(node):
            node.replace_input_with(value, self._graph.call_function(aten.clamp.default, (value, *ends)))

    def _sign(self) -> None:
        """Makes activations int8: XNNPACK reads codes of uint8 as such, without a word."""
        for node in self._nodes(QUANTIZE, DEQUANTIZE):
            q = QParams.of(node)
            shift = 128 if q.dtype == torch.uint8 else 0
            if (q.quant_min - shift, q.quant_max - shift) != (-128, 127):
                raise ArtifactError(
                    f"XNNPACK rounds activations to 8 bits with all 256 codes; here is a grid from {q.quant_min} to "
                    f"{q.quant_max} ({str(q.dtype)[6:]}). Use QScheme(bits=8) without narrow_range for activations."
                )
            node.args = (node.args[0], q.scale, q.zero_point - shift, -128, 127, torch.int8)

    # Reading

    def _nodes(self, *targets: Any) -> list[fx.Node]:
        return [node for node in self._graph.nodes if node.target in targets]

    def _tensors(self, node: fx.Node) -> list[fx.Node]:
        return [value for value in node.all_input_nodes if value not in self._old or self._ops.is_tensor(value)]

    def _weight(self, layer: fx.Node) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scale and zero point."""
        weight: Any = layer.args[1]
        codes, scale, zero_point = (self._tensor(value) for value in weight.args[:3])
        return codes, scale, zero_point

    def _tensor(self, node: Any) -> Tensor:
        found: Tensor = operator.attrgetter(node.target)(self.module)
        return found


def _within(ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (ratio >= bounds[0]) & (ratio < bounds[1])
