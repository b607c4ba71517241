"""The page of a report: what is known of the models behind it, looked at and put in order."""

from __future__ import annotations

import copy
import platform
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qlightning.backends.base import cpu_features
from qlightning.errors import CalibrationError, ConfigError, QuantizationError
from qlightning.fake_quantize import FakeQuantize
from qlightning.graph.calibrate import call_arguments, check_batches
from qlightning.graph.capture import module_device
from qlightning.graph.convert import convert
from qlightning.graph.examination import Examination, examine
from qlightning.graph.preparation import Preparation, captured_roots, is_prepared
from qlightning.graph.prepare import prepare
from qlightning.graph.recording import Call, in_eval_mode, noting_calls
from qlightning.graph.source import Source, Training
from qlightning.html import Layer, Measured, Page, Sensitivity, Step
from qlightning.version import __version__

if TYPE_CHECKING:
    from qlightning.graph.report import Report

_FORMS = {"float": "float", "fake_quant": "fake-quantized", "int8": "int8"}
LATENCY = "latency_ms"
ROUNDS = 30


def page_of(
    report: Report,
    data: Iterable[Any] | None,
    model: nn.Module | None,
    figures: Mapping[str, Mapping[str, float]],
    sensitivity: Any,
    latency: bool,
) -> Page:
    """Gathers everything that the page of a report shows; arguments as for ``Report.save``."""
    source = report.source
    dossier = _Dossier(source)
    if model is not None or data is not None:
        dossier.give(model, data)
    figures = {form: {**source.figures.get(form, {}), **figures.get(form, {})} for form in _FORMS}
    if latency:
        for form, value in dossier.latencies(model).items():
            figures[form] = {LATENCY: value, **figures[form]}
    examination = dossier.examine()
    training = source.training() if source.training is not None else Training()
    steps = tuple(_step(step) for step in report.steps)
    rows, unit = _sensitivities(sensitivity)
    layers = tuple(_layer(row, examination) for row in report.layers)
    return Page(
        title=source.title or "Model",
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        facts=(
            ("backend", report.backend),
            ("activations", report.activation),
            ("threads", str(torch.get_num_threads())),
            ("CPU", f"{_cpu()} ({cpu_features()})"),
        ),
        measured=dossier.measured(figures, model),
        metrics=source.metrics,
        output_sqnr=examination.output_sqnr,
        same_answer=examination.same_answer,
        samples=examination.samples,
        layers=layers,
        grids=tuple(examination.grids.values()),
        history=training.history,
        length=training.length,
        stages=training.stages,
        sensitivity=rows,
        sensitivity_unit=unit,
        steps=steps,
        settings=(*dossier.settings(), *source.settings.items()),
        versions=tuple(_versions(report.backend).items()),
        notes=tuple(filter(None, (report.choice, report.cpu, *report.notes, *dossier.notes))),
        missing=tuple(_missing(examination, layers, training, rows, dossier)),
    )


class _Dossier:
    """The models of a source, with what a user has given beside them."""

    def __init__(self, source: Source) -> None:
        self.int8, self.prepared = dict(source.int8), dict(source.prepared)
        self.calls = {name: dict(calls) for name, calls in source.calls.items()}
        self.notes: list[str] = []
        self._given = False
        self.reference = {name: module for name, module in self.prepared.items() if is_prepared(module)}
        for name, module in self.reference.items():
            if name not in self.int8:
                self._convert(name, module)

    def _convert(self, name: str, prepared: nn.Module) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # which convert says again when it is meant
                self.int8[name] = convert(prepared, backend="reference")
        except CalibrationError:
            pass  # nothing was observed yet: the page says so
        except QuantizationError as error:
            self.notes.append(f"Not looked into {name or 'the model'}: {error}")

    def give(self, model: nn.Module | None, data: Iterable[Any] | None) -> None:
        """Takes a float model for the reference, and batches for the calls.

        Raises:
            ConfigError: There are several models, or none, or the float one is of another structure.
        """
        names = list(self.int8) or list(self.prepared)
        if len(names) != 1:
            raise ConfigError(
                f"report.save: data and model are for one model, and this report is on {len(names)}. Take the report "
                "of one of them: qlightning.report(net).save(path, data=batches, model=float_net)."
            )
        (name,) = names
        if model is not None:
            self.reference = {name: _twin(model, self.int8.get(name))}
        if data is None:
            return
        check_batches(data, "data")
        if name not in self.int8:
            raise CalibrationError("report.save: no range was observed yet, so there is no grid to look at data by.")
        self.calls = {name: _calls(self.int8[name], data)}
        self._given = True

    def examine(self) -> Examination:
        """Looks into every model; names are those in the whole."""
        whole = Examination()
        for name, int8 in self.int8.items():
            found = self._examine(name, int8)
            start = f"{name}." if name else ""
            for layer, row in found.layers.items():
                row.grid = f"{start}{row.grid}" if row.grid else ""
                whole.layers[f"{start}{layer}"] = row
            for grid in found.grids.values():
                named = f"{start}{grid.name}"
                whole.grids[named] = replace(grid, name=named)
            whole.samples = max(whole.samples, found.samples)
            if len(self.int8) == 1:
                whole.output_sqnr, whole.same_answer = found.output_sqnr, found.same_answer
        return whole

    def _examine(self, name: str, int8: nn.Module) -> Examination:
        try:
            return examine(int8, self.reference.get(name), self.calls.get(name))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            if self._given:
                raise
            # The first samples of a call, which were kept, may be no call where samples are not the first dimension.
            self.notes.append(f"{name or 'The model'} does not run on the first samples of a batch: {error}")
            return examine(int8, self.reference.get(name))

    def measured(self, figures: Mapping[str, Mapping[str, float]], model: nn.Module | None) -> tuple[Measured, ...]:
        """What is known of the float, the fake-quantized and the int8 model."""
        floats = {"": model} if model is not None else self.reference
        sizes = {"float": _size(floats.values()), "int8": _size(self.int8.values())}
        return tuple(
            Measured(
                shown,
                {name: value for name, value in figures[form].items() if name not in (LATENCY, "size_mb")},
                sizes.get(form) or None,
                figures[form].get(LATENCY),
            )
            for form, shown in _FORMS.items()
        )

    def latencies(self, model: nn.Module | None) -> dict[str, float]:
        """Median milliseconds of a call with one sample, the models by turns; of those that there are."""
        name, int8 = next(iter(self.int8.items()), ("", None))
        calls = self.calls.get(name, {}).get("")
        if int8 is None or not calls or len(self.int8) > 1:
            return {}
        call = calls[0].cut(1)
        models = {"int8": int8} if model is None else {"float": model, "int8": int8}
        times: dict[str, list[float]] = {form: [] for form in models}
        with torch.inference_mode(), in_eval_mode(model.modules() if model is not None else ()):
            for turn in range(3 + ROUNDS):
                for form, module in models.items():
                    start = time.perf_counter()
                    module(*call.args, **call.kwargs)
                    if turn > 2:
                        times[form].append(1e3 * (time.perf_counter() - start))
        return {form: statistics.median(found) for form, found in times.items()}

    def settings(self) -> Iterable[tuple[str, str]]:
        """How the first of the models was prepared: they have the settings in common."""
        for module in (*self.int8.values(), *self.prepared.values()):
            preparation: Preparation | None = module.__dict__.get("_preparation")
            if preparation is None:
                continue
            qconfig = preparation.qconfig.with_observers(preparation.mode)
            yield "mode", {"qat": "training with quantization", "ptq": "post-training"}[preparation.mode]
            yield "prepared for", preparation.backend.name
            yield "activation", f"{qconfig.activation}, {_spell(qconfig.activation_observer)}"
            yield "weight", f"{qconfig.weight}, {_spell(qconfig.weight_observer)}"
            for pattern, other in qconfig.overrides.items():
                spelled = "float" if other is None else f"activation {other.activation}, weight {other.weight}"
                yield f"for {_spell(pattern)}", spelled
            if qconfig.exclude:
                yield "excluded", ", ".join(_spell(pattern) for pattern in qconfig.exclude)
            return


def _twin(model: nn.Module, int8: nn.Module | None) -> nn.Module:
    """A prepared copy of a float model, to run it without rounding as the int8 model was captured."""
    if is_prepared(model):
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = prepare(copy.deepcopy(model).eval(), backend="reference")
    if int8 is not None:
        roots, others = ({name for name, _ in captured_roots(m)} for m in (twin, int8))
        if not roots & others:
            raise ConfigError(
                f"report.save: model={type(model).__name__} is of another structure than the int8 model: give the "
                "float model that it was made from."
            )
    return twin


@torch.no_grad()
def _calls(int8: nn.Module, data: Iterable[Any]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    roots = dict(captured_roots(int8))
    for batch in data:
        args, kwargs = call_arguments(int8, batch, module_device(int8))
        if "" in roots:
            found.setdefault("", []).append(Call(args, kwargs))
            continue
        with noting_calls(roots, lambda name, call: found.setdefault(name, []).append(call)):
            int8(*args, **kwargs)
    return found


def _layer(row: Any, examination: Examination) -> Layer:
    name = row.name
    found = examination.layers.get(name) or examination.layers.get(f"{name}.layer".lstrip("."))
    layer = Layer(name, row.kind, row.int8, row.reason, row.scheme, row.kernel)
    return layer if found is None else Layer(**{**layer.__dict__, **found.__dict__})


def _step(step: Any) -> Step:
    rows = tuple((row.layer, row.changed, row.what, row.before, row.after) for row in step.layers)
    return Step(step.name, step.measure, rows)


def _sensitivities(sensitivity: Any) -> tuple[tuple[Sensitivity, ...], str]:
    """The rows of a sensitivity analysis, the worst first, and what their bars count.

    Args:
        sensitivity: What ``qlightning.sensitivity`` gives, or numbers by layer, of which larger ones are worse.
    """
    if sensitivity is None:
        return (), ""
    if isinstance(sensitivity, Mapping):
        rows = [Sensitivity(str(name), float(value), f"{float(value):.4g}") for name, value in sensitivity.items()]
        return tuple(sorted(rows, key=lambda row: -row.value)), ""
    if not hasattr(sensitivity, "ranking"):
        raise ConfigError(
            f"report.save: sensitivity={type(sensitivity).__name__}: what qlightning.sensitivity() gives is possible, "
            "or a mapping from layers to numbers."
        )
    alone = sensitivity.mode == "only"
    rows = []
    for layer in sensitivity.ranking:
        # Noise against signal, of which half is 6 dB less; or the decibels gained.
        value = 10 ** (-layer.sqnr_db / 20) if alone else layer.sqnr_db - sensitivity.sqnr_db
        shown = f"{layer.sqnr_db:.1f} dB" if alone else f"{value:+.1f} dB"
        note = "" if layer.drop is None else f"{sensitivity.metric_name} drop {layer.drop:.4g}"
        rows.append(Sensitivity(layer.name, value, shown, note))
    whole = f"with all layers in int8 it is {sensitivity.sqnr_db:.1f} dB"
    if alone:
        return tuple(rows), f"the SQNR of the output with this layer alone in int8; {whole}. Bars are noise"
    return tuple(rows), f"what the SQNR of the output gains where this layer alone stays float; {whole}"


def _missing(
    examination: Examination,
    layers: tuple[Layer, ...],
    training: Training,
    sensitivity: tuple[Sensitivity, ...],
    dossier: _Dossier,
) -> Iterable[tuple[str, str]]:
    """What the page lacks, and how it is had."""
    if not dossier.int8:
        yield "Errors and histograms", "no range was observed yet: train or calibrate, then save the report again."
        return
    if not examination.grids:
        yield (
            "Activations: errors, histograms, clipped values",
            "they need inputs: save(path, data=batches), batches as for calibrate.",
        )
    elif all(layer.output_sqnr is None for layer in layers):
        yield "Outputs against float", "they need the float model: save(path, data=batches, model=float_model)."
    if all(layer.weight_sqnr is None for layer in layers):
        yield "SQNR of weights", "it needs the float weights: save(path, model=float_model)."
    if not training.history.steps:
        yield "Ranges over training", "they are sampled while QuantizationAwareTraining trains."
    if not sensitivity:
        yield (
            "Sensitivity",
            "what each layer costs takes an analysis of its own: save(path, sensitivity=qlightning.sensitivity(...)).",
        )


def _size(modules: Iterable[nn.Module]) -> int:
    """Bytes of parameters and buffers, without what fake-quantizers keep."""
    total = 0
    for module in modules:
        own = [name for name, m in module.named_modules() if isinstance(m, FakeQuantize)]
        for name, tensor in module.state_dict().items():
            if isinstance(tensor, torch.Tensor) and not any(name.startswith(f"{fq}.") for fq in own):
                total += tensor.numel() * tensor.element_size()
    return total


def _versions(backend: str) -> dict[str, str]:
    found = {"qlightning": __version__, "torch": torch.__version__}
    packages = ["lightning", "pytorch-lightning", *([backend] if backend in ("openvino", "onnxruntime") else [])]
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _spell(value: Any) -> str:
    if isinstance(value, str):
        return value
    inner, keywords = getattr(value, "func", value), getattr(value, "keywords", None)
    name = getattr(inner, "__qualname__", None) or type(inner).__name__
    return f"{name}({', '.join(f'{key}={item!r}' for key, item in keywords.items())})" if keywords else str(name)
