"""Which modules of a model are captured as graphs, and which stay whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from qlightning.errors import ConfigError
from qlightning.graph.eager import check_not_quantized
from qlightning.graph.failure import TraceError, TraceFailure, source_of
from qlightning.graph.reads import Read
from qlightning.graph.signature import CallSpec, describe_call, expected_calls, signature_of
from qlightning.graph.tracing import has_layers, is_container, trace
from qlightning.nn.qat import layer_type


@dataclass
class CapturedRoot:
    """A module and the graphs of its forward.

    Attributes:
        path: Its name below the model; "" for the model itself.
        module: The module.
        original: Its class.
        graphs: From the way of calling and the mode to the graph, and the plain values that it may depend on.
        leaves: Names below it of modules that are called in one piece.
    """

    path: str
    module: nn.Module
    original: type[nn.Module]
    graphs: dict[tuple[CallSpec, bool], tuple[fx.Graph, tuple[Read, ...]]]
    leaves: frozenset[str]


@dataclass
class Capture:
    """All roots of a model, and what could not be traced (with names below the model)."""

    roots: list[CapturedRoot] = field(default_factory=list)
    failures: list[TraceFailure] = field(default_factory=list)


def capture(model: nn.Module, stays_float: Callable[[str], bool]) -> Capture:
    """Captures a model: its own forward, or where that cannot be traced, each of its parts on its own.

    Args:
        model: Left as it is.
        stays_float: Whether the module of a name is excluded, with all below it.

    Raises:
        ConfigError: A module is compiled or wrapped, which comes after prepare; or torch.ao has quantized it.
    """
    found = Capture()
    for name, module in model.named_modules():
        _check_not_wrapped(name, module)
        if not stays_float(name):
            check_not_quantized(name, module)
    _capture(model, "", stays_float, found)
    return found


def _check_not_wrapped(name: str, module: nn.Module) -> None:
    wrappers = {"OptimizedModule": "torch.compile", "DistributedDataParallel": "DDP", "DataParallel": "DataParallel"}
    kind = wrappers.get(type(module).__name__)
    if kind and type(module).__module__.startswith("torch."):
        raise ConfigError(f"{name or 'the model'} is wrapped by {kind}: prepare first, and wrap the prepared model.")


def _capture(module: nn.Module, path: str, stays_float: Callable[[str], bool], found: Capture) -> None:
    if stays_float(path) or not has_layers(module) or any(root.module is module for root in found.roots):
        return
    if "forward" in vars(module):
        message = "its forward is an attribute of the object, which a graph cannot replace; define it in a class"
        found.failures.append(TraceFailure(path, type(module).__name__, source_of(type(module)), message))
        _capture_children(module, path, stays_float, found)
        return
    if is_container(module) or type(module).forward is nn.Module.forward or is_torch_transformer(module):
        _capture_children(module, path, stays_float, found)
        return
    excluded = {name for name, _ in module.named_modules() if name and stays_float(_join(path, name))}
    apart = {
        name for name, m in module.named_modules() if name and (_is_hooked(m) or is_torch_transformer(m))
    } - excluded
    traced = _trace_root(module, excluded | apart)
    found.failures += [_below(path, failure) for failure in traced.failures]
    if not traced.graphs:
        _capture_children(module, path, stays_float, found)
        return
    leaves = frozenset(excluded | apart | {failure.path for failure in traced.failures})
    found.roots.append(CapturedRoot(path, module, type(module), traced.graphs, leaves))
    for name in sorted(_outermost(leaves - excluded)):
        part = module.get_submodule(name)
        if name in apart:
            _capture(part, _join(path, name), stays_float, found)
        else:
            _capture_children(part, _join(path, name), stays_float, found)


def _capture_children(module: nn.Module, path: str, stays_float: Callable[[str], bool], found: Capture) -> None:
    for name, child in module.named_children():
        _capture(child, _join(path, name), stays_float, found)


@dataclass
class _Traced:
    graphs: dict[tuple[CallSpec, bool], tuple[fx.Graph, tuple[Read, ...]]]
    failures: list[TraceFailure]


def _trace_root(module: nn.Module, leaves: set[str]) -> _Traced:
    """Traces all the ways of calling to be expected; a part that cannot be traced becomes a leaf."""
    original = type(module)
    signature = signature_of(original)
    specs = [describe_call(signature, args, kwargs)[0] for args, kwargs in expected_calls(signature)]
    failures: list[TraceFailure] = []
    while True:
        all_leaves = leaves | {failure.path for failure in failures}
        graphs: dict[tuple[CallSpec, bool], tuple[fx.Graph, tuple[Read, ...]]] = {}
        failed = None
        for index, spec in enumerate(specs):
            try:
                variants = {
                    (spec, training): trace(module, original, spec, training=training, leaves=all_leaves)
                    for training in (False, True)
                }
            except TraceError as error:
                if index == 0:
                    failed = error.failure
                    break
                continue  # a way of calling that may never be used: an error where it is
            graphs |= variants
        if failed is None:
            return _Traced(graphs, failures)
        failures.append(failed)
        if not failed.path:
            return _Traced({}, failures)


def _is_hooked(module: nn.Module) -> bool:
    """Whether a module of the user's has forward hooks, which a graph that looks inside it would not call."""
    own = not type(module).__module__.startswith("torch.nn.") or isinstance(module, nn.Sequential)
    return own and bool(module._forward_hooks or module._forward_pre_hooks) and layer_type(module) is None


def is_torch_transformer(module: nn.Module) -> bool:
    """Whether a module runs the forward of torch's transformers, which branches on the masks that it is given."""
    return isinstance(module, _TRANSFORMERS) and any(type(module).forward is kind.forward for kind in _TRANSFORMERS)


_TRANSFORMERS: tuple[type[nn.Module], ...] = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


def _outermost(names: frozenset[str]) -> Iterator[str]:
    return (name for name in names if not any(name.startswith(f"{other}.") for other in names))


def _below(path: str, failure: TraceFailure) -> TraceFailure:
    return TraceFailure(_join(path, failure.path), failure.module_type, failure.where, failure.message)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def module_device(module: nn.Module) -> torch.device:
    """The device of a module's first parameter or buffer; the CPU where it has none."""
    tensor = next(module.parameters(), next(module.buffers(), None))
    return torch.device("cpu") if tensor is None else tensor.device
