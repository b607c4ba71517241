"""Which pairs of layers of a graph can share out a factor for each channel between them, so that nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from qlightning.calls import function_name, torch_module
from qlightning.graph.patterns import can_fold, only_user
from qlightning.graph.programs import Captured
from qlightning.nn.qat import QATLayer
from qlightning.vocabulary import Kind, Vocabulary

aten = torch.ops.aten

# These give each channel what they make of that channel alone, and a positive factor of it comes out as it went in.
_MODULES = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
_FUNCTIONS = {
    *(
        f"{adaptive}{kind}_pool{dims}d"
        for adaptive in ("", "adaptive_")
        for kind in ("max", "avg")
        for dims in (1, 2, 3)
    ),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone"),
}


@dataclass(frozen=True)
class Pair:
    """Two layers, the second of which alone reads the channels of the first.

    Attributes:
        first: The name of the first below the root.
        bn: The name of the BatchNorm that folds into it; "" for none.
        second: The name of the second.
        second_bn: The name of the BatchNorm that folds into that; "" for none.
    """

    first: str
    bn: str
    second: str
    second_bn: str


def find_pairs(root: nn.Module, called: Counter[int], shared: Collection[int]) -> dict[str, Pair | str]:
    """The pairs of a prepared root, in the order of its graph: of each layer the pair it is the first of, or why not.

    A pair has to be one in all of the ways in which the root is called.

    Args:
        root: A prepared module.
        called: How often each module is called by graphs of one way of calling, by its id.
        shared: The ids of parameters that several modules hold.
    """
    captured: Captured = root.__dict__["_captured"]
    found: list[dict[str, Pair | str]] = []
    read: set[str] = set()
    for (_, training), programs in captured.programs.items():
        for program in programs if not training else ():
            ops = Vocabulary(program.graph, root)
            layers = [n for n in program.graph.nodes if isinstance(ops.module(n), QATLayer)]
            found.append({str(n.target): pair_from(n, ops) for n in layers if ops[n].kind is Kind.LAYER})
            read |= {str(n.target).rpartition(".")[0] for n in program.graph.nodes if n.op == "get_attr"}

    def checked(name: str, pair: Pair | str) -> Pair | str:
        if isinstance(pair, str):
            return pair
        both = {pair.first, pair.second}
        if any(both & ways.keys() and ways.get(name) != pair for ways in found):
            return "another way of calling the net reads it otherwise"
        for path in filter(None, (pair.first, pair.bn, pair.second)):
            module = root.get_submodule(path)
            if called[id(module)] > 1:
                return f"{path} is called several times"
            own = module._parameters
            if "weight" not in own or path in read:
                return f"the weight of {path} is computed, or read by more than the layer"
            if any(id(parameter) in shared for parameter in own.values()):
                return f"{path} shares parameters with another layer"
        return pair

    merged: dict[str, Pair | str] = {}
    for ways in found:
        for name, pair in ways.items():
            merged.setdefault(name, checked(name, pair))
    return merged


def pair_from(node: fx.Node, ops: Vocabulary) -> Pair | str:
    """The pair that a layer is the first of, or why there is none.

    Args:
        node: The call of a layer that is a module, in a prepared graph of eval mode.
        ops: The vocabulary of the graph.
    """
    bn, value = "", node
    first: Any = ops.module(node)
    if isinstance(first, nn.modules.conv._ConvTransposeNd):
        return "a transposed convolution is left alone"
    while True:
        users = only_user(value, ops)
        if users is None:
            return "its result is read in several places, or is the net's"
        kind, module = ops[users].kind, ops.module(users)
        if kind is Kind.BATCH_NORM:
            if value is not node or not can_fold(users, ops) or isinstance(first, nn.Linear):
                return "a BatchNorm stands between that does not fold into it"
            if not getattr(module, "affine", False):
                return "its BatchNorm has no weight and bias to scale"
            bn = str(users.target)
        elif kind is Kind.ACTIVATION:
            if ops.elementwise(users)[0] not in (aten.relu.default, aten.leaky_relu.default):
                named = type(module).__name__ if module is not None else function_name(users.target)
                return f"{named} stands between, which would not scale along"
        elif kind is Kind.LAYER:
            return _ends(node, users, bn, ops)
        elif kind is not Kind.FAKE_QUANT and not _keeps_channels(users, module):
            named = type(module).__name__ if module is not None else function_name(users.target)
            return f"{named} stands between"
        value = users


def _ends(first: fx.Node, second: fx.Node, bn: str, ops: Vocabulary) -> Pair | str:
    module: Any = ops.module(second)
    if not isinstance(module, QATLayer):
        return f"{second.target} behind it stays float" if second.op == "call_module" else "a function is behind it"
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return f"{second.target} behind it is a transposed convolution"
    before: Any = ops.module(first)
    if isinstance(module, nn.Linear) is not isinstance(before, nn.Linear):
        return f"{second.target} behind it has its channels elsewhere"
    follower = only_user(second, ops)
    folds = follower is not None and can_fold(follower, ops) and not isinstance(module, nn.Linear)
    return Pair(str(first.target), bn, str(second.target), str(follower.target) if folds and follower else "")


def _keeps_channels(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return torch_module(module, _MODULES) is not None or isinstance(module, nn.Identity)
    return function_name(node.target) in _FUNCTIONS
