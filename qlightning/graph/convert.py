"""convert: from a prepared model to a new one that runs on integers; the prepared one can go on training."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qlightning.backends import Backend, resolve_backend
from qlightning.backends.qdq import (
    CONV_TRANSPOSES,
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE,
    QUANTIZE_PER_CHANNEL,
    QParams,
    aten,
)
from qlightning.errors import BackendError, CalibrationError, ConfigError
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize
from qlightning.functional import quantize
from qlightning.graph.bind import GRAPH_MODULES, BoundModule, Captured, Program, bind
from qlightning.graph.patterns import can_fold, only_user, source_of
from qlightning.graph.prepare import Preparation, PreparedModule, is_prepared
from qlightning.nn.qat import QATLayer, bn_factor, grid_scales_with_channel, layer_type, swap_out
from qlightning.nn.quantized import QuantizedLayer, dequantized_weight
from qlightning.tensor import QuantizedTensor
from qlightning.vocabulary import LAYER_FUNCTIONS, Kind, Vocabulary, argument, function_name, has_effect, is_dropout


class ConvertedModule(BoundModule):
    """Marks a module whose forward runs on integers."""


@torch.no_grad()
def convert(prepared: nn.Module, *, backend: str | Backend | None = None) -> nn.Module:
    """Converts a prepared model to int8.

    Args:
        prepared: A model from :func:`prepare` that has been trained or calibrated; left as it is.
        backend: What the int8 model runs on; None: what it was prepared for.

    Returns:
        A new model on the CPU, in eval mode for good, with float inputs and outputs. It is of the same class, keeps the
        other methods and plain attributes, and every int8 layer stands under its old name and has ``weight()``.

    Raises:
        ConfigError: The model is not prepared.
        CalibrationError: No grid was observed: it has seen no training or calibration batch.
        BackendError: The backend cannot run here, or this CPU would saturate on the ranges that the model has.
    """
    return _convert(prepared, backend, keep_class=True)


@torch.no_grad()
def convert_standalone(prepared: nn.Module, backend: str | Backend | None = None) -> nn.Module:
    """As :func:`convert`, but the result is a bare module with the forward alone, not of the class of ``prepared``."""
    return _convert(prepared, backend, keep_class=False)


def _convert(prepared: nn.Module, backend: str | Backend | None, keep_class: bool) -> nn.Module:
    if not is_prepared(prepared):
        raise ConfigError(f"{type(prepared).__name__} is not prepared: call prepare first, then train or calibrate.")
    preparation: Preparation | None = prepared.__dict__.get("_preparation")
    if preparation is None:
        raise ConfigError(f"{type(prepared).__name__} is a part of a prepared model: convert that one.")
    chosen = resolve_backend(backend) if backend is not None else preparation.backend
    chosen.adapt(preparation.qconfig)
    if chosen.saturates(preparation.qconfig.activation, preparation.qconfig.weight):
        raise BackendError(
            f"The model has full 8-bit activations and weights, on which backend {chosen.name!r} would saturate on this "
            f"CPU. Convert with backend='reference', or prepare the model on this machine."
        )
    with torch.inference_mode(False):
        _check_observed(prepared)
        converted = _convert_tree(prepared, chosen, keep_class)
    converted.__dict__["_preparation"] = preparation
    converted.__dict__["_backend"] = chosen
    for parameter in converted.parameters():
        parameter.requires_grad_(False)
    return nn.Module.train(converted, False)


def _check_observed(prepared: nn.Module) -> None:
    grids = [(n, m) for n, m in prepared.named_modules() if isinstance(m, FakeQuantize)]
    activations = [(n, m) for n, m in grids if not isinstance(m, WeightFakeQuantize)]
    missing = [m.name or n for n, m in activations if not m.observed]
    if not activations or len(missing) == len(activations):
        raise CalibrationError(
            f"No range was observed in {type(prepared).__name__}: run training batches (QAT) or calibrate (PTQ) first."
        )
    in_eval = _in_eval_graphs(prepared)
    if missing := [m.name or n for n, m in activations if not m.observed and id(m) in in_eval]:
        shown = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        warnings.warn(f"{len(missing)} values were never seen and stay float: {shown}", stacklevel=4)


def _in_eval_graphs(prepared: nn.Module) -> set[int]:
    found = set()
    for module in prepared.modules():
        if isinstance(module, PreparedModule):
            for (_, training), program in module.__dict__["_captured"].programs.items():
                calls = () if training else (n for n in program.graph.nodes if n.op == "call_module")
                found |= {id(module.get_submodule(str(node.target))) for node in calls}
    return found


def _convert_tree(module: nn.Module, backend: Backend, keep_class: bool = True) -> nn.Module:
    """A copy of a module in which every captured part runs on integers."""
    if isinstance(module, PreparedModule):
        return _RootConversion(module, backend, keep_class).run()
    if not is_prepared(module):
        return copy.deepcopy(module).cpu()
    shell = _shell(module, type(module))
    for name, child in module._modules.items():
        shell._modules[name] = None if child is None else _convert_tree(child, backend)
    return shell


def _shell(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A module of a class with the plain attributes, parameters and buffers of another, and no submodules yet."""
    shell = cls.__new__(cls)
    nn.Module.__init__(shell)
    skipped = {"_parameters", "_buffers", "_modules", "_captured", "_preparation", "_float_class", "following_bn"}
    shell.__dict__.update(
        {
            k: copy.copy(v) if k.startswith("_") and "hooks" in k else v
            for k, v in module.__dict__.items()
            if k not in skipped
        }
    )
    for name, parameter in module._parameters.items():
        shell._parameters[name] = None if parameter is None else nn.Parameter(_copied(parameter), requires_grad=False)
    for name, buffer in module._buffers.items():
        shell._buffers[name] = None if buffer is None else _copied(buffer)
    return shell


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


class _RootConversion:
    """Converts one captured module: its eval graphs to QDQ form, on a copy of its tree, and lowers them."""

    def __init__(self, module: nn.Module, backend: Backend, keep_class: bool) -> None:
        captured: Captured = module.__dict__["_captured"]
        self._module = module
        self._backend = backend
        self._captured = captured
        self._is_layer = issubclass(captured.original, QATLayer)
        self._class = captured.original
        if self._is_layer:
            self._class = module.__dict__["_float_class"]
        self._keep_class = keep_class
        self._layers: dict[tuple[str, str, int], str] = {}

    def run(self) -> nn.Module:
        graphs = {s: p.graph for (s, training), p in self._captured.programs.items() if not training}
        self._root = self._copy_tree()
        qdq = {spec: self._to_qdq(graph) for spec, graph in graphs.items()}
        self._drop_unused(qdq.values())
        captured = Captured(self._class if self._keep_class else _Standalone, None)
        captured.signature = self._captured.signature
        for spec, graph in qdq.items():
            program = Program(self._backend.lower(graph, self._root))
            captured.add(spec, False, program)
            captured.add(spec, True, program)
        members: dict[str, Any] = {"train": _stays_in_eval}
        if self._is_layer:
            members["weight"] = _weight_of_layer
        bind(self._root, captured, ConvertedModule, **members)
        self._root.__dict__["_qdq"] = qdq
        return self._root

    # The tree

    def _copy_tree(self) -> nn.Module:
        def copy_below(module: nn.Module) -> nn.Module:
            if isinstance(module, PreparedModule) and module is not self._module:
                return _convert_tree(module, self._backend)
            if isinstance(module, QATLayer):
                layer = copy.copy(module)
                layer.__dict__["_modules"] = dict(module._modules)
                swap_out(layer)
                return copy.deepcopy(layer).cpu()
            if not any(isinstance(m, (QATLayer, PreparedModule)) for m in module.modules()):
                return copy.deepcopy(module).cpu()
            shell = _shell(module, type(module))
            for name, child in module._modules.items():
                shell._modules[name] = None if child is None else copy_below(child)
            return shell

        root = _shell(self._module, self._class if self._keep_class else _Standalone)
        for name, child in self._module._modules.items():
            if name not in (GRAPH_MODULES, "weight_fake_quant"):
                root._modules[name] = None if child is None else copy_below(child)
        return root

    def _drop_unused(self, graphs: Any) -> None:
        """Layers that became int8 stand under their old names; a BatchNorm that was folded leaves an Identity."""
        called = {str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_module"}
        for path, module in list(self._root.named_modules()):
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and path in self._folded and path not in called:
                _set_submodule(self._root, path, nn.Identity())
        if self._is_layer and not called:
            for name in list(self._root._parameters):
                del self._root._parameters[name]

    # The graph

    def _to_qdq(self, graph: fx.Graph) -> fx.Graph:
        return _GraphConversion(self, graph).run()

    @property
    def _folded(self) -> set[str]:
        return {bn for _, bn, _ in self._layers if bn}

    def place(self, path: str, bn: str, number: int, build: Callable[[], QuantizedLayer], free: bool) -> str:
        """Puts a QuantizedLayer into the tree, under the name of the float layer where that is free."""
        key = (path, bn, number)
        if key not in self._layers:
            taken = set(self._layers.values())
            name = path
            if not free or name in taken:
                name = next(n for i in range(1, 1000) if (n := f"{path}_call{i}") not in taken)
            self._layers[key] = name
            _set_submodule(self._root, name, build())
        return self._layers[key]


class _Standalone(nn.Module):
    """The forward of a converted module and what it needs, without the class that it came from."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # replaced by the graphs


def _stays_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    """An int8 model has no training mode."""
    return nn.Module.train(self, False)


def _weight_of_layer(self: nn.Module) -> QuantizedTensor:
    return self.layer.weight()  # type: ignore[operator,union-attr,no-any-return]


def _set_submodule(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    root.get_submodule(parent)._modules[name] = module


class _GraphConversion:
    """Rewrites one prepared eval graph to QDQ form."""

    def __init__(self, conversion: _RootConversion, graph: fx.Graph) -> None:
        self._conversion = conversion
        self._module = conversion._module
        self._root = conversion._root
        self._old = graph
        self._ops = Vocabulary(graph, self._module)
        self._new = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._calls: dict[str, int] = {}
        self._float_calls = {
            str(n.target)
            for n in graph.nodes
            if n.op == "call_module" and self._ops[n].kind is Kind.LAYER and not self._is_int8(n)
        }

    def run(self) -> fx.Graph:
        for node in self._old.nodes:
            self._values[node] = self._visit(node)
        self._new.eliminate_dead_code(is_impure_node=has_effect)
        self._new.lint()
        return self._new

    def _visit(self, node: fx.Node) -> fx.Node:
        kind = self._ops[node].kind
        if kind is Kind.FAKE_QUANT:
            fq = self._ops.module(node)
            assert isinstance(fq, FakeQuantize)
            value = self._values[node.args[0]]  # type: ignore[index]
            return self._quantize_dequantize(value, fq) if self._is_grid(fq) else value
        if kind is Kind.LAYER and self._is_int8(node):
            return self._layer(node)
        if kind is Kind.BATCH_NORM and (layer := self._folds_into(node)) is not None:
            return self._values[layer]
        if kind is Kind.ACTIVATION:
            target, args, kwargs = self._ops.elementwise(node)
            return self._new.call_function(target, (self._values[self._ops[node].inputs[0]], *args), kwargs)
        if kind is Kind.BINARY:
            target = aten.add.Tensor if self._ops.binary_name(node) == "add" else aten.mul.Tensor
            return self._new.call_function(target, tuple(self._values[n] for n in self._ops[node].inputs))
        if self._does_nothing(node):
            return self._values[self._ops[node].inputs[0]]
        if node.op == "get_attr":
            return self._get_attr(str(node.target))
        copied = self._new.node_copy(node, lambda n: self._values[n])
        return copied

    def _does_nothing(self, node: fx.Node) -> bool:
        if self._ops[node].kind is not Kind.SAME:
            return False
        if is_dropout(node):
            # In an eval graph the flag is a constant; True is a dropout that the user wants in eval mode too.
            flag = argument(node, {"stochastic_depth": 3}.get(function_name(node.target), 2), "training", True)
            return flag is False
        return isinstance(self._ops.module(node), (nn.Identity, nn.modules.dropout._DropoutNd))

    @staticmethod
    def _is_grid(fq: FakeQuantize) -> bool:
        return fq.observed and not isinstance(fq, WeightFakeQuantize)

    def _is_int8(self, node: fx.Node) -> bool:
        """Whether a layer computes on codes: its input lies on a grid, and so does its weight."""
        source = source_of(self._ops[node].inputs[0], self._ops)
        fq = self._ops.module(source)
        if not (isinstance(fq, FakeQuantize) and self._is_grid(fq)):
            return False
        if node.op == "call_module":
            module = self._ops.module(node)
            return isinstance(module, QATLayer) and module.weight_fake_quant.observed
        weight = argument(node, 1, "weight")
        grid = self._ops.module(weight) if isinstance(weight, fx.Node) else None
        return isinstance(grid, WeightFakeQuantize) and grid.observed

    def _folds_into(self, bn: fx.Node) -> fx.Node | None:
        """The int8 layer that a BatchNorm folds into."""
        layer = self._ops[bn].inputs[0]
        if self._ops[layer].kind is not Kind.LAYER or not can_fold(bn, self._ops):
            return None
        if only_user(layer, self._ops) is not bn or not self._is_int8(layer):
            return None
        if _base_type(layer, self._ops) is nn.Linear:
            # Its channels are the last dimension, those of a BatchNorm the second: the same in 2-d only.
            fq = self._ops.module(source_of(self._ops[layer].inputs[0], self._ops))
            assert isinstance(fq, FakeQuantize)
            return layer if fq.seen_ndims == {2} else None
        return layer

    def _quantize_dequantize(self, value: fx.Node, fq: FakeQuantize) -> fx.Node:
        scheme = fq.scheme
        ends = (scheme.quant_min, scheme.quant_max, scheme.dtype)
        if scheme.axis is None:
            qparams = QParams(float(fq.scale), int(fq.zero_point), *ends)
            codes = self._new.call_function(QUANTIZE, (value, *qparams.args()))
            return self._new.call_function(DEQUANTIZE, (codes, *qparams.args()))
        name = re.sub(r"\W", "_", fq.name)
        for suffix in ("scale", "zero_point"):
            self._root.register_buffer(f"{name}_{suffix}", _copied(getattr(fq, suffix)))
        grid = (self._new.get_attr(f"{name}_scale"), self._new.get_attr(f"{name}_zero_point"), scheme.axis, *ends)
        codes = self._new.call_function(QUANTIZE_PER_CHANNEL, (value, *grid))
        return self._new.call_function(DEQUANTIZE_PER_CHANNEL, (codes, *grid))

    def _get_attr(self, target: str) -> fx.Node:
        """A parameter or buffer; one of a layer that became int8 is kept beside it."""
        owner, _, name = target.rpartition(".")
        if isinstance(self._module.get_submodule(owner), QATLayer):
            tensor = getattr(self._module.get_submodule(owner), name)
            target = f"float_{re.sub(r'[^0-9a-zA-Z]', '_', target)}"
            if target not in self._root._buffers:
                self._root.register_buffer(target, _copied(tensor))
        return self._new.get_attr(target)

    def _layer(self, node: fx.Node) -> fx.Node:
        base = _base_type(node, self._ops)
        if node.op == "call_module":
            path = str(node.target)
            module = self._ops.module(node)
            assert isinstance(module, QATLayer)
            weight, bias, fq = module.weight, module.bias, module.weight_fake_quant
            call = _ModuleCall(module)
        else:
            attribute = argument(node, 1, "weight").args[0].target
            path, _, _ = str(attribute).rpartition(".")
            owner = self._module.get_submodule(path)
            free = layer_type(owner) is not None and path != ""
            path = path if free else "layer" if self._conversion._is_layer else f"{attribute}_quantized"
            weight = _attribute(self._module, str(attribute))
            bias_node = argument(node, 2, "bias")
            bias = None if bias_node is None else _attribute(self._module, str(bias_node.target))
            fq = self._ops.module(argument(node, 1, "weight"))  # type: ignore[assignment]
            call = _FunctionCall(node, base)
        number = self._calls.get(path, 0)
        self._calls[path] = number + 1
        follower = only_user(node, self._ops)
        folded = follower is not None and self._folds_into(follower) is node
        bn = self._ops.module(follower) if folded and follower is not None else None
        name = self._conversion.place(
            path,
            str(follower.target) if folded and follower is not None else "",
            number if bn is None else 0,
            lambda: quantized_layer(weight, bias, fq, bn, base.__name__),
            free=path not in self._float_calls,
        )
        layer = self._root.get_submodule(name)
        assert isinstance(layer, QuantizedLayer)
        return self._emit(node, name, layer, base, call)

    def _emit(self, node: fx.Node, name: str, layer: QuantizedLayer, base: type[nn.Module], call: Any) -> fx.Node:
        new = self._new
        parts = (new.get_attr(f"{name}.codes"), new.get_attr(f"{name}.scale"), new.get_attr(f"{name}.zero_point"))
        weight = new.call_function(dequantized_weight, (*parts, layer.transposed_groups))
        bias = None if layer.bias is None else new.get_attr(f"{name}.bias")
        x = self._values[self._ops[node].inputs[0]]
        if base is nn.Linear:
            result = new.call_function(aten.linear.default, (x, weight, bias))
        elif issubclass(base, nn.modules.conv._ConvTransposeNd):
            target = next(t for t, dims in CONV_TRANSPOSES.items() if dims == layer.codes.dim() - 2)
            geometry = (call.stride, call.padding, call.output_padding, call.groups, call.dilation)
            result = new.call_function(target, (x, weight, bias, *geometry))
        else:
            x, padding = self._padded(x, call, layer.codes.shape[2:])
            target = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)[layer.codes.dim() - 3]
            result = new.call_function(target, (x, weight, bias, call.stride, padding, call.dilation, call.groups))
        result.meta["layer"] = name
        return result

    def _padded(self, x: fx.Node, call: Any, kernel: torch.Size) -> tuple[fx.Node, list[int]]:
        """The input with the padding that the convolution itself cannot do, and the padding left to it."""
        padding = call.padding
        none = [0] * len(kernel)
        if padding == "valid":
            padding = none
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(_each(call.dilation, len(kernel)), kernel, strict=True)]
            margins = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
            if call.padding_mode == "zeros" and all(t % 2 == 0 for t in total):
                return x, [t // 2 for t in total]
        else:
            margins = [p for p in reversed(_each(padding, len(kernel))) for _ in range(2)]
        mode = {"zeros": "constant"}.get(call.padding_mode, call.padding_mode)
        if call.padding_mode == "zeros" and padding != "same":
            return x, _each(padding, len(kernel))
        return self._new.call_function(F.pad, (x, margins, mode)), none


def _each(value: Any, dims: int) -> list[int]:
    return [int(value)] * dims if isinstance(value, int) else [int(v) for v in value] * (dims if len(value) == 1 else 1)


class _ModuleCall:
    """The geometry of a convolution that is a module."""

    def __init__(self, module: Any) -> None:
        if isinstance(module, nn.Linear):
            return
        self.stride, self.padding, self.dilation = list(module.stride), module.padding, list(module.dilation)
        self.padding = self.padding if isinstance(self.padding, str) else list(self.padding)
        self.output_padding, self.groups = list(module.output_padding), module.groups
        self.padding_mode = module.padding_mode


class _FunctionCall:
    """The geometry of a convolution that is called as a function."""

    padding_mode = "zeros"

    def __init__(self, node: fx.Node, base: type[nn.Module]) -> None:
        if base is nn.Linear:
            return
        dims = int(base.__name__[-2])
        transposed = issubclass(base, nn.modules.conv._ConvTransposeNd)
        self.stride = _each(argument(node, 3, "stride", 1), dims)
        padding = argument(node, 4, "padding", 0)
        self.padding = padding if isinstance(padding, str) else _each(padding, dims)
        if transposed:
            self.output_padding = _each(argument(node, 5, "output_padding", 0), dims)
            self.groups = argument(node, 6, "groups", 1)
            self.dilation = _each(argument(node, 7, "dilation", 1), dims)
        else:
            self.dilation = _each(argument(node, 5, "dilation", 1), dims)
            self.groups = argument(node, 6, "groups", 1)


def _base_type(node: fx.Node, ops: Vocabulary) -> type[nn.Module]:
    module = ops.module(node)
    base = layer_type(module) if module is not None else LAYER_FUNCTIONS[function_name(node.target)]
    assert base is not None
    return base


def _attribute(root: nn.Module, target: str) -> Tensor:
    owner, _, name = target.rpartition(".")
    tensor: Tensor = getattr(root.get_submodule(owner), name)
    return tensor


def quantized_layer(
    weight: Tensor, bias: Tensor | None, fq: WeightFakeQuantize, bn: Any | None, kind: str = ""
) -> QuantizedLayer:
    """Quantizes the weight of a layer as its fake-quantizer does, and folds the BatchNorm behind it in.

    With f = gamma / sqrt(running_var + eps): weight * f and (bias - running_mean) * f + beta. Where the grid scales with
    the channel, f goes into its scale, and its sign into the codes; else it is the weight times f that is on the grid.

    Args:
        weight: The float weight, in the layer's layout.
        bias: float (out,), or None.
        fq: The fake-quantizer of the weight.
        bn: The BatchNorm, or None.
        kind: The type of the layer, for the report.
    """
    w = fq.to_output_first(weight.detach().float())
    channels = w.shape[0]
    scale, zero_point = fq.scale.detach().clone(), fq.zero_point.detach().clone()
    if scale.dim() == 0:
        scale, zero_point = scale.repeat(channels), zero_point.repeat(channels)
    if bn is None:
        codes = quantize(w, fq.scale, fq.zero_point, fq.scheme)
        new_bias = None if bias is None else bias.detach().float().clone()
    else:
        factor = bn_factor(bn)
        gamma_is_zero = torch.zeros_like(factor, dtype=torch.bool) if bn.weight is None else bn.weight == 0
        shaped = factor.view(-1, *[1] * (w.dim() - 1))
        if grid_scales_with_channel(fq.scheme):
            codes = quantize(w, fq.scale, fq.zero_point, fq.scheme) * shaped.sign().to(torch.int8)
            scale = scale * factor.abs()
        else:
            codes = quantize(w * shaped, fq.scale, fq.zero_point, fq.scheme)
        if bool(gamma_is_zero.any()):
            codes[gamma_is_zero] = zero_point[gamma_is_zero].to(codes.dtype).view(-1, *[1] * (w.dim() - 1))
        mean = bn.running_mean.float()
        start = -mean if bias is None else bias.detach().float() - mean
        new_bias = start * factor.masked_fill(gamma_is_zero, 0.0)
        if bn.bias is not None:
            new_bias = new_bias + bn.bias.detach().float()
    new_bias = None if new_bias is None else new_bias.cpu()
    return QuantizedLayer(
        codes.cpu(), scale.cpu(), zero_point.cpu(), new_bias, fq.transposed_groups, kind, str(fq.scheme)
    )
