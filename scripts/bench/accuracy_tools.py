"""What the benchmark of accuracy compares: ours on each backend, and the peers' post-training quantization.

Each takes a float net with batches of calibration images, and gives the int8 net as a function of images. All use 8
bits. Where a tool offers several calibrations, those that do well stand here beside its default.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qlightning.backends import available
from qlightning.steps import BiasCorrection, Step
from scripts.bench.runners import (
    Run,
    Subject,
    exported,
    onnxruntime_quantized,
    onnxruntime_run,
    openvino_run,
    pt2e,
    torch_run,
)


@dataclass(frozen=True)
class Tool:
    """One way to quantize a trained net.

    Attributes:
        name: What the tables call it.
        kind: "ours" or "peer".
        packages: Those whose versions matter.
        quantize: From a net and its calibration images to a function of images.
    """

    name: str
    kind: str
    packages: tuple[str, ...]
    quantize: Callable[[Subject], Run]


_PACKAGES = {"onednn": ("torch",), "openvino": ("openvino",), "onnxruntime": ("onnxruntime",)}
"""Of ours; the classic engines compute as onednn does, but for a rounding."""


def tools() -> list[Tool]:
    """All of them, ours first; those whose package is not there fail when they are to quantize."""
    backends = [name for name in available() if name in _PACKAGES]
    ours = [
        Tool(f"qlightning, {name}{words}", "ours", _PACKAGES[name], functools.partial(_ours, backend=name, steps=steps))
        for words, steps in (("", ()), (", bias correction", (BiasCorrection(),)))
        for name in backends
    ]
    fx, ort, nncf = ("torch",), ("onnxruntime",), ("nncf", "openvino")
    peers = [
        Tool("torch.ao FX, x86 default", "peer", fx, functools.partial(_fx, reduce_range=True)),
        Tool("torch.ao FX, full 8-bit ranges", "peer", fx, functools.partial(_fx, reduce_range=False)),
        Tool("torchao PT2E, x86", "peer", ("torchao",), lambda subject: torch_run(pt2e(subject))),
        *(
            Tool(f"ONNX Runtime, {words}", "peer", ort, functools.partial(_onnxruntime, method=name))
            for words, name in (("min-max", "MinMax"), ("percentile", "Percentile"), ("entropy", "Entropy"))
        ),
        Tool("NNCF + OpenVINO, default, single images", "peer", nncf, functools.partial(_nncf, single=True)),
        Tool("NNCF + OpenVINO, min-max", "peer", nncf, functools.partial(_nncf, single=True, minmax=True)),
        Tool("NNCF + OpenVINO, batches", "peer", nncf, _nncf),
        Tool("NNCF + OpenVINO, accurate bias correction", "peer", nncf, functools.partial(_nncf, accurate_bias=True)),
        Tool("Neural Compressor, PT2E", "peer", ("neural-compressor-pt",), _neural_compressor),
        Tool("Brevitas, graph (simulated)", "peer", ("brevitas",), functools.partial(_brevitas, whole_graph=True)),
        Tool("Brevitas, layerwise (simulated)", "peer", ("brevitas",), functools.partial(_brevitas, whole_graph=False)),
        Tool("AIMET, per channel (simulated)", "peer", ("aimet-torch",), _aimet),
    ]
    return [*ours, *peers]


def _ours(subject: Subject, backend: str, steps: tuple[Step, ...]) -> Run:
    from qlightning import quantize_model

    return torch_run(quantize_model(subject.net, subject.images, backend=backend, steps=steps))


def _fx(subject: Subject, reduce_range: bool) -> Run:
    import torch.ao.quantization as ao
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    mapping = ao.get_default_qconfig_mapping("x86")
    if not reduce_range:
        full = ao.QConfig(
            activation=ao.HistogramObserver.with_args(reduce_range=False),
            weight=ao.default_per_channel_weight_observer,
        )
        mapping = ao.QConfigMapping().set_global(full)
    prepared = prepare_fx(copy.deepcopy(subject.net), mapping, (subject.images[0],))
    _forward(prepared, subject)
    return torch_run(convert_fx(prepared))


def _onnxruntime(subject: Subject, method: str) -> Run:
    path = onnxruntime_quantized(subject, subject.folder / f"ort_{method}.onnx", method)
    return onnxruntime_run(path, len(subject.images[0]), torch.get_num_threads())


def _nncf(subject: Subject, single: bool = False, minmax: bool = False, accurate_bias: bool = False) -> Run:
    """Its default ranges are means of those of batches: narrower ones with single images, which its manual advises."""
    import nncf
    import openvino
    from nncf.quantization import range_estimator

    batches = [part.numpy() for x in subject.images for part in x.split(1 if single else len(x))]
    ranges = range_estimator.RangeEstimatorParametersSet.MINMAX
    model = nncf.quantize(
        openvino.Core().read_model(exported(subject)),
        nncf.Dataset(batches),
        fast_bias_correction=not accurate_bias,
        subset_size=len(batches),
        advanced_parameters=nncf.AdvancedQuantizationParameters(activations_range_estimator_params=ranges)
        if minmax
        else None,
    )
    return openvino_run(model, -1, torch.get_num_threads())


def _neural_compressor(subject: Subject) -> Run:
    from neural_compressor.torch.export import export
    from neural_compressor.torch.quantization import INT8StaticQuantConfig, convert, prepare

    batch = torch.export.Dim("batch", min=1, max=1024)
    graph = export(copy.deepcopy(subject.net), (subject.images[0],), ({0: batch},))
    prepared = prepare(graph, INT8StaticQuantConfig(), example_inputs=(subject.images[0],))
    _forward(prepared, subject)
    return torch_run(convert(prepared))


def _brevitas(subject: Subject, whole_graph: bool) -> Run:
    """Fake-quantized, as Brevitas has no int8 kernels for CPUs; layer by layer, sums and the like stay float."""
    from brevitas.graph.calibrate import bias_correction_mode, calibration_mode
    from brevitas.graph.quantize import layerwise_quantize, preprocess_for_quantize, quantize

    plain = preprocess_for_quantize(copy.deepcopy(subject.net))
    net: nn.Module = (quantize if whole_graph else layerwise_quantize)(plain).eval()
    with torch.no_grad(), calibration_mode(net):
        _forward(net, subject)
    with torch.no_grad(), bias_correction_mode(net):
        _forward(net, subject)
    return torch_run(net)


def _aimet(subject: Subject) -> Run:
    """Fake-quantized with its rules for weights per channel, as its int8 kernels are those of phones."""
    import aimet_torch
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.common.defs import QuantScheme
    from aimet_torch.common.quantsim_config.utils import get_path_for_per_channel_config
    from aimet_torch.model_preparer import prepare_model

    images = subject.images[0]
    net = prepare_model(copy.deepcopy(subject.net))
    fold_all_batch_norms(net, tuple(images.shape), images)
    scheme = QuantScheme.post_training_tf_enhanced
    sim = aimet_torch.QuantizationSimModel(net, images, scheme, config_file=get_path_for_per_channel_config())
    sim.compute_encodings(lambda net: _forward(net, subject))
    return torch_run(sim.model)


def _forward(net: Callable[[Tensor], Any], subject: Subject) -> None:
    with torch.no_grad():
        for x in subject.images:
            net(x)
