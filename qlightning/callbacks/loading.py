"""Every LightningModule meets checkpoints of the prepared form: rebuilt as they say, and converted to be evaluated."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from qlightning.callbacks.base import quantizing_callbacks
from qlightning.callbacks.placement import Place, int8_modules, place_int8, put_int8, take_int8, write_prepared
from qlightning.callbacks.rebuild import meet
from qlightning.graph import facts, unprepare
from qlightning.graph.state import is_prepared_key

# LightningModules that have met a state dict from a process of their training, which asks to be converted.
_handed_back: WeakSet[nn.Module] = WeakSet()
# Between the two hooks of a load: what is to be converted again.
_taken: WeakKeyDictionary[nn.Module, list[Place]] = WeakKeyDictionary()


def ensure(pl_module: nn.Module) -> None:
    """Lets the state dicts that a LightningModule gives and takes have the prepared form, also where it is in int8."""
    if not any(getattr(hook, "hook", None) is _before_load for hook in pl_module._load_state_dict_pre_hooks.values()):
        pl_module.register_load_state_dict_pre_hook(_before_load)
        pl_module.register_load_state_dict_post_hook(_after_load)
        pl_module.register_state_dict_post_hook(write_prepared)


def _before_load(pl_module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    taken = take_int8(pl_module)
    try:
        meet(pl_module, state_dict, prefix)
    except BaseException:
        put_int8(pl_module, taken)
        raise
    if any(found.get("to_convert") for found in facts.read(state_dict, prefix).values()):
        _handed_back.add(pl_module)
    if not taken:
        return
    if any(key.startswith(prefix) and is_prepared_key(key) for key in state_dict):
        _taken[pl_module] = [place for place, _int8 in taken]
        return
    for place, _int8 in taken:
        unprepare(place.prepared)  # its ranges belong to other weights
    rank_zero_warn(
        f"A state dict without quantization ranges was loaded into the int8 {type(pl_module).__name__}: its float "
        "model is back in place, with these weights."
    )


def _after_load(pl_module: nn.Module, _: Any) -> None:
    """Converts what was in int8; and what nothing else will: the result of a spawned fit, an evaluation without us."""
    for place in _taken.pop(pl_module, []):
        place_int8(pl_module, {place.name: place.prepared}, place.backend)
    trainer: Any = getattr(pl_module, "_trainer", None)
    alone = trainer is not None and not quantizing_callbacks(trainer)
    fits = alone and trainer.state.fn == "fit"
    prepared = {name: module for name, module in pl_module.named_modules() if facts.of(module) is not None}
    if fits and prepared:
        rank_zero_warn(
            f"{type(pl_module).__name__} goes on with the prepared nets of a checkpoint, but this Trainer has no "
            "QuantizationAwareTraining: nothing freezes on schedule, and no int8 net is made at the end. Give it the "
            "callback; to train in float, load the checkpoint first and unprepare() the nets."
        )
    if int8_modules(pl_module) or not ((alone and not fits) or pl_module in _handed_back):
        return
    _handed_back.discard(pl_module)
    for name, module in prepared.items():
        place_int8(pl_module, {name: module}, module.__dict__["_preparation"].backend)
