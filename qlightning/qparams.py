"""Scales and zero points that fit a tensor and a scheme: chosen, or given and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qlightning.affine import calculate_qparams
from qlightning.errors import CalibrationError, ConfigError
from qlightning.qscheme import QScheme

NATIVE_SCHEMES = {torch.quint8: QScheme(signed=False), torch.qint8: QScheme()}
_DTYPES = {**NATIVE_SCHEMES, torch.uint8: QScheme(signed=False), torch.int8: QScheme()}


def choose_qparams(x: Tensor, qscheme: QScheme | torch.dtype, reduce_range: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the scale and the zero point of the grid that covers a tensor from its minimum to its maximum.

    Args:
        x: Floating point values, of any shape.
        qscheme: As for :func:`quantize`; with an axis, one grid for each slice along it.
        reduce_range: Uses one bit less, as for kernels that would saturate on 8. Quantize with the scheme's
            ``reduced()`` then.

    Returns:
        Scale (float32) and zero point (int32): 0-d, or one value for each channel.

    Raises:
        ConfigError: ``x`` is no float tensor, or lacks the axis.
        CalibrationError: ``x`` is empty.
        NonFiniteError: ``x`` has NaN or infinity.

    Examples:
        >>> scale, zero_point = choose_qparams(torch.tensor([-1.0, 1.55]), torch.quint8)
        >>> round(float(scale), 4), int(zero_point)
        (0.01, 100)
    """
    scheme = as_scheme(qscheme)
    check_float(x, "choose_qparams")
    if x.numel() == 0:
        raise CalibrationError(f"choose_qparams: a tensor of shape {tuple(x.shape)} has no range.")
    axis = _axis(scheme, x)
    rest = [dim for dim in range(x.ndim) if axis is not None and dim != axis]
    x = x.detach()
    if axis is None:
        low, high = x.aminmax()
    elif rest:
        low, high = x.amin(rest), x.amax(rest)
    else:
        low = high = x
    return calculate_qparams(low.float(), high.float(), scheme.reduced() if reduce_range else scheme)


def as_scheme(scheme: Any) -> QScheme:
    """The scheme itself, or that of a torch dtype.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(scheme, torch.dtype) and scheme in _DTYPES:
        return _DTYPES[scheme]
    if not isinstance(scheme, QScheme):
        raise ConfigError(f"scheme={scheme!r}: a QScheme, torch.quint8 or torch.qint8 is possible.")
    return scheme


def _axis(scheme: QScheme, x: Tensor) -> int | None:
    if scheme.axis is None:
        return None
    if not -x.ndim <= scheme.axis < x.ndim:
        raise ConfigError(f"QScheme axis={scheme.axis}: a tensor of shape {tuple(x.shape)} has no such dimension.")
    return scheme.axis % x.ndim


def check_float(x: Any, what: str) -> None:
    """Checks that something is a floating point tensor.

    Raises:
        ConfigError: It is not; ``what`` says who wants it.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"{what} takes a floating point tensor, got {found}.")


def checked_qparams(scale: Any, zero_point: Any, scheme: QScheme, x: Tensor) -> tuple[Tensor, Tensor, QScheme]:
    """Returns scale and zero point as tensors that fit a scheme and a tensor, and the scheme with its axis counted up.

    Raises:
        ConfigError: They do not fit.
    """
    axis = _axis(scheme, x)
    scale = torch.as_tensor(scale, device=x.device).detach()
    zero_point = torch.as_tensor(zero_point, device=x.device).detach()
    for name, value in (("scale", scale), ("zero point", zero_point)):
        if value.is_complex() or value.dtype == torch.bool or (name == "zero point" and value.is_floating_point()):
            raise ConfigError(
                f"A {name} of {value.dtype}: {'an integer' if name != 'scale' else 'a number'} is needed."
            )
        channels = 1 if axis is None else x.shape[axis]
        if value.ndim > 1 or (value.numel() != channels and (axis is None or value.ndim == 1)):
            wanted = "one number" if axis is None else f"{channels} of them, one for each slice along axis {axis}"
            raise ConfigError(
                f"A {name} of shape {tuple(value.shape)} for {scheme} and a tensor of shape {tuple(x.shape)}: {wanted}."
            )
    shape = () if axis is None else (x.shape[axis],)
    scale, zero_point = scale.to(torch.float32).expand(shape), zero_point.to(torch.int32).expand(shape)
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ConfigError(f"scale={_few(scale)}: finite numbers above zero are needed, as float32.")
    if not bool(((zero_point >= scheme.quant_min) & (zero_point <= scheme.quant_max)).all()):
        raise ConfigError(
            f"zero_point={_few(zero_point)} is off the grid of {scheme}: codes from {scheme.quant_min} to "
            f"{scheme.quant_max} are possible."
        )
    if scheme.symmetric and not bool((zero_point == scheme.middle).all()):
        raise ConfigError(f"zero_point={_few(zero_point)}: {scheme} has its zero point at {scheme.middle}.")
    return scale, zero_point, replace(scheme, axis=axis)


def _few(value: Tensor) -> str:
    return str(value.tolist() if value.numel() <= 4 else f"of {value.numel()} channels")
