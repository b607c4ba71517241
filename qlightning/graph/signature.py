"""How a forward was called: the tensors in its arguments, and all else as a key that tells ways of calling apart."""

from __future__ import annotations

import enum
import inspect
import re
from typing import Any

import torch
from torch import Tensor

CONSTANTS = (type(None), bool, str, bytes, enum.Enum, torch.dtype, torch.device, torch.memory_format)
LEAF, VALUE = "*", "?"  # tensors, and all else that the graph takes as inputs


class CallSpec:
    """One way of calling a forward: which arguments, nested how, and the values of those that are no tensors.

    Two calls with equal specs run the same graph. Tensors, numbers and objects of other kinds are leaves, which the
    graph takes as inputs; None, flags, strings and the like are part of the spec.

    Attributes:
        leaf_names: A name for every leaf.
        value_names: The names of those that are no tensors.
    """

    def __init__(self, key: tuple[Any, ...], leaf_names: list[str], value_names: frozenset[str]) -> None:
        self.key = key
        self.leaf_names = leaf_names
        self.value_names = value_names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallSpec) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def describe(self) -> str:
        """The call, with ``*`` for every leaf."""
        positional, keywords = self.key
        spelled = [_spell(spec) for spec in positional] + [f"{name}={_spell(spec)}" for name, spec in keywords]
        return f"({', '.join(spelled)})"

    def rebuild(self, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the forward, made from leaves."""
        taken = iter(leaves)
        positional, keywords = self.key
        return [_rebuild(spec, taken) for spec in positional], {name: _rebuild(spec, taken) for name, spec in keywords}


def describe_call(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], *, freeze_numbers: bool = False
) -> tuple[CallSpec, list[Any]]:
    """Splits the arguments of a call into a spec and its leaves.

    Args:
        signature: Of the forward, without ``self``.
        args: Positional arguments.
        kwargs: Keyword arguments.
        freeze_numbers: Takes int and float arguments into the spec, for a forward that branches on them.

    Raises:
        TypeError: The arguments do not fit the signature, in Python's own words.
    """
    bound = signature.bind(*args, **kwargs)
    leaves: list[Any] = []
    names: list[str] = []
    values: set[str] = set()

    def visit(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            pass
        elif isinstance(value, CONSTANTS) or (freeze_numbers and isinstance(value, (int, float))):
            return ("constant", type(value), value)
        elif isinstance(value, dict):
            return ("dict", type(value), tuple((key, visit(item, f"{name}_{key}")) for key, item in value.items()))
        elif isinstance(value, (list, tuple)):
            return ("sequence", type(value), tuple(visit(item, f"{name}_{i}") for i, item in enumerate(value)))
        leaves.append(value)
        names.append(_unique(re.sub(r"\W", "_", name), names))
        if isinstance(value, Tensor):
            return LEAF
        values.add(names[-1])
        return VALUE

    parameters = list(signature.parameters.values())
    positional, keywords = [], []
    as_keywords = False
    for parameter in parameters:
        if parameter.name not in bound.arguments:
            as_keywords = True
            continue
        value = bound.arguments[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [visit(item, f"{parameter.name}_{i}") for i, item in enumerate(value)]
            as_keywords = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords += [(key, visit(item, key)) for key, item in value.items()]
        elif parameter.kind is parameter.KEYWORD_ONLY or (
            as_keywords and parameter.kind is not parameter.POSITIONAL_ONLY
        ):
            keywords.append((parameter.name, visit(value, parameter.name)))
        else:
            positional.append(visit(value, parameter.name))
    return CallSpec((tuple(positional), tuple(keywords)), names, frozenset(values)), leaves


def _spell(spec: Any) -> str:
    if spec in (LEAF, VALUE):
        return LEAF
    kind, cls, content = spec
    if kind == "constant":
        return repr(content)
    items = [f"{key!r}: {_spell(item)}" for key, item in content] if kind == "dict" else [_spell(i) for i in content]
    return f"{cls.__name__}({', '.join(items)})"


def _unique(name: str, taken: list[str]) -> str:
    name = name if name.isidentifier() else f"arg_{name}"
    # "self" is the module in generated code.
    candidate, count = (name, 0) if name not in ("self", "_call", "_forward") else (f"{name}_", 0)
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def _rebuild(spec: Any, leaves: Any) -> Any:
    if spec in (LEAF, VALUE):
        return next(leaves)
    kind, cls, content = spec
    if kind == "constant":
        return content
    if kind == "dict":
        items = {key: _rebuild(item, leaves) for key, item in content}
        return items if cls is dict else _construct(cls, items)
    values = [_rebuild(item, leaves) for item in content]
    return cls(*values) if hasattr(cls, "_fields") else cls(values)


def _construct(cls: type, items: dict[Any, Any]) -> Any:
    try:
        return cls(**items)
    except TypeError:
        return cls(items)


def expected_calls(signature: inspect.Signature) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls to be ready for: all defaults; then each flag turned, each None replaced by a tensor.

    Tensors are stood in for by empty ones; ``*args`` is one where nothing else is required, ``**kwargs`` is left out.
    """
    required = [
        p
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    needed = {
        p.name: torch.empty(0)
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind is p.KEYWORD_ONLY
    }
    variadic = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    positional = tuple(torch.empty(0) for _ in range(len(required) or int(variadic)))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(positional, dict(needed))]
    for p in signature.parameters.values():
        if p.kind is p.POSITIONAL_ONLY:
            continue
        if isinstance(p.default, bool):
            calls.append((positional, {**needed, p.name: not p.default}))
        elif p.default is None:
            calls.append((positional, {**needed, p.name: torch.empty(0)}))
    return calls


def signature_of(cls: type) -> inspect.Signature:
    """The signature of the forward of a class, without ``self``."""
    signature = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return signature.replace(parameters=list(signature.parameters.values())[1:])
