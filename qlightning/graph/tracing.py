"""From the forward of a module to a torch.fx graph of the calls that it makes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from qlightning.graph.aliasing import may_write, mutates, read_after_write, writes_to_inputs
from qlightning.graph.bind import GRAPH_MODULES
from qlightning.graph.eager import functionals_as_own, is_eager
from qlightning.graph.effects import Generators, Snapshot
from qlightning.graph.failure import TraceError, TraceFailure, failure_of, source_of
from qlightning.graph.grad_mode import detach_regions
from qlightning.graph.reads import Read, recording_reads
from qlightning.graph.signature import CallSpec, describe_call, expected_calls, signature_of
from qlightning.graph.tracer import Tracer, recording
from qlightning.nn.qat import layer_type
from qlightning.vocabulary import OPAQUE, Vocabulary


def trace(
    module: nn.Module,
    original: type[nn.Module],
    spec: CallSpec,
    *,
    training: bool | None,
    leaves: Collection[str] = (),
) -> tuple[fx.Graph, tuple[Read, ...]]:
    """Traces the forward of a module for one way of calling it.

    Args:
        module: The root; left as it is.
        original: The class whose ``forward`` is traced.
        spec: The way of calling; its leaves are symbols during the trace, and the placeholders of the graph.
        training: The mode that ``module.training`` shows in it and all below; None: the mode that each has.
        leaves: Names of modules that are called in one piece.

    Returns:
        The graph, and the plain values of the modules on which it may depend.

    Raises:
        TraceError: Some code cannot be traced; carries which and where.
    """
    own_class = module.__class__
    modes = [(m, m.training) for m in module.modules()]
    for m, mode in modes:
        m.training = mode if training is None else training
    prepared = _as_before_prepare(module, leaves)
    functionals = functionals_as_own(module)
    before, generators = Snapshot(module), Generators(module)
    tracer = Tracer(leaves, spec.value_names)
    reads: list[Read] = []
    refusal = None
    try:
        module.__class__ = type(original.__name__, (own_class,), {"forward": _forward(original, spec)})
        with torch.enable_grad(), recording(), recording_reads(module, reads):
            graph = tracer.trace(module)
            if not torch.is_grad_enabled():
                refusal = "forward switches gradients off and leaves them so"
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(failure_of("", module, error, original)) from error
    finally:
        module.__class__ = own_class
        written = before.restore()
        drawn = generators.restore()
        for m, cls in functionals:
            m.__class__ = cls
        for m, cls, children in prepared:
            m.__class__ = cls
            m._modules.clear()
            m._modules.update(children)
        for m, mode in modes:
            m.training = mode
    path = ""
    if drawn:
        refusal = "forward draws random numbers"
    elif written is not None:
        path, attribute = written
        refusal = f"forward changes self.{attribute}"
    elif tracer.keeps_symbols():
        refusal = "forward keeps a value outside of the module"
    if refusal is not None:
        cls = type(module.get_submodule(path)) if path else original
        message = f"{refusal}, which a graph would not repeat"
        raise TraceError(TraceFailure(path, cls.__name__, source_of(cls), message))
    try:
        detach_regions(graph, Vocabulary(graph, module))
        read_after_write(graph, module, lambda name: _writes_to_input(module.get_submodule(name)))
    except ValueError as error:
        raise TraceError(TraceFailure("", original.__name__, source_of(original), str(error))) from error
    graph.eliminate_dead_code(is_impure_node=_keeps)
    return graph, tuple(reads)


def _as_before_prepare(
    root: nn.Module, leaves: Collection[str]
) -> list[tuple[nn.Module, type[nn.Module], dict[str, nn.Module | None]]]:
    """Hides what prepare has added to modules; returns the classes and children that they have to get back."""
    changed = []
    for name, module in root.named_modules():
        captured = vars(module).get("_captured")
        if captured is not None and name not in leaves:
            changed.append((module, type(module), dict(module._modules)))
            module._modules.pop(GRAPH_MODULES, None)
            if module is not root:  # a part that others call, too, with graphs of its own
                module.__class__ = captured.original
    return changed


def _forward(original: type[nn.Module], spec: CallSpec) -> Any:
    """The forward of a class, with the leaves of one way of calling it for its parameters."""
    params = ", ".join(spec.leaf_names)
    namespace: dict[str, Any] = {"_call": spec.rebuild, "_forward": original.forward}
    body = f"args, kwargs = _call([{params}]); return _forward(self, *args, **kwargs)"
    exec(f"def forward(self, {params}): {body}\n", namespace)
    return namespace["forward"]


def _writes_to_input(module: nn.Module) -> bool:
    """Whether a module may change in place what it is called with; what cannot be traced is judged from outside."""
    if not may_write(module):
        return False
    signature = signature_of(type(module))
    args, kwargs = expected_calls(signature)[0]
    try:
        graph, _ = trace(module, type(module), describe_call(signature, args, kwargs)[0], training=None)
    except TraceError:
        return True
    return writes_to_inputs(graph, module)


def _keeps(node: fx.Node) -> bool:
    """Dead calls are dropped, but those with effects: of modules (hooks, BatchNorm), in place, and assertions."""
    return node.op in ("placeholder", "output", "call_module") or node.target is torch._assert or mutates(node)


def has_layers(module: nn.Module) -> bool:
    """Whether a module is, or holds, a layer that can be quantized (attention and recurrent modules aside)."""
    if isinstance(module, OPAQUE) and not is_eager(module):
        return False
    return layer_type(module) is not None or any(has_layers(child) for child in module.children())


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and cannot be called, or is one of torch's lists of modules."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
