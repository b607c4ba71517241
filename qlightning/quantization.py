"""quantize_model: float in, int8 out, in one call."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from qlightning.analysis.max_drop import checked_max_drop, keep_within
from qlightning.analysis.metric import Metric
from qlightning.backends import Backend
from qlightning.errors import ConfigError
from qlightning.graph.calibrate import calibrate, check_batches, run_batches
from qlightning.graph.convert import convert
from qlightning.graph.prepare import prepare
from qlightning.qconfig import ObserverFactory, Pattern, QConfig
from qlightning.steps.base import Step, apply_steps, checked_steps
from qlightning.steps.subject import Subject


def quantize_model(
    model: nn.Module,
    calibration_data: Iterable[Any],
    *,
    observer: ObserverFactory | None = None,
    qconfig: QConfig | None = None,
    backend: str | Backend = "auto",
    exclude: Iterable[Pattern] = (),
    steps: Iterable[Step] = (),
    max_drop: float | None = None,
    metric: Metric | None = None,
    evaluation_data: Iterable[Any] | None = None,
) -> nn.Module:
    """Quantizes a float model after training.

    Args:
        model: The float model; left as it is.
        calibration_data: Batches as :func:`calibrate` takes them.
        observer: Builds the observers of the activations, in place of those of ``qconfig``.
        qconfig: What to quantize to; None for the defaults.
        backend: What the int8 model runs on.
        exclude: Names, globs or types of modules that stay float.
        steps: Of `qlightning.steps`, in their order: what makes the int8 model more accurate, at the cost of some
            passes over the calibration data, which then is kept in memory as a whole. ``report(int8).steps`` says what
            they did.
        max_drop: How much worse than in float ``metric`` may become, in units of the metric: 0.5 of an accuracy in
            percent, 0.005 of a fraction. The fewest layers are kept in float that keep to it, found by the noise that
            each leaves and checked on the int8 model; ``report(int8)`` says which and why. None: all in int8.
        metric: ``metric(model)`` or ``metric(outputs, targets)``, a number of which more is better, or a
            ``torchmetrics.Metric``; for ``max_drop``, as :func:`sensitivity` takes it.
        evaluation_data: Batches with targets that the metric is measured on, kept in memory as a whole. None: the
            calibration data; data that the ranges do not come from says more.

    Returns:
        The int8 model, on the CPU, with float inputs and outputs.

    Raises:
        QuantizationError: As :func:`prepare`, :func:`calibrate` and :func:`convert` raise.
        AccuracyError: ``max_drop`` cannot be met with any layer in int8.

    Examples:
        >>> import torch
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        >>> int8 = quantize_model(net, [torch.randn(4, 3, 8, 8)], backend="reference")
        >>> int8(torch.randn(2, 3, 8, 8)).shape, int8[0].weight().int_repr().dtype
        (torch.Size([2, 4]), torch.int8)
    """
    check_batches(calibration_data)
    chain = checked_steps(steps)
    _check_goal(max_drop, metric, evaluation_data)
    prepared = prepare(copy.deepcopy(model), qconfig, observer=observer, backend=backend, mode="ptq", exclude=exclude)
    if not chain and max_drop is None:
        return convert(calibrate(prepared, calibration_data))
    batches = list(calibration_data)  # they pass several times, and a loader would shuffle them each time
    subject = Subject({"": prepared}, lambda context: run_batches(prepared, batches, context))
    apply_steps(chain, subject, before_calibration=True)
    calibrate(prepared, batches)
    apply_steps(chain, subject, before_calibration=False)
    if max_drop is not None and metric is not None:
        keep_within(prepared, batches if evaluation_data is None else list(evaluation_data), metric, max_drop)
    return convert(prepared)


def _check_goal(max_drop: float | None, metric: Metric | None, evaluation_data: Any) -> None:
    if max_drop is None:
        if metric is not None or evaluation_data is not None:
            raise ConfigError("metric and evaluation_data serve max_drop, which is None: set it, or leave them out.")
        return
    checked_max_drop(max_drop)
    if metric is None:
        raise ConfigError(
            f"max_drop={max_drop:g} of what? Give metric=..., a function of the model or of outputs and targets."
        )
    if evaluation_data is not None:
        check_batches(evaluation_data, "evaluation_data")
