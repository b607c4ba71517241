"""convert: from a prepared model to a new one that runs on integers; the prepared one can go on training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.parallel import DistributedDataParallel

from qlightning.backends import Backend, resolve_backend
from qlightning.backends.qdq import has_attribute
from qlightning.errors import BackendError, CalibrationError, CaptureError, ConfigError
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize, fake_quantizers, raise_nonfinite
from qlightning.graph import state
from qlightning.graph.bind import COMPILED, GRAPH_MODULES, BoundModule, bind
from qlightning.graph.failure import TraceError
from qlightning.graph.preparation import CONV_TYPES, Grid, Preparation, PreparedModule, captured_roots, is_prepared
from qlightning.graph.programs import Captured, Example, Int8Captured, Program
from qlightning.graph.qdq import GraphConversion, Source
from qlightning.graph.ranges import WIDE, wide
from qlightning.graph.reads import Read
from qlightning.graph.selection import left_out
from qlightning.graph.signature import CallSpec
from qlightning.learned import learned_fake_quantizers
from qlightning.nn.qat import QATLayer, has_forward_hooks, swap_out
from qlightning.nn.quantized import QuantizedLayer, has_int8_layers
from qlightning.tensor import QuantizedTensor


class ConvertedModule(BoundModule):
    """Marks a module whose forward runs on integers."""


@torch.no_grad()
def convert(prepared: nn.Module, *, backend: str | Backend | None = None) -> nn.Module:
    """Converts a prepared model to int8.

    Args:
        prepared: A model from :func:`prepare` that has been trained or calibrated, or DistributedDataParallel around
            it; left as it is.
        backend: What the int8 model runs on; None: what it was prepared for.

    Returns:
        A new model on the CPU, in eval mode for good, with float inputs and outputs. It is of the same class, keeps the
        other methods and plain attributes, and every int8 layer stands under its old name and has ``weight()``.

    Raises:
        ConfigError: The model is not prepared.
        CalibrationError: No grid was observed: it has seen no training or calibration batch.
        NonFiniteError: A batch with NaN or infinity has passed a compiled graph, which could not raise it.
        BackendError: The backend cannot run here, or this CPU would saturate on the ranges that the model has.
    """
    return _convert(prepared, backend, keep_class=True)


def lower_again(int8: nn.Module, backend: Backend) -> None:
    """Lets an int8 model run on another backend, or on codes that have changed since; in place."""
    for module in int8.modules():
        if isinstance(module, QuantizedLayer):
            module.unpack()
    for root in [module for module in int8.modules() if isinstance(module, BoundModule)]:

        def lowered(program: Program, root: nn.Module = root) -> Program:
            assert program.qdq is not None
            again = Program(backend.lower(program.qdq, root), program.reads, program.qdq)
            again.example = program.example
            return again

        root._captured.rewrite(lowered)
    int8.__dict__["_backend"] = backend


@torch.no_grad()
def convert_standalone(prepared: nn.Module, backend: str | Backend | None = None) -> nn.Module:
    """As :func:`convert`, but the result is a bare module with the forward alone, not of the class of ``prepared``."""
    return _convert(prepared, backend, keep_class=False)


def _convert(prepared: nn.Module, backend: str | Backend | None, keep_class: bool) -> nn.Module:
    if isinstance(prepared, DistributedDataParallel):
        prepared = prepared.module
    if not is_prepared(prepared):
        if has_int8_layers(prepared):
            raise ConfigError(f"{type(prepared).__name__} is in int8 already.")
        raise ConfigError(f"{type(prepared).__name__} is not prepared: call prepare first, then train or calibrate.")
    preparation: Preparation | None = prepared.__dict__.get("_preparation")
    if preparation is None:
        raise ConfigError(f"{type(prepared).__name__} is a part of a prepared model: convert that one.")
    chosen = resolve_backend(backend) if backend is not None else preparation.backend
    chosen.adapt(preparation.qconfig)
    configs = list(preparation.qconfig.all())  # values go from a layer with one to a layer with another
    if any(chosen.saturates(a.activation, w.weight) for a in configs for w in configs):
        raise BackendError(
            f"The model has full 8-bit activations and weights, on which backend {chosen.name!r} would saturate on "
            f"this CPU. Convert with backend='reference', or prepare the model here with backend={chosen.name!r}."
        )
    with torch.inference_mode(False), torch.no_grad():  # the first alone switches gradients on
        for _, fq in learned_fake_quantizers(prepared):
            if fq.observer_enabled:  # an optimizer step may lie behind the last forward
                fq.settle()
        _check_observed(prepared)
        off = left_out(prepared, preparation.float_choice)
        converted = _convert_tree(prepared, chosen, off, keep_class)
    activations = [(n, m) for n, m in fake_quantizers(prepared) if not isinstance(m, WeightFakeQuantize)]
    grids = {name: Grid.of(fq) for name, fq in activations if fq.observed and fq not in off}
    reasons = {**preparation.reasons, **preparation.float_choice.reasons}
    converted.__dict__["_preparation"] = replace(preparation, grids=grids, reasons=reasons, changes={})
    converted.__dict__["_backend"] = chosen
    for name, part in captured_roots(converted):
        if part is not converted:
            part.__dict__.update(_preparation=_part_of(converted.__dict__["_preparation"], name), _backend=chosen)
    state.guard(converted)
    for parameter in converted.parameters():
        parameter.requires_grad_(False)
    return nn.Module.train(converted, False)


def _part_of(preparation: Preparation, name: str) -> Preparation:
    """What is known of a part of a model: so that it can be reported on and saved like a model."""

    def below(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(f"{name}."): v for key, v in values.items() if key.startswith(f"{name}.")}

    steps = tuple(step.of(name) for step in preparation.steps)
    grids = below(preparation.grids)
    return replace(preparation, reasons=below(preparation.reasons), grids=grids, failures=(), steps=steps)


def _check_observed(prepared: nn.Module) -> None:
    grids = [(n, m) for n, m in prepared.named_modules() if isinstance(m, FakeQuantize)]
    raise_nonfinite(m for _, m in grids)
    activations = [(n, m) for n, m in grids if not isinstance(m, WeightFakeQuantize)]
    missing = [m.name or n for n, m in activations if not m.observed]
    if not activations or len(missing) == len(activations):
        raise CalibrationError(
            f"No range was observed in {type(prepared).__name__}: run training batches (QAT) or calibrate (PTQ) first. "
            f"Training batches count in train mode: call net.train() before them."
            + ("" if prepared.training else " It is in eval mode now.")
        )
    in_eval = _in_eval_graphs(prepared)
    if missing := [m.name or n for n, m in activations if not m.observed and id(m) in in_eval]:
        shown = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        warnings.warn(f"{len(missing)} values were never seen and stay float: {shown}", stacklevel=4)
    if found := wide(m for _, m in activations):
        shown = ", ".join(f"{row.name} ({row.low:.3g} to {row.high:.3g})" for row in found[:10])
        warnings.warn(
            f"Ranges far beyond {WIDE:g} leave next to nothing of other values: {shown}. See ranges(prepared), and "
            "clip outliers (HistogramObserver, PercentileObserver) or exclude the layers.",
            stacklevel=4,
        )


def _in_eval_graphs(prepared: nn.Module) -> set[int]:
    found = set()
    for module in prepared.modules():
        if isinstance(module, PreparedModule):
            for (_, training), programs in module.__dict__["_captured"].programs.items():
                nodes = [] if training else [node for program in programs for node in program.graph.nodes]
                calls = (node for node in nodes if node.op == "call_module")
                found |= {id(module.get_submodule(str(node.target))) for node in calls}
    return found


def _convert_tree(
    module: nn.Module, backend: Backend, off: frozenset[FakeQuantize], keep_class: bool = True
) -> nn.Module:
    """A copy of a module in which every captured part runs on integers."""
    if isinstance(module, PreparedModule):
        return _RootConversion(module, backend, off, keep_class).run()
    if not is_prepared(module):
        return _deepcopied(module)
    shell = _shell(module, type(module))
    for name, child in module._modules.items():
        shell._modules[name] = None if child is None else _convert_tree(child, backend, off)
    return shell


def _shell(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A module of a class with the plain attributes, parameters and buffers of another, and no submodules yet."""
    shell = cls.__new__(cls)
    nn.Module.__init__(shell)
    skipped = {
        "_parameters",
        "_buffers",
        "_modules",
        "_captured",
        "_preparation",
        "_float_class",
        "following_bn",
        COMPILED,
    }
    if cls is _Standalone:  # the attributes and hooks belong to the class: a LightningModule's hold its Trainer
        skipped.update(module.__dict__)
    shell.__dict__.update(
        {
            k: _hooks_of(shell, v) if k.startswith("_") and "hooks" in k and isinstance(v, dict) else v
            for k, v in module.__dict__.items()
            if k not in skipped
        }
    )
    for name, parameter in module._parameters.items():
        shell._parameters[name] = None if parameter is None else nn.Parameter(_copied(parameter), requires_grad=False)
    for name, buffer in module._buffers.items():
        shell._buffers[name] = None if buffer is None else _copied(buffer)
    return shell


def _hooks_of(shell: nn.Module, hooks: dict[int, Any]) -> dict[int, Any]:
    """The hooks of a module for its shell; those that are given the module get the shell, not the module."""
    copied = copy.copy(hooks)
    for key, hook in hooks.items():
        if isinstance(hook, _WrappedHook) and hook.with_module:
            copied[key] = _WrappedHook(hook.hook, shell)
    return copied


def _deepcopied(module: nn.Module) -> nn.Module:
    """A copy on the CPU, also of a module that keeps a weight which a hook has computed (weight norm, pruning)."""
    kept = [value for m in module.modules() for value in vars(m).values() if isinstance(value, Tensor)]
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in kept if not value.is_leaf}
    return copy.deepcopy(module, memo).cpu()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


class _RootConversion:
    """Converts one captured module: its eval graphs to QDQ form, on a copy of its tree, and lowers them."""

    def __init__(self, module: nn.Module, backend: Backend, off: frozenset[FakeQuantize], keep_class: bool) -> None:
        captured: Captured = module.__dict__["_captured"]
        self._module = module
        self._off = off
        self._backend = backend
        self._captured = captured
        self._is_layer = issubclass(captured.original, QATLayer)
        self._class = captured.original
        if self._is_layer:
            self._class = module.__dict__["_float_class"]
        self._keep_class = keep_class
        self._float_layers = {path for path, m in module.named_modules() if isinstance(m, _LAYERS)}
        self._layers: dict[Source, str] = {}
        self._kept: dict[tuple[str, str], str] = {}

    def run(self) -> nn.Module:
        programs = list(self._eval_programs())
        self._root = self._copy_tree()
        qdq = [(spec, reads, self._to_qdq(graph)) for spec, reads, graph in programs]
        self._finish_tree([graph for _, _, graph in qdq])
        captured = Int8Captured(self._class if self._keep_class else _Standalone)
        captured.follow(self._captured)
        for spec, reads, graph in qdq:
            program = Program(self._backend.lower(graph, self._root), reads, graph)
            program.example = self._example(spec)
            captured.add(spec, False, program)
            captured.add(spec, True, program)
        members: dict[str, Any] = {"train": stays_in_eval}
        if self._is_layer:
            members.update(weight=_weight_of_layer, bias=property(_bias_of_layer), extra_repr=_repr_of_layer)
        bind(self._root, captured, ConvertedModule, **members)
        return self._root

    def _eval_programs(self) -> Iterator[tuple[CallSpec, tuple[Read, ...], fx.Graph]]:
        """The graphs of eval mode and what they depend on, but for modes: an int8 model has no other."""
        modes = [(m, m.training) for m in self._module.modules()]
        try:
            for m, _ in modes:
                m.training = False
            for spec in [spec for spec, training in self._captured.programs if not training]:
                try:
                    now = self._captured.program(self._module, spec)
                except TraceError as error:
                    raise CaptureError(f"{self._captured.original.__name__}, as it is now: {error}") from error
                for program in self._captured.programs[spec, False] if self._keep_class else [now]:
                    if not any(name == "training" and mode for _, name, mode in program.reads):
                        reads = tuple(read for read in program.reads if read[1] != "training")
                        yield spec, reads if self._keep_class else (), program.graph
        finally:
            for m, mode in modes:
                m.training = mode

    def _example(self, spec: CallSpec) -> Example | None:
        """What a call of the prepared module looked like, in calibration or training."""
        found = (p.example for training in (False, True) for p in self._captured.programs.get((spec, training), ()))
        return next((example for example in found if example is not None), None)

    # The tree

    def _copy_tree(self) -> nn.Module:
        def copy_below(module: nn.Module) -> nn.Module:
            if isinstance(module, PreparedModule) and module is not self._module:
                return _convert_tree(module, self._backend, self._off)
            if isinstance(module, QATLayer):
                return nn.Identity()  # until it is known whether it becomes int8: a float weight is not copied in vain
            if not any(isinstance(m, (QATLayer, PreparedModule)) for m in module.modules()):
                return _deepcopied(module)
            shell = _shell(module, type(module))
            for name, child in module._modules.items():
                shell._modules[name] = None if child is None else copy_below(child)
            return shell

        root = _shell(self._module, self._class if self._keep_class else _Standalone)
        for name, child in self._module._modules.items():
            if name not in (GRAPH_MODULES, "weight_fake_quant"):
                root._modules[name] = None if child is None else copy_below(child)
        return root

    def _finish_tree(self, graphs: Iterable[fx.Graph]) -> None:
        """Puts layers that stay float in place; a BatchNorm that was folded leaves an Identity."""
        called = {str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_module"}
        int8 = set(self._layers.values())
        modules = dict(self._module.named_modules(remove_duplicate=False))
        placed = {id(modules[path]): path for path in int8 if path in modules}
        for path, module in modules.items():
            if isinstance(module, QATLayer) and path and path not in int8 and not self._in_other_root(path):
                # A layer under two names is one layer in int8, too.
                other = placed.get(id(module))
                layer = self._root.get_submodule(other) if other else _float_copy(module)
                if path not in called and not other:
                    layer.__dict__["_float_reason"] = "called in training only"
                elif has_forward_hooks(module):
                    layer.__dict__["_float_reason"] = "has forward hooks, which an int8 kernel would not call"
                _set_submodule(self._root, path, layer)
        folded = {source.bn for source in self._layers if source.bn} - called
        for path, module in list(self._root.named_modules()):
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and path in folded:
                _set_submodule(self._root, path, nn.Identity())
        if self._is_layer and not called:
            for name in list(self._root._parameters):
                del self._root._parameters[name]

    def _in_other_root(self, path: str) -> bool:
        parents = path.split(".")
        inner = (self._module.get_submodule(".".join(parents[:i])) for i in range(1, len(parents) + 1))
        return any(isinstance(m, PreparedModule) for m in inner)

    # The graph

    def _to_qdq(self, graph: fx.Graph) -> fx.Graph:
        return GraphConversion(graph, self._module, self._root, self.place, self._kept, self._off).run()

    def place(self, source: Source, build: Callable[[], QuantizedLayer], free: bool) -> str:
        """Puts a QuantizedLayer into the tree, under the name of the float layer where that is free.

        One that was called as a function, on a weight of a module that is no layer, has no float layer to replace.
        """
        if source not in self._layers:
            name = path = source.path
            replaces = path in self._float_layers
            if not free or name in self._layers.values() or not (replaces or self._is_free(name)):
                name = next(n for i in range(1, 1000) if self._is_free(n := f"{path}_call{i}"))
            self._layers[source] = name
            _set_submodule(self._root, name, build())
        return self._layers[source]

    def _is_free(self, path: str) -> bool:
        owner, _, name = path.rpartition(".")
        return not has_attribute(self._root.get_submodule(owner), name)


_LAYERS = (nn.Linear, *CONV_TYPES)


def _float_copy(layer: QATLayer) -> nn.Module:
    twin = copy.copy(layer)
    twin.__dict__["_modules"] = dict(layer._modules)
    swap_out(twin)
    return _deepcopied(twin)


class _Standalone(nn.Module):
    """The forward of a converted module and what it needs, without the class that it came from."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # replaced by the graphs


def stays_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    """An int8 model has no training mode."""
    return nn.Module.train(self, False)


def _weight_of_layer(self: nn.Module) -> QuantizedTensor:
    return self.layer.weight()  # type: ignore[operator,union-attr]


def _bias_of_layer(self: nn.Module) -> Tensor | None:
    bias: Tensor | None = self.layer.bias  # type: ignore[union-attr,assignment]
    return bias


def _repr_of_layer(self: nn.Module) -> str:
    return ""  # all there is stands in the layer below


def _set_submodule(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    root.get_submodule(parent)._modules[name] = module
