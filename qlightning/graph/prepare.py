"""prepare: grids on the edges and in the layers of a model, in place; unprepare takes them off again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qlightning.backends import Backend, resolve_backend
from qlightning.errors import CaptureError, ConfigError
from qlightning.fake_quantize import fake_quantizers
from qlightning.graph import facts, state
from qlightning.graph.bind import GRAPH_MODULES, bind, unbind
from qlightning.graph.capture import Capture, CapturedRoot, capture
from qlightning.graph.changes import undo
from qlightning.graph.failure import TraceFailure
from qlightning.graph.insert import GraphPreparer
from qlightning.graph.preparation import Preparation, PreparedModule, float_reasons, is_prepared
from qlightning.graph.programs import Captured, Program
from qlightning.graph.signature import CallSpec
from qlightning.nn.qat import QATLayer, check_layer, layer_type, swap_in, swap_out
from qlightning.nn.quantized import QuantizedLayer
from qlightning.qconfig import Mode, ObserverFactory, Pattern, QConfig, Resolver
from qlightning.vocabulary import Kind


@torch.no_grad()
def prepare(
    model: nn.Module,
    qconfig: QConfig | None = None,
    *,
    backend: str | Backend = "auto",
    mode: Mode = "qat",
    exclude: Iterable[Pattern] = (),
    observer: ObserverFactory | None = None,
) -> nn.Module:
    """Prepares a model for quantization, in place: the same object, with the same parameters under the same names.

    Layers get a fake-quantizer for their weight, and the values that int8 calls will compute on get one each. The
    state dict is the float one plus the keys of these. A model that is prepared already, in the same way, is left as
    it is.

    Args:
        model: Any module; its mode and device stay.
        qconfig: What to quantize to; None for the defaults.
        backend: A name ("auto", "onednn", "openvino", ...; docs/backends.md has all) or a Backend.
        mode: "qat": training batches move the ranges. "ptq": only :func:`calibrate` does.
        exclude: Names, globs or types of modules that stay float.
        observer: Builds the observers of the activations, in place of those of ``qconfig``.

    Returns:
        The model.

    Raises:
        ConfigError: A setting cannot be used, a pattern matches nothing, a weight is parametrized, or nothing can be
            quantized. The model is then as it was.
        BackendError: The backend cannot run here, or does not take the schemes.
        CaptureError: No part of the model with layers can be traced.

    Examples:
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
        raise ConfigError(
            f"qconfig: a qlightning.QConfig or None is needed, not a {type(qconfig).__module__}."
            f"{type(qconfig).__name__}. QConfig() has the defaults; torch.ao's observers can stand in one."
        )
    if observer is not None:
        qconfig = replace(qconfig or QConfig(), activation_observer=observer)
    chosen = resolve_backend(backend)
    settings = chosen.adapt((qconfig or QConfig()).excluding(exclude))
    if mode == "ptq" and any(config.learned for config in settings.all()):
        raise ConfigError(
            "QConfig learned scales with mode='ptq': they are learned by training. Use mode='qat' (with the callbacks: "
            "QuantizationAwareTraining), or learned=None."
        )
    before = facts.of(model)
    if before is not None:
        other = facts.differences(before, facts.collect(settings, chosen.name, mode))
        if not other:
            return model
        raise ConfigError(
            f"{type(model).__name__} is prepared already, with other settings; unprepare it first: {'; '.join(other)}."
        )
    if is_prepared(model) or any(isinstance(module, QATLayer) for module in model.modules()):
        raise ConfigError(f"A part of {type(model).__name__} is prepared already; unprepare it first.")
    with torch.inference_mode(False), torch.no_grad():  # the first alone switches gradients on
        resolver = Resolver(model, settings)
        captured = capture(model, lambda name: resolver.resolve(name)[0] is None)
        _check(model, captured, resolver)
        try:
            _leave_fast_path(model)
            called = set().union(*(_apply(root, resolver, chosen, mode) for root in captured.roots))
        except BaseException:
            _undo(model)
            raise
    reasons = float_reasons(model, resolver, called, captured.roots)
    model.__dict__["_preparation"] = Preparation(settings, chosen, mode, reasons, tuple(captured.failures))
    if not any(True for _ in fake_quantizers(model)):
        _undo(model)
        _nothing(model, reasons, captured.failures)
    state.attach(model)
    _warn_failures(captured.failures)
    return model


def _apply(root: CapturedRoot, resolver: Resolver, backend: Backend, mode: Mode) -> set[str]:
    """Prepares one root; returns the names of its layers that became QAT layers."""
    preparer = GraphPreparer(root.path, resolver, backend, mode, root.leaves)
    layers: dict[str, list[Any]] = {}
    for graph, _ in root.graphs.values():
        found, ops = preparer.plan(graph, root.module)
        for block in found.blocks.values():
            if ops[block.head].kind is Kind.LAYER and block.head.op == "call_module":
                bn = ops.module(block.bn) if block.bn is not None else None
                layers.setdefault(str(block.head.target), []).append(bn)
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
            captured.add(spec, training, preparer.trace(root.module, spec, training))
        return {root.path}
    for name, bns in layers.items():
        bn = bns[0] if all(other is bns[0] for other in bns) else None  # a layer with several has a grid of its own
        full = f"{root.path}.{name}" if root.path else name
        qconfig = resolver.resolve(full)[0]
        assert qconfig is not None
        if not isinstance(layer := root.module.get_submodule(name), QATLayer):  # two roots may share it
            swap_in(layer, full, qconfig, bn)
        changed.add(full)
    for (spec, training), (graph, reads) in root.graphs.items():
        preparer.insert(graph, root.module, training)
        programs.append((spec, training, Program(graph, reads)))
    bind(root.module, captured, PreparedModule)
    for spec, training, program in programs:
        captured.add(spec, training, program)
    return changed


def _check(model: nn.Module, captured: Capture, resolver: Resolver) -> None:
    for name, module in model.named_modules():
        if layer_type(module) is not None and resolver.resolve(name)[0] is not None:
            check_layer(name or type(module).__name__, module)
    if not captured.roots:
        reasons = float_reasons(model, resolver, set(), ())
        _nothing(model, reasons, captured.failures)


def _nothing(model: nn.Module, reasons: dict[str, str], failures: Iterable[TraceFailure]) -> None:
    kind = type(model).__name__
    if failures := list(failures):
        raise CaptureError(f"Nothing in {kind} can be quantized. " + " ".join(f"{failure}." for failure in failures))
    if reasons:
        spelled = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
        raise ConfigError(f"Nothing in {kind} is left to quantize ({spelled}).")
    if any(isinstance(module, QuantizedLayer) for module in model.modules()):
        raise ConfigError(f"{kind} is in int8 already: give the float model that it was made from.")
    raise ConfigError(f"{kind} has nothing to quantize: no convolution and no linear layer.")


def _warn_failures(failures: Iterable[TraceFailure]) -> None:
    for failure in failures:
        warnings.warn(
            f"{failure}. It is called in one piece, in float; its parts are quantized on their own.", stacklevel=3
        )


def unprepare(model: nn.Module) -> nn.Module:
    """Takes everything off that :func:`prepare` has put on, in place; the weights stay as they are now.

    What steps of post-training quantization have set gets the value back that it had before them.

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
        preparation: Preparation | None = module.__dict__.pop("_preparation", None)
        if preparation is not None:
            undo(module, preparation.changes)
            state.detach(module)


def _leave_fast_path(model: nn.Module) -> None:
    """Keeps torch's transformers from the fused kernels of eval mode, which run on the float weights of their parts."""
    for module in model.modules():
        settings = {"activation_relu_or_gelu": 0, "use_nested_tensor": False}
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            before = {name: vars(module)[name] for name in settings if name in vars(module)}
            vars(module).update({name: settings[name] for name in before})
            module.__dict__["_fast_path"] = before
