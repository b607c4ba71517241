"""ONNX: the QDQ form as a graph of QuantizeLinear and DequantizeLinear, which ONNX Runtime and OpenVINO run in int8."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from typing_extensions import Unpack

from qlightning.backends.qdq import QUANTIZE, QUANTIZE_PER_CHANNEL, QParams, aten
from qlightning.errors import ArtifactError
from qlightning.export.form import first_paragraph, tried_form
from qlightning.export.metadata import KEY, Metadata, Notes, collect, input_specs
from qlightning.files import written_whole
from qlightning.graph.qdq_module import QDQModule, with_free_batch
from qlightning.nn.quantized import QuantizedLayer

OPSET = 20
"""Of 2023: what ONNX Runtime reads from 1.17 on and OpenVINO from 2024 on."""

_LAYERS = ("Conv", "ConvTranspose", "Gemm")


def save_onnx(int8: nn.Module, path: str | Path, *, example_inputs: Any = None, **notes: Unpack[Notes]) -> Metadata:
    """Writes an int8 model as ONNX with explicit quantization (QDQ), checked by ONNX's own checker.

    Weights are int8 in the file, biases int32 with the scale of the sums, as runtimes expect them; BatchNorm is folded.
    The batch size is free where the model allows. The file is complete or not there.

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        path: The file, ``.onnx``.
        example_inputs: The arguments of a call; None: like one that the model has seen.
        notes: What else the file is to say.

    Returns:
        The facts that the file carries, in its ``metadata_props``.

    Raises:
        ConfigError: The model is no int8 graph as a whole; names the parts that are.
        ArtifactError: The shapes of its inputs are not known, or ONNX has no operator for a part of it.
        ImportError: onnx or onnxscript is not installed.
    """
    proto, found = onnx_model(int8, example_inputs, **notes)
    if any(isinstance(layer, QuantizedLayer) and bool(layer.zero_point.any()) for layer in int8.modules()):
        warnings.warn(
            f"{path}: weights have zero points, which the kernels of ONNX Runtime (1.32) get wrong. Use a symmetric "
            "scheme for the weights there, or switch the runtime's graph optimizations off.",
            stacklevel=3,
        )
    with written_whole(path) as temporary:
        _onnx().save_model(proto, temporary)
    return found


def onnx_model(int8: nn.Module, example_inputs: Any = None, **notes: Unpack[Notes]) -> tuple[Any, Metadata]:
    """The ONNX model that :func:`save_onnx` writes, as a ``ModelProto``, and its facts."""
    onnx = _onnx()
    qdq = tried_form(int8, example_inputs)
    proto, free = _exported(replace(qdq, module=_with_clamps(qdq.module)))
    _quantize_biases(onnx, proto)
    found = collect(int8, input_specs(qdq, free), **notes)
    onnx.helper.set_model_props(proto, {KEY: found.to_json()})
    proto.producer_name = "qlightning"
    onnx.checker.check_model(proto, full_check=True)
    return proto, found


def onnx_metadata(path: str | Path) -> Metadata:
    """The facts that a file from :func:`save_onnx` carries.

    Raises:
        ArtifactError: It is no such file, or damaged.
        FileNotFoundError: There is no file.
        ImportError: onnx is not installed.
    """
    onnx = _onnx()
    with open(path, "rb") as file:
        content = file.read()
    try:
        proto = onnx.ModelProto.FromString(content)  # no external data is looked for
        texts = [entry.value for entry in proto.metadata_props if entry.key == KEY]
    except Exception as error:  # protobuf's own, which has several names
        raise ArtifactError(f"{path} is no ONNX file: {error}.") from error
    if len(texts) != 1:
        raise ArtifactError(f"{path}: there is no metadata of qlightning in it.")
    return Metadata.from_json(texts[0], str(path))


def _onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
        import onnxscript  # noqa: F401  torch's exporter is written in it
    except ImportError as error:
        raise ImportError("ONNX needs onnx and onnxscript: pip install 'qlightning[onnx]'.") from error
    return onnx


def _with_clamps(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that clamps values before it rounds them to a grid of fewer codes than its dtype has.

    QuantizeLinear saturates at the ends of the dtype alone.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.target is QUANTIZE_PER_CHANNEL and _is_narrow(*node.args[4:7]):
            raise ArtifactError("ONNX has no grids of fewer than 8 bits a channel for activations; save it as .pt2.")
        if node.target is QUANTIZE:
            q = QParams.of(node)
            if _is_narrow(q.quant_min, q.quant_max, q.dtype):
                ends = [(end - q.zero_point) * q.scale for end in (q.quant_min, q.quant_max)]
                with graph.inserting_before(node):
                    node.args = (graph.call_function(aten.clamp.default, (node.args[0], *ends)), *node.args[1:])
    return fx.GraphModule(module, graph, type(module).__name__).eval()


def _is_narrow(quant_min: int, quant_max: int, dtype: torch.dtype) -> bool:
    info = torch.iinfo(dtype)
    return (quant_min, quant_max) != (info.min, info.max)


def _exported(qdq: QDQModule) -> tuple[Any, list[list[int]]]:
    """The graph as ONNX, and the free dimensions of each input."""
    free = [[0] if x.dim() else [] for x in qdq.example]
    example = with_free_batch(qdq.example)
    failures: list[Exception] = []
    none: list[list[int]] = [[] for _ in free]
    for sizes in (free, none):  # with a free batch size; else with that of the example
        try:
            return _torch_export(qdq, example if any(sizes) else qdq.example, sizes), sizes
        except Exception as error:  # torch's exporter raises whatever went wrong in a pass
            failures.append(error)
    cause = failures[-1].__cause__ or failures[-1]  # the exporter's own error is about its steps
    raise ArtifactError(
        f"{type(qdq.module).__name__} cannot be written as ONNX: {first_paragraph(cause)}. Keep what torch's exporter "
        "lacks out of the model, or save it as .pt2."
    ) from failures[-1]


def _torch_export(qdq: QDQModule, example: tuple[Tensor, ...], free: list[list[int]]) -> Any:
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple(dict.fromkeys(sizes, batch) for sizes in free)
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            qdq.module,
            example,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(qdq.names),
            dynamic_shapes=shapes if any(free) else None,
            optimize=True,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it torch's exporter does not log its steps."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _quantize_biases(onnx: Any, proto: Any) -> None:
    """Gives the biases of int8 layers the form that int8 kernels add: int32 in steps of input scale times weight scale.

    ``bias = DequantizeLinear(int32 codes, input scale * weight scale)``; rounding moves it by half such a step at most.
    One that would exceed int32 stays float.
    """
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made = {output: node for node in graph.node for output in node.output}

    def value(name: str) -> Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(constants[name]).copy())

    new_nodes = []
    for node in graph.node:
        pair = [n for name in node.input[:2] if (n := made.get(name)) is not None and n.op_type == "DequantizeLinear"]
        scales = [constants[n.input[1]] for n in pair if n.input[1] in constants]
        # Two scales, that of the input one for all channels.
        is_int8 = len(scales) == 2 and not scales[0].dims
        if node.op_type in _LAYERS and is_int8 and len(node.input) > 2 and node.input[2] in constants:
            step = value(scales[0].name).double() * value(scales[1].name).double()
            bias = value(node.input[2])
            step = step.expand(bias.shape)
            codes = (bias.double() / step.float().double()).round()
            if bool((codes.abs() < 2**31).all()):
                name = f"{node.name}_bias"
                for suffix, tensor in (("int32", codes.int()), ("scale", step.float())):
                    graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy(), f"{name}_{suffix}"))
                inputs = [f"{name}_int32", f"{name}_scale"]
                new_nodes.append(onnx.helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=0))
                node.input[2] = name
        new_nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in new_nodes]
    del graph.node[:]
    graph.node.extend(copies)
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
