"""Figures, drawn by matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from qlightning.analysis.describe import Description

_BLUE, _RED, _GREY = "#1f5fa8", "#c0392b", "#9aa5b1"
_BINS = 128
STEEP = 30
"""How many times as high as the middle one a bar may be on a linear scale."""


def figure(columns: int = 1, rows: int = 1, width: float = 5.0, height: float = 3.4) -> Any:
    """A figure that no window shows, with axes of a common look.

    Returns:
        The figure and the list of its axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install matplotlib.") from error
    made = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=120)
    axes = list(made.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    return made, axes


def codes_and_values(description: Description) -> Any:
    """How often each code occurs, the ends in red where elements lie on them; beside it the float values, if known."""
    q = description.tensor
    made, axes = figure(columns=1 if description.original is None else 2)
    counts = description.counts
    ends = torch.zeros_like(counts)
    ends[[0, -1]] = counts[[0, -1]]
    edges = torch.arange(q.scheme.quant_min, q.scheme.quant_max + 2) - 0.5
    for part, color in ((counts - ends, _BLUE), (ends, _RED)):  # a shape each: 256 bars take half a second
        axes[0].stairs(part.numpy(), edges.numpy(), fill=True, color=color)
    axes[0].set_title(f"Codes: {description.used} of {description.levels} used", fontsize=10)
    axes[0].set_xlabel(f"code ({q.scheme})", fontsize=9)
    _log_if_steep(axes[0], counts.tolist())
    if description.original is not None:
        _values(axes[1], description)
    return made


def _values(axis: Any, description: Description) -> None:
    import numpy as np  # which comes with matplotlib

    q, values = description.tensor, description.original
    assert values is not None
    finite = values[values.isfinite()]
    heights, edges = np.histogram(finite.flatten().double().numpy(), bins=_BINS)
    axis.stairs(heights, edges, fill=True, color=_GREY)
    if q.axis is None:
        ends = (torch.tensor([q.scheme.quant_min, q.scheme.quant_max]) - q.q_zero_point()) * q.q_scale()
        for end in ends.tolist():
            axis.axvline(end, color=_RED, linewidth=1, linestyle="--")
        axis.set_title("Float values; the ends of the grid are dashed", fontsize=10)
    else:
        axis.set_title("Float values of all channels", fontsize=10)
    axis.set_xlabel(f"value (SQNR {description.sqnr:.1f} dB)", fontsize=9)
    _log_if_steep(axis, heights.tolist())


def _log_if_steep(axis: Any, heights: list[float]) -> None:
    """Counts on a logarithmic scale where one bar (the zeros behind a ReLU) would flatten all others."""
    filled = sorted(height for height in heights if height)
    steep = bool(filled) and filled[-1] > STEEP * filled[len(filled) // 2]
    if steep:
        axis.set_yscale("log")
    axis.set_ylabel("elements, logarithmic" if steep else "elements", fontsize=9)
