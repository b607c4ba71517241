"""Every LightningModule meets checkpoints of the prepared form: rebuilt as they say, and converted to be evaluated."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from qlightning.callbacks.placement import int8_modules, place_int8
from qlightning.callbacks.rebuild import meet
from qlightning.graph import facts

# LightningModules that have met a state dict from a process of their training, which asks to be converted.
_handed_back: WeakSet[nn.Module] = WeakSet()


def ensure(pl_module: nn.Module) -> None:
    """Lets a LightningModule meet state dicts of the prepared form."""
    if not any(getattr(hook, "hook", None) is _before_load for hook in pl_module._load_state_dict_pre_hooks.values()):
        pl_module.register_load_state_dict_pre_hook(_before_load)
        pl_module.register_load_state_dict_post_hook(_after_load)


def _before_load(pl_module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    meet(pl_module, state_dict, prefix)
    if any(found.get("to_convert") for found in facts.read(state_dict, prefix).values()):
        _handed_back.add(pl_module)


def _after_load(pl_module: nn.Module, _: Any) -> None:
    """Converts what nothing else will: the result of a spawned fit, or what is to be evaluated without a callback."""
    trainer = getattr(pl_module, "_trainer", None)
    alone = (
        trainer is not None
        and trainer.state.fn != "fit"
        and not any(hasattr(callback, "prepare_for_checkpoint") for callback in trainer.callbacks)
    )
    if int8_modules(pl_module) or not (alone or pl_module in _handed_back):
        return
    _handed_back.discard(pl_module)
    for name, module in [(name, m) for name, m in pl_module.named_modules() if facts.of(m) is not None]:
        place_int8(pl_module, {name: module}, module.__dict__["_preparation"].backend)
