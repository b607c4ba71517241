"""ranges: what the grids of a prepared model cover, and which of them say little."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from qlightning.errors import ConfigError
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize, fake_quantizers
from qlightning.table import aligned

WIDE = 1e6
"""A range beyond it says that something has run away: a code then spans thousands."""


@dataclass(frozen=True)
class LayerRange:
    """The grid of one tensor.

    Attributes:
        name: The place in the model.
        what: "activation" or "weight".
        scheme: The grid, in words.
        low: The lowest value that it represents, of all channels; NaN while nothing was observed.
        high: The highest one.
        step: The distance of its codes, the largest of all channels.
        remark: What is unusual about it; empty where nothing is.
    """

    name: str
    what: str
    scheme: str
    low: float
    high: float
    step: float
    remark: str = ""


@dataclass(frozen=True)
class Ranges:
    """The grids of a model; the text is a table."""

    rows: tuple[LayerRange, ...]

    @property
    def unusual(self) -> tuple[LayerRange, ...]:
        """Those with a remark."""
        return tuple(row for row in self.rows if row.remark)

    def __str__(self) -> str:
        head = ("place", "of", "lowest", "highest", "step", "scheme", "remark")
        return aligned(head, [_cells(row) for row in self.rows])


def ranges(prepared: nn.Module) -> Ranges:
    """Lists what the grids of a prepared model cover: a look at it before ``convert`` finds runaway ranges.

    Args:
        prepared: A model from :func:`prepare`, trained or calibrated.

    Raises:
        ConfigError: It is not prepared.

    Examples:
        >>> import torch
        >>> from qlightning import calibrate, prepare
        >>> net = prepare(nn.Sequential(nn.Linear(2, 1)), mode="ptq")
        >>> _ = calibrate(net, [torch.tensor([[0.0, 1e9]])])
        >>> [row.remark for row in ranges(net).unusual][0]
        'far beyond 1e+06: look for outliers, NaN-like values or an unused branch'
    """
    rows = tuple(_row(fq, name) for name, fq in fake_quantizers(prepared))
    if not rows:
        raise ConfigError(f"{type(prepared).__name__} is not prepared: it has no grids, or they are in its int8 graph.")
    return Ranges(rows)


def wide(fqs: Iterable[FakeQuantize]) -> list[LayerRange]:
    """The observed grids among some that reach beyond `WIDE`."""
    rows = (_row(fq, fq.name) for fq in fqs if fq.observed)
    return [row for row in rows if max(-row.low, row.high) > WIDE]


def _cells(row: LayerRange) -> tuple[str, ...]:
    ends = f"{row.low:.4g}", f"{row.high:.4g}", f"{row.step:.3g}"
    return row.name or "(input)", row.what, *ends, row.scheme, row.remark


def _row(fq: FakeQuantize, path: str) -> LayerRange:
    what = "weight" if isinstance(fq, WeightFakeQuantize) else "activation"
    name, nan = fq.name or path, float("nan")
    if not fq.observed:
        return LayerRange(name, what, str(fq.scheme), nan, nan, nan, "never observed")
    low, high = ends_of(fq)
    remark = ""
    if max(-low, high) > WIDE:
        remark = f"far beyond {WIDE:g}: look for outliers, NaN-like values or an unused branch"
    elif float(fq.scale.max()) < 1e-15:
        remark = "nothing but zeros was seen"
    return LayerRange(name, what, str(fq.scheme), low, high, float(fq.scale.max()), remark)


def ends_of(fq: FakeQuantize) -> tuple[float, float]:
    """The lowest and the highest value that a grid represents; of all channels, where each has its own."""

    def at(code: int) -> Tensor:
        return (code - fq.zero_point).double() * fq.scale.double()

    return float(at(fq.scheme.quant_min).min()), float(at(fq.scheme.quant_max).max())
