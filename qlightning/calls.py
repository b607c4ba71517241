"""How a call in a graph is read: its name, its arguments, the ATen call that an elementwise one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

aten = torch.ops.aten

# What torch takes for its own names, as numpy calls them.
_NUMPY_NAMES = {"dim": ("axis",), "keepdim": ("keepdims",), "input": ("x", "a", "x1"), "other": ("x2",)}


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by keyword, under torch's name or numpy's."""
    if len(node.args) > index:
        return node.args[index]
    names = (name, *_NUMPY_NAMES.get(name, ()))
    return next((node.kwargs[n] for n in names if n in node.kwargs), default)


def function_name(target: Any) -> str:
    """The bare name of a function, a method or an ATen operator, without its overload and trailing underscores."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2].rstrip("_")
    return str(getattr(target, "__name__", target)).rstrip("_")


def is_known_origin(target: Any) -> bool:
    """Whether a function is torch's or Python's own; one of the user's may share its name and mean another thing."""
    origin = getattr(target, "__module__", None) or "torch"
    return origin.partition(".")[0] in ("torch", "_operator", "builtins") or function_name(target) == "stochastic_depth"


def is_dtype(value: Any) -> bool:
    """Whether an argument is a dtype, or a node that asks a tensor for its."""
    if isinstance(value, fx.Node):
        return function_name(value.target) == "getattr" and str(value.args[1]) == "dtype"
    return isinstance(value, torch.dtype)


def torch_module(module: nn.Module, table: Any) -> type[nn.Module] | None:
    """The torch module of a table that a module computes as: the class itself, or a subclass with the same forward."""
    for entry in table:
        if isinstance(module, entry):
            # That of torch's own: a private base (the paddings, BatchNorm) has its forward in its subclasses, too.
            own: Any = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn."))
            same = type(module).forward is own.forward and "forward" not in vars(module)
            return entry if same and issubclass(own, entry) else None
    return None


# Elementwise calls: from module type, function name or method name to the ATen call they are.
Elementwise = tuple[Any, tuple[Any, ...], dict[str, Any]]

ACTIVATION_MODULES: dict[type[nn.Module], Callable[[Any], Elementwise]] = {
    nn.ReLU: lambda m: (aten.relu.default, (), {}),
    nn.ReLU6: lambda m: (aten.hardtanh.default, (0.0, 6.0), {}),
    nn.Hardtanh: lambda m: (aten.hardtanh.default, (float(m.min_val), float(m.max_val)), {}),
    nn.LeakyReLU: lambda m: (aten.leaky_relu.default, (float(m.negative_slope),), {}),
    nn.ELU: lambda m: (aten.elu.default, (float(m.alpha),), {}),
    nn.Hardswish: lambda m: (aten.hardswish.default, (), {}),
    nn.Hardsigmoid: lambda m: (aten.hardsigmoid.default, (), {}),
    nn.SiLU: lambda m: (aten.silu.default, (), {}),
    nn.GELU: lambda m: (aten.gelu.default, (), {"approximate": m.approximate}),
    nn.Sigmoid: lambda m: (aten.sigmoid.default, (), {}),
    nn.Tanh: lambda m: (aten.tanh.default, (), {}),
}

ACTIVATION_FUNCTIONS: dict[str, Callable[[fx.Node], Elementwise]] = {
    "relu": lambda n: (aten.relu.default, (), {}),
    "relu6": lambda n: (aten.hardtanh.default, (0.0, 6.0), {}),
    "hardtanh": lambda n: (
        aten.hardtanh.default,
        (float(argument(n, 1, "min_val", -1.0)), float(argument(n, 2, "max_val", 1.0))),
        {},
    ),
    "leaky_relu": lambda n: (aten.leaky_relu.default, (float(argument(n, 1, "negative_slope", 0.01)),), {}),
    "elu": lambda n: (aten.elu.default, (float(argument(n, 1, "alpha", 1.0)),), {}),
    "hardswish": lambda n: (aten.hardswish.default, (), {}),
    "hardsigmoid": lambda n: (aten.hardsigmoid.default, (), {}),
    "silu": lambda n: (aten.silu.default, (), {}),
    "gelu": lambda n: (aten.gelu.default, (), {"approximate": n.kwargs.get("approximate", "none")}),
    "sigmoid": lambda n: (aten.sigmoid.default, (), {}),
    "tanh": lambda n: (aten.tanh.default, (), {}),
}

_SCALAR_OPERATORS: dict[str, Any] = {
    "add": aten.add.Scalar,
    "sub": aten.sub.Scalar,
    "mul": aten.mul.Scalar,
    "div": aten.div.Scalar,
}
ARITHMETIC = {
    "add": "add",
    "iadd": "add",
    "sub": "sub",
    "isub": "sub",
    "mul": "mul",
    "imul": "mul",
    "multiply": "mul",
    "subtract": "sub",
    "div": "div",
    "divide": "div",
    "truediv": "div",
    "itruediv": "div",
    "rsub": "sub",
}


def elementwise(node: fx.Node, module: nn.Module | None) -> Elementwise:
    """For an elementwise call: the ATen operator, its arguments behind the tensor, its keywords.

    Args:
        node: The call.
        module: The module that it calls, if it calls one.
    """
    if module is not None:
        return ACTIVATION_MODULES[torch_module(module, ACTIVATION_MODULES)](module)  # type: ignore[index]
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target, node.args[1:], dict(node.kwargs)
    name = function_name(node.target)
    if name in ACTIVATION_FUNCTIONS:
        return ACTIVATION_FUNCTIONS[name](node)
    if name in ("clamp", "clip"):
        return aten.hardtanh.default, (float(argument(node, 1, "min")), float(argument(node, 2, "max"))), {}
    name = ARITHMETIC[name]
    left, right = operands(node)
    if isinstance(left, fx.Node):
        return _SCALAR_OPERATORS[name], (right,), {}
    if name == "sub":
        return aten.rsub.Scalar, (left,), {}
    return _SCALAR_OPERATORS[name], (left,), {}


def operands(node: fx.Node) -> tuple[Any, Any]:
    """The left and the right side of an arithmetic call."""
    left, right = argument(node, 0, "input"), argument(node, 1, "other")
    return (right, left) if function_name(node.target) == "rsub" else (left, right)


LAYER_FUNCTIONS: dict[str, type[nn.Module]] = {
    "linear": nn.Linear,
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "conv_transpose1d": nn.ConvTranspose1d,
    "conv_transpose2d": nn.ConvTranspose2d,
    "conv_transpose3d": nn.ConvTranspose3d,
}
