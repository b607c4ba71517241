""".pt2: a torch.export archive of the QDQ form, from which the int8 model is built again without its source code."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import operator
import types
import warnings
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from typing_extensions import Unpack

from qlightning.backends import Backend
from qlightning.backends.qdq import DEQUANTIZE_PER_CHANNEL, QUANTIZE, QParams, layer_path
from qlightning.errors import ArtifactError, QuantizationError
from qlightning.export.archive import Archive
from qlightning.export.choice import backend_for
from qlightning.export.form import first_paragraph, tried_form
from qlightning.export.graph_json import check_paths, decode, encode
from qlightning.export.metadata import Metadata, Notes, collect, dtype_of, input_specs
from qlightning.files import written_whole
from qlightning.graph.bind import bind
from qlightning.graph.convert import ConvertedModule, stays_in_eval
from qlightning.graph.programs import Int8Captured, Program
from qlightning.graph.qdq_module import QDQModule, with_free_batch
from qlightning.graph.report import LayerReport, Report, converted_layer
from qlightning.graph.signature import describe_call
from qlightning.graph.state import guard
from qlightning.nn.quantized import QuantizedLayer, dequantized_weight
from qlightning.qscheme import QScheme
from qlightning.strict_json import parse

_METADATA, _GRAPH = "qlightning.json", "qlightning.graph.json"
_PARTS = ("codes", "scale", "zero_point", "bias")


def save_pt2(int8: nn.Module, path: str | Path, *, example_inputs: Any = None, **notes: Unpack[Notes]) -> Metadata:
    """Writes an int8 model as a ``torch.export`` archive of its QDQ form; batch and, where it can, image size are free.

    ``load_pt2`` makes an int8 model of it on any machine with torch and qlightning; ``torch.export.load`` (with
    ``import torch.ao.quantization.fx._decomposed`` before) gives the QDQ form, which computes in float. The file is
    complete or not there.

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        path: The file, ``.pt2``.
        example_inputs: The arguments of a call; None: like one that the model has seen.
        notes: What else the file is to say.

    Returns:
        The facts that the file carries.

    Raises:
        ConfigError: The model is no int8 graph as a whole; names the parts that are.
        ArtifactError: The shapes of its inputs are not known, or torch.export cannot take it.
    """
    qdq = tried_form(int8, example_inputs)
    program, free = _exported(qdq)
    found = collect(int8, input_specs(qdq, free), **notes)
    structure = _structure(qdq)
    check_paths([*program.state_dict, *program.constants], type(int8).__name__)
    with written_whole(path) as temporary:
        torch.export.save(program, temporary)  # says where in the archive each tensor lies
        content = json.dumps(
            {
                "nodes": encode(program, structure),
                "tensors": _places(temporary, program),
                "layers": {n: _layer(m) for n, m in int8.named_modules() if isinstance(m, QuantizedLayer)},
            }
        )
        digest = hashlib.sha256(content.encode()).hexdigest()
        extra = {_GRAPH: content, _METADATA: json.dumps({"facts": found.to_json(), "graph_sha256": digest})}
        torch.export.save(program, temporary, extra_files=extra)
    return found


def load_pt2(path: str | Path, *, backend: str | Backend = "auto") -> nn.Module:
    """Makes an int8 model of a file from :func:`save_pt2`; nothing in the file is executed.

    Only plain facts, the names of torch's tensor operators and raw tensors are read from it: no pickle, no code. The
    checksums in it find damage; they are no signature of its origin.

    Args:
        path: The file.
        backend: What it is to run on; ``"auto"``: the fastest here that can run it, with a warning where this is
            another than the one that it was made for.

    Returns:
        An int8 model like the saved one, on the CPU: ``report``, ``weight()`` of each layer, copies. It takes the
        tensors of the call that was saved, one after the other or by name.

    Raises:
        ArtifactError: It is no such file, or damaged; says what was found. Nothing is loaded then.
        BackendError: The backend cannot run here, or not these ranges.
        FileNotFoundError: There is no file.
    """
    with Archive(path) as archive:
        facts, content = _contents(archive)
        members: dict[str, bytearray] = {}
        tensors = {name: _tensor(archive, members, name, place) for name, place in content["tensors"].items()}
    graph = decode(content["nodes"], set(tensors), str(path))
    root = _tree(tensors, content["layers"], str(path))
    try:
        _fold_weights(graph, root)
        _drop_indices(graph)
        chosen = backend_for(backend, facts, *_schemes(graph, root))
        return _bound(root, graph, facts, chosen)
    except (QuantizationError, Warning):
        raise
    except Exception as error:  # calls whose arguments do not fit together
        raise ArtifactError(f"{path}: its graph is damaged: {type(error).__name__}: {error}.") from error


def pt2_metadata(path: str | Path) -> Metadata:
    """The facts that a file from :func:`save_pt2` carries.

    Raises:
        ArtifactError: It is no such file, or damaged.
        FileNotFoundError: There is no file.
    """
    with Archive(path) as archive:
        return _contents(archive)[0]


# Writing


def _exported(qdq: QDQModule) -> tuple[torch.export.ExportedProgram, list[list[int]]]:
    """The program, and the free dimensions of each input: batch and image size as far as torch.export lets them be."""
    auto, batch = torch.export.Dim.AUTO, torch.export.Dim("batch", min=1)
    example = with_free_batch(qdq.example)
    batches = tuple({0: batch} if x.dim() else {} for x in example)
    images = tuple(
        {**sizes, 2: auto, 3: auto} if x.dim() == 4 else sizes for x, sizes in zip(example, batches, strict=True)
    )
    failure: Exception = RuntimeError()
    for shapes, inputs in ((images, example), (batches, example), (None, qdq.example)):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(qdq.module, inputs, dynamic_shapes=shapes)
            return program, _free(program)
        except Exception as error:  # torch.export raises whatever went wrong
            failure = error
    raise ArtifactError(
        f"{type(qdq.module).__name__}: torch.export cannot take it: {first_paragraph(failure)}."
    ) from failure


def _free(program: torch.export.ExportedProgram) -> list[list[int]]:
    """The dimensions of each input whose sizes are no constants of the program."""
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return [[dim for dim, size in enumerate(values[name].shape) if not isinstance(size, int)] for name in names]


def _structure(qdq: QDQModule) -> Any:
    with torch.no_grad():
        return qdq.module(*qdq.example)


def _places(path: str, program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Where in the archive the bytes of each tensor lie, and what they are."""
    with zipfile.ZipFile(path) as archive:
        configs = [name for name in archive.namelist() if name.endswith("_config.json")]
        entries = {
            name: f"{config.split('/', 1)[1].rsplit('/', 1)[0]}/{entry['path_name']}"
            for config in configs
            for name, entry in json.loads(archive.read(config))["config"].items()
        }
    places = {}
    for name, value in {**program.state_dict, **program.constants}.items():
        if isinstance(value, Tensor):
            places[name] = {
                "member": entries[name],
                "dtype": str(value.dtype)[6:],
                "shape": list(value.shape),
                "stride": list(value.stride()),
            }
    return places


def _layer(layer: QuantizedLayer) -> dict[str, Any]:
    return {"kind": layer.kind, "scheme": asdict(layer.scheme), "transposed_groups": layer.transposed_groups}


# Reading


def _contents(archive: Archive) -> tuple[Metadata, dict[str, Any]]:
    where = str(archive.path)
    try:
        header = parse(archive.read(f"extra/{_METADATA}"))
        digest = header["graph_sha256"]
        facts = Metadata.from_json(header["facts"], where)
        text = archive.read(f"extra/{_GRAPH}")
        if hashlib.sha256(text).hexdigest() != digest:
            raise ArtifactError(f"{where}: its graph does not have the checksum that it was saved with.")
        content = parse(text)
        checked = {name: dict(content[name]) for name in ("tensors", "layers")}
        check_paths([*checked["tensors"], *checked["layers"]], where)
        return facts, {**checked, "nodes": content["nodes"]}
    except ArtifactError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ArtifactError(f"{where}: its contents are damaged: {type(error).__name__}: {error}.") from error


def _tensor(archive: Archive, members: dict[str, bytearray], name: str, place: Any) -> Tensor:
    """A tensor of an archive; those that lie in one member share its memory, so that all are no larger than the file.

    Args:
        archive: The file.
        members: What of it was read before; one more is added.
        name: The name of the tensor.
        place: Where it lies and what it is, not trusted.
    """
    try:
        member, dtype = str(place["member"]), dtype_of(place["dtype"])
        shape, stride = ([int(size) for size in place[key]] for key in ("shape", "stride"))
        numel = math.prod(shape)
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if min([*shape, *stride, 0]) < 0 or (numel and last >= numel):
            raise ValueError(f"shape {shape}, stride {stride}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(f"{archive.path}: the tensor {str(name)[:100]!r} is damaged: {error}.") from error
    size = numel * dtype.itemsize
    if member not in members or len(members[member]) != size:
        members[member] = bytearray(archive.read(member, size))
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(members[member], dtype=dtype).as_strided(shape, stride)


def _tree(tensors: dict[str, Tensor], layers: dict[str, Any], where: str) -> nn.Module:
    """Modules that hold the tensors under their names; the int8 layers are such."""
    root = nn.Module()
    try:
        parts = [part for path in layers for name in _PARTS if (part := tensors.get(f"{path}.{name}")) is not None]
        if len(places := [part.data_ptr() for part in parts if part.numel()]) != len(set(places)):
            raise ValueError("two share a tensor, of which kernels keep a copy each")
        for path, entry in sorted(layers.items()):
            scheme, groups = QScheme(**entry["scheme"]), entry["transposed_groups"]
            if groups is not None and (not isinstance(groups, int) or groups < 1):
                raise ValueError(f"transposed_groups={groups!r}")
            codes, scale, zero_point, bias = (tensors.get(f"{path}.{part}") for part in _PARTS)
            if codes is None or scale is None or zero_point is None:
                continue  # a layer that the saved call does not reach
            layer = QuantizedLayer(codes, scale, zero_point, bias, groups, str(entry["kind"]), scheme)
            layer.weight()  # checks that its parts fit together
            _put(root, path, layer)
        for name, tensor in tensors.items():
            owner, _, attribute = name.rpartition(".")
            if owner not in layers or attribute not in _PARTS:
                _put(root, name, tensor)
    except ArtifactError:
        raise
    except Exception as error:  # what damaged entries lead to
        raise ArtifactError(f"{where}: its layers are damaged: {type(error).__name__}: {error}.") from error
    return root


def _put(root: nn.Module, path: str, value: nn.Module | Tensor) -> None:
    *parents, name = path.split(".")
    module = root
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    if isinstance(value, Tensor):
        module.register_buffer(name, value)
    elif (before := module._modules.get(name)) is not None:
        raise ValueError(f"{path} is there twice, as {type(before).__name__}")
    else:
        module.add_module(name, value)


def _fold_weights(graph: fx.Graph, root: nn.Module) -> None:
    """Says again which weights are those of int8 layers: exported, they are calls on plain tensors."""
    for node in list(graph.nodes):
        if node.target is not DEQUANTIZE_PER_CHANNEL or not isinstance(node.args[0], fx.Node):
            continue
        path, _, attribute = str(node.args[0].target).rpartition(".")
        layer = _submodule(root, path) if node.args[0].op == "get_attr" and attribute == "codes" else None
        if not isinstance(layer, QuantizedLayer):
            continue
        last = node
        while layer.transposed_groups is not None and len(last.users) == 1:
            (user,) = last.users
            if user.target not in _SWAPS:
                break
            last = user
        with graph.inserting_before(node):
            weight = graph.call_function(dequantized_weight, (*node.args[:3], layer.transposed_groups))
        last.replace_all_uses_with(weight)
    graph.eliminate_dead_code()


aten = torch.ops.aten
_SWAPS = {aten.reshape.default, aten.view.default, aten.transpose.int, aten.clone.default, aten._unsafe_view.default}


def _drop_indices(graph: fx.Graph) -> None:
    """Calls max poolings, of which an exported graph takes the first of two results, for that alone."""
    for node in list(graph.nodes):
        if node.target in _WITH_INDICES and all(user.target is operator.getitem for user in node.users):
            if any(user.args[1] != 0 for user in node.users):
                continue
            node.target = _WITH_INDICES[node.target]
            for user in list(node.users):
                user.replace_all_uses_with(node)
                graph.erase_node(user)


_WITH_INDICES: dict[Any, Any] = {
    aten.adaptive_max_pool1d.default: F.adaptive_max_pool1d,
    aten.adaptive_max_pool2d.default: F.adaptive_max_pool2d,
    aten.adaptive_max_pool3d.default: F.adaptive_max_pool3d,
    aten.max_pool1d_with_indices.default: F.max_pool1d,
    aten.max_pool2d_with_indices.default: F.max_pool2d,
    aten.max_pool3d_with_indices.default: F.max_pool3d,
}


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _schemes(graph: fx.Graph, root: nn.Module) -> tuple[set[QScheme], set[QScheme]]:
    """The schemes of a graph's activations and weights."""
    activations = {_activation(node) for node in graph.nodes if node.target is QUANTIZE}
    paths = {layer_path(node) for node in graph.nodes if layer_path(node) is not None}
    return activations, {
        layer.scheme for path in paths if isinstance(layer := root.get_submodule(str(path)), QuantizedLayer)
    }


def _activation(node: fx.Node) -> QScheme:
    qparams = QParams.of(node)
    signed = qparams.dtype == torch.int8
    bits = qparams.quant_max.bit_length() + int(signed)
    return QScheme(bits=bits, signed=signed, narrow_range=qparams.quant_min % 2 == 1)


def _bound(root: nn.Module, graph: fx.Graph, facts: Metadata, backend: Backend) -> nn.Module:
    names = [spec.name for spec in facts.inputs]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(names) != len(placeholders):
        raise ArtifactError(f"Its graph takes {len(placeholders)} inputs, its metadata names {len(names)}.")
    cls = types.new_class("Int8Model", (_Loaded,), {}, lambda body: body.update(forward=_forward(names)))
    root.__class__ = cls
    spec, _ = describe_call(inspect.signature(root.forward), tuple(torch.empty(0) for _ in names), {})
    captured = Int8Captured(cls)
    program = Program(backend.lower(graph, root), (), graph)
    program.example = tuple((spec.example, dtype_of(spec.dtype)) for spec in facts.inputs)
    captured.add(spec, False, program)
    captured.add(spec, True, program)
    bind(root, captured, ConvertedModule, train=stays_in_eval)
    root.__dict__["_report"] = _report(root, facts, backend)
    root.__dict__["_backend"] = backend
    root.__dict__["metadata"] = facts
    guard(root)
    return root.eval()


class _Loaded(nn.Module):
    """An int8 model from a file."""


def _forward(names: list[str]) -> Any:
    def forward(self: nn.Module, *args: Tensor) -> Any:
        raise NotImplementedError  # replaced by the graph

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def _report(root: nn.Module, facts: Metadata, backend: Backend) -> Report:
    own = {name: m for name, m in root.named_modules() if isinstance(m, QuantizedLayer)}
    layers = tuple(
        converted_layer(row.name, own[row.name])
        if row.name in own
        else LayerReport(row.name, row.kind, row.int8, row.reason, row.scheme)
        for row in facts.layers
    )
    return Report(backend.name, facts.activation, layers, (), backend.explain_ranges(), backend.explain_choice())
