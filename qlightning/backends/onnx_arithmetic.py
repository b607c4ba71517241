"""What each ATen call that computes is in ONNX: elementwise, products, reductions, norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from qlightning.backends.onnx_call import Call, Operator
from qlightning.backends.onnx_graph import DTYPES

aten = torch.ops.aten


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


def _cumsum(c: Call) -> str:
    return c.add("CumSum", c.name("self", c.out.dtype), c.graph.constant(c["dim"], torch.int64))


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


def _matmul(c: Call) -> str:
    return c.add("MatMul", c.name("self"), c.name("mat2"))


def _where(c: Call) -> str:
    return c.add("Where", c.name("condition"), c.name("self", c.out.dtype), c.name("other", c.out.dtype))


def _rsqrt(c: Call) -> str:
    return c.add("Reciprocal", c.add("Sqrt", c.name("self")))


ARITHMETIC: dict[Any, Operator] = {
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
    aten.native_layer_norm.default: _layer_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.native_group_norm.default: _group_norm,
    aten.var.correction: _var,
}  # fmt: skip
