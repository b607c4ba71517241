"""calibrate: lets the observers of a prepared model see data, without training."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from qlightning.errors import CalibrationError, ConfigError, NonFiniteError
from qlightning.fake_quantize import calibrating
from qlightning.graph.bind import BoundModule
from qlightning.graph.capture import module_device
from qlightning.graph.preparation import is_prepared


@torch.no_grad()
def calibrate(prepared: nn.Module, batches: Iterable[Any], *, num_batches: int | None = None) -> nn.Module:
    """Runs batches through a prepared model in eval mode and takes the ranges from what its observers see.

    A batch is what the model's forward takes: a tensor; a mapping, given as keywords where its keys are names of the
    forward's arguments; or a tuple or list, whose first entries are given, as many as the forward has required
    arguments (so that of an (image, label) pair the image is). It is moved to the model's device.

    Args:
        prepared: A model from prepare; changed in place, its mode comes back.
        batches: The calibration data.
        num_batches: How many to use; None: all.

    Returns:
        The model, whose fake-quantizers now round.

    Raises:
        ConfigError: The model is not prepared, ``batches`` is one batch or no iterable, or ``num_batches`` is no
            positive number.
        CalibrationError: There is no batch.
        NonFiniteError: A batch leads to NaN or infinity; names batch and layer. The ranges are then as they were, but
            for observers that batches before it have moved.
    """
    if not is_prepared(prepared):
        raise ConfigError(f"{type(prepared).__name__} is not prepared: call prepare(model, mode='ptq') first.")
    check_num_batches(num_batches)
    check_batches(batches)
    if not run_batches(prepared, itertools.islice(batches, num_batches), calibrating(prepared)):
        raise CalibrationError("There is no calibration batch: the data is empty.")
    return prepared


def run_batches(prepared: nn.Module, batches: Iterable[Any], context: AbstractContextManager[None]) -> int:
    """Runs batches through a prepared model in eval mode, within a context that looks at them.

    Args:
        prepared: Its mode comes back.
        batches: As :func:`calibrate` takes them.
        context: Entered in eval mode.

    Returns:
        The number of batches.

    Raises:
        NonFiniteError: Of an observer, with the number of the batch.
    """
    device = module_device(prepared)
    seen = 0
    with evaluating(prepared), context:
        for index, batch in enumerate(batches):
            args, kwargs = call_arguments(prepared, batch, device)
            try:
                prepared(*args, **kwargs)
            except NonFiniteError as error:
                raise NonFiniteError(f"Calibration batch {index}: {error}") from error
            seen += 1
    return seen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it a model is in eval mode and builds no graph of gradients; its modes come back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        nn.Module.train(model, False)
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_num_batches(num_batches: Any) -> None:
    """Raises a ConfigError for a number of batches that is none."""
    if num_batches is not None and (
        isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 1
    ):
        raise ConfigError(f"num_batches={num_batches!r}: a positive integer or None is possible.")


def check_batches(batches: Any, name: str = "calibration data") -> None:
    """Raises a ConfigError for data that is one batch, or cannot be iterated over; ``name`` is what it is called."""
    one_batch = isinstance(batches, (torch.Tensor, Mapping))
    if one_batch or isinstance(batches, (str, bytes)) or not _is_iterable(batches):
        hint = "; did you mean [x]?" if one_batch else "."
        raise ConfigError(f"{name} is an iterable of batches, got a {type(batches).__name__}{hint}")


def _is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


def call_arguments(model: nn.Module, batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a model's forward takes a batch."""
    batch = _to(batch, device)
    signature = (
        model.__dict__["_captured"].signature if isinstance(model, BoundModule) else inspect.signature(model.forward)
    )
    parameters = signature.parameters.values()
    if isinstance(batch, Mapping):
        names = {p.name for p in parameters}
        if any(p.kind is p.VAR_KEYWORD for p in parameters) or set(batch) <= names:
            return (), dict(batch)
        return (batch,), {}
    if isinstance(batch, (tuple, list)):
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return tuple(batch), {}
        required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        return tuple(batch[: len(required)]), {}
    return (batch,), {}


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_to(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
