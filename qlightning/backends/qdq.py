"""Reading a QDQ graph: the quantize and dequantize calls, and the layers between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch import fx, nn

from qlightning.calls import argument, function_name
from qlightning.nn.quantized import dequantized_weight

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
QUANTIZE_PER_CHANNEL = torch.ops.quantized_decomposed.quantize_per_channel.default
DEQUANTIZE_PER_CHANNEL = torch.ops.quantized_decomposed.dequantize_per_channel.default

aten = torch.ops.aten
CONVS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
CONV_TRANSPOSES = {aten.conv_transpose1d.default: 1, aten.conv_transpose2d.input: 2, aten.conv_transpose3d.input: 3}

FLOAT_LAYER = "float between dequantize and quantize"
NO_KERNEL = f"the backend has no kernel for it: {FLOAT_LAYER}"
"""What the report calls the kernel of a layer that runs as the QDQ graph has it."""


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


def conv_geometry(node: fx.Node, dims: int) -> tuple[list[int], list[int], list[int], int]:
    """Stride, padding, dilation and groups of an ATen convolution."""
    stride, padding, dilation = (
        ints(argument(node, index, name, default), dims)
        for index, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    return stride, padding, dilation, int(argument(node, 6, "groups", 1))


def transpose_geometry(node: fx.Node, dims: int) -> tuple[list[int], list[int], list[int], int, list[int]]:
    """Stride, padding, output padding, groups and dilation of an ATen transposed convolution."""
    stride, padding, output_padding, dilation = (
        ints(argument(node, index, name, default), dims)
        for index, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1))
    )
    return stride, padding, output_padding, int(argument(node, 6, "groups", 1)), dilation


def spread_geometry(
    node: fx.Node, dims: int, kernel: Sequence[int]
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """A transposed convolution as a plain one over an input with zeros between and around its elements.

    Returns:
        The distance of the elements, how many zeros stand before and after them (negative: elements cut off), the
        dilation and the groups.
    """
    spacing, padding, output_padding, groups, dilation = transpose_geometry(node, dims)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    before = [r - p for r, p in zip(reach, padding, strict=True)]
    return spacing, before, [b + o for b, o in zip(before, output_padding, strict=True)], dilation, groups


def max_pool2d_args(node: fx.Node, module: nn.Module | None) -> tuple[Any, ...] | None:
    """Arguments of the int8 max pooling kernel, for a call that is one."""
    if isinstance(module, nn.MaxPool2d):
        values = (module.kernel_size, module.stride, module.padding, module.dilation)
        return (*(ints(value, 2) for value in values), module.ceil_mode)
    if node.op == "call_function" and function_name(node.target) == "max_pool2d":
        kernel = argument(node, 1, "kernel_size")
        values = (
            kernel,
            argument(node, 2, "stride") or kernel,
            argument(node, 3, "padding", 0),
            argument(node, 4, "dilation", 1),
        )
        if any(
            isinstance(part, fx.Node)
            for value in values
            for part in (value if isinstance(value, (list, tuple)) else [value])
        ):
            return None
        return (*(ints(value, 2) for value in values), bool(argument(node, 5, "ceil_mode", False)))
    return None
