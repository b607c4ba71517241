"""describe: how well the codes of a quantized tensor are used, and how far it is from its float original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlightning.affine import sqnr
from qlightning.errors import ConfigError
from qlightning.tensor import QuantizedTensor

WORST = 5
"""How many channels are named."""


@dataclass(frozen=True)
class ChannelError:
    """The error of one channel.

    Attributes:
        channel: Its number along the axis.
        scale: The distance of its codes.
        sqnr: Signal to quantization noise in dB.
    """

    channel: int
    scale: float
    sqnr: float


@dataclass(frozen=True, eq=False)
class Description:
    """What :func:`describe` has found; its text is a table.

    Attributes:
        tensor: The quantized tensor.
        original: The float one, or None.
        counts: How often each code of the grid occurs, int64 (levels,), from ``quant_min`` to ``quant_max``.
        max_error: The largest absolute difference to the original; None without one.
        mean_error: The mean absolute difference.
        sqnr: Signal to quantization noise in dB: 6 dB are about one bit.
        worst_channels: Of a per-channel tensor the few with the least signal to noise, worst first.
    """

    tensor: QuantizedTensor
    original: Tensor | None
    counts: Tensor
    max_error: float | None = None
    mean_error: float | None = None
    sqnr: float | None = None
    worst_channels: tuple[ChannelError, ...] = ()

    @property
    def levels(self) -> int:
        """The number of codes that the grid has."""
        return len(self.counts)

    @property
    def used(self) -> int:
        """The number of codes that occur."""
        return int((self.counts > 0).sum())

    @property
    def unused(self) -> int:
        """The number of codes that never occur."""
        return self.levels - self.used

    @property
    def saturated_low(self) -> float:
        """The share of elements on the lowest code, where what lies below it was clipped to; 0 to 1."""
        return self._share(0)

    @property
    def saturated_high(self) -> float:
        """The share of elements on the highest code; 0 to 1."""
        return self._share(-1)

    def _share(self, index: int) -> float:
        return float(self.counts[index]) / max(int(self.counts.sum()), 1)

    def __str__(self) -> str:
        q = self.tensor
        scales = f"{q.q_scale():.6g}" if q.axis is None else f"{_range(q.scale)} ({len(q.scale)} channels)"
        zero_points = str(q.q_zero_point()) if q.axis is None else _range(q.zero_point)
        rows = [
            ("shape", f"{tuple(q.shape)}, {q.numel()} elements"),
            ("scheme", str(q.scheme)),
            ("scale", scales),
            ("zero point", zero_points),
            ("codes used", f"{self.used} of {self.levels} ({self.unused} unused)"),
            ("on the lowest code", f"{self.saturated_low:.2%}"),
            ("on the highest code", f"{self.saturated_high:.2%}"),
        ]
        if self.sqnr is not None:
            rows += [
                ("largest error", f"{self.max_error:.6g}"),
                ("mean error", f"{self.mean_error:.6g}"),
                ("SQNR", f"{self.sqnr:.2f} dB"),
            ]
        rows += [
            (f"channel {worst.channel}", f"{worst.sqnr:.2f} dB, scale {worst.scale:.6g}")
            for worst in self.worst_channels
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def plot(self) -> Any:
        """Draws how often each code occurs, beside the histogram of the float original.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from qlightning.analysis.plots import codes_and_values

        return codes_and_values(self)

    def save_plot(self, path: str | Path) -> None:
        """Saves the plot as a picture, of the kind that the suffix says."""
        self.plot().savefig(path)


def describe(q: QuantizedTensor, original: Tensor | None = None) -> Description:
    """Looks inside a quantized tensor.

    Args:
        q: The quantized tensor.
        original: The float tensor that it was made from, of the same shape: for the error.

    Raises:
        ConfigError: ``q`` is no QuantizedTensor, or ``original`` no float tensor of its shape.

    Examples:
        >>> from qlightning import QScheme, quantize
        >>> x = torch.tensor([-1.0, -0.2, 0.0, 0.1, 5.0])
        >>> print(describe(quantize(x, 0.25, 0, QScheme(bits=3)), x))
        shape                (5,), 5 elements
        scheme               int3 affine per tensor
        scale                0.25
        zero point           0
        codes used           4 of 8 (4 unused)
        on the lowest code   20.00%
        on the highest code  20.00%
        largest error        4.25
        mean error           0.88
        SQNR                 1.59 dB
    """
    if not isinstance(q, QuantizedTensor):
        raise ConfigError(f"describe takes a QuantizedTensor, got {type(q).__name__}. Quantize it first.")
    scheme = q.scheme
    levels = scheme.quant_max - scheme.quant_min + 1
    counts = torch.bincount(q.codes.cpu().flatten().int() - scheme.quant_min, minlength=levels)
    if original is None:
        return Description(q, None, counts)
    if not isinstance(original, Tensor) or not original.is_floating_point() or original.shape != q.shape:
        got = tuple(original.shape) if isinstance(original, Tensor) else type(original).__name__
        raise ConfigError(f"describe: the original has to be a float tensor of shape {tuple(q.shape)}, got {got}.")
    exact, found = original.detach().cpu().double(), q.dequantize().cpu()
    error = (exact - found).abs()
    return Description(
        q,
        exact,
        counts,
        max_error=float(error.max()) if error.numel() else 0.0,
        mean_error=float(error.mean()) if error.numel() else 0.0,
        sqnr=sqnr(exact, found),
        worst_channels=_worst(exact, found, q),
    )


def _worst(exact: Tensor, found: Tensor, q: QuantizedTensor) -> tuple[ChannelError, ...]:
    if q.axis is None or not q.numel():
        return ()
    pairs = zip(exact.unbind(q.axis), found.unbind(q.axis), q.scale.tolist(), strict=True)
    channels = [ChannelError(i, scale, sqnr(one, other)) for i, (one, other, scale) in enumerate(pairs)]
    return tuple(sorted(channels, key=lambda channel: channel.sqnr)[:WORST])


def _range(values: Tensor) -> str:
    if not len(values):
        return "none"
    low, high = values.amin().item(), values.amax().item()
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
