"""What every call of a graph means for quantization: one vocabulary over modules, functions and methods."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qlightning.calls import (
    ACTIVATION_FUNCTIONS,
    ACTIVATION_MODULES,
    ARITHMETIC,
    LAYER_FUNCTIONS,
    Elementwise,
    argument,
    elementwise,
    function_name,
    is_dtype,
    is_known_origin,
    operands,
    torch_module,
)
from qlightning.fake_quantize import FakeQuantize
from qlightning.nn.bias import BiasRounding
from qlightning.nn.float_functional import matmul
from qlightning.nn.qat import has_forward_hooks, layer_type

# Called in one piece: what torch computes inside has no graph of its own, or runs in fused kernels on its own weights.
OPAQUE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


class Kind(enum.Enum):
    """What a call does to a quantized tensor."""

    LAYER = "layer"  # convolution or linear: int8 weight, int32 sums
    BATCH_NORM = "batch norm"  # folds into the layer before it
    ACTIVATION = "activation"  # elementwise, of one tensor
    BINARY = "binary"  # add or mul of two tensors
    MATMUL = "matmul"  # matrix product of two activations that FloatFunctional asks for
    CAT = "cat"  # puts tensors side by side
    POOL = "pool"  # averages
    SAME = "same"  # moves, repeats or picks values: the grid stays
    FAKE_QUANT = "fake quant"
    SOURCE = "source"  # an input, a parameter
    FLOAT = "float"  # all other computing on tensors
    NUMBER = "number"  # read out of a tensor: no tensor, but of its values
    OTHER = "other"  # sizes, flags: no tensor


@dataclass(frozen=True)
class Op:
    """The meaning of one node.

    Attributes:
        kind: See Kind.
        inputs: The nodes of the tensors it computes on, behind any Identity; for a layer, its activation alone.
        shape: For OTHER: whether it asks for what a tensor and its codes have in common.
        sequence: Whether the result is a sequence of tensors.
    """

    kind: Kind
    inputs: tuple[fx.Node, ...] = ()
    shape: bool = False
    sequence: bool = False


_POOL_MODULES = (
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)
_POOL_FUNCTIONS = {
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "mean",
}
_SAME_MODULES = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.ChannelShuffle,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.UpsamplingNearest2d,
    nn.Upsample,
    nn.modules.padding._ConstantPadNd,
    nn.modules.padding._ReflectionPadNd,
    nn.modules.padding._ReplicationPadNd,
    nn.modules.padding._CircularPadNd,
)
_MAX_POOL_FUNCTIONS = {f"{adaptive}max_pool{dims}d" for adaptive in ("", "adaptive_") for dims in (1, 2, 3)}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "stochastic_depth"}
_MOVES = {
    "flatten",
    "unflatten",
    "reshape",
    "view",
    "view_as",
    "reshape_as",
    "permute",
    "transpose",
    "t",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "clone",
    "detach",
    "expand",
    "expand_as",
    "repeat",
    "narrow",
    "select",
    "roll",
    "flip",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "native_channel_shuffle",
    "index_select",
    "slice",  # this and the next in exported graphs
    *(f"{exact}{dims}d" for exact in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
}
_SEQUENCES = {"chunk", "split", "tensor_split", "unbind", "split_with_sizes", "unsafe_chunk", "unsafe_split"}
# Questions whose answer is no tensor: the same for a tensor and its codes, or not.
_SHAPE_CALLS = {"size", "sym_size", "sym_numel", "dim", "ndimension", "numel", "nelement", "get_device", "len", "__len"}
_SHAPE_ATTRIBUTES = {"shape", "device", "ndim", "is_cuda"}
_TYPE_CALLS = {"is_floating_point", "is_complex", "is_signed", "element_size", "stride", "is_contiguous"}
_TYPE_ATTRIBUTES = {"dtype", "layout", "requires_grad", "itemsize", "nbytes", "is_nested"}
_NUMBERS = {"item", "tolist"}
_NEAREST = ("nearest", "nearest-exact")


class Vocabulary:
    """Answers for each node of a graph what it means.

    Args:
        graph: A traced graph.
        root: The module whose submodules it calls.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self._root = root
        self._ops: dict[fx.Node, Op] = {}
        for node in graph.nodes:
            op = self._classify(node)
            self._ops[node] = replace(op, inputs=tuple(self._passed_by_identities(value) for value in op.inputs))

    def __getitem__(self, node: fx.Node) -> Op:
        return self._ops[node]

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls."""
        return self._root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def is_tensor(self, value: Any) -> bool:
        """Whether an argument is, as far as can be told, a tensor."""
        return isinstance(value, fx.Node) and self._ops[value].kind not in (Kind.OTHER, Kind.NUMBER)

    def is_identity(self, node: fx.Node) -> bool:
        """Whether a node calls a module that hands its input on, and nothing else."""
        return self._ops[node].kind is Kind.SAME and isinstance(self.module(node), nn.Identity)

    def elementwise(self, node: fx.Node) -> Elementwise:
        """For a node of kind ACTIVATION: the ATen operator, its arguments behind the tensor, its keywords."""
        return elementwise(node, self.module(node))

    def binary_name(self, node: fx.Node) -> str:
        """For a node of kind BINARY: "add" or "mul"."""
        return ARITHMETIC[function_name(node.target)]

    def computed_argument(self, node: fx.Node) -> str:
        """What of a layer that is called as a function the forward computes anew; empty where it can be int8."""
        if not isinstance(argument(node, 0, "input"), fx.Node):
            return "input"
        for index, name in ((1, "weight"), (2, "bias")):
            value = argument(node, index, name)
            if not self._is_parameter(value) and (name == "weight" or value is not None):
                return name
        known = {argument(node, index, name) for index, name in ((0, "input"), (1, "weight"), (2, "bias"))}
        return "geometry" if set(node.all_input_nodes) - known else ""

    def _passed_by_identities(self, value: fx.Node) -> fx.Node:
        return self._ops[value].inputs[0] if self.is_identity(value) else value

    def _classify(self, node: fx.Node) -> Op:
        if node.op == "placeholder" or node.op == "get_attr":
            return Op(Kind.SOURCE)
        if node.op == "output":
            return Op(Kind.FLOAT, tuple(n for n in node.all_input_nodes if self.is_tensor(n)))
        inputs = tuple(n for n in node.all_input_nodes if self.is_tensor(n))
        if node.op == "call_module":
            return self._classify_module(node, inputs)
        if not inputs:
            return Op(Kind.OTHER)
        return self._classify_call(node, function_name(node.target), inputs)

    def _classify_module(self, node: fx.Node, inputs: tuple[fx.Node, ...]) -> Op:
        module = self.module(node)
        assert module is not None
        if isinstance(module, FakeQuantize):
            return Op(Kind.FAKE_QUANT, inputs)
        if isinstance(module, BiasRounding):
            return Op(Kind.SAME, inputs)
        if not inputs:
            return Op(Kind.FLOAT)
        if has_forward_hooks(module) or "forward" in vars(module):  # only the module itself, when called, runs these
            return Op(Kind.FLOAT, inputs, sequence=isinstance(module, OPAQUE))
        if layer_type(module) is not None and len(node.args) + len(node.kwargs) == 1:
            return Op(Kind.LAYER, inputs)
        if torch_module(module, (_BatchNorm,)):
            return Op(Kind.BATCH_NORM, inputs)
        if torch_module(module, ACTIVATION_MODULES):
            return Op(Kind.ACTIVATION, inputs)
        if torch_module(module, _POOL_MODULES):
            return Op(Kind.POOL, inputs)
        if torch_module(module, _SAME_MODULES) and self._keeps_grid(module):
            return Op(Kind.SAME, inputs)
        return Op(Kind.FLOAT, inputs, sequence=isinstance(module, OPAQUE))

    @staticmethod
    def _keeps_grid(module: Any) -> bool:
        if isinstance(module, nn.modules.padding._ConstantPadNd):
            return module.value == 0
        if isinstance(module, nn.Upsample):
            return module.mode in _NEAREST
        return not getattr(module, "return_indices", False)

    def _classify_call(self, node: fx.Node, name: str, inputs: tuple[fx.Node, ...]) -> Op:
        first = inputs[0]
        if node.target is matmul:
            return Op(Kind.MATMUL, (argument(node, 0, "x"), argument(node, 1, "y")))
        if node.op == "call_function" and not is_known_origin(node.target):
            return Op(Kind.FLOAT, inputs)
        if node.target is torch.ops.aten.index.Tensor:  # the places to pick are tensors, too
            return Op(Kind.SAME, inputs[:1])
        if name in ("getattr", "__getattr__"):
            if node.args[1] in _SHAPE_ATTRIBUTES | _TYPE_ATTRIBUTES:
                return Op(Kind.OTHER, shape=node.args[1] in _SHAPE_ATTRIBUTES)
            return Op(Kind.FLOAT, inputs)
        if name in _SHAPE_CALLS | _TYPE_CALLS:
            return Op(Kind.OTHER, shape=name in _SHAPE_CALLS)
        if name in _NUMBERS:
            return Op(Kind.NUMBER, inputs)
        if name.startswith("dequantize_per_"):  # in a QDQ graph
            return Op(Kind.FAKE_QUANT, inputs)
        if node.kwargs.get("out") is not None:
            return Op(Kind.FLOAT, inputs)
        if name in LAYER_FUNCTIONS and node.op == "call_function":
            computed = self.computed_argument(node)
            return Op(Kind.FLOAT, inputs) if computed else Op(Kind.LAYER, (argument(node, 0, "input"),))
        if name == "getitem":
            parent = self._ops[first]
            if parent.kind in (Kind.SOURCE, Kind.FLOAT):  # which may be a tuple: the grid is that of what is taken
                return Op(parent.kind, inputs)
            picks_codes = isinstance(node.args[1], (int, slice, tuple, type(None), type(Ellipsis))) and len(inputs) == 1
            return Op(Kind.SAME if picks_codes else Kind.FLOAT, inputs)
        if name in ACTIVATION_FUNCTIONS and node.all_input_nodes == [argument(node, 0, "input")]:
            return Op(Kind.ACTIVATION, inputs)
        if name in ("clamp", "clip") and all(
            isinstance(argument(node, i, k), (int, float)) for i, k in ((1, "min"), (2, "max"))
        ):
            return Op(Kind.ACTIVATION, inputs)
        if name in ARITHMETIC:
            return self._classify_arithmetic(node, ARITHMETIC[name], inputs)
        if name in ("cat", "concat", "concatenate"):
            parts = argument(node, 0, "tensors")
            if isinstance(parts, (list, tuple)) and all(self.is_tensor(part) for part in parts):
                return Op(Kind.CAT, tuple(parts))
            return Op(Kind.FLOAT, inputs)
        if name in _POOL_FUNCTIONS:
            return Op(Kind.POOL, inputs)
        if name in _SEQUENCES:
            return Op(Kind.SAME, inputs, sequence=True)
        if (name in _MOVES or name in _DROPOUTS) and inputs == (argument(node, 0, "input"),):
            to_dtype = any(is_dtype(value) for value in (*node.args[1:], *node.kwargs.values()))
            return Op(Kind.FLOAT if to_dtype else Kind.SAME, inputs)
        if name in _MAX_POOL_FUNCTIONS and not argument(
            node, 2 if name.startswith("adaptive") else 6, "return_indices", False
        ):
            return Op(Kind.SAME, inputs)
        if name == "pad" and (argument(node, 2, "mode", "constant") != "constant" or not argument(node, 3, "value", 0)):
            return Op(Kind.SAME, inputs)
        if name == "interpolate" and argument(node, 3, "mode", "nearest") in _NEAREST:
            return Op(Kind.SAME, inputs)
        takes_dim = len(node.args) > 1 or not {"dim", "axis"}.isdisjoint(node.kwargs)
        return Op(Kind.FLOAT, inputs, sequence=name in ("topk", "sort", "max", "min") and takes_dim)

    def _classify_arithmetic(self, node: fx.Node, name: str, inputs: tuple[fx.Node, ...]) -> Op:
        left, right = operands(node)
        tensors = [value for value in (left, right) if self.is_tensor(value)]
        plain = node.kwargs.get("alpha", 1) == 1 and node.kwargs.get("rounding_mode") is None
        if not plain or len(node.args) > 2:  # torch.add(x, 2, y): the factor of y by position
            return Op(Kind.FLOAT, inputs)
        numbers = [value for value in (left, right) if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if len(tensors) == 1 and len(numbers) == 1:
            divides_by_tensor = name == "div" and left is numbers[0]
            return Op(Kind.FLOAT if divides_by_tensor else Kind.ACTIVATION, inputs)
        parameter = any(value.op == "get_attr" for value in tensors)
        if name in ("add", "mul") and len(tensors) == 2 and not parameter:
            return Op(Kind.BINARY, (left, right))
        return Op(Kind.FLOAT, inputs)

    def _is_parameter(self, value: Any) -> bool:
        """A parameter, or a parameter behind its fake-quantizer."""
        if isinstance(value, fx.Node) and value.op == "call_module" and self._ops[value].kind is Kind.FAKE_QUANT:
            value = value.args[0]
        return isinstance(value, fx.Node) and value.op == "get_attr" and "constant" not in value.meta


def is_dropout(node: fx.Node) -> bool:
    """Whether a node calls a dropout function."""
    return node.op == "call_function" and function_name(node.target) in _DROPOUTS


def has_effect(node: fx.Node) -> bool:
    """Whether a node of an eval graph is needed though nothing reads its result."""
    return node.op in ("placeholder", "output") or node.target is torch._assert
