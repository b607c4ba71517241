"""From the ATen form of a call to an ONNX model: integer weights, grids, layers; all else is in onnx_operators."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from qlightning.backends.onnx_call import Call, UntranslatableError
from qlightning.backends.onnx_graph import DTYPES, OnnxGraph
from qlightning.backends.onnx_operators import OPERATORS
from qlightning.backends.qdq import (
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE,
    QUANTIZE_PER_CHANNEL,
    QParams,
    aten,
    ints,
)
from qlightning.nn.quantized import QuantizedLayer, dequantized_weight

_QDQ = (QUANTIZE, DEQUANTIZE, QUANTIZE_PER_CHANNEL, DEQUANTIZE_PER_CHANNEL)
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default)
_LAYERS = (aten.convolution.default, aten.addmm.default, aten.mm.default)
KNOWN = frozenset({*OPERATORS, *_QDQ, *_LAYERS})
"""The ATen calls that have an ONNX form."""


@dataclass(frozen=True)
class OnnxForm:
    """An ONNX model, and what its parts are called.

    Attributes:
        model: The model, of static shapes.
        inputs: The names of its inputs, one for each tensor of the call that it uses.
        used: For each of these, its position among the inputs of the graph that was translated.
        layers: The names of the layers whose weights are integers in it, and those of the nodes that compute them.
    """

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    used: tuple[int, ...]
    layers: tuple[tuple[str, str], ...]


class Weight:
    """The weight of an int8 layer as it goes into ONNX: codes, and a scale for each output channel.

    Args:
        path: The name of the layer.
        layer: The layer.
    """

    def __init__(self, path: str, layer: QuantizedLayer) -> None:
        self.path, self.layer = path, layer
        # ONNX has an axis of scales only where the output channels of all groups are one dimension.
        self.is_plain = layer.transposed_groups in (None, 1)

    def float(self) -> Tensor:
        """Its values, in the layout of the float layer."""
        layer = self.layer
        return dequantized_weight(layer.codes, layer.scale, layer.zero_point, layer.transposed_groups)

    def emit(self, graph: OnnxGraph) -> str:
        """Adds its codes and their dequantization; returns the name of the value."""
        if not self.is_plain:
            return graph.constant(self.float())
        swapped = self.layer.transposed_groups is not None
        codes = self.layer.codes.transpose(0, 1) if swapped else self.layer.codes
        scale, zero_point = self.layer.scale, self.layer.zero_point
        return graph.add(
            "DequantizeLinear", *_grid(graph, graph.constant(codes), scale, zero_point, codes.dtype), axis=int(swapped)
        )


def onnx_form(
    module: fx.GraphModule, known: Mapping[fx.Node, Weight | Tensor], integer_bias: bool, signed: bool
) -> OnnxForm:
    """Translates a graph of ATen calls.

    Args:
        module: The graph; every tensor's node has ``meta["val"]``, its output is one of them or a list.
        known: Those of its inputs that are weights of int8 layers, or constants.
        integer_bias: Whether biases are int32 in steps of input scale times weight scale; else they stay float.
        signed: Whether uint8 codes around 128 become int8 codes around 0: the same values.

    Raises:
        UntranslatableError: ONNX has no counterpart of a call.
    """
    return _Translation(module, known, integer_bias, signed).run()


def problem(node: fx.Node) -> str:
    """Why a call cannot be part of an ONNX model; empty where it can."""
    if any(not _fits(value) for value in (node, *node.all_input_nodes)):
        return f"{node.target} has a dtype that the runtimes lack"
    if node.target is not operator.getitem and node.target not in KNOWN:
        return f"{node.target} has no counterpart"
    trial = _Translation(None, {}, False, False)
    values = {value: value.name for value in node.all_input_nodes}
    trial.values.update(
        {value: [name] * 99 if isinstance(value.meta["val"], (tuple, list)) else name for value, name in values.items()}
    )
    try:
        trial.call(node)
    except UntranslatableError as error:
        return str(error)
    return ""


def _fits(node: fx.Node) -> bool:
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return all(not isinstance(part, Tensor) or part.dtype in DTYPES for part in parts)


def _grid(graph: OnnxGraph, x: str, scale: Any, zero_point: Any, dtype: torch.dtype) -> list[str]:
    return [x, graph.constant(scale, torch.float32), graph.constant(zero_point, dtype)]


@dataclass(frozen=True)
class _Swapped:
    """The weight of a linear layer as (inputs, outputs), which a product takes as it is."""

    weight: fx.Node


class _Translation:
    """Attributes: values, from nodes to the names of ONNX values, to constants, or to a list of these."""

    def __init__(
        self,
        module: fx.GraphModule | None,
        known: Mapping[fx.Node, Weight | Tensor],
        integer_bias: bool,
        signed: bool,
    ) -> None:
        self._module = module
        self._weights = {node: value for node, value in known.items() if isinstance(value, Weight)}
        self._integer_bias = integer_bias
        self._signed = signed
        self._graph = OnnxGraph()
        self._scales: dict[str, float] = {}  # of values behind a grid
        self._codes_of: dict[str, tuple[str, float, int, torch.dtype]] = {}  # likewise their codes and grid
        self._layers: dict[str, str] = {}
        self.values: dict[fx.Node, Any] = {node: v for node, v in known.items() if isinstance(v, Tensor)}

    def run(self) -> OnnxForm:
        assert self._module is not None
        known = {*self._weights, *self.values}
        placeholders = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        inputs = {n: f"input_{i}" for i, n in enumerate(placeholders) if n.users and n not in known}
        self.values.update(inputs)
        outputs = []
        for node in self._module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = operator.attrgetter(node.target)(self._module).detach()
            elif node.op == "call_function":
                self.values[node] = self.call(node)
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
                outputs = [(self._graph.add("Identity", self._name(r)), r.meta["val"]) for r in results]
        model = self._graph.model([(name, node.meta["val"]) for node, name in inputs.items()], outputs)
        used = tuple(placeholders.index(node) for node in inputs)
        return OnnxForm(model, tuple(inputs.values()), used, tuple(self._layers.items()))

    def call(self, node: fx.Node) -> Any:
        """The value of a call."""
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.all_input_nodes and all(isinstance(self.values.get(n), Tensor) for n in node.all_input_nodes):
            return self._folded(node)
        call = Call(node, self._graph, self._name)
        if node.target is aten.convolution.default:
            return self._convolution(call)
        if node.target is aten.addmm.default:
            return self._linear(call, "mat1", "mat2", "self")
        if node.target is aten.mm.default:
            return self._linear(call, "self", "mat2", "")
        if node.target in _RESHAPES:
            return self._reshape(call)
        if node.target in (QUANTIZE, QUANTIZE_PER_CHANNEL):
            return self._quantize(call)
        if node.target in (DEQUANTIZE, DEQUANTIZE_PER_CHANNEL):
            return self._dequantize(call)
        if node.target in (aten.t.default, aten.t_copy.default) and node.args[0] in self._weights:
            assert isinstance(node.args[0], fx.Node)
            return _Swapped(node.args[0])
        return OPERATORS[node.target](call)

    def _folded(self, node: fx.Node) -> Any:
        """The result of a call on constants."""
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
            raise UntranslatableError(f"{node.target} draws random numbers")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _name(self, node: fx.Node) -> str:
        if node in self._weights:
            return self._weights[node].emit(self._graph)
        value = self.values[node]
        if isinstance(value, _Swapped):
            return self._graph.add("Transpose", self._name(value.weight), perm=[1, 0])
        return self._graph.constant(value) if isinstance(value, Tensor) else str(value)

    # Grids

    def _quantize(self, c: Call) -> str:
        """QuantizeLinear saturates at the ends of the dtype alone: a narrower grid needs a clamp before it."""
        x, dtype = c.name("input", torch.float32), c["dtype"]
        ends = (c["quant_min"], c["quant_max"])
        narrow = ends != (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if "axis" in c.arguments:
            if narrow:
                raise c.refuse("has a grid of fewer than 8 bits a channel")
            return c.add(
                "QuantizeLinear", x, c.name("scales", torch.float32), c.name("zero_points", dtype), axis=c["axis"]
            )
        if narrow:
            bounds = [(end - c["zero_point"]) * c["scale"] for end in ends]
            x = c.add("Clip", x, *(self._graph.constant(bound, torch.float32) for bound in bounds))
        return c.add("QuantizeLinear", *_grid(self._graph, x, c["scale"], *self._codes(c.node)))

    def _dequantize(self, c: Call) -> str:
        if "axis" in c.arguments:
            scales, zero_points = c.name("scales", torch.float32), c.name("zero_points", c["dtype"])
            return c.add("DequantizeLinear", c.name("input"), scales, zero_points, axis=c["axis"])
        codes = self._codes(c["input"] if c["input"].target is QUANTIZE else c.node)
        result = c.add("DequantizeLinear", *_grid(self._graph, c.name("input"), c["scale"], *codes))
        self._scales[result] = c["scale"]
        self._codes_of[result] = (c.name("input"), c["scale"], *codes)
        return result

    def _reshape(self, c: Call) -> str:
        """A change of shape, on the codes: ONNX Runtime looks for a grid right before a layer."""
        x = c.name("self")
        if not self._integer_bias or x not in self._codes_of:
            return str(OPERATORS[c.node.target](c))
        codes, scale, zero_point, dtype = self._codes_of[x]
        codes = c.add("Reshape", codes, self._graph.constant(list(c.out.shape)))
        result = c.add("DequantizeLinear", *_grid(self._graph, codes, scale, zero_point, dtype))
        self._scales[result], self._codes_of[result] = scale, (codes, scale, zero_point, dtype)
        return result

    def _codes(self, node: fx.Node) -> tuple[int, torch.dtype]:
        """The zero point and the dtype of the codes of a quantize call, or of a dequantize call that has none."""
        q = QParams.of(node)
        is_alone = node.target is QUANTIZE and all(
            user.target is DEQUANTIZE and QParams.of(user) == q for user in node.users
        )
        is_centred = (q.zero_point, q.dtype) == (128, torch.uint8)
        return (0, torch.int8) if self._signed and is_centred and is_alone else (q.zero_point, q.dtype)

    # Layers

    def _convolution(self, c: Call) -> str:
        dims = c.value("weight").dim() - 2
        if c.value("input").dim() != dims + 2:
            raise c.refuse("has no batch dimension")
        stride, padding, dilation = (ints(c[name], dims) for name in ("stride", "padding", "dilation"))
        x, weight = c.name("input"), c.name("weight")
        bias = self._bias(c["bias"], x, c["weight"])
        geometry: dict[str, Any] = {"strides": stride, "pads": padding * 2, "dilations": dilation, "group": c["groups"]}
        kind = "Conv"
        if c["transposed"]:
            kind, geometry["output_padding"] = "ConvTranspose", ints(c["output_padding"], dims)
        return c.add(kind, x, weight, *bias, name=self._node_name(c["weight"]), **geometry)

    def _linear(self, c: Call, x: str, weight: str, bias: str) -> str:
        if bias and (c["beta"] != 1 or c["alpha"] != 1):
            raise c.refuse("is scaled")
        operand, value = c.name(x), self.values.get(c[weight])
        is_layer = isinstance(value, _Swapped)
        factor = self._name(value.weight if isinstance(value, _Swapped) else c[weight])
        names = [operand, factor, *(self._bias(c[bias], operand, c[weight]) if bias else [])]
        return c.add("Gemm", *names, name=self._node_name(c[weight]), transB=int(is_layer))

    def _weight_of(self, node: fx.Node) -> Weight | None:
        """The weight that a node is, as it is or swapped."""
        value = self.values.get(node)
        return self._weights.get(value.weight if isinstance(value, _Swapped) else node)

    def _node_name(self, node: fx.Node) -> str:
        """The name of a layer's node; one that is called twice has two."""
        weight = self._weight_of(node)
        if weight is None or not weight.is_plain:
            return ""
        name = weight.path or "layer"
        while name in self._layers.values():
            name += "_again"
        self._layers[weight.path] = name
        return name

    def _bias(self, node: fx.Node | None, x: str, weight_node: fx.Node) -> list[str]:
        if node is None:
            return []
        weight, bias = self._weight_of(weight_node), self.values[node]
        if not (self._integer_bias and weight is not None and isinstance(bias, Tensor) and x in self._scales):
            return [self._name(node)]
        step = (weight.layer.scale.double() * self._scales[x]).float()
        codes = (bias.double() / step.double()).round()
        if not bool((codes.abs() < 2**31).all()):
            return [self._name(node)]
        zero = torch.zeros(len(bias), dtype=torch.int32)
        return [
            self._graph.add(
                "DequantizeLinear",
                *_grid(self._graph, self._graph.constant(codes.int()), step, zero, torch.int32),
                axis=0,
            )
        ]
