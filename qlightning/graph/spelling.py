"""A graph as lines of text: the same for two graphs that compute the same, so that these can be told apart."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import fx, nn

from qlightning.calls import function_name

_SPELLED = (bool, int, float, complex, str, type(None), type(Ellipsis))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def spell(graph: fx.Graph, root: nn.Module) -> list[str]:
    """Writes each call of a graph with its constants, the values it takes by their numbers, tensors by their names.

    Args:
        graph: The graph.
        root: The module it belongs to.

    Examples:
        >>> from torch.fx import symbolic_trace
        >>> net = symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Flatten(2)))
        >>> spell(net.graph, net)
        ['input', '0: ReLU(inplace=False)(%0)', '1: Flatten(end_dim=-1, start_dim=2)(%1)', 'output(%2)']
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return [_line(node, root, numbers) for node in graph.nodes]


def _line(node: fx.Node, root: nn.Module, numbers: dict[fx.Node, int]) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"tensor {node.target}"
    args = [_value(arg, numbers) for arg in node.args]
    args += [f"{name}={_value(arg, numbers)}" for name, arg in sorted(node.kwargs.items())]
    called = f"({', '.join(args)})"
    if node.op == "call_module":
        return f"{node.target}: {_module(root.get_submodule(str(node.target)))}{called}"
    if node.op == "call_method":
        return f".{node.target}{called}"
    if node.op == "output":
        return f"output{called}"
    overload = isinstance(node.target, torch._ops.OpOverload)
    return f"{node.target if overload else function_name(node.target)}{called}"


def _module(module: nn.Module) -> str:
    """The type of a module, and the plain attributes of torch's own, which are how it computes."""
    own = type(module).__module__.startswith("torch.nn.")
    values = {k: _value(v, {}) for k, v in sorted(vars(module).items()) if own and not k.startswith("_")}
    values.pop("training", None)
    parts = [f"{name}: {_module(child)}" for name, child in module.named_children()]
    return f"{type(module).__name__}({', '.join([*(f'{k}={v}' for k, v in values.items()), *parts])})"


def _value(value: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item, numbers) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value(item, numbers)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"{_value(value.start, numbers)}:{_value(value.stop, numbers)}:{_value(value.step, numbers)}"
    if isinstance(value, enum.Enum):
        return value.name
    if type(value) in _SPELLED or isinstance(value, _OF_TORCH):
        return repr(value)
    return type(value).__name__
