"""sensitivity: what each layer costs in int8, alone or by contrast, measured on data."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from torch import nn
from tqdm.auto import tqdm

from qlightning.analysis.metric import Metric, Scorer, scorer
from qlightning.analysis.probe import Call, Probe
from qlightning.backends import Backend
from qlightning.errors import CalibrationError, ConfigError
from qlightning.graph.calibrate import calibrate, call_arguments, check_batches, check_num_batches, evaluating
from qlightning.graph.capture import module_device
from qlightning.graph.prepare import prepare
from qlightning.qconfig import Pattern, QConfig
from qlightning.table import aligned

SensitivityMode = Literal["only", "all_but"]


@dataclass(frozen=True)
class LayerSensitivity:
    """What one layer costs.

    Attributes:
        name: Of the layer, as ``exclude`` takes it.
        kind: Its type.
        scheme: The grid of its weight.
        sqnr_db: Signal to noise of the model's outputs against float: with this layer alone in int8 (mode "only"), or
            with all but this one ("all_but"). Infinite where nothing changes.
        metric: The metric so; None where none was given.
        drop: How much worse that is than in float, in units of the metric; below zero where it is better.
        weights: How many numbers its weight has.
        macs: Multiplications per sample; None where they are not known (functions, products of activations).
        mac_share: Its share of those of all layers, 0 to 1.
    """

    name: str
    kind: str
    scheme: str
    sqnr_db: float
    metric: float | None = None
    drop: float | None = None
    weights: int = 0
    macs: int | None = None
    mac_share: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """What :func:`sensitivity` has found; its text is a table with the most sensitive layer first.

    Attributes:
        mode: "only" or "all_but".
        layers: In the order of the graph; ``ranking`` has the most sensitive one first.
        sqnr_db: Of the outputs with all layers in int8.
        metric_name: What the metric is called; "" without one.
        higher_is_better: Its direction.
        metric_float: The metric in float; None without one.
        metric_int8: The metric with all layers in int8 (fake-quantized).
        backend: Whose grids were measured.
        batches: How many batches each figure stands on.
        passes: How often the data went through the model.
        seconds: How long that took.
    """

    mode: SensitivityMode
    layers: tuple[LayerSensitivity, ...]
    sqnr_db: float
    metric_name: str = ""
    higher_is_better: bool = True
    metric_float: float | None = None
    metric_int8: float | None = None
    backend: str = ""
    batches: int = 0
    passes: int = 0
    seconds: float = 0.0

    @property
    def ranking(self) -> tuple[LayerSensitivity, ...]:
        """The layers by SQNR, the most sensitive one first: alone it leaves the most noise, or its absence the least.

        Not by the metric, which moves in steps of whole samples: most layers alone change it by nothing that shows.
        """
        sign = 1 if self.mode == "only" else -1
        return tuple(sorted(self.layers, key=lambda layer: sign * layer.sqnr_db))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON; an infinite SQNR is None. Layers are in the order of the ranking."""
        found = asdict(replace(self, layers=self.ranking))
        found["layers"] = [{key: _plain(value) for key, value in layer.items()} for layer in found["layers"]]
        return {key: _plain(value) for key, value in found.items()}

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def plot(self) -> Any:
        """Draws the ranking as bars: SQNR, and beside it the drop of the metric where there is one.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from qlightning.analysis.plots import sensitivities

        return sensitivities(self)

    def save_plot(self, path: str | Path) -> None:
        """Writes :meth:`plot` to a file, in the format of its ending."""
        self.plot().savefig(path)

    def __str__(self) -> str:
        measured = self.metric_float is not None
        head = [
            "layer",
            "type",
            "weight",
            "numbers",
            "MACs",
            "SQNR",
            *([f"{self.metric_name} drop"] if measured else []),
        ]
        rows = [
            [
                layer.name or "(model)",
                layer.kind,
                layer.scheme or "-",
                f"{layer.weights:,}",
                "-" if layer.mac_share is None else f"{layer.mac_share:.1%}",
                f"{layer.sqnr_db:.1f} dB",
                *([f"{layer.drop:+.4g}"] if measured else []),
            ]
            for layer in self.ranking
        ]
        what = "alone in int8" if self.mode == "only" else "in float, all others in int8"
        summary = f"Each layer {what}; all in int8: {self.sqnr_db:.1f} dB"
        if measured:
            summary += f", {self.metric_name} {self.metric_int8:.6g} ({self.metric_float:.6g} in float)"
        cost = f"{self.passes} passes over {self.batches} batches in {self.seconds:.1f} s"
        return f"{aligned(head, rows)}\n{summary}; {cost}; backend {self.backend}."


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sensitivity(
    model: nn.Module,
    data: Iterable[Any],
    *,
    metric: Metric | None = None,
    mode: SensitivityMode = "only",
    qconfig: QConfig | None = None,
    backend: str | Backend = "auto",
    exclude: Iterable[Pattern] = (),
    calibration_data: Iterable[Any] | None = None,
    num_batches: int | None = 32,
    progress: bool = True,
) -> Sensitivity:
    """Measures what every layer of a float model costs in int8.

    The model is prepared and calibrated once, as a copy; then fake-quantizers are switched on and off. A layer in
    int8 means its weight and the values that it reads on their grids, just as if ``exclude`` had named all the others.
    The data goes through the model twice for float and int8, and once for each layer; as often again for a
    ``metric(model)``.

    Args:
        model: The float model; left as it is.
        data: Batches as :func:`calibrate` takes them; those used are held in memory, so that each layer sees the same.
        metric: ``metric(model)`` or ``metric(outputs, targets)`` gives a number of which more is better (outputs and
            targets of all batches at once); or a ``torchmetrics.Metric``, which knows its direction. None: SQNR alone.
        mode: "only": one layer in int8, all others in float: what it costs. "all_but": one layer in float, all others
            in int8: what keeping it in float would gain.
        qconfig: What to quantize to; None for the defaults.
        backend: Whose grids.
        exclude: Names, globs or types of modules that stay float throughout.
        calibration_data: What the ranges are taken from; None: the same batches.
        num_batches: How many batches to use; None: all.
        progress: Whether to show a progress bar.

    Returns:
        A row for each layer, with a table as its text, ``to_dict()``, ``to_json()`` and ``save_plot(path)``.

    Raises:
        ConfigError: A setting or the metric cannot be used.
        QuantizationError: As :func:`prepare` and :func:`calibrate` raise.

    Examples:
        >>> import torch
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
        >>> found = sensitivity(net, [torch.randn(4, 3, 8, 8)], backend="reference", progress=False)
        >>> [layer.name for layer in found.layers]
        ['0', '3']
    """
    if mode not in ("only", "all_but"):
        raise ConfigError(f"mode={mode!r}: 'only' or 'all_but' is possible.")
    check_num_batches(num_batches)
    check_batches(data, "data")
    batches = list(islice(data, num_batches))
    if not batches:
        raise CalibrationError("There is no batch to measure on: the data is empty.")
    scored = None if metric is None else scorer(metric, batches)
    prepared = prepare(copy.deepcopy(model), qconfig, backend=backend, mode="ptq", exclude=exclude)
    calibrate(prepared, batches if calibration_data is None else calibration_data)
    return measure(prepared, batches, scored, mode, progress)


def measure(
    prepared: nn.Module,
    batches: Sequence[Any],
    scored: Scorer | None = None,
    mode: SensitivityMode = "only",
    progress: bool = False,
) -> Sensitivity:
    """As :func:`sensitivity`, on a model that is prepared and has its ranges; it is left as it was."""
    device = module_device(prepared)
    calls = [call_arguments(prepared, batch, device) for batch in batches]
    return measure_calls(prepared, calls, scored, mode, progress)


def measure_calls(
    prepared: nn.Module,
    calls: Sequence[Call],
    scored: Scorer | None = None,
    mode: SensitivityMode = "only",
    progress: bool = False,
) -> Sensitivity:
    """As :func:`measure`, on the arguments of calls."""
    started = time.perf_counter()
    with evaluating(prepared), tqdm(desc="Measuring layers", disable=not progress, unit="batch") as bar:
        probe = Probe(prepared, calls, bar.update)
        names = list(probe.selection.parts)
        bar.total = (len(names) + 2) * len(calls)
        bar.refresh()
        total = sum(probe.macs.values())
        with probe.selection.rounding() as rounding:

            def look(int8: Sequence[str]) -> tuple[float, float | None]:
                outputs = probe.outputs(rounding, int8) if int8 else probe.exact
                rounding.only(int8)
                if scored is None:
                    return probe.sqnr(outputs), None
                value = scored.evaluate(prepared) if scored.score is None else scored.score(outputs)
                return probe.sqnr(outputs), value

            _, float_value = look(())
            rows = []
            for name, part in probe.selection.parts.items():
                int8 = [name] if mode == "only" else [other for other in names if other != name]
                noise, value = look(int8)
                drop = (
                    None if scored is None or value is None or float_value is None else scored.drop(float_value, value)
                )
                macs = probe.macs.get(name)
                share = None if macs is None or not total else macs / total
                rows.append(
                    LayerSensitivity(name, part.kind, part.scheme, noise, value, drop, part.weights, macs, share)
                )
            noise, int8_value = look(names)
    return Sensitivity(
        mode,
        tuple(rows),
        noise,
        "" if scored is None else scored.name,
        True if scored is None else scored.higher_is_better,
        float_value,
        int8_value,
        prepared.__dict__["_preparation"].backend.name,
        len(calls),
        (len(names) + 2) * (2 if scored is not None and scored.score is None else 1),
        time.perf_counter() - started,
    )
