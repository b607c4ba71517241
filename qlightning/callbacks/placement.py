"""The int8 model in its place in a LightningModule, and the prepared one that it stands for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn

from qlightning.callbacks.base import quantizing_callbacks
from qlightning.callbacks.targets import OWN_FORWARD
from qlightning.errors import ConfigError
from qlightning.graph import PLACE, convert, convert_standalone, delegate, replace_forward, restore_forward


class Place:
    """Where an int8 module stands, and what for. Kept by the module that stands there.

    A copy of the LightningModule has places of its own, with a copy of the prepared module: it can be trained, saved
    and loaded like the original. A copy of the int8 module alone has none.

    Args:
        name: Of the target.
        owner: The LightningModule.
        prepared: The prepared module; where the target is the LightningModule's own forward, the LightningModule.
        backend: What it was converted with.
    """

    def __init__(self, name: str, owner: nn.Module, prepared: nn.Module, backend: Any) -> None:
        self.name, self.backend = name, backend
        self._owner = ref(owner)
        self._prepared = None if prepared is owner else prepared

    @property
    def prepared(self) -> nn.Module:
        """The prepared module."""
        prepared = self._prepared if self._prepared is not None else self._owner()
        assert prepared is not None
        return prepared

    def is_in(self, pl_module: nn.Module) -> bool:
        """Whether it belongs to a LightningModule."""
        return self._owner() is pl_module

    def __deepcopy__(self, memo: dict[int, Any]) -> Place | None:
        owner = memo.get(id(self._owner()))
        if owner is None:
            return None
        return Place(self.name, owner, copy.deepcopy(self.prepared, memo), self.backend)

    def before_move(self) -> None:
        """Stops a Trainer that would train an int8 module; it moves modules to its device before it trains them.

        Raises:
            ConfigError: The LightningModule is in a fit without a callback of ours, which would have made room.
        """
        trainer = getattr(self._owner(), "_trainer", None)
        if trainer is None or trainer.state.fn != "fit" or trainer.state.status != "running":
            return
        if not quantizing_callbacks(trainer):
            raise ConfigError(
                f"{self.name or type(self._owner()).__name__} is in int8 and cannot be trained. Give the Trainer a "
                "QuantizationAwareTraining, which goes on with the prepared net, or a PostTrainingQuantization, which "
                "goes on with the float one."
            )


def int8_modules(pl_module: nn.Module) -> Mapping[str, nn.Module]:
    """The int8 modules that stand in the LightningModule, by target name."""
    return {place.name: module for place, module in _standing(pl_module)}


def place_int8(pl_module: nn.Module, prepared: Mapping[str, nn.Module], backend: Any) -> dict[str, nn.Module]:
    """Converts the prepared modules of a LightningModule and puts the int8 ones in their places.

    Args:
        pl_module: The LightningModule; changed in place.
        prepared: By target name.
        backend: As for ``qlightning.convert``.

    Returns:
        The int8 modules, by target name.
    """
    int8 = {
        name: convert_standalone(module, backend) if name == OWN_FORWARD else convert(module, backend=backend)
        for name, module in prepared.items()
    }
    put_int8(pl_module, [(Place(name, pl_module, prepared[name], backend), m.eval()) for name, m in int8.items()])
    return int8


def restore_prepared(pl_module: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """Puts the prepared modules back where int8 ones stand.

    Args:
        pl_module: The LightningModule; changed in place.
        names: Of the targets; None: all.

    Returns:
        The prepared modules by target name; empty where nothing was in int8.
    """
    return {place.name: place.prepared for place, _ in take_int8(pl_module, names)}


@contextmanager
def prepared_in_place(pl_module: nn.Module) -> Iterator[None]:
    """Within it the prepared modules stand where int8 ones did."""
    taken = take_int8(pl_module)
    try:
        yield
    finally:
        put_int8(pl_module, taken)


def take_int8(pl_module: nn.Module, names: Iterable[str] | None = None) -> list[tuple[Place, nn.Module]]:
    """Takes the int8 modules of the names, or all, out of a LightningModule: the prepared ones are in place again.

    Returns:
        Each place and the int8 module that stood there, for :func:`put_int8`.
    """
    chosen = None if names is None else set(names)
    taken = [(place, module) for place, module in _standing(pl_module) if chosen is None or place.name in chosen]
    for place, module in taken:
        if place.name == OWN_FORWARD:
            del pl_module.__dict__[PLACE]
            restore_forward(pl_module)
        else:
            _exchange(pl_module, module, place.prepared)
    return taken


def put_int8(pl_module: nn.Module, int8: Iterable[tuple[Place, nn.Module]]) -> None:
    """Puts int8 modules in the places of the prepared ones."""
    for place, module in int8:
        if place.name == OWN_FORWARD:
            replace_forward(pl_module, module)
            pl_module.__dict__[PLACE] = place
        else:
            module.__dict__[PLACE] = place
            _exchange(pl_module, place.prepared, module)


def write_prepared(pl_module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Gives the state dict of a LightningModule its prepared form, where int8 modules stand: a hook of that."""
    int8 = {id(module): place for place, module in _standing(pl_module) if place.name != OWN_FORWARD}
    names = pl_module.named_modules(remove_duplicate=False) if int8 else ()
    for name, place in [(name, int8[id(module)]) for name, module in names if id(module) in int8]:
        start = f"{prefix}{name}."
        for entries in (state_dict, getattr(state_dict, "_metadata", {})):
            for key in [key for key in entries if f"{key}.".startswith(start)]:
                del entries[key]
        place.prepared.state_dict(destination=state_dict, prefix=start)


def _standing(pl_module: nn.Module) -> list[tuple[Place, nn.Module]]:
    """The places in a LightningModule, and the int8 modules that stand there."""
    found = [(module.__dict__.get(PLACE), module) for module in pl_module.modules()]
    return [
        (place, delegate(module) if place.name == OWN_FORWARD else module)
        for place, module in found
        if place is not None and place.is_in(pl_module)
    ]


def _exchange(pl_module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module in the place of another one, under every name that it has."""
    for parent in list(pl_module.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
