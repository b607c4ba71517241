"""Lightning's ModelPruning beside int8 modules, which have no parameters that it could prune."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from qlightning.callbacks.base import is_a
from qlightning.callbacks.placement import prepared_in_place


def let_prune(trainer: Any) -> None:
    """Shows the ModelPruning callbacks of a Trainer the prepared modules, wherever int8 ones stand.

    ModelPruning looks its modules up in every ``setup``, also in that of ``trainer.test``, and a further fit would have
    it prune what it finds. It may stand before our callback, so that its own ``setup`` is the only place.
    """
    for callback in trainer.callbacks:
        if is_a(callback, "ModelPruning") and "setup" not in vars(callback):
            callback.setup = partial(_setup, callback)


def _setup(callback: Any, trainer: Any, pl_module: nn.Module, stage: str) -> None:
    with prepared_in_place(pl_module):
        type(callback).setup(callback, trainer, pl_module, stage)
