"""Every LightningModule meets checkpoints of the prepared form: rebuilt as they say, and converted to be evaluated."""

from __future__ import annotations

from typing import Any

from torch import nn

from qlightning.callbacks.placement import int8_modules, place_int8
from qlightning.callbacks.rebuild import meet
from qlightning.graph import facts


def ensure(pl_module: nn.Module) -> None:
    """Lets a LightningModule meet state dicts of the prepared form."""
    if not any(getattr(hook, "hook", None) is meet for hook in pl_module._load_state_dict_pre_hooks.values()):
        pl_module.register_load_state_dict_pre_hook(meet)
        pl_module.register_load_state_dict_post_hook(_convert_to_evaluate)


def _convert_to_evaluate(pl_module: nn.Module, _: Any) -> None:
    """Converts what was loaded where a Trainer without a callback of ours is about to evaluate it."""
    trainer = getattr(pl_module, "_trainer", None)
    if trainer is None or trainer.state.fn == "fit" or int8_modules(pl_module):
        return
    if any(callable(getattr(callback, "_adopt", None)) for callback in trainer.callbacks):
        return
    for name, module in [(name, m) for name, m in pl_module.named_modules() if facts.of(m) is not None]:
        place_int8(pl_module, {name: module}, module.__dict__["_preparation"].backend)
