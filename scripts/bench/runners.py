"""What the benchmark of int8 nets times: the float net, ours on each backend, and the peers.

Each family builds what does not depend on batch and threads once for a net (:class:`Family.prepare`), and compiles it
for a case (:class:`Family.compile`). All of them calibrate on the same images.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qlightning.backends import available

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A float net, and what it is calibrated on.

    Attributes:
        name: What torchvision calls it.
        net: The net in eval mode.
        images: Batches of one size.
        folder: Where files of it can be kept while the benchmark runs.
    """

    name: str
    net: nn.Module
    images: tuple[Tensor, ...]
    folder: Path


@dataclass(frozen=True)
class Family:
    """One way to run a net.

    Attributes:
        name: What the tables call it.
        kind: "float", "ours" or "peer".
        prepare: From a subject to what all cases share.
        compile: From that, the batch size and the number of threads to a function of images.
    """

    name: str
    kind: str
    prepare: Callable[[Subject], Any]
    compile: Callable[[Any, int, int], Run]


def families() -> list[Family]:
    """All that can run here, the float net first."""
    float_nets = [
        Family("float", "float", lambda s: s.net, lambda net, *case: torch_run(net)),
        Family("float, channels_last", "float", _channels_last, lambda net, *case: torch_run(net, channels_last=True)),
    ]
    ours = [
        Family(name, "ours", functools.partial(_ours, backend=name), lambda convert, *case: torch_run(convert()))
        for name in available()
        if name != "reference"
    ]
    peers = [
        Family("torch.ao FX, x86", "peer", _fx, lambda net, *case: torch_run(net)),
        Family("ONNX Runtime, static", "peer", _onnxruntime_quantized, onnxruntime_run),
        Family("OpenVINO, ORT's QDQ file", "peer", _onnxruntime_quantized, openvino_run),
        Family("OpenVINO, NNCF", "peer", _nncf, openvino_run),
        Family("torchao PT2E, Inductor", "peer", pt2e, _inductor),
    ]
    return [*float_nets, *ours, *peers]


# In torch


def torch_run(net: Callable[[Tensor], Tensor], channels_last: bool = False) -> Run:
    """A net of torch, without gradients."""

    def run(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return net(x.contiguous(memory_format=torch.channels_last) if channels_last else x)

    return run


def _channels_last(subject: Subject) -> nn.Module:
    return copy.deepcopy(subject.net).to(memory_format=torch.channels_last)


def _ours(subject: Subject, backend: str) -> Callable[[], nn.Module]:
    from qlightning import calibrate, convert, prepare

    prepared = calibrate(prepare(copy.deepcopy(subject.net), backend=backend, mode="ptq"), subject.images)
    return lambda: convert(prepared)


def _fx(subject: Subject) -> nn.Module:
    import torch.ao.quantization as ao
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    prepared = prepare_fx(copy.deepcopy(subject.net), ao.get_default_qconfig_mapping("x86"), (subject.images[0],))
    with torch.no_grad():
        for x in subject.images:
            prepared(x)
    return convert_fx(prepared)


def pt2e(subject: Subject) -> nn.Module:
    """Quantized by torchao for x86; computes on rounded float values until Inductor compiles it."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    batch = torch.export.Dim("batch", min=1, max=1024)
    exported = torch.export.export(
        copy.deepcopy(subject.net), (subject.images[0],), dynamic_shapes=({0: batch},), strict=True
    ).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    with torch.no_grad():
        for x in subject.images:
            prepared(x)
    return convert_pt2e(prepared)


def _inductor(net: nn.Module, batch: int, threads: int) -> Run:
    from torch._inductor import config

    torch._dynamo.reset()
    compiled = torch.compile(net, dynamic=False)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad(), config.patch(freezing=True):
            result: Tensor = compiled(x)
            return result

    return run


# Runtimes


def exported(subject: Subject) -> Path:
    """The float net as ONNX, with a free batch size."""
    path = subject.folder / "float.onnx"
    if not path.exists():
        batch = torch.export.Dim("batch", min=1, max=1024)
        torch.onnx.export(
            subject.net,
            (subject.images[0],),
            path,
            dynamo=True,
            dynamic_shapes=({0: batch},),
            external_data=False,
            verbose=False,
        )
    return path


def _onnxruntime_quantized(subject: Subject) -> Path:
    path = subject.folder / "ort_int8.onnx"
    return path if path.exists() else onnxruntime_quantized(subject, path, "MinMax")


def onnxruntime_quantized(subject: Subject, path: Path, method: str) -> Path:
    """ONNX Runtime's own static quantization, in its QDQ form, with its own preparation of the graph.

    Args:
        subject: The float net.
        path: The file to write.
        method: The name of one of its ways to calibrate; its default is "MinMax".
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = subject.folder / "ort_prepared.onnx"
    quant_pre_process(exported(subject), prepared)
    quantization.quantize_static(
        prepared,
        path,
        Reader(subject.images),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        calibrate_method=quantization.CalibrationMethod[method],
    )
    return path


class Reader:
    """Calibration images as ONNX Runtime asks for them."""

    def __init__(self, images: tuple[Tensor, ...]) -> None:
        self._images: Iterator[Tensor] = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        image = next(self._images, None)
        return None if image is None else {"x": image.numpy()}


def onnxruntime_run(path: Path, batch: int, threads: int) -> Run:
    """A file in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Threads that spin while others are timed would count as theirs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _nncf(subject: Subject) -> Any:
    import nncf
    import openvino

    model = openvino.Core().read_model(exported(subject))
    return nncf.quantize(model, nncf.Dataset([x.numpy() for x in subject.images]), subset_size=len(subject.images))


def openvino_run(model: Any, batch: int, threads: int) -> Run:
    """A file or a model in OpenVINO; a batch size of -1 leaves it free."""
    import openvino

    core = openvino.Core()
    net = core.read_model(model) if isinstance(model, Path) else model.clone()
    net.reshape([batch, *net.input(0).partial_shape[1:]])
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(net, "CPU", settings).create_infer_request()
    return lambda x: torch.from_numpy(request.infer([x.numpy()], share_inputs=True)[0].copy())


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the files of one net."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
