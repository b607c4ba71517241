"""What each ATen call is in ONNX: arithmetic, reductions, moves. The layers and the grids are in onnx_layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qlightning.backends.onnx_graph import DTYPES, OnnxGraph
from qlightning.backends.qdq import ints

aten = torch.ops.aten


class UntranslatableError(Exception):
    """A call that has no counterpart in ONNX, or not with these arguments."""


class Call:
    """One ATen call while it is translated.

    Args:
        node: Its node; ``meta["val"]`` says shape and dtype.
        graph: The ONNX graph that grows.
        name: Gives the ONNX name of an argument that is a tensor.
    """

    def __init__(self, node: fx.Node, graph: OnnxGraph, name: Callable[[Any], str]) -> None:
        self.node, self.graph, self._name = node, graph, name
        self.add = graph.add
        self.out: Any = node.meta.get("val")
        given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
        self.arguments = {
            a.name: given.get(a.name, node.kwargs.get(a.name, a.default_value))
            for a in node.target._schema.arguments  # type: ignore[union-attr]
        }

    def __getitem__(self, name: str) -> Any:
        """An argument as it stands in the node, by the name that it has in the schema."""
        return self.arguments[name]

    def value(self, name: str = "self") -> Tensor:
        """A fake tensor of the shape and dtype of an argument."""
        found: Tensor = self.arguments[name].meta["val"]
        return found

    def name(self, argument: str = "self", dtype: torch.dtype | None = None) -> str:
        """The ONNX name of an argument that is a tensor or a number.

        Args:
            argument: Its name in the schema.
            dtype: Cast to this; None: as it is.
        """
        return self.name_of(self.arguments[argument], dtype)

    def name_of(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """The ONNX name of a tensor's node or a number."""
        if not isinstance(value, fx.Node):
            return self.graph.constant(value, dtype)
        name = self._name(value)
        if dtype is not None and value.meta["val"].dtype != dtype:
            return self.add("Cast", name, to=DTYPES[dtype])
        return name

    def axes(self, name: str = "dim") -> list[int]:
        """Dimensions as counted from the front; all where none is given."""
        dims, rank = self[name], self.value().dim()
        if dims is None or dims == []:
            return list(range(rank))
        return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims))

    def refuse(self, why: str) -> UntranslatableError:
        """The error that says what ONNX lacks."""
        return UntranslatableError(f"{self.node.target}: {why}")


Operator = Callable[[Call], Any]


def _unary(op_type: str, **attributes: Any) -> Operator:
    return lambda c: c.add(op_type, c.name("self"), **attributes)


def _binary(op_type: str) -> Operator:
    """Arithmetic of two tensors, or one and a number, in the dtype of the result."""

    def translate(c: Call) -> str:
        if c.arguments.get("alpha", 1) != 1 or c.arguments.get("rounding_mode") is not None:
            raise c.refuse("has a factor or a rounding mode")
        other = "exponent" if "exponent" in c.arguments else "other"
        return c.add(op_type, c.name("self", c.out.dtype), c.name(other, c.out.dtype))

    return translate


def _compare(op_type: str) -> Operator:
    def translate(c: Call) -> str:
        other = c["other"]
        both = (c.value(), other.meta["val"] if isinstance(other, fx.Node) else other)
        dtype = torch.result_type(*both)
        return c.add(op_type, c.name("self", dtype), c.name("other", dtype))

    return translate


def _clip(c: Call) -> str:
    low, high = c.arguments.get("min_val", c.arguments.get("min")), c.arguments.get("max_val", c.arguments.get("max"))
    ends = ["" if end is None else c.graph.constant(float(end), torch.float32) for end in (low, high)]
    if c.out.dtype != torch.float32:
        raise c.refuse("of another dtype than float32")
    return c.add("Clip", c.name("self"), *ends)


def _hardsigmoid(c: Call) -> str:
    """ONNX's HardSigmoid has a fast kernel in neither runtime."""
    x = c.add("Add", c.name("self"), c.graph.constant(3.0, torch.float32))
    x = c.add("Clip", x, *(c.graph.constant(end, torch.float32) for end in (0.0, 6.0)))
    return c.add("Mul", x, c.graph.constant(1 / 6, torch.float32))


def _silu(c: Call) -> str:
    x = c.name("self")
    return c.add("Mul", x, c.add("Sigmoid", x))


def _elu(c: Call) -> str:
    if c["scale"] != 1 or c["input_scale"] != 1:
        raise c.refuse("is scaled")
    return c.add("Elu", c.name("self"), alpha=float(c["alpha"]))


def _softmax(op_type: str) -> Operator:
    return lambda c: c.add(op_type, c.name("self", c.out.dtype), axis=c["dim"])


def _reduce(op_type: str) -> Operator:
    def translate(c: Call) -> str:
        x = c.name("self", c.out.dtype)
        return c.add(op_type, x, c.graph.constant(c.axes()), keepdims=int(c["keepdim"]))

    return translate


def _mean(c: Call) -> str:
    """One over all places of an image is global pooling, for which runtimes have int8 kernels."""
    if c.value().dim() >= 3 and c.axes() == list(range(2, c.value().dim())) and c["keepdim"]:
        return c.add("GlobalAveragePool", c.name("self", c.out.dtype))
    return _reduce("ReduceMean")(c)


def _extreme(sign: int) -> Operator:
    """A maximum or minimum, as max pooling over all that is reduced.

    OpenVINO (2026.4) shifts its ReduceMax and ReduceMin by the zero point where the result is rounded to a grid.
    """

    def translate(c: Call) -> str:
        if c.out.dtype != torch.float32:
            return _reduce("ReduceMax" if sign > 0 else "ReduceMin")(c)
        x, shape, axes = c.name("self"), list(c.value().shape), c.axes()
        kept = [d for d in range(len(shape)) if d not in axes]
        if axes != list(range(2, len(shape))):
            x = c.add("Transpose", x, perm=kept + axes)
            rows, columns = math.prod(shape[d] for d in kept), math.prod(shape[d] for d in axes)
            x, window = c.add("Reshape", x, c.graph.constant([1, 1, rows, columns])), [1, columns]
        else:
            window = shape[2:]
        x = x if sign > 0 else c.add("Neg", x)
        x = c.add("MaxPool", x, kernel_shape=window, strides=window)
        x = x if sign > 0 else c.add("Neg", x)
        return c.add("Reshape", x, c.graph.constant(list(c.out.shape)))

    return translate


def _any(c: Call) -> str:
    number = c.name("self", torch.int32)
    found = c.add("ReduceMax", number, c.graph.constant(c.axes()), keepdims=int(c["keepdim"]))
    return c.add("Cast", found, to=DTYPES[torch.bool])


def _full(c: Call) -> str:
    return c.graph.constant(torch.full(tuple(c.out.shape), c["fill_value"], dtype=c.out.dtype))


def _index(c: Call) -> str:
    places = [i for i, index in enumerate(c["indices"]) if index is not None]
    index = c["indices"][places[0]].meta["val"]
    if len(places) > 1 or index.dtype != torch.int64:
        raise c.refuse("has several indices, or a mask")
    return c.add("Gather", c.name("self"), c.name_of(c["indices"][places[0]]), axis=places[0])


def _flip(c: Call) -> str:
    axes = c.axes("dims")
    starts, ends, steps = [-1] * len(axes), [-(2**62)] * len(axes), [-1] * len(axes)
    return c.add("Slice", c.name("self"), *(c.graph.constant(b) for b in (starts, ends, axes, steps)))


def _unbind(c: Call) -> list[str]:
    count, shape = len(c.out), c.graph.constant(list(c.out[0].shape))
    parts = c.graph.add_many("Split", c.name("self"), c.graph.constant([1] * count), count=count, axis=c["dim"])
    return [c.add("Reshape", part, shape) for part in parts]


def _cumsum(c: Call) -> str:
    return c.add("CumSum", c.name("self", c.out.dtype), c.graph.constant(c["dim"], torch.int64))


def _reshape(c: Call) -> str:
    return c.add("Reshape", c.name("self"), c.graph.constant(list(c.out.shape)))


def _transpose(c: Call) -> str:
    order = list(range(c.value().dim()))
    if "dims" in c.arguments:
        order = [d % len(order) for d in c["dims"]]
    else:
        a, b = (c["dim0"], c["dim1"]) if "dim0" in c.arguments else (0, len(order) - 1)
        order[a], order[b] = order[b], order[a]
    return c.add("Transpose", c.name("self"), perm=order)


def _slice(c: Call) -> str:
    start, end = c["start"] or 0, c["end"]
    bounds = [[start], [2**62 if end is None else min(end, 2**62)], [c["dim"]], [c["step"]]]
    return c.add("Slice", c.name("self"), *(c.graph.constant(b) for b in bounds))


def _select(c: Call) -> str:
    index = c["index"] % c.value().shape[c["dim"]]
    return c.add("Gather", c.name("self"), c.graph.constant(index, torch.int64), axis=c["dim"])


def _split(c: Call) -> list[str]:
    dim = c["dim"]
    sizes = [int(part.shape[dim]) for part in c.out]
    return c.graph.add_many("Split", c.name("self"), c.graph.constant(sizes), count=len(sizes), axis=dim)


def _cat(c: Call) -> str:
    parts = [part for part in c["tensors"] if part.meta["val"].shape != (0,)]
    return c.add("Concat", *(c.name_of(part, c.out.dtype) for part in parts), axis=c["dim"])


def _pad(mode: str) -> Operator:
    def translate(c: Call) -> str:
        margins = list(c["pad"] if "pad" in c.arguments else c["padding"])
        pairs = list(zip(margins[::2], margins[1::2], strict=True))[::-1]
        pairs = [(0, 0)] * (c.value().dim() - len(pairs)) + pairs
        pads = c.graph.constant([p[0] for p in pairs] + [p[1] for p in pairs])
        value = [c.graph.constant(c["value"], c.out.dtype)] if mode == "constant" else []
        return c.add("Pad", c.name("self"), pads, *value, mode=mode)

    return translate


def _max_pool(c: Call) -> tuple[str, None]:
    dims = len(c["kernel_size"]) if len(c["kernel_size"]) > 1 else c.value().dim() - 2
    kernel, padding, dilation = (ints(c[name], dims) for name in ("kernel_size", "padding", "dilation"))
    stride = ints(c["stride"], dims) if c["stride"] else kernel
    _batched(c, dims)
    ends = _ends(c, c.out[0], kernel, stride, padding, dilation)
    pooled = c.add(
        "MaxPool", c.name("self"), kernel_shape=kernel, strides=stride, pads=padding + ends, dilations=dilation
    )
    return pooled, None


def _avg_pool(c: Call) -> str:
    dims = int(c.node.target._schema.name[-2])  # type: ignore[union-attr]
    kernel, padding = (ints(c[name], dims) for name in ("kernel_size", "padding"))
    stride = ints(c["stride"], dims) if c["stride"] else kernel
    _batched(c, dims)
    ends = _ends(c, c.out, kernel, stride, padding, [1] * dims)
    if ends != padding or c.arguments.get("divisor_override") is not None:
        raise c.refuse("divides by other numbers than those of the places")
    x = c.name("self")
    if c["count_include_pad"] and any(padding):
        # OpenVINO (2026.4) takes padding that counts for zeros among the codes, whatever the zero point is; and takes
        # in a Pad before the pooling, unless its value is no zero.
        margins = c.graph.constant([0, 0, *padding] * 2)
        x, padding = c.add("Pad", x, margins, c.graph.constant(_NEXT_TO_ZERO, torch.float32)), [0] * dims
    return c.add("AveragePool", x, kernel_shape=kernel, strides=stride, pads=padding * 2)


_NEXT_TO_ZERO = 1e-30
"""Added to any value on a grid it changes nothing in float32."""


def _batched(c: Call, dims: int) -> None:
    if c.value().dim() != dims + 2:
        raise c.refuse("has no batch dimension")


def _ends(
    c: Call, out: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """The padding behind each dimension that gives the size of the result, also where that was rounded up."""
    sizes = zip(c.value().shape[2:], out.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [max(p, (o - 1) * s + d * (k - 1) + 1 - i - p) for i, o, k, s, p, d in sizes]


def _adaptive_pool(op_type: str, dims: int) -> Operator:
    def translate(c: Call) -> Any:
        _batched(c, dims)
        out = c.out[0] if isinstance(c.out, tuple) else c.out
        sizes = list(zip(c.value().shape[2:], out.shape[2:], strict=True))
        if any(size % result for size, result in sizes):
            raise c.refuse("has windows of several sizes")
        window = [size // result for size, result in sizes]
        pooled = c.add(op_type, c.name("self"), kernel_shape=window, strides=window)
        return (pooled, None) if isinstance(c.out, tuple) else pooled

    return translate


def _resize(c: Call) -> str:
    sizes = c.graph.constant(list(c.out.shape))
    mode = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    argument = "self" if "self" in c.arguments else "input"
    return c.add("Resize", c.name(argument), "", "", sizes, mode="nearest", **mode)


def _resize_linear(c: Call) -> str:
    argument = "self" if "self" in c.arguments else "input"
    if c.arguments.get("scales_h") or c.arguments.get("scale_factors"):
        raise c.refuse("has factors that need not be the ratio of the sizes")
    mode = "align_corners" if c["align_corners"] else "half_pixel"
    sizes = c.graph.constant(list(c.out.shape))
    return c.add("Resize", c.name(argument), "", "", sizes, mode="linear", coordinate_transformation_mode=mode)


def _pixel_shuffle(c: Call) -> str:
    if c.value().dim() != 4:
        raise c.refuse("has no batch dimension, or several")
    return c.add("DepthToSpace", c.name("self"), blocksize=c["upscale_factor"], mode="CRD")


def _layer_norm(c: Call) -> tuple[str, None, None]:
    if c["weight"] is None:
        raise c.refuse("has no weight")
    parts = [c.name("input"), c.name("weight"), *([] if c["bias"] is None else [c.name("bias")])]
    eps = float(c["eps"])
    return c.add("LayerNormalization", *parts, axis=-len(c["normalized_shape"]), epsilon=eps), None, None


def _group_norm(c: Call) -> tuple[str, None, None]:
    """As a norm over one dimension for each group, then the weights of the channels."""
    shape, groups = list(c.value("input").shape), c["group"]
    x = c.add("Reshape", c.name("input"), c.graph.constant([shape[0], groups, -1]))
    size = math.prod(shape[1:]) // groups
    x = c.add("LayerNormalization", x, c.graph.constant(torch.ones(size)), axis=-1, epsilon=float(c["eps"]))
    x = c.add("Reshape", x, c.graph.constant(shape))
    for op_type, name in (("Mul", "weight"), ("Add", "bias")):
        if c[name] is not None:
            channels = c.graph.constant([-1, *[1] * (len(shape) - 2)])
            x = c.add(op_type, x, c.add("Reshape", c.name(name), channels))
    return x, None, None


def _var(c: Call) -> str:
    x, axes = c.name("self"), c.graph.constant(c.axes())
    count = math.prod(c.value().shape[d] for d in c.axes())
    centred = c.add("Sub", x, c.add("ReduceMean", x, axes, keepdims=1))
    total = c.add("ReduceSum", c.add("Mul", centred, centred), axes, keepdims=int(c["keepdim"]))
    correction = 1 if c["correction"] is None else c["correction"]
    return c.add("Div", total, c.graph.constant(float(max(count - correction, 0)), c.out.dtype))


def _batch_norm(c: Call) -> tuple[str, None, None]:
    if c["weight"] is None or c["bias"] is None:
        raise c.refuse("has no weight")
    parts = [c.name(name) for name in ("input", "weight", "bias", "running_mean", "running_var")]
    return c.add("BatchNormalization", *parts, epsilon=float(c["eps"])), None, None


def _embedding(c: Call) -> str:
    return c.add("Gather", c.name("weight"), c.name("indices"), axis=0)


def _index_select(c: Call) -> str:
    return c.add("Gather", c.name("self"), c.name("index"), axis=c["dim"])


def _matmul(c: Call) -> str:
    return c.add("MatMul", c.name("self"), c.name("mat2"))


def _same(c: Call) -> str:
    return c.name("self")


def _expand(c: Call) -> str:
    return c.add("Expand", c.name("self"), c.graph.constant(list(c.out.shape)))


def _repeat(c: Call) -> str:
    repeats = c["repeats"]
    x = c.name("self")
    if len(repeats) > c.value().dim():
        missing = [1] * (len(repeats) - c.value().dim())
        x = c.add("Reshape", x, c.graph.constant(missing + list(c.value().shape)))
    return c.add("Tile", x, c.graph.constant(list(repeats)))


def _cast(c: Call) -> str:
    return c.name("self", c.out.dtype)


def _where(c: Call) -> str:
    return c.add("Where", c.name("condition"), c.name("self", c.out.dtype), c.name("other", c.out.dtype))


def _rsqrt(c: Call) -> str:
    return c.add("Reciprocal", c.add("Sqrt", c.name("self")))


OPERATORS: dict[Any, Operator] = {
    **{getattr(aten, name).default: _unary(op) for name, op in {
        "relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "exp": "Exp", "sqrt": "Sqrt", "neg": "Neg", "abs": "Abs",
        "erf": "Erf", "log": "Log", "floor": "Floor", "ceil": "Ceil", "round": "Round", "reciprocal": "Reciprocal",
        "sin": "Sin", "cos": "Cos", "hardswish": "HardSwish", "softplus": "Softplus", "mish": "Mish",
        "logical_not": "Not", "sign": "Sign",
    }.items()},
    aten.hardsigmoid.default: _hardsigmoid,
    aten.leaky_relu.default: lambda c: c.add("LeakyRelu", c.name("self"), alpha=float(c["negative_slope"])),
    aten.gelu.default: lambda c: c.add("Gelu", c.name("self"), approximate=c["approximate"]),
    aten.silu.default: _silu,
    aten.elu.default: _elu,
    aten.hardtanh.default: _clip,
    aten.clamp.default: _clip,
    aten.clamp_min.default: _clip,
    aten.clamp_max.default: _clip,
    aten.rsqrt.default: _rsqrt,
    aten._softmax.default: _softmax("Softmax"),
    aten._log_softmax.default: _softmax("LogSoftmax"),
    **{getattr(getattr(aten, name), overload): _binary(op) for name, op in {
        "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div",
    }.items() for overload in ("Tensor", "Scalar")},
    aten.maximum.default: _binary("Max"),
    aten.minimum.default: _binary("Min"),
    aten.pow.Tensor_Scalar: _binary("Pow"),
    aten.pow.Tensor_Tensor: _binary("Pow"),
    **{getattr(getattr(aten, name), overload): _compare(op) for name, op in {
        "eq": "Equal", "gt": "Greater", "lt": "Less", "ge": "GreaterOrEqual", "le": "LessOrEqual",
    }.items() for overload in ("Tensor", "Scalar")},
    aten.where.self: _where,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _reduce("ReduceSum"),
    aten.amax.default: _extreme(1),
    aten.amin.default: _extreme(-1),
    aten.any.dim: _any,
    aten.cumsum.default: _cumsum,
    aten.full_like.default: _full,
    aten.index.Tensor: _index,
    aten.flip.default: _flip,
    aten.unbind.int: _unbind,
    aten.unbind_copy.int: _unbind,
    **dict.fromkeys((
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
        aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.unsqueeze_copy.default,
    ), _reshape),
    **dict.fromkeys((
        aten.permute.default, aten.transpose.int, aten.t.default,
        aten.permute_copy.default, aten.transpose_copy.int, aten.t_copy.default,
    ), _transpose),
    **dict.fromkeys((
        aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default,
        aten.alias_copy.default, aten.detach_copy.default,
    ), _same),
    aten._to_copy.default: _cast,
    aten.expand.default: _expand,
    aten.expand_copy.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.slice_copy.Tensor: _slice,
    aten.select.int: _select,
    aten.select_copy.int: _select,
    **dict.fromkeys((
        aten.split.Tensor, aten.split_with_sizes.default, aten.split_copy.Tensor, aten.split_with_sizes_copy.default,
    ), _split),
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad("constant"),
    **{getattr(aten, f"{name}_pad{dims}d").default: _pad(mode) for name, mode in (
        ("reflection", "reflect"), ("replication", "edge"),
    ) for dims in (1, 2, 3)},
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool3d_with_indices.default: _max_pool,
    aten.avg_pool1d.default: _avg_pool,
    aten.avg_pool2d.default: _avg_pool,
    aten.avg_pool3d.default: _avg_pool,
    aten._adaptive_avg_pool2d.default: _adaptive_pool("AveragePool", 2),
    aten._adaptive_avg_pool3d.default: _adaptive_pool("AveragePool", 3),
    aten.adaptive_max_pool2d.default: _adaptive_pool("MaxPool", 2),
    aten.adaptive_max_pool3d.default: _adaptive_pool("MaxPool", 3),
    **{getattr(getattr(aten, f"upsample_nearest{dims}d"), kind): _resize
       for dims in (1, 2, 3) for kind in ("default", "vec")},
    aten.upsample_bilinear2d.default: _resize_linear,
    aten.upsample_bilinear2d.vec: _resize_linear,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.native_layer_norm.default: _layer_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.native_group_norm.default: _group_norm,
    aten.var.correction: _var,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
}  # fmt: skip
