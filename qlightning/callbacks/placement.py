"""The int8 model in its place in a LightningModule, and the prepared one that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.utils.hooks import RemovableHandle

from qlightning.callbacks.rebuild import meet
from qlightning.callbacks.targets import OWN_FORWARD
from qlightning.graph import convert, convert_standalone, replace_forward, restore_forward, unprepare
from qlightning.graph.state import is_prepared_key


@dataclass
class Placement:
    """The int8 modules that stand in a LightningModule.

    Attributes:
        int8: By target name; ``""`` where the LightningModule's own forward runs in int8.
        prepared: What they were converted from, but the LightningModule itself.
        backends: What to convert with again.
        handles: Of the hooks that let a checkpoint meet the prepared modules.
        loading: Whether a state dict is on its way into the prepared modules.
    """

    int8: dict[str, nn.Module] = field(default_factory=dict)
    prepared: dict[str, nn.Module] = field(default_factory=dict)
    backends: dict[str, Any] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)
    loading: bool = False


# By LightningModule and not on it: it has no attributes but its own, and its copies and pickles hold nothing of ours.
_placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()


def int8_modules(pl_module: nn.Module) -> Mapping[str, nn.Module]:
    """The int8 modules that stand in the LightningModule, by target name."""
    placement = _placements.get(pl_module)
    return placement.int8 if placement is not None else {}


def place_int8(pl_module: nn.Module, prepared: Mapping[str, nn.Module], backend: Any) -> dict[str, nn.Module]:
    """Converts the prepared modules of a LightningModule and puts the int8 ones in their places.

    From then on a state dict that is loaded into the LightningModule goes to the prepared modules and is converted.

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
    placement = _placements.setdefault(pl_module, Placement())
    if not placement.handles:
        placement.handles = [
            pl_module.register_load_state_dict_pre_hook(_before_load),
            pl_module.register_load_state_dict_post_hook(_after_load),
        ]
    for name, module in int8.items():
        placement.int8[name] = module.eval()
        placement.backends[name] = backend
        if name == OWN_FORWARD:
            replace_forward(pl_module, module)
        else:
            placement.prepared[name] = prepared[name]
            _exchange(pl_module, prepared[name], module)
    return int8


def restore_prepared(pl_module: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """Puts the prepared modules back where int8 ones stand.

    Args:
        pl_module: The LightningModule; changed in place.
        names: Of the targets; None: all.

    Returns:
        The prepared modules by target name; empty where nothing was in int8.
    """
    placement = _placements.get(pl_module, Placement())
    chosen = Placement({name: m for name, m in placement.int8.items() if names is None or name in names})
    chosen.prepared = {name: m for name, m in placement.prepared.items() if name in chosen.int8}
    prepared = _put_back(pl_module, chosen)
    for name in chosen.int8:
        del placement.int8[name]
        placement.prepared.pop(name, None)
    if not placement.int8:
        for handle in placement.handles:
            handle.remove()
        _placements.pop(pl_module, None)
    return prepared


@contextmanager
def prepared_in_place(pl_module: nn.Module) -> Iterator[None]:
    """Within it the prepared modules stand where int8 ones did, so that a state dict has their form."""
    placement = _placements.get(pl_module, Placement())
    _put_back(pl_module, placement)
    try:
        yield
    finally:
        _put_int8(pl_module, placement)


def _put_back(pl_module: nn.Module, placement: Placement) -> dict[str, nn.Module]:
    prepared = dict(placement.prepared)
    for name, module in placement.int8.items():
        if name == OWN_FORWARD:
            restore_forward(pl_module)
            prepared[name] = pl_module
        else:
            _exchange(pl_module, module, prepared[name])
    return prepared


def _put_int8(pl_module: nn.Module, placement: Placement) -> None:
    for name, module in placement.int8.items():
        if name == OWN_FORWARD:
            replace_forward(pl_module, module)
        else:
            _exchange(pl_module, placement.prepared[name], module)


def _exchange(pl_module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module in the place of another one, under every name that it has."""
    for parent in list(pl_module.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


# Hooks are plain functions: a copy of the LightningModule copies them, and finds no placement of its own.
def _before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    placement = _placements.get(module)
    if placement is None or _is_int8_state(placement, state_dict, prefix):
        return
    prepared = _put_back(module, placement)
    if any(map(is_prepared_key, state_dict)):
        try:
            meet(module, state_dict, prefix)
        except BaseException:
            _put_int8(module, placement)
            raise
        placement.loading = True
        return
    # Ranges in place belong to other weights. The hooks go with the next placement: torch is iterating over them.
    placement.int8.clear()
    for target in prepared.values():
        unprepare(target)
    rank_zero_warn(
        f"A state dict without quantization ranges was loaded into the int8 {type(module).__name__}: its float model is"
        " back in place, with these weights."
    )


def _after_load(module: nn.Module, _: Any) -> None:
    placement = _placements.get(module)
    if placement is None or not placement.loading:
        return
    placement.loading = False
    prepared = dict(placement.prepared, **({OWN_FORWARD: module} if OWN_FORWARD in placement.int8 else {}))
    for name, target in prepared.items():
        place_int8(module, {name: target}, placement.backends[name])


def _is_int8_state(placement: Placement, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether a state dict comes from the LightningModule as it is now."""
    names = [name for name in placement.int8 if name != OWN_FORWARD]
    return bool(names) and all(
        f"{prefix}{name}.{key}" in state_dict for name in names for key in placement.int8[name].state_dict()
    )
