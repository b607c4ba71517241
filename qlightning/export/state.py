"""An int8 state dict as ``.safetensors``, from which the int8 model is built on an instance of the float one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from qlightning.backends import Backend
from qlightning.errors import ArtifactError, ConfigError, QuantizationError
from qlightning.export.choice import backend_for
from qlightning.export.metadata import KEY, InputSpec, Metadata, Notes, collect, dtype_of, input_specs
from qlightning.export.settings import read_settings
from qlightning.export.template import template
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.graph import convert, facts, is_prepared, prepare
from qlightning.graph.convert import lower_again
from qlightning.graph.failure import TraceError
from qlightning.graph.preparation import Grid, Preparation, captured_roots
from qlightning.graph.programs import Captured
from qlightning.graph.qdq_module import qdq_module
from qlightning.graph.signature import LEAF, VALUE
from qlightning.graph.spelling import spell
from qlightning.nn.quantized import QuantizedLayer, has_int8_layers
from qlightning.strict_json import parse
from qlightning.tensor_file import read_safetensors, write_safetensors

FORMAT = 2
MAX_NUMBER = 2**16
"""The largest integer of a call that is kept: a forward may count up to it while it is traced."""
_STATE = f"{KEY}.state"


def save_state(int8: nn.Module, path: str | Path, *, example_inputs: Any = None, **notes: Unpack[Notes]) -> Metadata:
    """Writes the state dict of an int8 model, with how it was made and where its activations lie as JSON.

    :func:`load_state` needs an instance of the float model beside it, and the source code of that. Models that are no
    single graph, which no other kind of file takes, can be saved so. The file is complete or not there.

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        path: The file, ``.safetensors``.
        example_inputs: The arguments of a call, from which the shapes in the facts come; None: like one that the model
            has seen.
        notes: What else the file is to say.

    Returns:
        The facts that the file carries.

    Raises:
        ConfigError: The model is not in int8, or was loaded from a ``.pt2`` file.
        ImportError: safetensors is not installed.
    """
    preparation: Preparation | None = int8.__dict__.get("_preparation")
    if preparation is None or is_prepared(int8) or not has_int8_layers(int8):
        known = isinstance(int8.__dict__.get("metadata"), Metadata)
        raise ConfigError(
            f"{type(int8).__name__} "
            + (
                "was loaded from a .pt2 file and does not know the float model that it was made from: copy that file."
                if known
                else "is not in int8: convert(prepared) or quantize_model(model, batches) first."
            )
        )
    tensors = {name: value for name, value in int8.state_dict().items() if isinstance(value, Tensor)}
    found = collect(int8, _inputs(int8, example_inputs), **notes)
    calls = {name: list(_calls(root)) for name, root in captured_roots(int8)}
    _warn_of_lost(int8, calls)
    state = {
        "format": FORMAT,
        "settings": facts.collect(preparation.qconfig, preparation.backend.name, preparation.mode),
        "grids": {name: _grid_facts(grid) for name, grid in preparation.grids.items()},
        "calls": {name: [call for call, _ in entries] for name, entries in calls.items()},
        "graphs": {name: [graph for _, graph in entries] for name, entries in calls.items()},
    }
    write_safetensors(path, tensors, {KEY: found.to_json(), _STATE: json.dumps(state)})
    return found


def load_state(path: str | Path, model: nn.Module, *, backend: str | Backend = "auto") -> nn.Module:
    """Makes an int8 model of a file from :func:`save_state`; nothing in the file is executed.

    Args:
        path: The file.
        model: An instance of the float model, of any weights; left as it is.
        backend: As for ``qlightning.load``.

    Returns:
        An int8 model of the class of ``model``, on the CPU, as the saved one was.

    Raises:
        ArtifactError: It is no such file, is damaged, or belongs to another model; says what was found.
        BackendError: The backend cannot run here, or not these ranges.
        ConfigError: ``model`` is no float model.
        FileNotFoundError: There is no file.
    """
    if not isinstance(model, nn.Module) or is_prepared(model) or has_int8_layers(model):
        raise ConfigError(f"model: an instance of the float model is needed, got {type(model).__name__}.")
    tensors, metadata = read_safetensors(path)
    where = str(path)
    found = Metadata.from_json(metadata.get(KEY), where)
    state = _state(metadata.get(_STATE), where)
    qconfig, _, mode = read_settings(state["settings"], where, observers=False)
    copied = template(model, tensors)
    try:
        schemes = [(config.activation, config.weight) for config in qconfig.all()]
        chosen = backend_for(backend, found, *map(set, zip(*schemes, strict=True)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what was said when the model was made
            prepared = prepare(copied, qconfig, backend="reference", mode=mode)
            _restore(prepared, state, where)
            int8 = convert(prepared)
    except QuantizationError as error:
        raise error if where in str(error) else type(error)(f"{where}: {error}") from error
    except Exception as error:  # what damaged values lead to
        raise ArtifactError(f"{path}: its settings are damaged: {type(error).__name__}: {error}.") from error
    _fill(int8, tensors, where)
    _compare(int8, state, where)
    lower_again(int8, chosen)
    if found.inputs and "_captured" in int8.__dict__:
        int8.__dict__["_captured"].remember(
            [spec.name for spec in found.inputs], tuple((spec.example, dtype_of(spec.dtype)) for spec in found.inputs)
        )
    int8.__dict__["metadata"] = found
    return int8


def state_metadata(path: str | Path) -> Metadata:
    """The facts that a file from :func:`save_state` carries.

    Raises:
        ArtifactError: It is no such file, or damaged.
        FileNotFoundError: There is no file.
    """
    _, metadata = read_safetensors(path)
    return Metadata.from_json(metadata.get(KEY), str(path))


# Writing


def _inputs(int8: nn.Module, example_inputs: Any) -> tuple[InputSpec, ...]:
    """What the model takes, where it is one graph that was called; the batch size is free."""
    try:
        qdq = qdq_module(int8, example_inputs)
    except (ConfigError, ArtifactError):
        return ()
    return input_specs(qdq, [[0] if x.dim() else [] for x in qdq.example])


def _grid_facts(grid: Grid) -> dict[str, Any]:
    return {"scale": grid.scale.tolist(), "zero_point": grid.zero_point.tolist(), "ndims": list(grid.ndims)}


def _calls(root: nn.Module) -> Iterator[tuple[Any, list[str] | None]]:
    """The ways of calling an int8 module, but for those with values that JSON lacks, and the QDQ graph of each."""
    captured: Captured = root.__dict__["_captured"]
    for (spec, training), programs in captured.programs.items():
        if training:  # an int8 module computes the same in both modes
            continue
        positional, keywords = spec.key
        graphs = (spell(p.qdq, root) for p in programs if p.qdq is not None and p.fits(root))
        try:
            call = [[_spelled(entry) for entry in positional], [[name, _spelled(entry)] for name, entry in keywords]]
        except TypeError:
            continue
        yield call, next(graphs, None)


def _warn_of_lost(int8: nn.Module, calls: Mapping[str, list[Any]]) -> None:
    for name, root in captured_roots(int8):
        known = [spec for spec, training in root.__dict__["_captured"].programs if not training]
        if lost := len(known) - len(calls[name]):
            warnings.warn(
                f"{type(root).__name__}: {lost} of the ways of calling it ({'; '.join(s.describe() for s in known)}) "
                f"are not kept in the file: integers beyond {MAX_NUMBER}, or values that JSON lacks.",
                stacklevel=5,
            )


def _is_large(content: Any) -> bool:
    return isinstance(content, int) and abs(content) > MAX_NUMBER


def _spelled(entry: Any) -> Any:
    if entry in (LEAF, VALUE):
        return entry
    kind, cls, content = entry
    if kind == "constant" and cls in (type(None), bool, str, int, float) and not _is_large(content):
        return {"constant": content}
    if kind == "dict" and cls is dict and all(isinstance(key, str) for key, _ in content):
        return {"dict": [[key, _spelled(item)] for key, item in content]}
    if kind == "sequence" and cls in (list, tuple):
        return {cls.__name__: [_spelled(item) for item in content]}
    raise TypeError(f"{cls} in JSON")


# Reading


def _state(text: str | None, where: str) -> dict[str, Any]:
    if text is None:
        raise ArtifactError(f"{where} holds no int8 model: it was not written by qlightning.save().")
    try:
        state = parse(text)
        version = state["format"]
        found = {name: dict(state[name]) for name in ("settings", "grids", "calls", "graphs")}
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{where}: what it says of the int8 model is damaged: {error}.") from error
    if version != FORMAT:
        raise ArtifactError(f"{where} has format {version!r} of int8 models; this qlightning reads {FORMAT}.")
    return found


def _restore(prepared: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Gives a prepared model the ways of calling and the grids of the one that was saved."""
    prepared.eval()
    for name, calls in state["calls"].items():
        root = _root(prepared, name, where)
        for args, kwargs, frozen in map(_arguments, calls):
            try:
                root.__dict__["_captured"].expect(root, args, kwargs, frozen)
            except (TypeError, TraceError) as error:
                raise ArtifactError(
                    f"{where} belongs to another model: {type(root).__name__} cannot be called as it: {error}."
                ) from error
    grids = {
        name: Grid(
            torch.tensor(entry["scale"], dtype=torch.float32),
            torch.tensor(entry["zero_point"], dtype=torch.int32),
            tuple(int(ndim) for ndim in entry["ndims"]),
        )
        for name, entry in state["grids"].items()
    }
    own = {name: fq for name, fq in fake_quantizers(prepared) if not isinstance(fq, WeightFakeQuantize)}
    if missing := [name for name in grids if name not in own]:
        raise ArtifactError(f"{where} belongs to another model: {type(prepared).__name__} has no value {missing[0]!r}.")
    for name, grid in grids.items():
        scheme = own[name].scheme
        in_range = bool(((grid.zero_point >= scheme.quant_min) & (grid.zero_point <= scheme.quant_max)).all())
        one = grid.scale.dim() == 1 if scheme.per_channel else grid.scale.numel() == 1  # torch.ao gives a list of one
        right = one and grid.scale.shape == grid.zero_point.shape
        if not right or not in_range or not bool(((grid.scale > 0) & grid.scale.isfinite()).all()):
            raise ArtifactError(f"{where}: the grid of {name!r} is none.")
        grid.give(own[name])


def _root(prepared: nn.Module, name: str, where: str) -> nn.Module:
    found = dict(captured_roots(prepared)).get(name)
    if found is None:
        raise ArtifactError(f"{where} belongs to another model: {type(prepared).__name__} has no graph {name!r}.")
    return found


def _arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments that stand for those of a call, and whether numbers among them are part of the graph."""
    positional, keywords = call
    numbers: list[Any] = []
    args = tuple(_stand_in(entry, numbers) for entry in positional)
    return args, {str(name): _stand_in(entry, numbers) for name, entry in keywords}, bool(numbers)


def _stand_in(entry: Any, numbers: list[Any]) -> Any:
    if entry == LEAF:
        return torch.empty(0)
    if entry == VALUE:
        return object()
    ((kind, content),) = entry.items()
    if kind == "constant" and isinstance(content, (type(None), bool, str, int, float)):
        if _is_large(content):
            raise ValueError(f"a call with a number beyond {MAX_NUMBER}")
        if isinstance(content, (int, float)) and not isinstance(content, bool):
            numbers.append(content)
        return content
    if kind == "dict":
        return {str(key): _stand_in(item, numbers) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_stand_in(item, numbers) for item in content]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"a call with {kind}")


def _fill(int8: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Writes the tensors of a file into an int8 model, once all of them fit."""
    own = {name: value for name, value in int8.state_dict().items() if isinstance(value, Tensor)}
    if other := sorted(own.keys() ^ tensors.keys()):
        side = "has no" if other[0] in own else "has a"
        raise ArtifactError(f"{where} belongs to another model than {type(int8).__name__}: it {side} {other[0]!r}.")
    for name, value in own.items():
        found = tensors[name]
        if value.shape != found.shape or value.dtype != found.dtype:
            raise ArtifactError(
                f"{where} belongs to another model than {type(int8).__name__}: {name!r} is {tuple(found.shape)} "
                f"({found.dtype}) there and {tuple(value.shape)} ({value.dtype}) here."
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
    for path, layer in int8.named_modules():
        if isinstance(layer, QuantizedLayer):
            try:
                layer.weight()  # checks that its parts fit together
            except QuantizationError as error:
                raise ArtifactError(f"{where}: the layer {path!r} is damaged: {error}") from error


def _compare(int8: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Refuses a model that computes something else with the same tensors."""
    for name, root in captured_roots(int8):
        own = {json.dumps(call): graph for call, graph in _calls(root)}
        for call, graph in zip(state["calls"].get(name, ()), state["graphs"].get(name, ()), strict=False):
            if graph is None:  # the saved model was in a state that it had no graph for
                continue
            if not isinstance(graph, list):
                raise ArtifactError(f"{where}: what it says of the graph {name!r} is damaged.")
            for ours, theirs in zip_longest(own.get(json.dumps(call)) or (), graph, fillvalue="nothing"):
                if ours != theirs:
                    raise ArtifactError(
                        f"{where} belongs to another model than {type(root).__name__} as it is here: that computes "
                        f"{str(theirs)[:200]}, this {ours[:200]}."
                    )
