"""MaxDrop: the goal of a callback for the metric of its int8 nets, and the layers that are left in float for it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from tqdm.auto import tqdm

from qlightning.analysis.max_drop import RANKING_BATCHES, Choice, Goal, checked_max_drop, choose
from qlightning.analysis.sensitivity import LayerSensitivity, Sensitivity, measure_calls
from qlightning.backends import Backend
from qlightning.callbacks.base import LIGHTNING_DATAMODULES
from qlightning.callbacks.calibration import check_at_most
from qlightning.callbacks.evaluation import Evaluation, iterable, validation_loaders
from qlightning.callbacks.int8_validation import Int8Validation
from qlightning.errors import CalibrationError, ConfigError
from qlightning.graph.preparation import FloatChoice
from qlightning.graph.selection import Selection, leave_in_float


@dataclass(frozen=True)
class MaxDrop:
    """How much worse than in float the int8 nets may be.

    Args:
        points: In units of the metric as it is logged: 0.5 of an accuracy in percent, 0.005 of a fraction.
        monitor: The metric that ``validation_step`` logs. None: what a ModelCheckpoint or EarlyStopping of the Trainer
            monitors.
        mode: "max" where more is better, "min" where less is. None: that of the callback that monitors it.
        data: A loader or a LightningDataModule to validate with. None: the validation data of the Trainer.
        batches: At most so many batches; None: all.

    Raises:
        ConfigError: A value cannot be used.
    """

    points: float
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    data: Any = None
    batches: int | None = None

    def __post_init__(self) -> None:
        checked_max_drop(self.points)
        if self.mode not in (None, "min", "max"):
            raise ConfigError(f"MaxDrop mode={self.mode!r}: 'min' or 'max' is possible.")
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise ConfigError(f"MaxDrop monitor={self.monitor!r}: the name of a metric is needed.")
        check_at_most("MaxDrop batches", self.batches)
        if self.data is not None and not isinstance(self.data, LIGHTNING_DATAMODULES) and not iterable(self.data):
            raise ConfigError(
                f"MaxDrop data={type(self.data).__name__}: a loader that can be gone through several times is needed."
            )

    @classmethod
    def parse(cls, value: float | MaxDrop | None) -> MaxDrop | None:
        """Takes a number for the points."""
        return value if value is None or isinstance(value, MaxDrop) else cls(value)

    def goal(self, trainer: Any) -> Goal:
        """The goal with the metric and the direction, which callbacks of the Trainer may know.

        Raises:
            ConfigError: They are not known.
        """
        known = {
            (callback.monitor, callback.mode)
            for callback in trainer.callbacks
            if getattr(callback, "monitor", None) is not None and getattr(callback, "mode", None) in ("min", "max")
        }
        if self.monitor is not None:
            known = {(monitor, mode) for monitor, mode in known if monitor == self.monitor}
        if self.monitor is not None and self.mode is not None:
            return Goal(self.points, self.monitor, self.mode == "max")
        if self.mode is not None:
            known = {(monitor, mode) for monitor, mode in known if mode == self.mode}
        if len(known) != 1:
            found = f" ({', '.join(sorted(f'{monitor}, {mode}' for monitor, mode in known))} are)" if known else ""
            raise ConfigError(
                f"max_drop={self.points:g} of what? No one metric is monitored by the Trainer's callbacks{found}: say "
                f"which, and which direction is better, such as max_drop=MaxDrop({self.points:g}, "
                f"monitor={self.monitor or 'val_acc'!r}, mode='max')."
            )
        ((monitor, mode),) = known
        return Goal(self.points, monitor, mode == "max")


@dataclass(frozen=True)
class Decision:
    """What was left in float, by target name, and why.

    Attributes:
        choice: By the names that layers have in the LightningModule.
        parts: What each net has of it.
        sensitivity: The measurement that it starts from, by target name.
    """

    choice: Choice
    parts: Mapping[str, FloatChoice]
    sensitivity: Mapping[str, Sensitivity]


def decide(
    trainer: Any,
    pl_module: Any,
    prepared: dict[str, nn.Module],
    backend: Backend,
    max_drop: MaxDrop,
    before: float | None = None,
) -> Decision:
    """Finds the layers that are to be left in float, and lets ``convert`` leave them so.

    The goal is measured against the same weights in float, or those before the training where these were better, on
    validation data.

    Args:
        trainer: The Trainer.
        pl_module: The LightningModule; its state, metrics and log are left as they are.
        prepared: Its nets with their ranges, by target name.
        backend: What they are converted for.
        max_drop: What is asked for.
        before: The metric in float before the training; None where there was none.

    Raises:
        ConfigError: The metric, its direction or the data is not known; ``points`` are not in units of the metric.
        AccuracyError: No layer can be in int8, or even in float the training has lost too much.
    """
    goal = max_drop.goal(trainer)
    loaders = validation_loaders(trainer, pl_module, max_drop.data)
    evaluation = Evaluation(trainer, pl_module, prepared, loaders, 1 if trainer.fast_dev_run else max_drop.batches)
    calls = evaluation.calls(RANKING_BATCHES)
    if not any(calls.values()):
        raise CalibrationError("max_drop: no batch of the validation data goes through the nets that are quantized.")
    chosen_before = {name: module.__dict__["_preparation"].float_choice for name, module in prepared.items()}
    measured = {name: measure_calls(prepared[name], found) for name, found in calls.items() if found}
    ranking = sorted(_named(measured), key=lambda layer: layer.sqnr_db)
    show = trainer.progress_bar_callback is not None and trainer.is_global_zero
    try:
        with _Switch(prepared, backend) as switch, tqdm(desc="Choosing layers", disable=not show) as bar:

            def simulated(int8: Collection[str]) -> float:
                switch.only(int8)
                bar.update()
                return evaluation.value(goal.metric)

            def true(int8: Collection[str]) -> float:
                bar.update()
                with switch.converted(int8):
                    return evaluation.value(goal.metric)

            choice = choose(goal, ranking, simulated, true, before)
    except BaseException:
        for name, module in prepared.items():
            leave_in_float(module, chosen_before[name])
        raise
    parts = {
        target: FloatChoice({below: choice.reasons[name] for name, below in names.items() if name in choice.reasons})
        for target, names in switch.names.items()
    }
    first = next(iter(parts))
    parts[first] = replace(parts[first], note=choice.note)
    for target, part in parts.items():
        leave_in_float(prepared[target], part)
    return Decision(choice, parts, measured)


def float_value(trainer: Any, pl_module: Any, prepared: dict[str, nn.Module], max_drop: MaxDrop) -> float:
    """The metric of nets in float, measured as :func:`decide` measures it.

    Raises:
        ConfigError: As :func:`decide` raises.
    """
    goal = max_drop.goal(trainer)
    loaders = validation_loaders(trainer, pl_module, max_drop.data)
    evaluation = Evaluation(trainer, pl_module, prepared, loaders, 1 if trainer.fast_dev_run else max_drop.batches)
    with ExitStack() as stack:
        for module in prepared.values():
            stack.enter_context(Selection(module).rounding()).only(())
        value = evaluation.value(goal.metric)
    goal.check_units(value)
    return value


def _named(measured: Mapping[str, Sensitivity]) -> Iterator[LayerSensitivity]:
    for target, found in measured.items():
        for layer in found.layers:
            yield replace(layer, name=f"{target}.{layer.name}".strip("."))


class _Switch:
    """All layers of several nets, by the names that they have in the LightningModule."""

    def __init__(self, prepared: Mapping[str, nn.Module], backend: Backend) -> None:
        self._prepared, self._backend = prepared, backend
        self._selections = {target: Selection(module) for target, module in prepared.items()}
        self._stack = ExitStack()
        self.names = {
            target: {f"{target}.{below}".strip("."): below for below in selection.parts}
            for target, selection in self._selections.items()
        }

    def __enter__(self) -> _Switch:
        self._roundings = {
            target: self._stack.enter_context(selection.rounding()) for target, selection in self._selections.items()
        }
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def only(self, int8: Collection[str]) -> None:
        for target, rounding in self._roundings.items():
            rounding.only([below for name, below in self.names[target].items() if name in int8])

    @contextmanager
    def converted(self, int8: Collection[str]) -> Iterator[None]:
        """Within it the nets run their conversions with these layers in int8."""
        for target, module in self._prepared.items():
            kept = [below for name, below in self.names[target].items() if name not in int8]
            leave_in_float(module, FloatChoice(dict.fromkeys(kept, "tried")))
        validation = Int8Validation()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the conversion of what is chosen says it again
                validation.start(self._prepared, self._backend)
            yield
        finally:
            validation.stop()
