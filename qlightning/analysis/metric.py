"""What a user measures a model by: a function of the model, or of its outputs and the targets."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from qlightning.errors import ConfigError
from qlightning.graph.calibrate import call_arguments
from qlightning.graph.capture import module_device

Metric = Callable[..., Any]


@dataclass(frozen=True)
class Scorer:
    """A metric and its direction.

    Attributes:
        name: For messages.
        higher_is_better: Whether more is better.
        evaluate: Measures a model, in eval mode and without gradients.
        score: Measures the outputs for each of the batches, where that is all it takes; None where it is not.
    """

    name: str
    higher_is_better: bool
    evaluate: Callable[[nn.Module], float]
    score: Callable[[Sequence[Any]], float] | None = None

    def drop(self, reference: float, value: float) -> float:
        """How much worse a value is than a reference, in units of the metric; below zero where it is better."""
        return drop(reference, value, self.higher_is_better)


def drop(reference: float, value: float, higher_is_better: bool) -> float:
    """How much worse a value of a metric is than a reference; below zero where it is better."""
    return reference - value if higher_is_better else value - reference


def scorer(metric: Metric, batches: Sequence[Any]) -> Scorer:
    """Takes a user's metric in any of its forms.

    Args:
        metric: ``metric(model)`` gives a number, higher is better. ``metric(outputs, targets)`` likewise, once over all
            batches, whose outputs and targets are put behind one another. A ``torchmetrics.Metric`` is updated batch by
            batch, and says itself which direction is better.
        batches: Pairs of inputs and targets, for the last two: the targets are the entry behind those that the
            forward takes.

    Raises:
        ConfigError: It is none of these, or a batch has no targets.
    """
    if not callable(metric):
        raise ConfigError(f"metric={metric!r}: a function of the model, or of outputs and targets, is needed.")
    name = getattr(metric, "__name__", type(metric).__name__)
    if all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset")):
        higher = getattr(metric, "higher_is_better", None)
        if not isinstance(higher, bool):
            raise ConfigError(
                f"metric={name}: it does not say whether higher is better (higher_is_better is {higher}). Wrap it in a "
                "function of outputs and targets that gives a number of which more is better."
            )
        return _of_outputs(name, higher, batches, lambda outputs, targets: _updated(metric, outputs, targets))
    required = _required(metric)
    if required == 1:
        return Scorer(name, True, lambda model: _checked(name, metric(model)))
    if required == 2:
        return _of_outputs(
            name, True, batches, lambda outputs, targets: metric(_joined(list(outputs)), _joined(targets))
        )
    raise ConfigError(
        f"metric={name} takes {required} arguments: metric(model) or metric(outputs, targets) is possible; "
        "functools.partial gives it the others."
    )


def _of_outputs(
    name: str, higher_is_better: bool, batches: Sequence[Any], compute: Callable[[Sequence[Any], list[Any]], Any]
) -> Scorer:
    def evaluate(model: nn.Module) -> float:
        arguments = [call_arguments(model, batch, module_device(model)) for batch in batches]
        targets = [_target(name, batch, len(args)) for batch, (args, _) in zip(batches, arguments, strict=True)]
        return _checked(name, compute([model(*args, **kwargs) for args, kwargs in arguments], targets))

    def score(outputs: Sequence[Any]) -> float:
        return _checked(name, compute(outputs, targets))

    # How many entries a forward takes is known with the model alone; of pairs the second is the target.
    if not all(isinstance(batch, (tuple, list)) and len(batch) == 2 for batch in batches):
        return Scorer(name, higher_is_better, evaluate)
    targets = [batch[1] for batch in batches]
    return Scorer(name, higher_is_better, evaluate, score)


def _required(metric: Metric) -> int:
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"metric={metric!r} does not say which arguments it takes. Wrap it: lambda model: ... or "
            "lambda outputs, targets: ..."
        ) from error
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty])


def _target(name: str, batch: Any, taken: int) -> Any:
    if not isinstance(batch, (tuple, list)) or len(batch) <= taken:
        raise ConfigError(
            f"metric={name} needs targets, and a batch has none: give batches of (inputs, targets), or a metric(model) "
            "that brings its own data."
        )
    return batch[taken]


def _updated(metric: Any, outputs: Sequence[Any], targets: Sequence[Any]) -> Any:
    metric.reset()
    for output, target in zip(outputs, targets, strict=True):
        metric.update(output.to(metric.device), target.to(metric.device))
    value = metric.compute()
    metric.reset()
    return value


def _joined(values: Sequence[Any]) -> Any:
    """Values of the same structure, the tensors in them put behind one another."""
    leaves = [tree_flatten(value) for value in values]
    columns = zip(*(found for found, _ in leaves), strict=True)
    joined = [torch.cat([t.cpu() for t in column]) if torch.is_tensor(column[0]) else column[0] for column in columns]
    return tree_unflatten(joined, leaves[0][1])


def _checked(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"metric={name} gave {type(value).__name__}, and not one number.") from error
    if not math.isfinite(number):
        raise ConfigError(f"metric={name} gave {number}: nothing can be compared with that.")
    return number
