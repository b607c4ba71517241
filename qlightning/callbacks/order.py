"""The order of a Trainer's callbacks: ours stand behind those that change what a checkpoint holds."""

from __future__ import annotations

from typing import Any

from qlightning.callbacks.base import is_a

_REPLACING = ("WeightAveraging", "ModelPruning")


def stand_behind(trainer: Any, callback: Any) -> None:
    """Moves a callback behind those that put a state dict of their own into checkpoints.

    Theirs are plain dicts and have lost how the model was prepared (EMA, ModelPruning); our ``on_save_checkpoint``,
    which puts it back, has to come later. The loop over the callbacks that is running goes on with the list it began.
    """
    order = list(trainer.callbacks)
    replacing = [other for other in order if is_a(other, *_REPLACING)]
    if replacing and order.index(replacing[-1]) > order.index(callback):
        order.remove(callback)
        order.insert(order.index(replacing[-1]) + 1, callback)
        trainer.callbacks = order
