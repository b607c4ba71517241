"""The errors qlightning raises: one family, each member also the built-in class a caller would catch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantizationError(Exception):
    """Base of every error that qlightning raises on purpose."""


class ConfigError(QuantizationError, ValueError):
    """A setting that cannot be used: an unknown name, a scheme off its limits, a pattern that matches nothing."""


class BackendError(QuantizationError, RuntimeError):
    """A backend that this machine lacks, or that cannot run what was asked of it."""


class CaptureError(QuantizationError, RuntimeError):
    """A module whose forward cannot be turned into a graph."""


class InputError(QuantizationError, RuntimeError):
    """An input that an int8 model cannot compute: its shape or its dtype is none that the model was made with."""


class CalibrationError(QuantizationError, RuntimeError):
    """Ranges that cannot be had: no batch, a layer that never ran."""


class NonFiniteError(CalibrationError, ValueError):
    """NaN or infinity where a range was to be observed."""


class AccuracyError(QuantizationError, ValueError):
    """A goal of accuracy that no choice of int8 layers meets."""


class ArtifactError(QuantizationError, ValueError):
    """A file that is damaged, of another kind or version, or for another machine."""


def closest(name: str, candidates: Iterable[str]) -> str:
    """Returns the hint ``" Did you mean 'x'?"`` for a mistyped name, or an empty string.

    Examples:
        >>> closest("fbgem", ["fbgemm", "onednn"])
        " Did you mean 'fbgemm'?"
    """
    found = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(match) for match in found)}?" if found else ""
