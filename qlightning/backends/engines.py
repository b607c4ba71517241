"""The backends ``x86``, ``fbgemm`` and ``qnnpack``: torch's classic quantized engines, ``torch.ops.quantized``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from qlightning.backends import engine_kernels, lowering
from qlightning.backends.base import Backend, accepts_symmetric_weights, cpu_has_int8_dot_products
from qlightning.backends.engine_kernels import ConvPacking, LinearPacking
from qlightning.backends.lowering import LayerCall, Value
from qlightning.backends.onednn import OneDnn, unavailable
from qlightning.backends.qdq import CONV_TRANSPOSES, CONVS, QUANTIZE, QParams, aten, conv_geometry, spread_geometry
from qlightning.calls import function_name

_NEEDED = (
    *(f"conv{dims}d{end}" for dims in (1, 2, 3) for end in ("", "_relu", "_prepack")),
    *("linear", "linear_relu", "linear_prepack", "add", "add_relu", "mul"),
)
_FBGEMM = "fbgemm adds pairs of products of depthwise layers up in 16 bits on every CPU"


def build() -> list[Backend]:
    """Builds the backends for this machine.

    x86 picks oneDNN's or fbgemm's kernels layer by layer; layers that would be fbgemm's depthwise ones are given to
    oneDNN here, where it can take them and the CPU adds up in 32 bits. qnnpack does so everywhere.
    """
    exact = cpu_has_int8_dot_products() and sys.platform == "linux" and "onednn" in _engines() and not unavailable()
    reason = _FBGEMM if cpu_has_int8_dot_products() else ""
    return [
        replace(_backend(Engine("x86", onednn=exact)), reduced=None if exact else "weight", reason=reason),
        replace(_backend(Engine("fbgemm")), reduced="weight", reason=reason),
        _backend(Engine("qnnpack")),
    ]


def _backend(engine: Engine) -> Backend:
    return Backend(engine.name, engine, _unavailable(engine.name), accepts=accepts_symmetric_weights)


def _unavailable(engine: str) -> str:
    gone = [name for name in _NEEDED if not hasattr(torch.ops.quantized, name)]
    if gone or not hasattr(torch, "_empty_affine_quantized"):
        return f"this torch ({torch.__version__}) has dropped its classic quantized operators ({', '.join(gone[:3])})."
    if engine not in _engines():
        return f"this torch is built without it, or this CPU cannot run it; engines here: {', '.join(_engines())}."
    return ""


def _engines() -> list[str]:
    return list(getattr(torch.backends.quantized, "supported_engines", []))


@dataclass(frozen=True)
class Engine:
    """The kernels of one engine, as the lowering asks for them.

    A layer takes in calls that end the range of its result (ReLU, ReLU6, Hardtanh). With others behind it, or with a
    float32 result, it is given to oneDNN's kernels for plain tensors, or stays in float. A sum that the engine cannot
    take in gets the layer's result rounded to a grid of its own.

    Args:
        name: As torch calls it.
        onednn: Whether layers may be given to oneDNN's kernels instead.
    """

    name: str
    onednn: bool = False

    def __call__(self, graph: fx.Graph, root: nn.Module) -> fx.Graph:
        """Turns a QDQ graph into one of this engine's kernels."""
        return lowering.lower(graph, root, self)

    def emit_average(self, graph: fx.Graph, value: Value, out: QParams) -> fx.Node | None:
        return None

    def emit_binary(self, graph: fx.Graph, name: str, left: Value, right: Value, out: QParams) -> fx.Node | None:
        return self._binary(graph, name, left, right, out, (out.quant_min, out.quant_max))

    def _binary(
        self, graph: fx.Graph, name: str, left: Value, right: Value, out: QParams, ends: tuple[int, int]
    ) -> fx.Node | None:
        ratios = [value.coded()[1] / out.scale for value in (left, right)]
        if self.name == "qnnpack" and name != "mul" and not all(2**-14 <= ratio < 2**8 for ratio in ratios):
            return None  # it refuses them
        operands = (*left.coded(), *right.coded())
        args = (name, self.name, *operands, out.scale, out.zero_point, _narrower(ends))
        return graph.call_function(engine_kernels.binary, args)

    def emit_layer(self, graph: fx.Graph, call: LayerCall) -> fx.Node | None:
        found = self._emit_own(graph, call)
        return OneDnn().emit_layer(graph, call) if found is None and self.onednn else found

    def _emit_own(self, graph: fx.Graph, call: LayerCall) -> fx.Node | None:
        out = call.out
        if out is None:
            return self._emit_float(graph, call)
        ends = _ends(call.post, out)
        if ends is None:
            return None
        if call.residual is None or (self.onednn and call.node.target is aten.conv2d.default):
            return self._emit(graph, call, out, ends)
        assert call.residual.qparams is not None
        stage = stage_of_sum(call.residual.qparams, out, ends)
        codes = None if stage is None else self._emit(graph, replace(call, residual=None, post=[]), stage, (0, 255))
        if codes is None:
            return None
        call.layer.kernel += f", then {_names('add', *call.post)}"
        return self._binary(graph, "add", Value(stage, codes), call.residual, out, ends)

    def _emit_float(self, graph: fx.Graph, call: LayerCall) -> fx.Node | None:
        """A linear layer with a float32 result; only fbgemm has one, and no convolution."""
        has_one = hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")
        if call.node.target is not aten.linear.default or self.name == "qnnpack" or not has_one:
            return None
        call.layer.kernel = f"{self.name} linear to float32"
        packed = call.packed(graph, LinearPacking("fbgemm", call.x.coded()[1]))
        args = (*call.x.coded(), packed, list(call.layer.codes.shape))
        return graph.call_function(engine_kernels.linear_to_float, args)

    def _emit(self, graph: fx.Graph, call: LayerCall, out: QParams, ends: tuple[int, int]) -> fx.Node | None:
        """A layer with what it takes in, on a grid; ``ends`` are its smallest and largest code."""
        node, layer = call.node, call.layer
        _, x_scale, _ = x = call.x.coded()
        if self.name == "qnnpack" and layer.bias is not None:
            # It rounds the bias in units of the sums; this is what one of these is worth in the result.
            used = layer.scale[layer.codes.flatten(1).any(1)]
            if used.numel() and float(used.abs().max()) * x_scale / out.scale > 0.5:
                return None
        relu = out.zero_point > 0 and ends == (out.zero_point, 255)
        tail = (out.scale, out.zero_point, relu, None if relu else _narrower(ends))
        fused = f"+{_names(*call.post)}" if call.post else ""
        if node.target is aten.linear.default:
            layer.kernel = f"{self.name} linear{fused} to uint8"
            packed = call.packed(graph, LinearPacking(self.name, x_scale))
            return graph.call_function(engine_kernels.linear, (*x, packed, list(layer.codes.shape), *tail))
        if node.target in CONV_TRANSPOSES:
            dims = CONV_TRANSPOSES[node.target]
            spacing, before, after, dilation, groups = spread_geometry(node, dims, layer.codes.shape[2:])
            pack = ConvPacking(self._engine(groups), x_scale, [1] * dims, [0] * dims, dilation, groups, flipped=True)
            layer.kernel = f"{self.name} conv{dims}d, transposed{fused} to uint8"
            channels = layer.codes.shape[1] * groups
            args = (*x, call.packed(graph, pack), channels, spacing, before, after, *tail)
            return graph.call_function(engine_kernels.conv_transpose, args)
        dims = CONVS[node.target]  # type: ignore[index]
        geometry = conv_geometry(node, dims)
        if call.residual is None:
            packed = call.packed(graph, ConvPacking(self._engine(geometry[-1]), x_scale, *geometry))
            layer.kernel = f"{self.name} conv{dims}d{fused} to uint8"
            channels = layer.codes.shape[1] * geometry[-1]
            return graph.call_function(engine_kernels.conv, (*x, packed, dims, channels, *tail))
        packed = call.packed(graph, ConvPacking("onednn", x_scale, *geometry))
        layer.kernel = f"{self.name} conv{dims}d+sum{fused} to uint8"
        middle = (*geometry, list(layer.codes.shape), *call.residual.coded())
        return graph.call_function(engine_kernels.conv2d_add, (*x, packed, *middle, *tail))

    def _engine(self, groups: int) -> str:
        """What packs a convolution: torch's x86 leaves those of more than 100 groups to fbgemm, which may saturate."""
        return "onednn" if self.onednn and groups > 100 else self.name


def stage_of_sum(residual: QParams, out: QParams, ends: tuple[int, int]) -> QParams | None:
    """A grid for a result that a residual is added to; None where its steps would be coarser than two of the sum.

    Beyond it the sum is at an end of its own grid, whatever the residual is; so the sum is one code off at most.

    Args:
        residual: The grid of the other summand.
        out: The grid of the sum.
        ends: The smallest and the largest code of the sum.
    """
    low, high = ((code - out.zero_point) * out.scale for code in ends)
    least, most = ((code - residual.zero_point) * residual.scale for code in (residual.quant_min, residual.quant_max))
    low, high = min(low - most, 0.0), max(high - least, 0.0)
    scale = (high - low) / 255
    if scale > 2.000001 * out.scale:
        return None
    return QParams(scale, round(-low / scale), 0, 255, torch.uint8)


def _ends(post: list[fx.Node], out: QParams) -> tuple[int, int] | None:
    """The smallest and the largest code behind elementwise calls that do nothing but end a range; None for others."""
    low, high = out.quant_min, out.quant_max
    for node in post:
        name = function_name(node.target)
        if name not in ("relu", "hardtanh"):
            return None
        bounds: Any = (0.0, float("inf")) if name == "relu" else node.args[1:3]
        first, last = QUANTIZE(torch.tensor(bounds, dtype=torch.float32), *out.args()).tolist()
        low, high = min(max(low, first), last), max(min(high, last), first)
    return low, high


def _names(*calls: fx.Node | str) -> str:
    return "+".join(call if isinstance(call, str) else function_name(call.target) for call in calls)


def _narrower(ends: tuple[int, int]) -> tuple[int, int] | None:
    return None if ends == (0, 255) else ends
