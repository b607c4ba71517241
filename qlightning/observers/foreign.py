"""Observers that are not ours: how torch.ao's are built for a scheme, and whether their grid is that of the scheme."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qlightning.errors import ConfigError, NonFiniteError
from qlightning.observers.base import Observer
from qlightning.qscheme import QScheme

_PACKAGES = ("torch.ao.", "torchao.")
_CODES = {torch.qint8: torch.int8, torch.int8: torch.int8, torch.quint8: torch.uint8, torch.uint8: torch.uint8}


def is_of_torch_ao(factory: Any) -> bool:
    """Whether something is an observer class of torch.ao, or the result of its ``with_args``."""
    cls = getattr(getattr(factory, "p", factory), "func", factory)
    return isinstance(cls, type) and cls.__module__.startswith(_PACKAGES)


def build(factory: Any, scheme: QScheme) -> Any:
    """Builds an observer of torch.ao for a scheme: these take the grid as ``dtype``, ``qscheme`` and its ends.

    What ``with_args`` has set counts; :func:`check_grid` compares it with the scheme.

    Raises:
        ConfigError: The class does not take such a grid.
    """
    kind = "per_tensor" if scheme.axis is None else "per_channel"
    arguments: dict[str, Any] = {
        "dtype": torch.qint8 if scheme.signed else torch.quint8,
        "qscheme": getattr(torch, f"{kind}_{'symmetric' if scheme.symmetric else 'affine'}"),
    }
    if scheme.bits < 8 or scheme.narrow_range:
        arguments.update(quant_min=scheme.quant_min, quant_max=scheme.quant_max)
    if scheme.axis is not None:
        arguments["ch_axis"] = scheme.axis
    given = getattr(getattr(factory, "p", None), "keywords", {})
    try:
        return factory(**{name: value for name, value in arguments.items() if name not in given})
    except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"{factory} cannot be built for {scheme}: {error} Give the QConfig an observer class of torch.ao for such "
            "a grid, or a function that builds one."
        ) from error


def check_grid(observer: nn.Module, scheme: QScheme) -> None:
    """Checks that an observer of others gives scales and zero points for the grid of the scheme.

    Raises:
        ConfigError: It says itself that it does not.
    """
    if isinstance(observer, Observer):
        return
    name = type(observer).__name__
    ends = tuple(getattr(observer, end, None) for end in ("quant_min", "quant_max"))
    if None in ends and type(observer).__module__.startswith(_PACKAGES):
        raise ConfigError(f"{name} has no grid, so it gives no scale: use another observer of torch.ao.")
    if None not in ends and ends != (scheme.quant_min, scheme.quant_max):
        raise ConfigError(
            f"{name} has the codes {ends[0]} to {ends[1]}, {scheme} has {scheme.quant_min} to {scheme.quant_max}. Give "
            "the QConfig a scheme of the same grid (reduce_range is one bit less), or let the observer have that one."
        )
    dtype = getattr(observer, "dtype", None)
    if None in ends and dtype in _CODES and _CODES[dtype] is not scheme.dtype:
        raise ConfigError(f"{name} has codes of {dtype}, {scheme} has {scheme.dtype}: give both the same.")
    qscheme = getattr(observer, "qscheme", None)
    if qscheme is torch.per_channel_affine_float_qparams:
        raise ConfigError(f"{name} has {qscheme}, whose zero points are no codes: {scheme} needs whole numbers.")
    symmetric = qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    per_channel = qscheme in (torch.per_channel_symmetric, torch.per_channel_affine)
    if qscheme is not None and (symmetric, per_channel) != (scheme.symmetric, scheme.per_channel):
        raise ConfigError(f"{name} has {qscheme}, which is another grid than {scheme}.")
    if per_channel and getattr(observer, "ch_axis", scheme.axis) != scheme.axis:
        raise ConfigError(f"{name} has ch_axis={observer.ch_axis}, the axis of {scheme} is another.")


def check_qparams(observer: nn.Module, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> None:
    """Checks the scale and the zero point that an observer gave by a ``calculate_qparams`` of its own.

    Raises:
        ConfigError: They are none of the grid of the scheme.
        NonFiniteError: A scale is NaN or infinite.
    """
    name = f"{type(observer).__name__} gave"
    if not isinstance(scale, Tensor) or not isinstance(zero_point, Tensor):
        raise ConfigError(f"{name} {scale!r} and {zero_point!r}: calculate_qparams() has to return two tensors.")
    counts = scale.numel(), zero_point.numel()
    if counts[0] != counts[1]:
        raise ConfigError(f"{name} {counts[0]} and {counts[1]} scales and zero points: as many of each are needed.")
    if counts[0] == 0 or (counts[0] != 1 and not scheme.per_channel):
        raise ConfigError(f"{name} {counts[0]} scales and zero points: {scheme} needs one of each.")
    if not bool(scale.isfinite().all()):
        raise NonFiniteError(f"{name} a scale of NaN or infinity. Look for the layer that made it.")
    if not bool((scale > 0).all()):
        raise ConfigError(f"{name} a scale of {scale.min().item():g}: scales are above 0.")
    lowest, highest = (end.item() for end in zero_point.aminmax())
    if zero_point.is_floating_point() and not bool((zero_point == zero_point.round()).all()):
        raise ConfigError(f"{name} a zero point of {lowest:g} to {highest:g}: it is a code, a whole number.")
    if not scheme.quant_min <= lowest <= highest <= scheme.quant_max:
        raise ConfigError(
            f"{name} zero points of {lowest:g} to {highest:g}, {scheme} has the codes {scheme.quant_min} to "
            f"{scheme.quant_max}: zero has to be one of them."
        )
    if scheme.symmetric and scheme.signed and (lowest, highest) != (0, 0):
        raise ConfigError(f"{name} zero points of {lowest:g} to {highest:g}: the middle of {scheme} is 0.")
