"""Figures, drawn by matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from qlightning.analysis.describe import Description
    from qlightning.analysis.sensitivity import Sensitivity

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


def sensitivities(found: Sensitivity) -> Any:
    """Noise in the outputs by layer, the most sensitive one on top; beside it the drop of the metric, if measured."""
    layers = found.ranking
    columns = 1 if found.metric_float is None else 2
    made, axes = figure(columns=columns, width=6.4, height=max(2.2, 0.9 + 0.2 * len(layers)))
    # Noise by signal, so that the longest bar is the most sensitive layer; where there is no noise there is no bar.
    noises = [10 ** (-layer.sqnr_db / 10) if math.isfinite(layer.sqnr_db) else 0.0 for layer in layers]
    _layer_bars(axes[0], [layer.name or "(model)" for layer in layers], noises, _BLUE)
    if filled := [noise for noise in (*noises, 10 ** (-found.sqnr_db / 10)) if noise]:
        axes[0].set_xscale("log")
        axes[0].set_xlim(min(filled) / 2, max(filled) * 8)
    for place, layer in enumerate(layers):
        axes[0].annotate(
            f"{layer.sqnr_db:.1f} dB", (noises[place] or min(filled, default=1) / 2, place),
            xytext=(3, 0), textcoords="offset points", va="center", fontsize=7,
        )  # fmt: skip
    axes[0].axvline(10 ** (-found.sqnr_db / 10), color=_RED, linewidth=1, linestyle="--")
    what = "alone in int8" if found.mode == "only" else "in float, all others in int8"
    axes[0].set_title(f"Each layer {what}; dashed: all in int8 ({found.sqnr_db:.1f} dB)", fontsize=10)
    axes[0].set_xlabel("noise by signal of the outputs (power)", fontsize=9)
    if columns == 2:
        drops = [layer.drop or 0.0 for layer in layers]
        _layer_bars(axes[1], [""] * len(layers), drops, _GREY)
        axes[1].axvline(0, color="black", linewidth=0.8)
        axes[1].set_title(f"{found.metric_name}: {found.metric_float:.5g} in float, "
                          f"{found.metric_int8:.5g} in int8", fontsize=10)  # fmt: skip
        axes[1].set_xlabel(f"worse than float by ({found.metric_name})", fontsize=9)
    return made


def _layer_bars(axis: Any, names: list[str], values: list[float], color: str) -> None:
    axis.barh(range(len(names)), values, color=color, height=0.7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.4, -0.6)
