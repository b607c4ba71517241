"""Numbers as the page spells them; a dash where there is none."""

from __future__ import annotations

import math

NONE = "–"


def decibel(value: float | None) -> str:
    """A ratio in dB, without the unit.

    Examples:
        >>> decibel(38.25), decibel(float("inf")), decibel(None)
        ('38.2', 'exact', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "exact" if value > 0 else "-∞"
    return f"{value:.1f}"


def percent(share: float | None) -> str:
    r"""A share of 0 to 1 in percent, with the digits that it has.

    Examples:
        >>> percent(0.9173), percent(0.00002), percent(0.0), percent(None)
        ('91.73\xa0%', '0.002\xa0%', '0\xa0%', '–')
    """
    if share is None:
        return NONE
    value = 100 * share
    if value == 0 or value >= 0.1:
        return f"{value:.4g}\xa0%"
    return f"{value:.3f}\xa0%" if value >= 0.0005 else "<\xa00.001\xa0%"


def number(value: float | None) -> str:
    """A number in four digits.

    Examples:
        >>> number(1234567.0), number(-0.012345), number(None)
        ('1.235e+06', '-0.01235', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    shown = f"{value:.4g}"
    return "0" if shown == "-0" else shown


def megabytes(size: int | None) -> str:
    """Bytes as megabytes of a million, or as kilobytes of a thousand.

    Examples:
        >>> megabytes(1_271_000), megabytes(27_100), megabytes(None)
        ('1.27 MB', '27.1 kB', '–')
    """
    if size is None:
        return NONE
    return f"{size / 1e6:.2f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


def milliseconds(value: float | None) -> str:
    """A time in milliseconds, or that it was not measured.

    Examples:
        >>> milliseconds(3.2), milliseconds(None)
        ('3.20 ms', 'not measured')
    """
    return "not measured" if value is None else f"{value:.2f} ms"


def metric(value: float | None, name: str) -> str:
    r"""A metric, an accuracy in percent; or that it was not measured.

    Examples:
        >>> metric(0.9173, "test/accuracy"), metric(1.5, "loss"), metric(None, "loss")
        ('91.73\xa0%', '1.5', 'not measured')
    """
    if value is None:
        return "not measured"
    return f"{100 * value:.2f}\xa0%" if "acc" in name.lower() and 0 <= value <= 1 else number(value)
