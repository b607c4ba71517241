"""Plain Python values of the modules that a forward reads: they decide which graph is the right one."""

from __future__ import annotations

import argparse
import dataclasses
import keyword
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from qlightning.graph.signature import CONSTANTS
from qlightning.nn.qat import layer_type

Read = tuple[str, str, Any]
"""The name of a module, that of an attribute, and the value it had."""

_UNKNOWN = object()
_LONGEST = 64
_OF_EVERY_MODULE = frozenset(dir(nn.Module())) - {"training"}


@contextmanager
def recording_reads(root: nn.Module, reads: list[Read]) -> Iterator[None]:
    """Adds every number, flag, string or collection of these that user code reads from the modules of a tree.

    Layers and the modules of torch.nn are left out (they are called in one piece), and the mode of the root, which is
    known.
    """
    paths = {
        id(m): name
        for name, m in root.named_modules()
        if layer_type(m) is None and (m is root or not type(m).__module__.startswith("torch.nn."))
    }
    seen: set[tuple[str, str]] = set()

    def read(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name in _OF_EVERY_MODULE or (path := paths.get(id(module))) is None or (path, name) in seen:
            return value
        file = sys._getframe(1).f_code.co_filename
        by_lightning = "/pytorch_lightning/" in file or "/lightning/pytorch/" in file  # how its properties are made
        if by_lightning or callable(value) or (not path and name == "training"):
            return value
        if (kept := frozen(value)) is not _UNKNOWN:
            seen.add((path, name))
            reads.append((path, name, kept))
        return value

    nn.Module.__getattribute__ = read  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


def frozen(value: Any) -> Any:
    """A value that compares equal as long as another has the same content; a marker for what is no plain value."""
    if isinstance(value, (*CONSTANTS, int, float, complex)):
        return value
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        value = vars(value) if hasattr(value, "__dict__") else {}
    if not isinstance(value, (list, tuple, set, frozenset, dict)) or len(value) > _LONGEST:
        return _UNKNOWN
    if isinstance(value, dict):
        items = [(key, frozen(item)) for key, item in value.items() if isinstance(key, (*CONSTANTS, int, float))]
        return ("dict", *((key, item) for key, item in items if item is not _UNKNOWN))
    parts = tuple(frozen(item) for item in value)
    return _UNKNOWN if _UNKNOWN in parts else (type(value).__name__, *parts)


def matcher(reads: tuple[Read, ...]) -> Callable[[nn.Module], bool]:
    """A fast test of whether all that was read from a module still has the value it had."""
    if not reads:
        return lambda module: True
    lines, names, terms = [], {"": "self"}, []
    for path, attribute, value in reads:
        if path not in names:
            names[path] = f"m{len(names)}"
            steps = "".join(f"._modules[{part!r}]" for part in path.split("."))
            lines.append(f"    {names[path]} = self{steps}")
        plain = attribute.isidentifier() and not keyword.iskeyword(attribute)
        term = f"{names[path]}.{attribute}" if plain else f"getattr({names[path]}, {attribute!r})"
        terms.append(f"frozen({term})" if isinstance(value, tuple) else term)
    source = "\n".join(["def current(self):", *lines, f"    return ({', '.join(terms)},)"])
    namespace: dict[str, Any] = {"frozen": frozen}
    exec(source, namespace)
    current, values = namespace["current"], tuple(value for _, _, value in reads)

    def matches(module: nn.Module) -> bool:
        try:
            return bool(current(module) == values)
        except Exception:  # an attribute that is gone, a property that fails now, an array in place of a number
            return False

    return matches
