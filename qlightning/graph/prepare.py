"""prepare: grids on the edges and in the layers of a model, in place; unprepare takes them off again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from qlightning.backends import Backend, resolve_backend
from qlightning.errors import CaptureError, ConfigError
from qlightning.fake_quantize import FakeQuantize, fake_quantizers, set_observers
from qlightning.graph.bind import GRAPH_MODULES, BoundModule, Captured, Program, bind, unbind
from qlightning.graph.capture import Capture, CapturedRoot, capture, module_device
from qlightning.graph.patterns import Plan, plan
from qlightning.graph.signature import CallSpec
from qlightning.graph.tracing import TraceFailure, has_layers, trace
from qlightning.nn.qat import QATLayer, build_weight_fake_quant, check_layer, layer_type, swap_in, swap_out
from qlightning.qconfig import Mode, Pattern, QConfig, Resolver
from qlightning.vocabulary import LAYER_FUNCTIONS, Kind, Vocabulary, argument


@dataclass(frozen=True)
class Preparation:
    """How a model was prepared.

    Attributes:
        qconfig: The settings as the backend has adapted them.
        backend: The backend.
        mode: "qat" or "ptq".
        reasons: Why a layer stays float, by its name.
        failures: Modules whose forward could not be traced.
    """

    qconfig: QConfig
    backend: Backend
    mode: Mode
    reasons: dict[str, str] = field(default_factory=dict)
    failures: tuple[TraceFailure, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        return self


class PreparedModule(BoundModule):
    """Marks a module whose forward runs graphs with fake-quantizers."""


class GraphPreparer:
    """Puts fake-quantizers into the graphs of one root, those that are traced later too.

    Args:
        path: Name of the root below the model.
        resolver: Answers which QConfig a name has.
        mode: "qat" or "ptq".
        leaves: Names of modules that are called in one piece.
    """

    def __init__(self, path: str, resolver: Resolver, mode: Mode, leaves: frozenset[str]) -> None:
        self._path = path
        self._resolver = resolver
        self._mode = mode
        self._leaves = leaves

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPreparer:
        return self

    def trace(self, module: nn.Module, spec: CallSpec, training: bool) -> fx.Graph:
        """Traces the module for one more way of calling it, and prepares the graph."""
        captured: Captured = module.__dict__["_captured"]
        graph = trace(module, captured.original, spec.rebuild, spec.leaf_names, training=training, leaves=self._leaves)
        self.insert(graph, module)
        return graph

    def plan(self, graph: fx.Graph, module: nn.Module) -> tuple[Plan, Vocabulary]:
        """Finds where the grids of a graph go."""
        ops = Vocabulary(graph, module)
        floats = {
            node
            for node in graph.nodes
            if node.op == "call_module" and self._resolver.resolve(self._full(str(node.target)))[0] is None
        }
        return plan(graph, ops, lambda node: self.qconfig_of(node, ops) is not None, floats), ops

    def qconfig_of(self, layer: fx.Node, ops: Vocabulary) -> QConfig | None:
        """The settings of a layer's node; None where it stays float."""
        if layer.op == "call_module":
            return self._resolver.resolve(self._full(str(layer.target)))[0]
        weight = argument(layer, 1, "weight")
        if weight.op == "call_module":
            weight = weight.args[0]
        return self._resolver.resolve(self._full(str(weight.target).rpartition(".")[0]))[0]

    def insert(self, graph: fx.Graph, module: nn.Module) -> None:
        """Puts fake-quantizers into a graph; those of the same name are shared with the module's other graphs."""
        found, ops = self.plan(graph, module)
        names = _call_names(graph)
        for node in found.grids:
            block = found.blocks.get(node)
            head = block.head if block is not None else node
            source = ops[node].kind is Kind.SOURCE
            name = f"{names[found.consumers[node]]}_input" if source else names[head]
            fq = self._fake_quant(module, name, str(head.meta.get("owner", "")))
            with graph.inserting_after(node):
                inserted = graph.call_module(f"{GRAPH_MODULES}.{fq}", (node,))
            node.replace_all_uses_with(inserted, delete_user_cb=lambda user, own=inserted: user is not own)  # type: ignore[misc]
        self._keep_constants(graph, module)
        for node in list(graph.nodes):
            if node.op == "call_function" and ops_kind(ops, node) is Kind.LAYER:
                self._insert_weight(graph, node, module, ops)
        if self._mode == "ptq":
            set_observers(module, False)  # calibrate alone moves the ranges
        graph.lint()

    def _keep_constants(self, graph: fx.Graph, module: nn.Module) -> None:
        """Gives the tensors that a forward has made a place that moves with the model and is not saved."""
        modules = self._graph_modules(module)
        for node in [node for node in graph.nodes if "constant" in node.meta]:
            value = node.meta.pop("constant")
            own = dict(modules.named_buffers(recurse=False))
            same = (n for n, t in own.items() if t.dtype == value.dtype and torch.equal(t.cpu(), value.cpu()))
            name = next(same, f"constant_{len(own)}")
            if name not in own:
                modules.register_buffer(name, value.clone(), persistent=False)
            node.target = f"{GRAPH_MODULES}.{name}"
            with graph.inserting_after(node):  # the forward makes it anew each time, and may change it in place
                fresh = graph.call_method("clone", (node,))
            node.replace_all_uses_with(fresh, delete_user_cb=lambda user, own=fresh: user is not own)

    def _insert_weight(self, graph: fx.Graph, node: fx.Node, module: nn.Module, ops: Vocabulary) -> None:
        """A weight fake-quantizer for a layer that is called as a function."""
        weight, qconfig = argument(node, 1, "weight"), self.qconfig_of(node, ops)
        if weight.op != "get_attr" or qconfig is None:
            return
        name = _identifier(f"{weight.target}_grid")
        modules = self._graph_modules(module)
        if name not in modules:
            base = LAYER_FUNCTIONS[str(getattr(node.target, "__name__", ""))]
            transposed = issubclass(base, nn.modules.conv._ConvTransposeNd)
            owner, _, attribute = str(weight.target).rpartition(".")
            fq = build_weight_fake_quant(
                getattr(module.get_submodule(owner), attribute),
                self._full(str(weight.target)),
                qconfig,
                argument(node, 6, "groups", 1) if transposed else None,
            )
            modules[name] = fq.train(module.training)
        with graph.inserting_after(weight):
            inserted = graph.call_module(f"{GRAPH_MODULES}.{name}", (weight,))
        node.replace_input_with(weight, inserted)

    def _fake_quant(self, module: nn.Module, name: str, owner: str) -> str:
        modules = self._graph_modules(module)
        key = _identifier(name)
        if key not in modules:
            qconfig = self._resolver.resolve(self._full(owner))[0] or self._resolver.resolve("")[0] or QConfig()
            fq = FakeQuantize(qconfig.activation, qconfig.build_activation_observer(self._mode), self._full(name))
            modules[key] = fq.to(module_device(module)).train(module.training)
        return key

    @staticmethod
    def _graph_modules(module: nn.Module) -> nn.ModuleDict:
        if GRAPH_MODULES not in module._modules:
            module.add_module(GRAPH_MODULES, nn.ModuleDict().train(module.training))
        modules = module._modules[GRAPH_MODULES]
        assert isinstance(modules, nn.ModuleDict)
        return modules

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path and name else self._path or name


def ops_kind(ops: Vocabulary, node: fx.Node) -> Kind | None:
    """The kind of a node that the vocabulary knows; None for one inserted later."""
    try:
        return ops[node].kind
    except KeyError:
        return None


def _identifier(name: str) -> str:
    name = re.sub(r"\W", "_", name)
    return f"{name}_" if hasattr(nn.ModuleDict(), name) else name  # "float", "keys": attributes of every ModuleDict


def _call_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for every call: the module called or the code it stands in, numbered where there are several."""
    seen: dict[str, int] = defaultdict(int)
    names = {}
    for node in graph.nodes:
        if node.op == "call_module":
            base = str(node.target)
        else:
            target = str(getattr(node.target, "__name__", node.target)).strip("_")
            owner = node.meta.get("owner", "")
            base = f"{owner}.{target}" if owner else target
        names[node] = f"{base}_{seen[base]}" if seen[base] else base
        seen[base] += 1
    return names


@torch.no_grad()
def prepare(
    model: nn.Module,
    qconfig: QConfig | None = None,
    *,
    backend: str | Backend = "auto",
    mode: Mode = "qat",
    exclude: Iterable[Pattern] = (),
) -> nn.Module:
    """Prepares a model for quantization, in place: the same object, with the same parameters under the same names.

    Layers get a fake-quantizer for their weight, and the values that int8 calls will compute on get one each. The
    state dict is the float one plus the keys of these. A model that is prepared already, in the same way, is left as
    it is.

    Args:
        model: Any module; its mode and device stay.
        qconfig: What to quantize to; None for the defaults.
        backend: A name ("auto", "onednn", "reference") or a Backend.
        mode: "qat": training batches move the ranges. "ptq": only :func:`calibrate` does.
        exclude: Names, globs or types of modules that stay float.

    Returns:
        The model.

    Raises:
        ConfigError: A setting cannot be used, a pattern matches nothing, a weight is parametrized, or nothing can be
            quantized. The model is then as it was.
        BackendError: The backend cannot run here, or does not take the schemes.
        CaptureError: No part of the model with layers can be traced.

    Example:
        >>> from torch import nn
        >>> net = prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), backend="reference")
        >>> list(net.state_dict())[:2]
        ['0.weight', '0.bias']
    """
    if mode not in ("qat", "ptq"):
        raise ConfigError(f"mode={mode!r}: 'qat' or 'ptq' is possible.")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"prepare needs a torch.nn.Module, not {type(model).__name__}.")
    if qconfig is not None and not isinstance(qconfig, QConfig):
        raise ConfigError(f"qconfig={qconfig!r}: a QConfig or None is needed.")
    chosen = resolve_backend(backend)
    settings = chosen.adapt((qconfig or QConfig()).excluding(exclude))
    before = model.__dict__.get("_preparation")
    if before is not None:
        if (before.qconfig, before.backend.name, before.mode) == (settings, chosen.name, mode):
            return model
        raise ConfigError(f"{type(model).__name__} is prepared already, with other settings; unprepare it first.")
    if is_prepared(model) or any(isinstance(module, QATLayer) for module in model.modules()):
        raise ConfigError(f"A part of {type(model).__name__} is prepared already; unprepare it first.")
    with torch.inference_mode(False), torch.no_grad():  # the first alone switches gradients on
        resolver = Resolver(model, settings)
        captured = capture(model, lambda name: resolver.resolve(name)[0] is None)
        _check(model, captured, resolver)
        try:
            _leave_fast_path(model)
            called = set().union(*(_apply(root, resolver, mode) for root in captured.roots))
        except BaseException:
            _undo(model)
            raise
    reasons = _float_reasons(model, captured, resolver, called)
    model.__dict__["_preparation"] = Preparation(settings, chosen, mode, reasons, tuple(captured.failures))
    if not any(True for _ in fake_quantizers(model)):
        _undo(model)
        _nothing(model, reasons, captured.failures)
    _warn_failures(captured.failures)
    return model


def _apply(root: CapturedRoot, resolver: Resolver, mode: Mode) -> set[str]:
    """Prepares one root; returns the names of its layers that became QAT layers."""
    preparer = GraphPreparer(root.path, resolver, mode, root.leaves)
    layers: dict[str, Any] = {}
    for graph in root.graphs.values():
        found, ops = preparer.plan(graph, root.module)
        for block in found.blocks.values():
            if ops[block.head].kind is Kind.LAYER and block.head.op == "call_module":
                bn = ops.module(block.bn) if block.bn is not None else None
                layers.setdefault(str(block.head.target), bn)
    captured = Captured(root.original, preparer.trace)
    programs: list[tuple[CallSpec, bool, Program]] = []
    changed: set[str] = set()
    if layer_type(root.module) is not None:  # a layer on its own: its QAT twin is what is traced
        qconfig = resolver.resolve(root.path)[0]
        assert qconfig is not None
        swap_in(root.module, root.path, qconfig, None)
        captured = Captured(type(root.module), preparer.trace)
        bind(root.module, captured, PreparedModule)
        for spec, training in root.graphs:
            captured.add(spec, training, Program(preparer.trace(root.module, spec, training)))
        return {root.path}
    for name, bn in layers.items():
        full = f"{root.path}.{name}" if root.path else name
        qconfig = resolver.resolve(full)[0]
        assert qconfig is not None
        swap_in(root.module.get_submodule(name), full, qconfig, bn)
        changed.add(full)
    for (spec, training), graph in root.graphs.items():
        preparer.insert(graph, root.module)
        programs.append((spec, training, Program(graph)))
    bind(root.module, captured, PreparedModule)
    for spec, training, program in programs:
        captured.add(spec, training, program)
    return changed


def _check(model: nn.Module, captured: Capture, resolver: Resolver) -> None:
    for name, module in model.named_modules():
        if layer_type(module) is not None and resolver.resolve(name)[0] is not None:
            check_layer(name or type(module).__name__, module)
    if not captured.roots:
        reasons = _float_reasons(model, captured, resolver, set())
        _nothing(model, reasons, captured.failures)


def _nothing(model: nn.Module, reasons: dict[str, str], failures: Iterable[TraceFailure]) -> None:
    kind = type(model).__name__
    if failures := list(failures):
        raise CaptureError(f"Nothing in {kind} can be quantized. " + " ".join(f"{failure}." for failure in failures))
    if reasons:
        spelled = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
        raise ConfigError(f"Nothing in {kind} is left to quantize ({spelled}).")
    raise ConfigError(f"{kind} has nothing to quantize: no convolution and no linear layer.")


def _float_reasons(model: nn.Module, captured: Capture, resolver: Resolver, called: set[str]) -> dict[str, str]:
    """Why each layer that is not in a graph stays float."""
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        base = next((cls for cls in type(module).__mro__ if cls in (nn.Linear, *CONV_TYPES)), None)
        if base is None or name in called or isinstance(module, QATLayer):
            continue
        config, reason = resolver.resolve(name)
        if config is None:
            reasons[name] = reason
        elif inside := _opaque_parent(model, name):
            reasons[name] = f"inside {inside}, which torch calls in one piece"
        elif layer_type(module) is None:
            reasons[name] = f"{type(module).__name__} has a forward of its own"
        else:
            reasons[name] = "not called as a module by the forward that was traced"
    return reasons


CONV_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _opaque_parent(model: nn.Module, name: str) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name)
        if not has_layers(parent) and type(parent).__module__.startswith("torch.nn.modules."):
            return type(parent).__name__
    return None


def _warn_failures(failures: Iterable[TraceFailure]) -> None:
    import warnings

    for failure in failures:
        warnings.warn(
            f"{failure}. It is called in one piece, in float; its parts are quantized on their own.", stacklevel=3
        )


def unprepare(model: nn.Module) -> nn.Module:
    """Takes everything off that :func:`prepare` has put on, in place; the weights stay as they are now.

    Returns:
        The model, which is a plain float model again.

    Raises:
        ConfigError: The model is not prepared.
    """
    if not is_prepared(model):
        raise ConfigError(f"{type(model).__name__} is not prepared.")
    _undo(model)
    return model


def _undo(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, PreparedModule):
            unbind(module)
        if GRAPH_MODULES in module._modules:
            delattr(module, GRAPH_MODULES)
        if isinstance(module, QATLayer):
            swap_out(module)
        vars(module).update(module.__dict__.pop("_fast_path", {}))
        module.__dict__.pop("_preparation", None)


def _leave_fast_path(model: nn.Module) -> None:
    """Keeps torch's transformers from the fused kernels of eval mode, which run on the float weights of their parts."""
    for module in model.modules():
        settings = {"activation_relu_or_gelu": 0, "use_nested_tensor": False}
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            before = {name: vars(module)[name] for name in settings if name in vars(module)}
            vars(module).update({name: settings[name] for name in before})
            module.__dict__["_fast_path"] = before


def is_prepared(module: nn.Module) -> bool:
    """Whether a module, or a part of it, is prepared."""
    return any(isinstance(m, PreparedModule) for m in module.modules())


def captured_roots(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules at or below a module whose forward runs graphs, with their names."""
    return [(name, m) for name, m in module.named_modules() if isinstance(m, BoundModule)]  # type: ignore[misc]
