"""From the eval graph of a prepared module to QDQ form: ATen calls between explicit quantize and dequantize calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qlightning.backends.qdq import (
    CONV_TRANSPOSES,
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE,
    QUANTIZE_PER_CHANNEL,
    QParams,
    aten,
    free_name,
    ints,
)
from qlightning.calls import LAYER_FUNCTIONS, argument, function_name
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize
from qlightning.graph.bind import GRAPH_MODULES
from qlightning.graph.fold import quantized_layer
from qlightning.graph.patterns import can_fold, only_user, source_of
from qlightning.nn.bias import BiasRounding
from qlightning.nn.qat import QATLayer, layer_type
from qlightning.nn.quantized import QuantizedLayer, dequantized_weight
from qlightning.vocabulary import Kind, Vocabulary, has_effect, is_dropout


@dataclass(frozen=True)
class Source:
    """What an int8 layer is made of; calls that have it in common share the layer, in all graphs of a module.

    Attributes:
        path: Name of the float layer.
        bn: Name of the BatchNorm that folds into it; "" for none.
        number: Which of several calls in a graph it is; 0 where a BatchNorm folds into it.
        grid: Name of the fake-quantizer of a weight that is given to a function; "" for a module.
        bias: Name of a bias that is given to a function; "" for none.
        x: Name of the fake-quantizer of the input, by whose scale the bias is rounded; "" where it is not.
    """

    path: str
    bn: str = ""
    number: int = 0
    grid: str = ""
    bias: str = ""
    x: str = ""


class Place(Protocol):
    """Puts a QuantizedLayer into the tree of the int8 model, once for each source.

    Args:
        source: What it is made of.
        build: Builds it.
        free: Whether it can stand under the name of the float layer.

    Returns:
        The name under which it stands.
    """

    def __call__(self, source: Source, build: Callable[[], QuantizedLayer], free: bool) -> str: ...


class GraphConversion:
    """Rewrites one prepared eval graph to QDQ form.

    Args:
        graph: The eval graph.
        module: The prepared module it belongs to.
        root: The int8 module that the QDQ graph will belong to.
        place: Puts int8 layers into it.
        kept: The names of the tensors that the graphs of the module keep in it beside, by what they are.
        off: The fake-quantizers that have nothing to round, as layers are left in float.
    """

    def __init__(
        self,
        graph: fx.Graph,
        module: nn.Module,
        root: nn.Module,
        place: Place,
        kept: dict[tuple[str, str], str],
        off: frozenset[FakeQuantize] = frozenset(),
    ) -> None:
        self._off = off
        self._module = module
        self._root = root
        self._place = place
        self._kept = kept
        self._old = graph
        self._ops = Vocabulary(graph, self._module)
        self._new = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._calls: dict[str, int] = {}
        self._float_calls = {
            str(n.target)
            for n in graph.nodes
            if n.op == "call_module"
            and isinstance(self._ops.module(n), QATLayer)
            and not (self._ops[n].kind is Kind.LAYER and self._is_int8(n))
        }

    def run(self) -> fx.Graph:
        for node in self._old.nodes:
            self._values[node] = self._visit(node)
        self._new.eliminate_dead_code(is_impure_node=has_effect)
        self._new.lint()
        return self._new

    def _visit(self, node: fx.Node) -> fx.Node:
        kind = self._ops[node].kind
        if kind is Kind.FAKE_QUANT:
            fq = self._ops.module(node)
            assert isinstance(fq, FakeQuantize)
            value = self._values[node.args[0]]  # type: ignore[index]
            return self._quantize_dequantize(value, fq) if self._is_grid(fq) else value
        if kind is Kind.LAYER and self._is_int8(node):
            return self._layer(node)
        if kind is Kind.BATCH_NORM and (layer := self._folds_into(node)) is not None:
            return self._values[layer]
        if kind is Kind.ACTIVATION:
            target, args, kwargs = self._ops.elementwise(node)
            return self._new.call_function(target, (self._values[self._ops[node].inputs[0]], *args), kwargs)
        if kind is Kind.BINARY:
            target = aten.add.Tensor if self._ops.binary_name(node) == "add" else aten.mul.Tensor
            return self._new.call_function(target, tuple(self._values[n] for n in self._ops[node].inputs))
        if kind is Kind.MATMUL:
            return self._new.call_function(aten.matmul.default, tuple(self._values[n] for n in self._ops[node].inputs))
        if self._does_nothing(node):
            return self._values[self._ops[node].inputs[0]]
        if node.op == "get_attr":
            return self._get_attr(str(node.target))
        copied = self._new.node_copy(node, lambda n: self._values[n])
        return copied

    def _does_nothing(self, node: fx.Node) -> bool:
        if self._ops[node].kind is not Kind.SAME:
            return False
        if is_dropout(node):
            # In an eval graph the flag is a constant; True is a dropout that the user wants in eval mode too.
            flag = argument(node, {"stochastic_depth": 3}.get(function_name(node.target), 2), "training", True)
            return flag is False
        return isinstance(self._ops.module(node), (nn.Identity, nn.modules.dropout._DropoutNd))

    def _is_grid(self, fq: FakeQuantize) -> bool:
        return fq.observed and fq not in self._off and not isinstance(fq, WeightFakeQuantize)

    def _is_int8(self, node: fx.Node) -> bool:
        """Whether a layer computes on codes: its input lies on a grid, and so does its weight."""
        source = source_of(self._ops[node].inputs[0], self._ops)
        fq = self._ops.module(source)
        if not (isinstance(fq, FakeQuantize) and self._is_grid(fq)):
            return False
        if node.op == "call_module":
            module = self._ops.module(node)
            return isinstance(module, QATLayer) and module.weight_fake_quant not in self._off
        weight = argument(node, 1, "weight")
        grid = self._ops.module(weight) if isinstance(weight, fx.Node) else None
        return isinstance(grid, WeightFakeQuantize) and grid not in self._off

    def _folds_into(self, bn: fx.Node) -> fx.Node | None:
        """The int8 layer that a BatchNorm folds into."""
        layer = self._ops[bn].inputs[0]
        if self._ops[layer].kind is not Kind.LAYER or not can_fold(bn, self._ops):
            return None
        if only_user(layer, self._ops) is not bn or not self._is_int8(layer):
            return None
        if _base_type(layer, self._ops) is nn.Linear:
            # Its channels are the last dimension, those of a BatchNorm the second: the same in 2-d only.
            fq = self._ops.module(source_of(self._ops[layer].inputs[0], self._ops))
            assert isinstance(fq, FakeQuantize)
            return layer if fq.seen_ndims == {2} else None
        return layer

    def _rounded_by(self, result: fx.Node, bn: nn.Module | None) -> tuple[str, Tensor | None]:
        """The name and the scale of the grid by which the prepared graph rounds the bias of what gives a result."""
        for user in result.users:
            rounding = self._ops.module(user)
            if isinstance(rounding, BiasRounding) and rounding.rounds() and rounding.of[1] is bn:
                return rounding.of[2].name, rounding.of[2].scale
        return "", None

    def _quantize_dequantize(self, value: fx.Node, fq: FakeQuantize) -> fx.Node:
        scheme = fq.scheme
        ends = (scheme.quant_min, scheme.quant_max, scheme.dtype)
        if scheme.axis is None:
            qparams = QParams(float(fq.scale), int(fq.zero_point), *ends)
            codes = self._new.call_function(QUANTIZE, (value, *qparams.args()))
            codes.meta["grid"] = fq.name
            return self._new.call_function(DEQUANTIZE, (codes, *qparams.args()))
        scale, zero_point = (self._keep(fq.name, suffix, getattr(fq, suffix)) for suffix in ("scale", "zero_point"))
        grid = (self._new.get_attr(scale), self._new.get_attr(zero_point), scheme.axis, *ends)
        codes = self._new.call_function(QUANTIZE_PER_CHANNEL, (value, *grid))
        codes.meta["grid"] = fq.name
        return self._new.call_function(DEQUANTIZE_PER_CHANNEL, (codes, *grid))

    def _get_attr(self, target: str) -> fx.Node:
        """A parameter or buffer; one of a layer that became int8 is kept beside it."""
        owner, _, name = target.rpartition(".")
        if isinstance(self._module.get_submodule(owner), QATLayer) or owner == GRAPH_MODULES:
            tensor = getattr(self._module.get_submodule(owner), name)
            target = self._keep(target, "float", tensor)
        return self._new.get_attr(target)

    def _keep(self, owner: str, role: str, tensor: Tensor) -> str:
        """The name of a buffer of the int8 module that holds a tensor of the prepared one."""
        key = (owner, role)
        if key not in self._kept:
            self._kept[key] = free_name(self._root, f"{re.sub(r'[^0-9a-zA-Z]', '_', owner)}_{role}")
            self._root.register_buffer(self._kept[key], tensor.detach().cpu().clone())
        return self._kept[key]

    def _layer(self, node: fx.Node) -> fx.Node:
        base = _base_type(node, self._ops)
        if node.op == "call_module":
            path = str(node.target)
            module = self._ops.module(node)
            assert isinstance(module, QATLayer)
            weight, bias, fq = module.weight, module.bias, module.weight_fake_quant
            multiplier = module.multiplier()
            names: dict[str, str] = {}
            call: _ModuleCall | _FunctionCall = _ModuleCall(module)
        else:
            attribute = argument(node, 1, "weight").args[0].target
            path, _, _ = str(attribute).rpartition(".")
            owner = self._module.get_submodule(path)
            free = layer_type(owner) is not None and path != ""
            path = path if free else "layer" if isinstance(self._module, QATLayer) else f"{attribute}_quantized"
            weight = _attribute(self._module, str(attribute))
            bias_node = argument(node, 2, "bias")
            bias = None if bias_node is None else _attribute(self._module, str(bias_node.target))
            names = {"grid": str(argument(node, 1, "weight").target), "bias": str(getattr(bias_node, "target", ""))}
            fq = self._ops.module(argument(node, 1, "weight"))  # type: ignore[assignment]
            multiplier = None
            call = _FunctionCall(node, base)
        number = self._calls.get(path, 0)
        self._calls[path] = number + 1
        follower = only_user(node, self._ops)
        bn_node = follower if follower is not None and self._folds_into(follower) is node else None
        bn, bn_name = (None, "") if bn_node is None else (self._ops.module(bn_node), str(bn_node.target))
        x_name, x_scale = self._rounded_by(bn_node or node, bn)
        name = self._place(
            Source(path, bn_name, 0 if bn_name else number, x=x_name, **names),
            lambda: quantized_layer(weight, bias, fq, bn, base.__name__, multiplier, x_scale),
            free=path not in self._float_calls,
        )
        layer = self._root.get_submodule(name)
        assert isinstance(layer, QuantizedLayer)
        return self._emit(node, name, layer, base, call)

    def _emit(self, node: fx.Node, name: str, layer: QuantizedLayer, base: type[nn.Module], call: Any) -> fx.Node:
        new = self._new
        parts = (new.get_attr(f"{name}.codes"), new.get_attr(f"{name}.scale"), new.get_attr(f"{name}.zero_point"))
        weight = new.call_function(dequantized_weight, (*parts, layer.transposed_groups))
        bias = None if layer.bias is None else new.get_attr(f"{name}.bias")
        x = self._values[self._ops[node].inputs[0]]
        if base is nn.Linear:
            result = new.call_function(aten.linear.default, (x, weight, bias))
        elif issubclass(base, nn.modules.conv._ConvTransposeNd):
            target = next(t for t, dims in CONV_TRANSPOSES.items() if dims == layer.codes.dim() - 2)
            geometry = (call.stride, call.padding, call.output_padding, call.groups, call.dilation)
            result = new.call_function(target, (x, weight, bias, *geometry))
        else:
            x, padding = self._padded(x, call, layer.codes.shape[2:])
            target = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)[layer.codes.dim() - 3]
            result = new.call_function(target, (x, weight, bias, call.stride, padding, call.dilation, call.groups))
        result.meta["layer"] = name
        return result

    def _padded(self, x: fx.Node, call: Any, kernel: torch.Size) -> tuple[fx.Node, list[int]]:
        """The input with the padding that the convolution itself cannot do, and the padding left to it."""
        padding = call.padding
        none = [0] * len(kernel)
        if padding == "valid":
            padding = none
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(ints(call.dilation, len(kernel)), kernel, strict=True)]
            margins = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
            if call.padding_mode == "zeros" and all(t % 2 == 0 for t in total):
                return x, [t // 2 for t in total]
        else:
            margins = [p for p in reversed(ints(padding, len(kernel))) for _ in range(2)]
        mode = {"zeros": "constant"}.get(call.padding_mode, call.padding_mode)
        if call.padding_mode == "zeros" and padding != "same":
            return x, ints(padding, len(kernel))
        return self._new.call_function(F.pad, (x, margins, mode)), none


class _ModuleCall:
    """The geometry of a convolution that is a module."""

    def __init__(self, module: Any) -> None:
        if isinstance(module, nn.Linear):
            return
        self.stride, self.padding, self.dilation = list(module.stride), module.padding, list(module.dilation)
        self.padding = self.padding if isinstance(self.padding, str) else list(self.padding)
        self.output_padding, self.groups = list(module.output_padding), module.groups
        self.padding_mode = module.padding_mode


class _FunctionCall:
    """The geometry of a convolution that is called as a function."""

    padding_mode = "zeros"

    def __init__(self, node: fx.Node, base: type[nn.Module]) -> None:
        if base is nn.Linear:
            return
        dims = int(base.__name__[-2])
        transposed = issubclass(base, nn.modules.conv._ConvTransposeNd)
        self.stride = ints(argument(node, 3, "stride", 1), dims)
        padding = argument(node, 4, "padding", 0)
        self.padding = padding if isinstance(padding, str) else ints(padding, dims)
        if transposed:
            self.output_padding = ints(argument(node, 5, "output_padding", 0), dims)
            self.groups = argument(node, 6, "groups", 1)
            self.dilation = ints(argument(node, 7, "dilation", 1), dims)
        else:
            self.dilation = ints(argument(node, 5, "dilation", 1), dims)
            self.groups = argument(node, 6, "groups", 1)


def _base_type(node: fx.Node, ops: Vocabulary) -> type[nn.Module]:
    module = ops.module(node)
    base = layer_type(module) if module is not None else LAYER_FUNCTIONS[function_name(node.target)]
    assert base is not None
    return base


def _attribute(root: nn.Module, target: str) -> Tensor:
    owner, _, name = target.rpartition(".")
    tensor: Tensor = getattr(root.get_submodule(owner), name)
    return tensor
