"""Report: for every layer of a model, whether it is int8 or float, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from qlightning.backends.qdq import NO_KERNEL
from qlightning.errors import ConfigError
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize
from qlightning.files import check_target, written_whole
from qlightning.graph.changes import StepReport
from qlightning.graph.dossier import page_of
from qlightning.graph.preparation import CONV_TYPES, Preparation, is_prepared
from qlightning.graph.source import Source
from qlightning.html import render
from qlightning.nn.qat import QATLayer, layer_type
from qlightning.nn.quantized import QuantizedLayer
from qlightning.table import aligned


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer.

    Attributes:
        name: Its name in the model.
        kind: Its type.
        int8: Whether it computes on int8, now or once converted.
        reason: Why it stays float; empty for an int8 layer.
        scheme: The grid of its weight.
        kernel: What computes it; empty before conversion.
    """

    name: str
    kind: str
    int8: bool
    reason: str = ""
    scheme: str = ""
    kernel: str = ""


@dataclass(frozen=True)
class Report:
    """The layers of a model.

    Attributes:
        backend: Name of the backend.
        activation: The grid of the activations.
        layers: A row for each.
        notes: Modules that could not be captured, and why.
        cpu: What this CPU means for the ranges; empty where it means nothing.
        choice: Why ``auto`` has chosen the backend; empty where it was asked for by name.
        steps: What steps of post-training quantization did, in their order.
        source: What :meth:`save` looks into.
    """

    backend: str
    activation: str
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    cpu: str = ""
    choice: str = ""
    steps: tuple[StepReport, ...] = ()
    source: Source = field(default_factory=Source, repr=False, compare=False)

    def save(
        self,
        path: str | Path,
        *,
        data: Iterable[Any] | None = None,
        model: nn.Module | None = None,
        figures: Mapping[str, Mapping[str, float]] | None = None,
        sensitivity: Any = None,
        latency: bool = False,
    ) -> Path:
        """Writes the report as one HTML file that needs no network: to look at, to print, to send.

        It has the layers, the errors of weights, inputs and outputs, how codes are used, what a training did to the
        ranges, settings and versions. Callbacks keep some samples of their batches, and both models, to look at; from
        elsewhere activations need ``data``, and errors against float need ``model``. What is not known is listed.

        Args:
            path: The file; folders are made.
            data: Batches to look at activations by, as :func:`calibrate` takes them.
            model: The float model that the int8 one was made from; a trained model is compared with what it was before.
            figures: What was measured elsewhere, such as ``{"float": {"accuracy": 0.917}, "int8": {"accuracy": 0.916,
                "latency_ms": 1.9}}``; possible are "float", "fake_quant" and "int8".
            sensitivity: What each layer costs: of ``qlightning.sensitivity``, or numbers by layer, of which larger are
                worse.
            latency: Measures it now, with one sample: 30 calls of each model.

        Returns:
            The path.

        Raises:
            ConfigError: An argument cannot be used, or the file has another suffix than .html.
            CalibrationError: ``data`` is given, and no range was observed.
            OSError: The file cannot be written.

        Examples:
            >>> import tempfile
            >>> import torch
            >>> from qlightning import quantize_model
            >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
            >>> images = [torch.randn(2, 3, 8, 8)]
            >>> int8 = quantize_model(net, images)
            >>> path = report(int8).save(f"{tempfile.mkdtemp()}/report.html", data=images, model=net)
            >>> path.read_text().startswith("<!DOCTYPE html>")
            True
        """
        check_target(path)
        if Path(path).suffix not in (".html", ".htm"):
            raise ConfigError(f"{path}: a report is written as HTML; name the file with the suffix .html.")
        text = self.html(data=data, model=model, figures=figures, sensitivity=sensitivity, latency=latency)
        with written_whole(path) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")
        return Path(path)

    def html(
        self,
        *,
        data: Iterable[Any] | None = None,
        model: nn.Module | None = None,
        figures: Mapping[str, Mapping[str, float]] | None = None,
        sensitivity: Any = None,
        latency: bool = False,
    ) -> str:
        """The text that :meth:`save` writes; arguments and errors are the same."""
        given = dict(figures or {})
        if unknown := set(given) - {"float", "fake_quant", "int8"}:
            raise ConfigError(
                f"report.save: figures of {sorted(unknown)}; 'float', 'fake_quant' and 'int8' are possible."
            )
        return render(page_of(self, data, model, given, sensitivity, latency))

    @property
    def int8_layers(self) -> list[LayerReport]:
        """The layers in int8."""
        return [layer for layer in self.layers if layer.int8]

    @property
    def float_layers(self) -> list[LayerReport]:
        """The layers in float."""
        return [layer for layer in self.layers if not layer.int8]

    def __str__(self) -> str:
        head = ("layer", "type", "runs in", "weight", "kernel or reason")
        rows = [
            (
                r.name or "(model)",
                r.kind,
                "int8" if r.int8 else "float",
                r.scheme or "-",
                r.kernel if r.int8 else r.reason,
            )
            for r in self.layers
        ]
        summary = (
            f"{len(self.int8_layers)} of {len(self.layers)} layers in int8; backend {self.backend}; "
            f"activations {self.activation}."
        )
        further = [*filter(None, (self.choice, self.cpu)), *self.notes, *map(str, self.steps)]
        return "\n".join([aligned(head, rows), summary, *further])


def report(model: nn.Module) -> Report:
    """Reports on a prepared or converted model.

    Raises:
        ConfigError: The model is neither.
    """
    if (stored := model.__dict__.get("_report")) is not None:  # of a model from a file, which has no float layers left
        assert isinstance(stored, Report)
        return replace(stored, source=_source(model))
    preparation: Preparation | None = model.__dict__.get("_preparation")
    if preparation is None:
        raise ConfigError(f"{type(model).__name__} is neither prepared nor converted.")
    backend = model.__dict__.get("_backend", preparation.backend)
    rows = []
    reported: set[int] = set()
    for name, module in model.named_modules():
        row = None if id(module) in reported else _row(name, module, preparation)
        if row is not None:
            rows.append(row)
            reported |= {id(part) for part in module.modules()}
    notes = tuple(f"{failure}." for failure in preparation.failures)
    notes += (preparation.float_choice.note,) if preparation.float_choice.note else ()
    notes += _few_bits(rows)
    scheme = preparation.qconfig.activation
    centred = "" if preparation.backend.centred(scheme) == scheme else ", symmetric where values have both signs"
    return Report(
        backend.name,
        f"{scheme}{centred}",
        tuple(rows),
        notes,
        backend.explain_ranges(),
        backend.explain_choice(),
        preparation.steps,
        source=_source(model),
    )


def _few_bits(rows: list[LayerReport]) -> tuple[str, ...]:
    """What weights of fewer bits than any kernel asks for (7, where 8 would saturate) are stored in and run on."""
    named = re.compile(r"u?int([2-6]) ")
    found = [row.name or "(model)" for row in rows if row.int8 and named.match(row.scheme)]
    if not found:
        return ()
    shown = ", ".join(found[:10]) + (" ..." if len(found) > 10 else "")
    return (
        f"Weights of less than 7 bits ({shown}) are stored in 8 bits and run on the kernels of 8: as exact as fewer "
        "bits are, and no faster or smaller.",
    )


def _source(model: nn.Module) -> Source:
    form = "prepared" if is_prepared(model) else "int8"
    return Source(type(model).__name__, **{form: {"": model}})  # type: ignore[arg-type]


def _row(name: str, module: nn.Module, preparation: Preparation) -> LayerReport | None:
    if isinstance(module, QuantizedLayer):
        return converted_layer(name, module)
    if isinstance(module, QATLayer):
        scheme = str(module.weight_fake_quant.scheme)
        kind = type(module).__name__
        reason = preparation.float_choice.reasons.get(name, "")
        return LayerReport(name, kind, not reason, reason, scheme)
    if isinstance(module, WeightFakeQuantize) and "_grid" in name:
        return LayerReport(module.name, "function", True, scheme=str(module.scheme))
    if isinstance(module, FakeQuantize):
        return None
    if isinstance(module, (nn.Linear, *CONV_TYPES)):
        alone = module._modules.get("layer")  # a layer that was captured on its own
        if isinstance(alone, QuantizedLayer):
            return converted_layer(name, alone)
        kind = (layer_type(module) or type(module)).__name__
        reason = preparation.reasons.get(name) or module.__dict__.get("_float_reason", "its input has no grid")
        return LayerReport(name, kind, False, reason=reason)
    return None


def converted_layer(name: str, layer: QuantizedLayer) -> LayerReport:
    """The row of a layer with an int8 weight; without a kernel for it, it computes in float."""
    scheme = str(layer.scheme)
    if layer.kernel.startswith(NO_KERNEL):
        return LayerReport(name, layer.kind, False, layer.kernel, scheme)
    return LayerReport(name, layer.kind, True, "", scheme, layer.kernel)
