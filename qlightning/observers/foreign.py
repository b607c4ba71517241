"""Observers that are not ours: how torch.ao's are built for a scheme, and whether their grid is that of the scheme."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qlightning.errors import ConfigError
from qlightning.observers.base import Observer
from qlightning.qscheme import QScheme

_PACKAGES = ("torch.ao.", "torchao.")


def is_of_torch_ao(factory: Any) -> bool:
    """Whether something is an observer class of torch.ao, or the result of its ``with_args``."""
    cls = getattr(getattr(factory, "p", factory), "func", factory)
    return isinstance(cls, type) and cls.__module__.startswith(_PACKAGES)


def build(factory: Any, scheme: QScheme) -> Any:
    """Builds an observer of torch.ao for a scheme: these take the grid as ``dtype``, ``qscheme`` and its ends.

    What ``with_args`` has set counts; :func:`check_grid` compares it with the scheme.
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
    return factory(**{name: value for name, value in arguments.items() if name not in given})


def check_grid(observer: nn.Module, scheme: QScheme) -> None:
    """Checks that an observer of others gives scales and zero points for the grid of the scheme.

    Raises:
        ConfigError: It says itself that it does not.
    """
    if isinstance(observer, Observer):
        return
    name = type(observer).__name__
    ends = tuple(getattr(observer, end, None) for end in ("quant_min", "quant_max"))
    if None not in ends and ends != (scheme.quant_min, scheme.quant_max):
        raise ConfigError(
            f"{name} has the codes {ends[0]} to {ends[1]}, {scheme} has {scheme.quant_min} to {scheme.quant_max}. Give "
            "the QConfig a scheme of the same grid (reduce_range is one bit less), or let the observer have that one."
        )
    qscheme = getattr(observer, "qscheme", None)
    symmetric = qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    per_channel = qscheme in (torch.per_channel_symmetric, torch.per_channel_affine)
    if qscheme is not None and (symmetric, per_channel) != (scheme.symmetric, scheme.per_channel):
        raise ConfigError(f"{name} has {qscheme}, which is another grid than {scheme}.")
    if per_channel and getattr(observer, "ch_axis", scheme.axis) != scheme.axis:
        raise ConfigError(f"{name} has ch_axis={observer.ch_axis}, the axis of {scheme} is another.")
