"""How far a Trainer is, read off its loops."""

from __future__ import annotations

import math
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from qlightning.callbacks.schedule import Progress, Schedule, Unit
from qlightning.errors import ConfigError


def progress_of(trainer: Any) -> Progress:
    """Where the training of a Trainer is, before its next batch; the same after a resume from a checkpoint.

    The fraction counts batches against ``max_epochs`` and optimizer steps against ``max_steps``, whichever ends the
    training first. ``trainer.estimated_stepping_batches`` is not used: it counts one optimizer where
    ``trainer.global_step`` counts all (manual optimization), and raises under a GradientAccumulationScheduler.
    """
    fractions = []
    if trainer.max_steps is not None and trainer.max_steps > 0:
        fractions.append(trainer.global_step / trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        batches = trainer.num_training_batches
        if 0 < batches < math.inf:
            # `completed` leaves out a batch that was cut short and will be run again after a resume.
            done = trainer.fit_loop.epoch_loop.batch_progress.total.completed
            fractions.append(done / (batches * trainer.max_epochs))
        else:  # an iterable data set without a length: the fraction moves once an epoch
            fractions.append(trainer.current_epoch / trainer.max_epochs)
    return Progress(trainer.current_epoch, trainer.global_step, max(fractions, default=None))


def lengths_of(trainer: Any) -> dict[Unit, float]:
    """How long the training of a Trainer is in each unit, as far as it is known once its loaders are there."""
    lengths: dict[Unit, float] = {"fraction": 1.0}
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
    steps = trainer.max_steps if trainer.max_steps is not None and trainer.max_steps > 0 else math.inf
    batches = trainer.num_training_batches
    if 0 < batches < math.inf and trainer.lightning_module.automatic_optimization:
        steps, epochs = _both(steps, epochs, batches, trainer)
    if epochs < math.inf:
        lengths["epoch"] = epochs
    if steps < math.inf:
        lengths["step"] = steps
    return lengths


def points_beyond(schedule: Schedule, trainer: Any) -> list[str]:
    """The points of a schedule that a training will not come to, with a warning for each.

    Raises:
        ConfigError: It is the start of fake quantization, or ranges would freeze before that.
    """
    lengths = lengths_of(trainer)
    schedule.check_order(lengths)
    beyond = []
    for name, point in schedule.points().items():
        if point.value >= lengths.get(point.unit, math.inf) and point.value > 0:
            message = f"{name} at {point} lies beyond the training, which ends at {point.unit} {lengths[point.unit]:g}."
            if name == "fake_quant_start":
                raise ConfigError(f"{message} Fake quantization would never start.")
            beyond.append(name)
            rank_zero_warn(f"{message} It will not happen.")
    return beyond


def _both(steps: float, epochs: float, batches: float, trainer: Any) -> tuple[float, float]:
    """Optimizer steps and epochs of a training that ends with either, however many batches go into a step."""
    schedulers = [c for c in trainer.callbacks if callable(getattr(c, "get_accumulate_grad_batches", None))]
    if not schedulers or steps == epochs == math.inf:
        steps_per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        return min(steps, epochs * steps_per_epoch), min(epochs, steps / steps_per_epoch)
    done, epoch = 0.0, 0.0
    while done < steps and epoch < epochs:
        steps_per_epoch = math.ceil(batches / schedulers[-1].get_accumulate_grad_batches(int(epoch)))
        count = min(steps_per_epoch, steps - done)
        done, epoch = done + count, epoch + count / steps_per_epoch
    return done, epoch


def check_finite(schedule: Schedule, trainer: Any) -> None:
    """Checks that the fractions of a schedule have a whole.

    Raises:
        ConfigError: They do not: the training has neither ``max_epochs`` nor ``max_steps``.
    """
    endless = trainer.max_epochs in (None, -1) and trainer.max_steps in (None, -1)
    for name, point in schedule.points().items():
        if endless and point.unit == "fraction" and point.value > 0:
            raise ConfigError(
                f"{name}={point.value!r} is a fraction of the training, but this Trainer has neither max_epochs nor "
                f'max_steps. Set one of them, or give {name} as an epoch (3), as steps ("1000 steps") or as None.'
            )
