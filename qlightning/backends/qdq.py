"""Reading a QDQ graph: the quantize and dequantize calls, and the layers between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch import fx, nn

from qlightning.nn.quantized import dequantized_weight

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
QUANTIZE_PER_CHANNEL = torch.ops.quantized_decomposed.quantize_per_channel.default
DEQUANTIZE_PER_CHANNEL = torch.ops.quantized_decomposed.dequantize_per_channel.default

aten = torch.ops.aten
CONVS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
CONV_TRANSPOSES = {aten.conv_transpose1d.default: 1, aten.conv_transpose2d.input: 2, aten.conv_transpose3d.input: 3}


@dataclass(frozen=True)
class QParams:
    """The grid of an activation: one scale and zero point, and the codes in use."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype

    @classmethod
    def of(cls, node: fx.Node) -> QParams:
        """Those of a quantize or dequantize call."""
        return cls(*node.args[1:6])  # type: ignore[arg-type]

    def args(self) -> tuple[Any, ...]:
        """As the arguments of a quantize or dequantize call."""
        return self.scale, self.zero_point, self.quant_min, self.quant_max, self.dtype


def free_name(module: nn.Module, wanted: str) -> str:
    """A name that a module has no attribute of yet, the user's included: the one wanted, or that with a number."""
    names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(1)))
    return next(name for name in names if not has_attribute(module, name))


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute; properties, which may raise, are not read."""
    own = (module.__dict__, module._parameters, module._buffers, module._modules)
    return any(name in place for place in own) or hasattr(type(module), name)


def is_layer(node: fx.Node) -> bool:
    """Whether a node is a layer with an int8 weight."""
    known = node.target in CONVS or node.target in CONV_TRANSPOSES or node.target is aten.linear.default
    return node.op == "call_function" and known and layer_path(node) is not None


def layer_path(node: fx.Node) -> str | None:
    """The name of the QuantizedLayer whose weight a layer's node computes with."""
    weight = node.args[1] if len(node.args) > 1 else None
    if isinstance(weight, fx.Node) and weight.target is dequantized_weight:
        codes = weight.args[0]
        assert isinstance(codes, fx.Node)
        return str(codes.target).rpartition(".")[0]
    return None


def ints(value: Any, dims: int) -> list[int]:
    """A number, or a sequence of them, for every dimension."""
    return [int(value)] * dims if isinstance(value, int) else [int(v) for v in value] * (dims if len(value) == 1 else 1)
