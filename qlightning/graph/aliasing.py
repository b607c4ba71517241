"""Calls that change a tensor in place: all that reads the tensor later reads the result of the call, or is refused."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable

import torch
from torch import fx, nn

from qlightning.calls import function_name, is_known_origin
from qlightning.vocabulary import Kind, Vocabulary

_OPERATORS = frozenset(
    f"i{name}"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
)


def mutates(node: fx.Node) -> bool:
    """Whether a function or method changes its first argument in place."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "retain_grad_")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return _inplace_flag(node) or name in _OPERATORS or (name.endswith("_") and name not in ("and_", "or_", "not_"))
    return False


def _inplace_flag(node: fx.Node) -> bool:
    position = _inplace_position(node.target) if len(node.args) > 1 else None
    given = node.kwargs.get("inplace", False)
    return bool(node.args[position] if position is not None and len(node.args) > position else given)


@functools.cache
def _inplace_position(function: Callable[..., object]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def read_after_write(graph: fx.Graph, root: nn.Module, writes_to_input: Callable[[str], bool]) -> None:
    """Lets later uses of a tensor that a call changes in place read the result of that call instead.

    Args:
        graph: Changed in place.
        root: The module whose submodules it calls.
        writes_to_input: Whether the module of a name, called in one piece, may change what it is given.

    Raises:
        ValueError: What is read later is a part of the tensor, or may share its memory, in a way that a graph of values
            cannot say.
    """
    ops = Vocabulary(graph, root)
    order = {node: index for index, node in enumerate(graph.nodes)}

    def later(value: fx.Node, node: fx.Node) -> list[fx.Node]:
        return [user for user in value.users if order[user] > order[node] and ops[user].kind is not Kind.OTHER]

    for node in graph.nodes:
        if node.op == "call_function" and node.kwargs.get("out") is not None:
            raise ValueError(f"forward writes into a tensor (out= of {node.name}), which a graph would not repeat")
        by_leaf = node.op == "call_module" and _is_opaque(ops.module(node))
        by_module = node.op == "call_module" and not by_leaf and getattr(ops.module(node), "inplace", False) is True
        if not (by_leaf or by_module or mutates(node)):
            continue
        for changed in node.all_input_nodes if by_leaf else _first(node):
            aliases = [(value, whole) for value, whole in _aliases(changed, node, ops, order) if later(value, node)]
            if by_leaf:
                if (aliases or later(changed, node)) and writes_to_input(str(node.target)):
                    raise ValueError(
                        f"{node.target} changes its input in place, and the input is read later ({changed.name})"
                    )
                continue
            if any(not whole for _, whole in aliases):
                raise ValueError(
                    f"forward changes a part of a tensor in place ({node.name}), which a graph would not repeat"
                )
            if node.meta.get("no_grad") and not changed.meta.get("no_grad"):
                raise ValueError(f"forward changes a tensor in place under no_grad ({node.name})")
            for value in (changed, *(value for value, _ in aliases)):
                for user in [user for user in value.users if order[user] > order[node]]:
                    user.replace_input_with(value, node)


def _first(node: fx.Node) -> list[fx.Node]:
    first = node.args[0] if node.args else node.kwargs.get("input")
    if isinstance(first, (list, tuple)):
        raise ValueError(f"forward changes several tensors in place ({node.name}), which a graph would not repeat")
    return [first] if isinstance(first, fx.Node) else []


def writes_to_inputs(graph: fx.Graph, root: nn.Module) -> bool:
    """Whether a graph changes in place what it is given, or what may share its memory."""
    ops = Vocabulary(graph, root)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        by_leaf = node.op == "call_module" and _is_opaque(ops.module(node)) and may_write(ops.module(node))
        by_module = node.op == "call_module" and getattr(ops.module(node), "inplace", False) is True
        if by_leaf or by_module or mutates(node):
            for changed in node.all_input_nodes if by_leaf else _first(node):
                reached = [changed, *(value for value, _ in _aliases(changed, node, ops, order))]
                if any(value.op == "placeholder" for value in reached):
                    return True
    return False


def may_write(module: nn.Module | None) -> bool:
    """Whether some code of a module changes something in place, as far as can be seen from outside."""
    for part in module.modules() if module is not None else ():
        if getattr(part, "inplace", False) is True:
            return True
        code = getattr(type(part).forward, "__code__", None)
        if type(part).__module__.startswith("torch.") or code is None:
            continue
        if any(name.endswith("_") and not name.endswith("__") for name in code.co_names) or "inplace" in str(
            code.co_consts
        ):
            return True
        if any(i.opname.startswith("INPLACE_") or i.argrepr in _ASSIGNMENTS for i in dis.get_instructions(code)):
            return True
    return False


_ASSIGNMENTS = frozenset({"+=", "-=", "*=", "/=", "//=", "%=", "**=", "&=", "|=", "^=", "<<=", ">>="})


def _is_opaque(module: nn.Module | None) -> bool:
    """Whether a module called in one piece has code that is not torch's."""
    if module is None or isinstance(module, (nn.Sequential, torch.jit.ScriptModule)):
        return module is not None
    return not type(module).forward.__module__.startswith(("torch.nn.", "qlightning."))


def _aliases(start: fx.Node, now: fx.Node, ops: Vocabulary, order: dict[fx.Node, int]) -> list[tuple[fx.Node, bool]]:
    """The values made before a call that may share the memory of another, and whether each surely is all of it."""
    found: dict[fx.Node, bool] = {start: True}
    todo = [start]
    while todo:
        value = todo.pop()
        links = [(parent, whole) for parent, whole in _shares_with(value, ops)]
        links += [
            (user, whole)
            for user in value.users
            if order[user] < order[now]
            for parent, whole in _shares_with(user, ops)
            if parent is value
        ]
        for other, whole in links:
            # A sequence that was reached from one of its parts: the other parts are other memory.
            part = ops[value].sequence and other in value.users and function_name(other.target) == "getitem"
            if other in found or (part and any(o in found for o in value.users)):
                continue
            found[other] = found[value] and whole
            todo.append(other)
    del found[start]
    return list(found.items())


def _shares_with(node: fx.Node, ops: Vocabulary) -> list[tuple[fx.Node, bool]]:
    """The arguments whose memory the result of a call may share, and whether it surely is the same tensor."""
    op = ops[node]
    inputs = [value for value in node.all_input_nodes if ops[value].kind is not Kind.OTHER]
    if op.kind is Kind.OTHER or node.op in ("placeholder", "get_attr", "output") or not inputs:
        return []
    if node.op == "call_module":
        module = ops.module(node)
        if getattr(module, "inplace", False) is True and not _is_opaque(module):
            return [(inputs[0], True)]
        if isinstance(module, nn.Identity):
            return [(inputs[0], type(module) is nn.Identity)]
        if _is_opaque(module):
            return [(value, False) for value in inputs]
        return [(inputs[0], False)] if isinstance(module, _SHARING_MODULES) else []
    if mutates(node):
        return [(inputs[0], True)]
    if node.op == "call_function" and not is_known_origin(node.target):
        return [(value, False) for value in inputs]
    return [(inputs[0], False)] if function_name(node.target) in _SHARING else []


_SHARING_MODULES = (
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.modules.dropout._DropoutNd,
)

# fmt: off
_SHARING = frozenset({
    "getitem", "getattr", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "permute",
    "transpose", "t", "adjoint", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand",
    "expand_as", "broadcast_to", "broadcast_tensors", "narrow", "select", "diagonal", "unfold", "as_strided", "chunk",
    "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split", "hsplit", "vsplit", "dsplit", "unbind",
    "detach", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "positive",
    "real", "imag", "conj", "resolve_conj", "view_as_real", "view_as_complex", "atleast_1d", "atleast_2d", "atleast_3d",
    "requires_grad", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout", "stochastic_depth", "pixel_shuffle", "pixel_unshuffle", "meshgrid",
})
# fmt: on
