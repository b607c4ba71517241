"""Arithmetic on quantized tensors, and the maths of their grids.

Each operation takes :class:`~qlightning.QuantizedTensor` and gives one: the exact result of the values that the codes
stand for, rounded once, half to even, to the grid of the result. What they have in common:

- ``scale``, ``zero_point`` and ``scheme`` say the grid of the result. Without ``scheme`` it is that of the first
  operand, per tensor. Without ``scale`` and ``zero_point`` the grid covers the exact result from its minimum to its
  maximum; but where this lies on the grid of the operand by its nature (``relu``, max pooling, nearest-neighbour
  resizing, ``cat`` of tensors on one grid), that grid is kept. A symmetric scheme needs no ``zero_point``.
- ``backend`` says what computes: ``"reference"`` in float64, on any device and all schemes; ``"onednn"`` by the int8
  kernels of the CPU where these take the operands (unsigned activations, signed symmetric weights, and sums that do not
  saturate on this CPU), within one code of the reference; what they do not take, the reference computes. ``"auto"``
  picks by the CPU. torch's classic engines run int8 models only: for their names, too, the reference computes.
- Errors are typed: `ConfigError` for operands that are not quantized, a scale not above zero, a zero point off the
  grid, half a grid. Shapes that do not fit are torch's own errors.
"""

from qlightning.affine import calculate_qparams, dequantize, fake_quantize, sqnr
from qlightning.functional.elementwise import (
    add_scalar,
    clamp,
    elu,
    gelu,
    hardsigmoid,
    hardswish,
    leaky_relu,
    mul_scalar,
    relu,
    relu6,
    requantize,
    sigmoid,
    silu,
    tanh,
)
from qlightning.functional.layers import conv1d, conv2d, conv3d, linear, matmul
from qlightning.functional.module import QFunctional
from qlightning.functional.norms import batch_norm, layer_norm
from qlightning.functional.pairs import add, add_relu, cat, mul
from qlightning.functional.pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    interpolate,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from qlightning.qparams import choose_qparams
from qlightning.tensor import quantize, quantize_per_channel

__all__ = [
    "QFunctional",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "add",
    "add_relu",
    "add_scalar",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "calculate_qparams",
    "cat",
    "choose_qparams",
    "clamp",
    "conv1d",
    "conv2d",
    "conv3d",
    "dequantize",
    "elu",
    "fake_quantize",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "interpolate",
    "layer_norm",
    "leaky_relu",
    "linear",
    "matmul",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mul",
    "mul_scalar",
    "quantize",
    "quantize_per_channel",
    "relu",
    "relu6",
    "requantize",
    "sigmoid",
    "silu",
    "sqnr",
    "tanh",
]
