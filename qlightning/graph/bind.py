"""Binding graphs to the module that they came from: the same object, whose forward runs a graph."""

from __future__ import annotations

import copy
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from qlightning.errors import QuantizationError
from qlightning.graph.programs import Captured

GRAPH_MODULES = "graph_fake_quant"
COMPILED = "_compiled_call_impl"
"""The attribute by which ``nn.Module.compile()`` puts a compiled forward before a module's own."""

PLACE = "_place"
"""The attribute by which a module knows what it stands for, with a ``before_move()``: called when devices change."""


class BoundModule:
    """Marks a module whose forward runs graphs."""

    _captured: Captured

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)
        if own is not None:
            return own(memo)
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[attr-defined]
        return copied

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())  # type: ignore[attr-defined]
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if (place := self.__dict__.get(PLACE)) is not None:
            place.before_move()
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made at run time, so that no other process could find it.

        Raises:
            QuantizationError: Always; says what to save instead.
        """
        raise QuantizationError(
            f"{type(self).__name__} is prepared or in int8 and cannot be pickled whole. Write an int8 model with "
            "qlightning.save(int8, 'net.pt2'). Save the state dict of a prepared model: load_state_dict() of one that "
            "is prepared the same way takes it, and convert() then gives the same int8 model."
        )


def bind(module: nn.Module, captured: Captured, marker: type[BoundModule] = BoundModule, **members: Any) -> None:
    """Lets a module run captured graphs, by a change of its class; its signature, methods and hooks stay.

    Args:
        module: Changed in place.
        captured: Its graphs.
        marker: Base class that tells what kind of graphs they are.
        members: Further members of the class.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_captured"].run(self, args, kwargs)

    original = captured.original
    forward.__code__ = forward.__code__.replace()  # its own, as torch.compile limits the variants of a code object
    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    forward.__doc__ = original.forward.__doc__
    listing = next((mixin for kind, mixin in _LISTINGS if issubclass(original, kind)), None)
    bases = (marker, listing, original) if listing is not None else (marker, original)
    body = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        **members,
    }
    module.__class__ = types.new_class(original.__name__, bases, {}, lambda namespace: namespace.update(body))
    module.__dict__["_captured"] = captured


def unbind(module: nn.Module) -> None:
    """Gives a bound module its class back."""
    captured: Captured = module.__dict__.pop("_captured")
    module.__class__ = captured.original


class _Delegating:
    """Marks a module whose forward runs another module."""

    _other: nn.Module
    _waiting: dict[str, Any]


def replace_forward(module: nn.Module, other: nn.Module) -> None:
    """Lets ``module(...)`` run ``other(...)``, by a change of class; all else of the module stays as it is.

    ``other`` is no submodule of it afterwards. What ``module.compile()`` has put before its forward waits meanwhile.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return other(*args, **kwargs)

    original = type(module)
    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    compiled = {name: vars(module).pop(name) for name in (COMPILED,) if name in vars(module)}
    body = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_other": other,
        "_waiting": compiled,
    }
    module.__class__ = types.new_class(
        original.__name__, (_Delegating, original), {}, lambda namespace: namespace.update(body)
    )


def delegate(module: nn.Module) -> nn.Module:
    """The module whose forward a module runs, after :func:`replace_forward`."""
    assert isinstance(module, _Delegating)
    return type(module)._other


def restore_forward(module: nn.Module) -> None:
    """Undoes :func:`replace_forward`; does nothing to a module that has its own forward."""
    if isinstance(module, _Delegating):
        vars(module).update(type(module)._waiting)
        module.__class__ = type(module).__mro__[2]  # itself, _Delegating, the original


def _listed(module: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in module._modules.items() if name != GRAPH_MODULES and m is not None}


class _SequentialListing(nn.Sequential):
    """An nn.Sequential that does not list the fake-quantizers that its graph has."""

    def __len__(self) -> int:
        return len(_listed(self))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(_listed(self).values())

    def __getitem__(self, idx: Any) -> Any:
        items = list(_listed(self).items())
        return nn.Sequential(OrderedDict(items[idx])) if isinstance(idx, slice) else items[idx][1]


class _ModuleListListing(nn.ModuleList):
    """An nn.ModuleList that does not list the fake-quantizers that its graph has."""

    def __len__(self) -> int:
        return len(_listed(self))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(_listed(self).values())

    def __getitem__(self, idx: Any) -> Any:
        items = list(_listed(self).values())
        return nn.ModuleList(items[idx]) if isinstance(idx, slice) else items[idx]


class _ModuleDictListing(nn.ModuleDict):
    """An nn.ModuleDict that does not list the fake-quantizers that its graph has."""

    def __len__(self) -> int:
        return len(_listed(self))

    def __iter__(self) -> Iterator[str]:
        return iter(_listed(self))

    def __contains__(self, key: object) -> bool:
        return key in _listed(self)

    def keys(self) -> Any:
        return _listed(self).keys()

    def items(self) -> Any:
        return _listed(self).items()

    def values(self) -> Any:
        return _listed(self).values()


_LISTINGS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.Sequential, _SequentialListing),
    (nn.ModuleList, _ModuleListListing),
    (nn.ModuleDict, _ModuleDictListing),
)
