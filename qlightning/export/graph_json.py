"""A graph of ATen calls as JSON, and back: what is read can name tensor operators and nothing else."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from qlightning.backends import qdq  # noqa: F401  registers quantized_decomposed
from qlightning.errors import ArtifactError

MAX_NODES = 1_000_000
# torch.fx writes names into the code that it generates, in quotes but as they are (torch/fx/graph.py, _format_target).
_PATH = re.compile(r"[\w+:/ -]+(\.[\w+:/ -]+)*")
_NAMESPACES = ("aten", "quantized_decomposed")
_TENSORS = ("Tensor", "SymInt", "int", "float", "bool", "Scalar", "SymBool", "SymFloat")
_FILES = {"filename", "file", "path"}
# Arithmetic on sizes, and taking one of several results.
_OPERATORS = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "getitem",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    )
}
_CHECKS = {
    "_assert_scalar",
    "_assert_async",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}
_KINDS: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def encode(program: torch.export.ExportedProgram, structure: Any) -> list[dict[str, Any]]:
    """Writes the graph of an exported program as plain values.

    Args:
        program: From ``torch.export.export``.
        structure: The nested result, with the number of a result in the place of each tensor.

    Raises:
        ArtifactError: It has calls of other kinds.
    """
    signature = program.graph_signature
    stored = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    nodes: list[dict[str, Any]] = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in stored:
            nodes.append({"op": "tensor", "name": node.name, "target": stored[node.name]})
        elif node.op == "placeholder":
            nodes.append({"op": "input", "name": node.name})
        elif node.op == "call_function" and _is_check(node.target):
            continue
        elif node.op == "call_function":
            args, kwargs = [_encoded(value) for value in node.args], {k: _encoded(v) for k, v in node.kwargs.items()}
            target = _spell(node.target)
            nodes.append({"op": "call", "name": node.name, "target": target, "args": args, "kwargs": kwargs})
        elif node.op == "output":
            results = node.args[0]
            nodes.append({"op": "output", "name": "output", "args": _encoded(_filled(structure, list(results)))})
        else:
            raise ArtifactError(f"A graph with {node.op} {node.target} cannot be saved.")
    return nodes


def decode(nodes: Any, names: set[str], where: str) -> fx.Graph:
    """Builds the graph that :func:`encode` has written.

    Args:
        nodes: Plain values, not trusted.
        names: The names of the tensors that it may read.
        where: The file, for messages.

    Raises:
        ArtifactError: They are no graph of tensor operators.
    """
    if not isinstance(nodes, list) or len(nodes) > MAX_NODES:
        raise ArtifactError(f"{where}: its graph is damaged.")
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    try:
        for entry in nodes:
            _add(graph, known, entry, names)
        graph.lint()
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}") from error
    except Exception as error:  # what damaged values lead to
        raise ArtifactError(f"{where}: its graph is damaged: {type(error).__name__}: {error}.") from error
    if not nodes or nodes[-1].get("op") != "output" or sum(n.op == "output" for n in graph.nodes) != 1:
        raise ArtifactError(f"{where}: its graph has no end.")
    return graph


def check_paths(paths: Iterable[str], where: str) -> None:
    """Lets names of layers and tensors pass that can do nothing where they become part of generated code.

    Raises:
        ArtifactError: One has other characters.
    """
    for path in paths:
        if not _PATH.fullmatch(path):
            raise ArtifactError(
                f"{where}: a layer or tensor has the name {path[:100]!r}; letters, digits, spaces and _ + : / - "
                "between dots are possible. Rename it in the model."
            )


def _add(graph: fx.Graph, known: dict[str, fx.Node], entry: dict[str, Any], names: set[str]) -> None:
    op, name = entry["op"], entry["name"]
    if not isinstance(name, str) or not name.isidentifier() or name in known:
        raise ArtifactError(f"a node has the name {str(name)[:100]!r}, which is none, or another one's.")
    if op == "input":
        node = graph.placeholder(name)
    elif op == "tensor":
        if entry["target"] not in names:
            raise ArtifactError(f"its graph reads the tensor {str(entry['target'])[:100]!r}, which is not in it.")
        node = graph.get_attr(entry["target"])
    elif op == "call":
        kwargs = entry["kwargs"]
        if not all(isinstance(key, str) and key.isidentifier() for key in kwargs):
            raise ArtifactError("a call has an argument without a name.")
        args = tuple(_decoded(value, known) for value in entry["args"])
        target = _operator(entry["target"])
        node = graph.call_function(target, args, {key: _decoded(value, known) for key, value in kwargs.items()})
    elif op == "output":
        node = graph.output(_decoded(entry["args"], known))
    else:
        raise ArtifactError(f"its graph has a node of the kind {str(op)[:100]!r}.")
    known[name] = node


def _is_check(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.partition("::")[2] in _CHECKS


def _spell(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        spelled = str(target)
        _operator(spelled)
        return spelled
    for name, function in _OPERATORS.items():
        if target is function:
            return name
    raise ArtifactError(f"A call of {target} cannot be saved: it is no operator of torch on tensors.")


def _operator(spelled: Any) -> Any:
    """The operator of a name: one that takes and gives tensors and numbers, and touches no file."""
    if spelled in _OPERATORS:
        return _OPERATORS[spelled]
    parts = spelled.split(".") if isinstance(spelled, str) else []
    if len(parts) != 3 or parts[0] not in _NAMESPACES or not all(part.isidentifier() for part in parts):
        raise ArtifactError(f"its graph calls {str(spelled)[:100]!r}, which is no operator on tensors.")
    namespace, name, overload = parts
    schemas = {s.overload_name or "default": s for s in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}")}
    schema = schemas.get(overload)
    packet = getattr(getattr(torch.ops, namespace), name, None) if schema is not None else None
    found = getattr(packet, overload, None) if packet is not None else None
    if schema is None or not isinstance(found, torch._ops.OpOverload):
        raise ArtifactError(f"its graph calls {spelled!r}, which this torch ({torch.__version__}) does not have.")
    returns = [str(value.type).replace("List[", "").rstrip("]").removeprefix("Optional[") for value in schema.returns]
    if not returns or not set(returns) <= set(_TENSORS) or any(map(_is_file, schema.arguments)):
        raise ArtifactError(f"its graph calls {spelled!r}, which is no operator on tensors.")
    return found


def _is_file(argument: Any) -> bool:
    return argument.name in _FILES and "str" in str(argument.type)


def _encoded(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list) or type(value) in (tuple, fx.immutable_collections.immutable_list):
        return {"tuple" if isinstance(value, tuple) else "list": [_encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[str(key), _encoded(item)] for key, item in value.items()]}
    if isinstance(value, torch.device):
        return {"device": "cpu"}
    for kind, cls in _KINDS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    raise ArtifactError(f"A call with {type(value).__name__} {value!r} cannot be saved.")


def _decoded(value: Any, known: dict[str, fx.Node]) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ArtifactError("an argument of a call is a number beyond 64 bits.")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ArtifactError("an argument of a call is damaged.")
    ((kind, content),) = value.items()
    if kind == "node":
        return known[content]
    if kind == "float":
        return float(content)
    if kind in ("list", "tuple"):
        items = [_decoded(item, known) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {str(key): _decoded(item, known) for key, item in content}
    if kind == "device":
        return torch.device("cpu")
    if kind in _KINDS:
        found = getattr(torch, content) if isinstance(content, str) and content.isidentifier() else None
        if isinstance(found, _KINDS[kind]):
            return found
    raise ArtifactError(f"an argument of a call is of the kind {str(kind)[:100]!r}.")


def _filled(structure: Any, results: list[Any]) -> Any:
    """The structure of the result with the results in their places."""
    if isinstance(structure, dict):
        return {key: _filled(value, results) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        items = [_filled(value, results) for value in structure]
        return items if isinstance(structure, list) else tuple(items)
    return results.pop(0)
