"""max_drop: the fewest layers left in float with which a metric stays near that of the float model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from qlightning.analysis.metric import Metric, drop, scorer
from qlightning.analysis.sensitivity import LayerSensitivity, measure
from qlightning.errors import AccuracyError, CalibrationError, ConfigError
from qlightning.graph.calibrate import evaluating
from qlightning.graph.convert import convert
from qlightning.graph.preparation import FloatChoice, Preparation
from qlightning.graph.selection import Selection, leave_in_float

RANKING_BATCHES = 8
"""On how many batches the layers are put in order; the metric is always measured on all."""

_LARGE_FOR_A_FRACTION = 0.1

Evaluate = Callable[[Collection[str]], float]


@dataclass(frozen=True)
class Goal:
    """How far a metric may fall.

    Attributes:
        max_drop: How much worse than in float at most, in units of the metric.
        metric: Its name.
        higher_is_better: Its direction.
    """

    max_drop: float
    metric: str
    higher_is_better: bool

    def drop(self, reference: float, value: float) -> float:
        """How much worse a value is than a reference."""
        return drop(reference, value, self.higher_is_better)

    def is_met(self, reference: float, value: float) -> bool:
        """Whether a value is near enough; differences that float32 cannot tell do not count."""
        return self.drop(reference, value) <= self.max_drop + 1e-6 * abs(reference)

    def check_units(self, reference: float) -> None:
        """Raises a ConfigError for percentage points where the metric is a fraction."""
        if self.higher_is_better and 0 <= reference <= 1 and self.max_drop >= _LARGE_FOR_A_FRACTION:
            raise ConfigError(
                f"max_drop={self.max_drop:g}, but {self.metric} is {reference:.4g} in float, a fraction. max_drop is "
                f"in units of the metric: {self.max_drop:g} percentage points are max_drop={self.max_drop / 100:g}."
            )


@dataclass(frozen=True)
class Choice:
    """What was left in float, and what it was chosen by.

    Attributes:
        goal: What was asked for.
        float_value: The metric in float: of the same weights, or of those before a training where these were better.
        int8_value: The metric with all layers in int8.
        value: The metric of what was chosen, in true int8.
        reasons: Why a layer is left in float, by its name.
        of: How many layers there are.
        evaluations: How often the metric was measured.
    """

    goal: Goal
    float_value: float
    int8_value: float
    value: float
    reasons: dict[str, str]
    of: int
    evaluations: int

    @property
    def note(self) -> str:
        """One line for the report."""
        met = f"{self.goal.metric} is {self.float_value:.6g} in float and {self.value:.6g} in int8"
        if not self.reasons:
            return f"max_drop={self.goal.max_drop:g}: {met}; no layer was kept in float for it."
        kept = f"{len(self.reasons)} of {self.of} layers kept in float ({self.int8_value:.6g} with none)"
        return f"max_drop={self.goal.max_drop:g}: {met}, with {kept}."


def choose(
    goal: Goal,
    ranking: Sequence[LayerSensitivity],
    simulated: Evaluate,
    true: Evaluate,
    before: float | None = None,
) -> Choice:
    """Finds the layers to leave in float.

    They are tried from the one that alone leaves the most noise on: bisection finds how many of the first it takes,
    then each of them that is not needed beside the others goes back to int8. The last word has the true int8 model:
    where it says less than the simulation, further layers follow. What comes out is minimal in that none of its layers
    can be left out of it; not all sets are tried.

    Args:
        goal: What is asked for.
        ranking: The layers, the most sensitive one first.
        simulated: The metric with layers of these names in int8, fake-quantized.
        true: Likewise, of the converted model.
        before: The metric in float before a training, which counts where it was better; None where there was none.

    Raises:
        ConfigError: ``max_drop`` is not in the units of the metric.
        AccuracyError: No layer can be in int8, or even in float the training has lost too much.
    """
    names = [layer.name for layer in ranking]
    count = 0

    def value_of(evaluate: Evaluate, kept: Collection[str]) -> float:
        nonlocal count
        count += 1
        return evaluate([name for name in names if name not in kept])

    now = reference = value_of(simulated, names)
    if before is not None and goal.drop(before, now) > 0:
        reference = before
    goal.check_units(reference)
    all_int8 = value = value_of(true, ())
    kept: list[str] = []
    if not goal.is_met(reference, value):
        if not goal.is_met(reference, now):
            raise _lost(goal, reference, now, all_int8, names)

        def suffices(kept: Collection[str]) -> bool:
            return len(kept) == len(names) or goal.is_met(reference, value_of(simulated, kept))

        kept = names[: _smallest(len(names), lambda number: suffices(names[:number]))]
        for name in reversed(kept):
            fewer = [other for other in kept if other != name]
            if suffices(fewer):
                kept = fewer
        if 0 < len(kept) < len(names):
            value = value_of(true, kept)
        while not goal.is_met(reference, value):
            kept = [*kept, *[name for name in names if name not in kept][:1]]
            if len(kept) == len(names):
                raise _unattainable(goal, reference, all_int8, names[-1], value_of(simulated, names[:-1]))
            value = value_of(true, kept)
    reasons = {}
    for layer in ranking:
        if layer.name in kept:
            alone = goal.drop(reference, value_of(simulated, [name for name in names if name != layer.name]))
            reasons[layer.name] = _reason(goal, alone, layer.sqnr_db)
    return Choice(goal, reference, all_int8, value, reasons, len(names), count)


def _smallest(most: int, suffices: Callable[[int], bool]) -> int:
    """The least number that suffices, where more always does; ``most`` does."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _reason(goal: Goal, alone: float, sqnr_db: float) -> str:
    noise = f"SQNR {sqnr_db:.1f} dB"
    if alone <= 0:
        return f"kept in float by max_drop: alone it costs no {goal.metric}, but with others it does ({noise})"
    return f"kept in float by max_drop: alone it costs {alone:.3g} of {goal.metric} ({noise})"


def _unattainable(goal: Goal, reference: float, all_int8: float, name: str, least: float) -> AccuracyError:
    return AccuracyError(
        f"max_drop={goal.max_drop:g} cannot be met with any layer in int8: {goal.metric} is {reference:.6g} in float, "
        f"{all_int8:.6g} in int8, and {least:.6g} with {name} alone in int8, the least sensitive layer. Allow more, "
        "use more bits, calibrate on other data, or train with QuantizationAwareTraining."
    )


def _lost(goal: Goal, before: float, now: float, all_int8: float, names: Sequence[str]) -> AccuracyError:
    return AccuracyError(
        f"max_drop={goal.max_drop:g} cannot be met: {goal.metric} was {before:.6g} in float before the training, and "
        f"is {all_int8:.6g} in int8 after it. No choice of layers brings that back, as these weights have {now:.6g} in "
        "float: they were trained to be rounded. Train at another rate or for longer, or leave the most sensitive "
        f"layers out of it from the start: exclude={list(names[:3])!r}. The nets are left as they were trained."
    )


def checked_max_drop(max_drop: Any) -> float:
    """Raises a ConfigError for a max_drop that is no finite number from 0 on."""
    if isinstance(max_drop, bool) or not isinstance(max_drop, (int, float)) or not 0 <= max_drop < math.inf:
        raise ConfigError(f"max_drop={max_drop!r}: a number from 0 on is needed, in units of the metric.")
    return float(max_drop)


def keep_within(prepared: nn.Module, batches: Sequence[Any], metric: Metric, max_drop: float) -> Choice:
    """Leaves layers of a calibrated model in float so that a metric falls by no more than ``max_drop``.

    Args:
        prepared: Changed in place: what ``convert`` leaves in float. After an error it is as it was.
        batches: What the metric is measured on, where it does not bring its own data.
        metric: As ``sensitivity`` takes it.
        max_drop: In units of the metric.

    Raises:
        ConfigError: The metric cannot be used, or ``max_drop`` is not in its units.
        CalibrationError: There is no batch.
        AccuracyError: No layer can be in int8.
    """
    if not batches:
        raise CalibrationError("max_drop: there is no batch to measure on: evaluation_data is empty.")
    scored = scorer(metric, batches)
    goal = Goal(max_drop, scored.name, scored.higher_is_better)
    ranking = measure(prepared, batches[:RANKING_BATCHES]).ranking
    preparation: Preparation = prepared.__dict__["_preparation"]
    selection = Selection(prepared)
    try:
        with evaluating(prepared), selection.rounding() as rounding:

            def simulated(int8: Collection[str]) -> float:
                rounding.only(int8)
                return scored.evaluate(prepared)

            def true(int8: Collection[str]) -> float:
                leave_in_float(prepared, FloatChoice({name: "tried" for name in selection.parts if name not in int8}))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the conversion of what is chosen says it again
                    return scored.evaluate(convert(prepared))

            choice = choose(goal, ranking, simulated, true)
    except BaseException:
        leave_in_float(prepared, preparation.float_choice)
        raise
    leave_in_float(prepared, FloatChoice(choice.reasons, choice.note))
    return choice
