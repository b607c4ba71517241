"""quantize_model: float in, int8 out, in one call."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from qlightning.backends import Backend
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

    Returns:
        The int8 model, on the CPU, with float inputs and outputs.

    Raises:
        QuantizationError: As :func:`prepare`, :func:`calibrate` and :func:`convert` raise.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        >>> int8 = quantize_model(net, [torch.randn(4, 3, 8, 8)], backend="reference")
        >>> int8(torch.randn(2, 3, 8, 8)).shape, int8[0].weight().int_repr().dtype
        (torch.Size([2, 4]), torch.int8)
    """
    check_batches(calibration_data)
    chain = checked_steps(steps)
    prepared = prepare(copy.deepcopy(model), qconfig, observer=observer, backend=backend, mode="ptq", exclude=exclude)
    if not chain:
        return convert(calibrate(prepared, calibration_data))
    batches = list(calibration_data)  # steps pass them several times, and a loader would shuffle them each time
    subject = Subject({"": prepared}, lambda context: run_batches(prepared, batches, context))
    apply_steps(chain, subject, before_calibration=True)
    calibrate(prepared, batches)
    apply_steps(chain, subject, before_calibration=False)
    return convert(prepared)
