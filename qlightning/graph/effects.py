"""What a forward leaves behind besides its result, found by comparing before and after; a graph would not repeat it."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_LARGE, _MOST = 10_000, 100_000  # above that it is data, not state


class Snapshot:
    """All Python state that hangs on the modules of a tree: attributes, and what lists, dicts and sets in them hold.

    Args:
        root: The top of the tree; the contents of tensors are not copied.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = dict(root.named_modules())
        self._contents: dict[int, tuple[Any, Any]] = {}  # by id: the container, a copy
        self._owners: dict[int, tuple[str, str]] = {}  # by id: the module and the attribute it was found in
        for path, module in self._modules.items():
            self._keep(vars(module), path, "")
            for name, value in list(vars(module).items()):
                self._visit(value, path, name)

    def _visit(self, value: Any, path: str, attribute: str) -> None:
        todo = [value]
        while todo and len(self._contents) < _MOST:
            value = todo.pop()
            if id(value) in self._contents or isinstance(value, nn.Module):
                continue
            if isinstance(value, (dict, list, set, deque)):
                self._keep(value, path, attribute)
                items: Any = value.values() if isinstance(value, dict) else value
            elif isinstance(value, tuple):
                items = value
            elif _is_plain_object(value) and id(vars(value)) not in self._contents:
                self._keep(vars(value), path, attribute)
                items = vars(value).values()
            else:
                continue
            if len(items) <= _LARGE:
                todo += items

    def _keep(self, container: Any, path: str, attribute: str) -> None:
        plain = next((kind for kind in (dict, set) if isinstance(container, kind)), list)
        self._contents[id(container)] = container, plain(container)
        self._owners[id(container)] = path, attribute

    def restore(self) -> tuple[str, str] | None:
        """Puts everything back; returns the module and the attribute that had changed first, or None."""
        written = None
        for key, (container, before) in self._contents.items():
            if (changed := _difference(container, before)) is None:
                continue
            path, attribute = self._owners[key]
            written = written or (path, attribute if attribute[:1] not in ("", "_") else changed or attribute)
            container.clear()
            container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
        return written


_FOREIGN = frozenset(
    {"torch", "builtins", "pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics", "qlightning"}
)


def _is_plain_object(value: Any) -> bool:
    """An object of a class of the user's that holds values: a namespace, a dataclass, a recorder."""
    origin = type(value).__module__.partition(".")[0]
    known = origin in _FOREIGN
    return not known and not callable(value) and isinstance(getattr(value, "__dict__", None), dict)


def _difference(container: Any, before: Any) -> str | None:
    """Where a container differs from its copy: the key, "" for no name; None where they are the same."""
    if isinstance(container, dict):
        absent = object()
        keys = (key for key in {**before, **container} if container.get(key, absent) is not before.get(key, absent))
        return next((str(key) for key in keys), None)
    if isinstance(container, set):
        return None if container == before else ""
    same = len(container) == len(before) and all(a is b for a, b in zip(container, before, strict=True))
    return None if same else ""


class Generators:
    """The states of the random generators that a forward may draw from: torch's, Python's, numpy's, the modules' own.

    Args:
        root: The module whose attributes may hold generators.
    """

    def __init__(self, root: nn.Module) -> None:
        self._states = [(get(), get, put) for get, put in _generators(root)]

    def restore(self) -> bool:
        """Puts the states back; returns whether one had changed."""
        drawn = False
        for before, get, put in self._states:
            if not _equal(get(), before):
                drawn = True
                put(before)
        return drawn


def _generators(root: nn.Module) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.get_state, numpy.random.set_state
    for value in [value for module in root.modules() for value in vars(module).values()]:
        if isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.random.RandomState)):
            yield value.get_state, value.set_state
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            yield functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b
